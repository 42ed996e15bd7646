"""The examples in the docstrings of the toolkit, of clip policies and of what is told of ranks."""

import doctest
import importlib

import pytest

MODULES = {
    "clip.global_norm": 1,
    "clip.per_group": 1,
    "clip.percentile": 1,
    "clip.policy": 1,
    "tools.checkpoints": 7,
    "clip.spikes": 1,
    "clip.value": 1,
    "ranks.ranks": 1,
    "records.events": 1,
    "tools.clipping": 1,
    "tools.early_stopping": 3,
    "tools.initialization": 5,
    "tools.lr_finder": 2,
    "tools.overfit": 6,
    "tools.param_groups": 4,
    "tools.settings": 4,
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_do_what_they_say(name):
    failed, attempted = doctest.testmod(importlib.import_module(f"fastguard.{name}"))
    assert not failed and attempted >= MODULES[name]
