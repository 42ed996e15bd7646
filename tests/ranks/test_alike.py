"""Ranks with different settings get an error at the first step, and do not hang."""

from pathlib import Path

import pytest
from several_processes import run, slow

pytestmark = slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(Path(__file__).with_name("alike_script.py"), 2, tmp_path_factory.mktemp("alike"))


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        ("ddp, max_norm", "`clip (max_norm)`: GlobalNorm(1) on ranks [0], GlobalNorm(2) on ranks [1]."),
        ("ddp, recovery", ", None on ranks [1]."),
        ("fsdp, max_norm", "`clip (max_norm)`: GlobalNorm(0.01) on ranks [0], GlobalNorm(1e+09) on ranks [1]."),
        ("fsdp, skip", "`skip_nonfinite`: True on ranks [0], False on ranks [1]."),
        ("fsdp, recovery", "`recovery`: Recovery(every=50, "),
    ],
)
def test_different_settings_are_an_error_on_all_ranks_at_the_first_step(found, case, difference):
    for each in found:
        assert each[case]["error"].startswith("the ranks of a guarded optimizer must have the same settings, got ")
        assert difference in each[case]["error"] and each[case]["step"] == 0


def test_settings_assigned_later_are_compared_where_the_ranks_gather(found):
    for each in found:
        for case in ("fsdp, clips assigned", "fsdp, clip on one", "fsdp, skip on one"):
            assert "got different checksums of what was assigned to `guard.clip`" in each[case]["error"]
            assert each[case]["step"] == 2


CALM = ["ddp, alike", "fsdp, alike", "apart", "fsdp, clip assigned"]


@pytest.mark.parametrize("case", CALM)
def test_equal_settings_and_models_that_share_nothing_are_silent(found, case):
    for each in found:
        assert each[case]["error"] == "" and each[case]["told"] == [] and each[case]["is over"]


def test_a_rank_without_a_guard_hangs_nobody(found):
    first, other = found
    assert "rank 0 has a guard that ranks [1] of 2 lack, after the store's timeout" in first["unguarded"]["error"]
    assert first["unguarded"]["step"] == 0 and other["unguarded"]["error"] == ""
    (said,) = first["ddp, one guard"]["told"]
    assert said == "rank 0 has a guard that ranks [1] of 2 lack: what this one clips or skips, they do not"
    assert first["ddp, one guard"]["error"] == "" and first["ddp, one guard"]["is over"]
