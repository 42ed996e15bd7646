"""`fastguard bench` on tiny cases. Nothing here asserts a time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from fastguard.commands import bench
from fastguard.commands.bench import clipping, harness
from fastguard.commands.bench.clipping import Case, StepCase, Subject

TINY = harness.Settings(budget_s=0.0, num_rounds=2, max_calls=3)
SHAPES = ((3,), (70, 50), (), (1,), (4096,), (2, 3, 5, 7))
FLOAT32 = Case("tiny-float32", "tiny float32", SHAPES)
BFLOAT16 = Case("tiny-bfloat16", "tiny bfloat16", SHAPES, torch.bfloat16)
TINY_STEP = StepCase("tiny", "tiny step", lambda: clipping.mlp(width=8, inputs=4, classes=3, batch=2))


def test_cases_are_the_models_they_name():
    sizes = {name: (case.num_tensors, case.num_elements) for name, case in clipping.CASES.items()}
    assert sizes == {"gpt2-float32": (148, 124_439_808), "300x1000": (300, 300_000)}
    assert sum(p.numel() for p in clipping.mlp().model.parameters()) == 101_386


@pytest.mark.parametrize("num_rivals", [2, 3, 4])
def test_each_call_follows_another_rivals_on_another_set_of_tensors(num_rivals):
    log = []
    calls = {
        name: [lambda name=name, index=index: log.append((name, index)) for index in range(harness.NUM_SETS)]
        for name in "abcd"[:num_rivals]
    }
    rounds = harness.take_turns(calls, harness.Settings(budget_s=1.0, num_rounds=2, max_calls=5))
    assert rounds.keys() == calls.keys() and all(len(times) == 2 for times in rounds.values())
    assert len(log) == num_rivals * (2 + 2 * 5)
    for (name, index), (next_name, next_index) in itertools.pairwise(log):
        assert name != next_name and index != next_index
    if num_rivals != harness.NUM_SETS:
        assert len(set(log)) == num_rivals * harness.NUM_SETS


@pytest.mark.parametrize(
    ("turn_ns", "expected"), [(1e3, (15, 100)), (4e7, (15, 6)), (1e9, (4, 1)), (60e9, (3, 1)), (0, (15, 100))]
)
def test_rounds_and_calls_keep_to_the_budget(turn_ns, expected):
    assert harness.plan(harness.Settings(), turn_ns) == expected


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("case", [FLOAT32, BFLOAT16], ids=lambda case: case.name)
def test_clipping_agrees_with_float64_and_is_timed(case, clips):
    found = clipping.Clipping(case, clips=clips).measure(TINY)
    assert found["norm_errors"].keys() == found["rounds_us"].keys() == {"ours", "theirs"}
    for key in ("ours_us", "theirs_us", "ratio"):
        assert 0 < found[key]["min"] <= found[key]["median"] <= found[key]["max"]


@pytest.mark.parametrize("name", clipping.FUNCTIONS)
def test_a_wrong_norm_is_refused(name, monkeypatch):
    monkeypatch.setitem(clipping.FUNCTIONS, name, lambda parameters, limit: torch.tensor(1.0))
    with pytest.raises(harness.WrongResultError, match="in float64 it is"):
        clipping.Clipping(FLOAT32)


def test_gradients_that_were_not_scaled_are_refused():
    subject = Subject(FLOAT32)
    subject.limit /= 2
    with pytest.raises(harness.WrongResultError, match="norm after clipping"):
        clipping.check("ours", torch.tensor(subject.norm), subject, clips=True)


@pytest.mark.parametrize("ours", [bench.GUARDED, bench.RECORDED])
def test_whole_steps_train_to_the_same_bits_and_are_compared(ours):
    found = bench.measure_steps(TINY_STEP, TINY, ours)
    assert len(found["repetitions"]) == 2
    assert found["plain_us"]["median"] > 0
    assert {"ours_us", "theirs_us", "ratio"} <= found.keys()
    assert all(repetition["num_steps"] == bench._MIN_STEPS for repetition in found["repetitions"])


def test_whole_steps_that_differ_are_refused(monkeypatch):
    monkeypatch.setattr(bench, "NO_CLIPPING", 1e-6)  # the guard and torch round their coefficients differently
    with pytest.raises(harness.WrongResultError, match="not those of the plain one"):
        bench.measure_steps(clipping.STEP_MLP, TINY, max_steps=6)


def test_whole_steps_with_a_wrong_norm_are_refused(monkeypatch):
    monkeypatch.setattr(bench.StepRun, "norm", lambda run: 1.0)
    with pytest.raises(harness.WrongResultError, match="tiny step: norm"):
        bench.measure_steps(TINY_STEP, TINY, max_steps=6)


def test_a_lost_record_is_noticed(monkeypatch):
    class Forgetful(bench.fastguard.JsonlSink):
        def write(self, record):
            if record.step != 2:
                super().write(record)

    monkeypatch.setattr(bench.fastguard, "JsonlSink", Forgetful)
    with pytest.raises(harness.WrongResultError, match="were recorded"):
        bench.measure_steps(TINY_STEP, TINY, bench.RECORDED, max_steps=6)


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
