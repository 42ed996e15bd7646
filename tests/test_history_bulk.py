"""Steps taken from a log many at once leave to the bit what they leave one by one, whatever stands among them."""

from __future__ import annotations

import json
import math
import random
import sys
from typing import Any

import pytest

from fastguard.records import Entry, TrainingHistory, log, overview, running, trend
from fastguard.records import history as core
from fastguard.visualization.runs import from_log


def _line(step: int, rng: random.Random, oddity: float) -> dict[str, object]:
    norm = rng.lognormvariate(0, 0.3) * (50 if rng.random() < 0.01 else 1)
    numbers = ("grad/max", "grad/min", "grad/mean", "grad/std")
    line: dict[str, object] = {"step": step, "time": 1e9 + step, "loss": 2.0 + rng.random()}
    line.update({"lr": 1e-3, "grad/norm": norm})
    line.update(dict.fromkeys(numbers, 0.5))
    line.update({"grad/num_zeros": 1, "grad/num_nans": 0, "grad/num_infs": 0, "grad/num_elements": 8})
    line.update({"clip/coef": min(1.0, 1.3 / norm), "clipped": norm > 1.3, "skipped": False})
    if norm > 1.3:
        line["grad/clipped_norm"] = 1.3
    if rng.random() < oddity:
        odd = rng.choice(
            [
                {"loss": "NaN"},
                {"loss": 3},
                {"loss": 1e200},
                {"loss": None},
                {"val_loss": 2.5},
                {"skipped": True, "clip/coef": 0.0},
                {"grad/norm": 0.0},
                {"grad/norm": 1e-200, "loss": -1e151},
                {"grad/norm": "NaN", "grad/num_nans": 2, "nonfinite": ["w"], "skipped": True},
                {"grad/cosine": 0.25},
                {"loss_scale": 1024.0},
                {"step": step - 5},
                {"step": 2**63 + step},
                {"tensors": {"w": [8, norm * norm, 0.1, 0.5, 0.1, 1, 0, 0, 0.2, norm]}},
                {"new": 1},
            ]
        )
        line.update(odd)
    return line


def _write(path, num, oddity, seed):
    rng = random.Random(seed)
    scale = {"loss_scale": 65536.0} if seed % 2 else {}
    with path.open("w") as file:
        for step in range(num):
            print(json.dumps({**_line(step, rng, oddity), **scale}), file=file)
            if rng.random() < oddity / 10:
                print(json.dumps({"time": 1.0, "model": {"clip_limit": rng.random()}}), file=file)


def _drawn(path) -> str:
    run = from_log(path, "run")
    ribbon = run.ribbon
    return repr(
        (
            json.dumps(run.state_dict()),
            {key: curve.points for key, curve in run.curves.items()},
            {key: rail.marks for key, rail in run.rails.items()},
            (ribbon.first_step, ribbon.last_step, bytes(ribbon.states), ribbon.counts),
            run.last,
        )
    )


@pytest.mark.parametrize(("num", "oddity", "seed"), [(4000, 0.0, 0), (3000, 0.003, 1), (1500, 0.05, 2), (300, 0.5, 3)])
def test_to_the_bit(tmp_path, monkeypatch, num, oddity, seed):
    path = tmp_path / "run.jsonl"
    _write(path, num, oddity, seed)
    at_once, drawn = TrainingHistory.from_jsonl(path), _drawn(path)
    extend, sizes = TrainingHistory.extend, []

    def extend_one_by_one(self, entries, records=()):
        sizes.append(len(entries))
        for entry in entries:
            extend(self, [entry], records)

    monkeypatch.setattr(TrainingHistory, "extend", extend_one_by_one)
    one_by_one = TrainingHistory.from_jsonl(path)
    assert max(sizes) > (50 if oddity < 0.01 else 1)
    assert json.dumps(at_once.state_dict()) == json.dumps(one_by_one.state_dict())
    assert at_once.last == one_by_one.last
    assert drawn == _drawn(path)


def test_an_error_names_its_line(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [_line(step, random.Random(step), 0.0) for step in range(50)]
    lines[37]["grad/mean"] = "what"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"got 'what' - at `record\['grad/mean'\]` - at .*run.jsonl, line 38"):
        TrainingHistory.from_jsonl(path)


