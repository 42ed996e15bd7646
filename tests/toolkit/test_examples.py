"""The examples in the docstrings of the toolkit, of clip policies and of what is told of ranks."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = {
    "guard.policies.global_norm": 1,
    "guard.policies.per_group": 1,
    "guard.policies.percentile": 1,
    "guard.policies.policy": 1,
    "tools.checkpoints": 7,
    "guard.policies.spikes": 1,
    "guard.policies.value": 1,
    "history.bad_ranks": 2,
    "tools.clipping": 1,
    "tools.early_stopping": 8,
    "tools.initialization.check": 1,
    "tools.initialization.stable": 4,
    "tools.lr_finder.finder": 1,
    "tools.lr_finder.result": 1,
    "tools.overfit": 6,
    "tools.param_groups": 4,
    "tools.schedules": 6,
    "tools.settings": 4,
    "weights.settings": 1,
    "weights.sampler": 1,
    "weights.table": 1,
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_do_what_they_say(name):
    failed, attempted = doctest.testmod(importlib.import_module(f"fastguard.{name}"))
    assert not failed and attempted >= MODULES[name]
