"""`fastguard bench` on tiny cases. Nothing here asserts a time."""

from __future__ import annotations

import pytest
import torch

from fastguard.commands import bench
from fastguard.commands.bench import Case, StepCase

TINY = bench.Settings(budget_s=0.0, num_rounds=2, max_calls=3)
SHAPES = ((3,), (70, 50), (), (1,), (4096,), (2, 3, 5, 7))
FLOAT32 = Case("tiny-float32", "tiny float32", SHAPES)
BFLOAT16 = Case("tiny-bfloat16", "tiny bfloat16", SHAPES, torch.bfloat16)
TINY_STEP = StepCase("tiny", "tiny step", lambda: bench.mlp(width=8, inputs=4, classes=3, batch=2))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("case", [FLOAT32, BFLOAT16], ids=lambda case: case.name)
def test_clipping_agrees_with_float64_and_is_timed(case, clips):
    found = bench.Clipping(case, clips=clips).measure(TINY)
    assert found["norm_errors"].keys() == found["rounds_us"].keys() == {"ours", "theirs"}
    for key in ("ours_us", "theirs_us", "ratio"):
        assert 0 < found[key]["min"] <= found[key]["median"] <= found[key]["max"]


@pytest.mark.parametrize("ours", [bench.GUARDED, bench.RECORDED])
def test_whole_steps_train_to_the_same_bits_and_are_compared(ours):
    found = bench.measure_steps(TINY_STEP, TINY, ours)
    assert {"ours_us", "theirs_us", "ratio"} == found.keys()


def test_the_command_prints_a_table(monkeypatch, capsys):
    part = bench.BenchPart("tiny clip", lambda: bench.Clipping(FLOAT32).measure)
    monkeypatch.setattr(bench, "PARTS", {"300x1000": part})
    monkeypatch.setattr(bench, "QUICK", TINY)
    assert bench.main(["--quick", "--only", "300x1000"]) == 0
    printed = capsys.readouterr().out
    assert "tiny clip" in printed and torch.__version__ in printed and "µs" in printed