@pytest.mark.parametrize(
    "broken",
    [
        '{"step":1,"loss":2.0},{"step":2,"loss":2.0}',  # what an array would take
        '{"step":1,"batches":[{"a":1}\n{"step":2}]}',
        '{"step":1,"x":"abc\n{"step":2,"x":"def"}',
        '{"step":1}}',
    ],
)
def test_lines_are_not_read_across(tmp_path, broken):
    path = tmp_path / "run.jsonl"
    path.write_text(f'{{"step":0}}\n{broken}\n{{"step":9}}\n')
    reader = log.LogReader(path)
    good = [line for line in broken.split("\n") if _is_json(line)]
    assert [record["step"] for record in reader] == [0, *(json.loads(line)["step"] for line in good), 9]
    assert reader.num_skipped == len(broken.split("\n")) - len(good)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _entry(step: int, rng: random.Random, oddity: float) -> Entry:
    entry = Entry(
        step, rng.lognormvariate(0, 0.3), 1.0, False, 2.0 + rng.random(), None, 1e-3, None, 1e-6 * rng.random()
    )
    if rng.random() >= oddity:
        return entry
    odd: list[dict[str, Any]] = [
        {"norm": 90.0, "loss": 70.0},
        {"loss": math.nan},
        {"loss": None},
        {"loss": 1e160},
        {"val_loss": 3.0},
        {"skipped": True, "clip_coef": 0.0},
        {"norm": math.nan},
        {"norm": 0.0},
        {"lr": None},
        {"loss_scale": 512.0},
        {"overhead_s": None},
        {"clip_coef": 0.5},
    ]
    return entry._replace(**rng.choice(odd))


@pytest.mark.parametrize(("num", "oddity", "seed"), [(900, 0.0, 0), (900, 0.02, 1), (600, 0.2, 2), (9000, 0.001, 3)])
def test_steps_taken_together_are_to_the_bit_what_they_are_apart(num, oddity, seed, monkeypatch):
    rng = random.Random(seed)
    apart, together = TrainingHistory(window=64), TrainingHistory(window=64)
    batches, step = [], 0
    while step < num:
        batches.append([_entry(step + i, rng, oddity) for i in range(rng.choice((1, 3, 4, 19, 32)))])
        step += len(batches[-1])
    for batch in batches:
        together.extend(batch)
    monkeypatch.setattr(core, "_fold_usual", None)  # the reference, in Python
    for batch in batches:
        for entry in batch:
            apart.extend([entry])
    assert json.dumps(together.state_dict()) == json.dumps(apart.state_dict())
    assert together.newest_step == step - 1
    assert [type(one) for one in together.recent] == [Entry] * 64
    assert {type(bucket.loss) for bucket in together.overview.buckets} == {overview.Summary}


@pytest.mark.skipif(core._fold_usual is None, reason="needs the C++ extension")
def test_usual_steps_are_folded_in_one_call(monkeypatch):
    calls, rng = [], random.Random(0)
    history = TrainingHistory()
    history.extend([_entry(step, rng, 0.0) for step in range(1100)])

    def counted(history, entries, start, end, *types):
        calls.append(fold(history, entries, start, end, *types) - start)
        return start + calls[-1]

    fold = core._fold_usual
    monkeypatch.setattr(core, "_fold_usual", counted)
    history.extend([_entry(step, rng, 0.0)._replace(norm=1.0, loss=2.0) for step in range(1100, 1132)])
    assert calls == [32] and history.num_steps == 1132


class InterruptError(BaseException):
    """What a handler of a signal raises."""


@pytest.mark.parametrize("has_extension", [False, True])
def test_a_step_that_was_counted_when_an_interrupt_came_is_not_counted_again(monkeypatch, has_extension):
    files = {module.__file__ for module in (core, overview, running, trend)}
    rng = random.Random(6)
    entries = [_entry(step, rng, 0.0) for step in range(40)]
    if not has_extension:
        monkeypatch.setattr(core, "_fold_usual", None)
    for at in range(1, 60):
        history, places = TrainingHistory(window=16), 0
        history.extend(entries[:25])

        def profile(frame, event, argument):
            nonlocal places
            if event in ("call", "c_return") and frame.f_code.co_filename in files:
                places += 1
                if places == at:  # noqa: B023
                    sys.setprofile(None)
                    raise InterruptError

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            history.extend(entries[25:32])
        except InterruptError:
            pass
        finally:
            sys.setprofile(before)
        history.extend([entry for entry in entries if entry.step > history.newest_step])  # as the ledger does
        assert history.num_steps == len(entries), at
        assert [one.step for one in history.recent] == list(range(24, 40)), at
