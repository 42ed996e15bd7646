"""`fastguard bench` on tiny cases. Nothing here asserts a time."""

import pytest
import torch

from fastguard.commands import bench
from fastguard.commands.bench import StepCase

TINY = bench.Settings(budget_s=0.0, num_rounds=2, max_calls=3)
SHAPES = ((3,), (70, 50), (), (1,), (4096,), (2, 3, 5, 7))
TINY_STEP = StepCase("tiny", "tiny step", lambda: bench.mlp(width=8, inputs=4, classes=3, batch=2))


def test_clipping_is_compared():
    found = bench.measure_clipping(SHAPES, TINY)
    for key in ("ours_us", "theirs_us", "ratio"):
        assert 0 < found[key]["min"] <= found[key]["median"] <= found[key]["max"]


@pytest.mark.parametrize("ours", [bench.GUARDED, bench.RECORDED])
def test_whole_steps_train_to_the_same_bits_and_are_compared(ours):
    found = bench.measure_steps(TINY_STEP, TINY, ours)
    assert {"ours_us", "theirs_us", "ratio"} == found.keys()


def test_the_command_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr(bench, "PARTS", {"tiny clip": lambda settings: bench.measure_clipping(SHAPES, settings)})
    monkeypatch.setattr(bench, "QUICK", TINY)
    assert bench.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "tiny clip" in printed and torch.__version__ in printed and " us" in printed
