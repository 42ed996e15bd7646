"""Several processes decide alike, whoever of them sees what is wrong."""

from pathlib import Path

import pytest
from several_processes import run, slow

pytestmark = slow


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return run(Path(__file__).with_name("sharded_script.py"), 2, tmp_path_factory.mktemp("sharded"))


def test_two_processes_under_ddp(sharded):
    found = [each["ddp"] for each in sharded]
    assert found[0] == found[1]
    assert [len(found[0][case]["told"]) for case in ("healthy", "ruined", "nan", "local")] == [0, 1, 1, 1]


def test_a_healthy_sharded_run_is_the_same_to_the_bit(sharded):
    for found in sharded:
        assert found["healthy"]["told"] == [] and found["healthy"]["bits"] == found["without"]["bits"]


@pytest.mark.parametrize("case", ["large", "tp", "nan", "lost state"])
def test_ruin_on_one_rank_puts_the_parts_on_both_back(sharded, case):
    for found in sharded:
        (told,) = found[case]["told"]
        assert told.startswith("rolled back from 63 to 50 because ")
        assert found[case]["is_as_it_was"] and found[case]["is_in_place"]
        assert found[case]["kinds"] == ["DTensor", "Tensor"]
    first, other = (found[case]["loss"] for found in sharded)
    assert first == other < 1.0


def test_copies_of_different_steps_are_put_back_nowhere(sharded):
    for found in sharded:
        told = found["lost snapshots"]["told"]
        assert "a process has no snapshot of the step that others go back to" in told and "Nothing could be" in told


def test_stages_go_back_together_though_one_alone_knows_losses(sharded):
    for found in sharded:
        assert found["pipeline"] == {"to": 50, "is_as_it_was": True}
