"""`fastguard bench` on tiny cases. Nothing here asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fastguard.commands import bench
from fastguard.commands.bench import clipping, harness
from fastguard.commands.bench.clipping import Case, StepCase

TINY = harness.Settings(budget_s=0.0, num_rounds=2, max_calls=3)
SHAPES = ((3,), (70, 50), (), (1,), (4096,), (2, 3, 5, 7))
FLOAT32 = Case("tiny-float32", "tiny float32", SHAPES)
BFLOAT16 = Case("tiny-bfloat16", "tiny bfloat16", SHAPES, torch.bfloat16)
TINY_STEP = StepCase("tiny", "tiny step", lambda: clipping.mlp(width=8, inputs=4, classes=3, batch=2))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("case", [FLOAT32, BFLOAT16], ids=lambda case: case.name)
def test_clipping_agrees_with_float64_and_is_timed(case, clips):
    found = clipping.Clipping(case, clips=clips).measure(TINY)
    assert found["norm_errors"].keys() == found["rounds_us"].keys() == {"ours", "theirs"}
    for key in ("ours_us", "theirs_us", "ratio"):
        assert 0 < found[key]["min"] <= found[key]["median"] <= found[key]["max"]


@pytest.mark.parametrize("ours", [bench.GUARDED, bench.RECORDED])
def test_whole_steps_train_to_the_same_bits_and_are_compared(ours):
    found = bench.measure_steps(TINY_STEP, TINY, ours)
    assert len(found["repetitions"]) == 2
    assert found["plain_us"]["median"] > 0
    assert {"ours_us", "theirs_us", "ratio"} <= found.keys()
    assert all(repetition["num_steps"] == bench._MIN_STEPS for repetition in found["repetitions"])


def test_results_survive_json_and_tell_the_machine(monkeypatch, tmp_path, capsys):
    part = bench.BenchPart("tiny clip", lambda: clipping.Clipping(FLOAT32).measure)
    monkeypatch.setattr(bench, "PARTS", {"300x1000": part})
    monkeypatch.setattr(bench, "QUICK", TINY)
    monkeypatch.chdir(tmp_path)
    assert bench.main(["--quick"]) == 0
    assert list(tmp_path.iterdir()) == []  # nothing is saved unless asked for
    path = Path("results", "out.json")
    assert bench.main(["--quick", "--only", "300x1000", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    noisy = {"min": 1.0, "max": 2.0}
    assert harness.overlap(noisy, {"min": 2.0, "max": 3.0}) and not harness.overlap(noisy, {"min": 2.1, "max": 3.0})
    assert "tiny clip" in printed and torch.__version__ in printed and "µs" in printed
    loaded = json.loads(path.read_text(encoding="utf-8"))
    assert loaded["quick"] and loaded["parts"]["300x1000"]["ratio"].keys() == {"median", "min", "max"}
    assert loaded["machine"].keys() >= {"cpu", "num_cores", "num_threads", "isa", "torch", "python", "fastguard"}
    assert loaded["machine"].keys() >= {"load_at_start", "others_ratio", "is_busy"}
