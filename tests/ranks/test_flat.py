"""FSDP1 on real process groups: its flat parameters, shown or not, have one norm and one decision on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_ranks import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
]
SCRIPT = Path(__file__).with_name("flat_script.py")
WORLD, BAD = 4, 6
TRAININGS = ("flat, NaN", "originals, NaN", "gradients only", "not sharded", "hybrid")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(SCRIPT, WORLD, tmp_path_factory.mktemp("flat"))


@pytest.mark.parametrize("case", TRAININGS)
def test_the_norm_is_that_of_the_whole_model_and_steps_are_those_of_one_process(
    found: list[dict[str, Any]], case: str
) -> None:
    for each in found:
        assert each[case]["norm"] < 1e-6 and each[case]["rows"] < 1e-6 and each[case]["outputs"] < 1e-6
        assert each[case]["bits"] == found[0][case]["bits"]
        assert (each[case]["failures"], each[case]["num_ranks"]) == ([], WORLD)
        assert each[case]["findings"] == (["non-finite-gradients"] if "NaN" in case else [])


@pytest.mark.parametrize(("case", "name"), [("flat, NaN", "0._flat_param"), ("originals, NaN", "0.weight")])
def test_a_nan_in_one_ranks_shard_skips_the_step_on_all_and_is_named(
    found: list[dict[str, Any]], case: str, name: str
) -> None:
    for each in found:
        assert [step for step, skipped in enumerate(each[case]["skipped"]) if skipped] == [BAD]
        assert each[case]["trouble"] == [[1, name, 1, 0]]


def test_shown_parameters_have_their_names_and_sizes(found: list[dict[str, Any]]) -> None:
    for case in ("originals, NaN", "hybrid"):
        assert found[0][case]["names"] == [f"{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]
        assert set(found[0][case]["elements"]) == {16 * 33 + 33 + 33 * 48 + 48 + 48 * 5 + 5}


def test_what_cannot_be_right_is_refused(found: list[dict[str, Any]]) -> None:
    said = found[0]["refusals"]
    for case in ("no model", "another model"):
        assert said[case].startswith("`model` must be the FullyShardedDataParallel module whose flat parameters")
    assert "over the same process group, with one sharding strategy" in said["two strategies"]
    assert said["recovery"].startswith("`recovery` must be left out") and said["units"].startswith("`clip` must be")
    assert said["plain"].startswith("`model` must not be sharded")
