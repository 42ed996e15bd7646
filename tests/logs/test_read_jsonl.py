"""Logs as lists of records and as histories: in one pass, many steps at once, whatever stands among them."""

import json
import math
import os
import random
import threading

import pytest

from fastguard.records import TrainingHistory, log
from fastguard.sinks import JsonlLog, JsonlSink, read_jsonl
from fastguard.visualization.runs import from_log

from records import make_bad_record, make_record


@pytest.fixture
def path(tmp_path):
    """Sixty steps with a note, a bad step, a cut line and a blank one."""
    path = tmp_path / "run.jsonl"
    with JsonlSink(path, tensors_every=7) as sink:
        sink.note({"names": ["w"]})
        for step in range(60):
            sink.write(make_bad_record(step, ["b"], loss=math.nan) if step == 9 else make_record(step, loss=1.0 / 3))
    with path.open("ab") as file:
        file.write(b'{"step":60,"lo\n\n{"step":61,"loss":"Infinity"}')
    return path


def test_a_list_of_records_knows_the_lines_that_it_left_out(path):
    log = read_jsonl(path)
    assert isinstance(log, JsonlLog) and isinstance(log, list) and len(log) == 61
    assert math.isnan(log[9]["loss"]) and log[-1]["loss"] == math.inf
    assert (log.skipped_lines, log.num_skipped, log.model) == ([62], 1, {"names": ["w"]})
    assert repr(log) == f"JsonlLog({str(path)!r}, 61 records)"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe(path, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()))
    writer.start()
    log = read_jsonl(pipe)
    writer.join()
    assert [record["step"] for record in log] == [record["step"] for record in read_jsonl(path)]


ODD = [
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
    {"step": 2**63},
    {"tensors": {"w": [8, 4.0, 0.1, 0.5, 0.1, 1, 0, 0, 0.2, 2.0]}},
    {"new": 1},
]


def lines_of(num, oddity, seed):
    rng = random.Random(seed)
    for step in range(num):
        norm = rng.lognormvariate(0, 0.3) * (50 if rng.random() < 0.01 else 1)
        line = {"step": step, "time": 1e9 + step, "loss": 2.0 + rng.random(), "lr": 1e-3, "grad/norm": norm}
        line |= {"grad/mean": 0.5, "grad/num_zeros": 1, "grad/num_nans": 0, "grad/num_elements": 8}
        line |= {"clip/coef": min(1.0, 1.3 / norm), "clipped": norm > 1.3, "skipped": False}
        yield line | (rng.choice(ODD) if rng.random() < oddity else {})
        if rng.random() < oddity / 10:
            yield {"time": 1.0, "model": {"clip_limit": rng.random()}}


@pytest.mark.parametrize(("num", "oddity", "seed"), [(3000, 0.003, 1), (1500, 0.05, 2), (300, 0.5, 3)])
def test_steps_read_at_once_are_to_the_bit_what_they_are_one_by_one(tmp_path, monkeypatch, num, oddity, seed):
    def read():
        run = from_log(path, "run")
        curves = {key: curve.items for key, curve in run.curves.items()}
        state = json.dumps(TrainingHistory.from_jsonl(path).state_dict())
        return repr((state, json.dumps(run.state_dict()), curves, run.last))

    def extend_one_by_one(self, entries, records=()):
        sizes.append(len(entries))
        for entry in entries:
            extend(self, [entry], records)

    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines_of(num, oddity, seed)))
    at_once = read()
    extend, sizes = TrainingHistory.extend, []
    monkeypatch.setattr(TrainingHistory, "extend", extend_one_by_one)
    assert read() == at_once
    assert max(sizes) > (50 if oddity < 0.01 else 1)


@pytest.mark.parametrize(
    ("broken", "good"),
    [
        ('{"step":1,"loss":2.0},{"step":2,"loss":2.0}', []),  # an array could hold this
        ('{"step":1,"batches":[{"a":1}\n{"step":2}]}', []),
        ('{"step":1,"x":"abc\n{"step":2,"x":"def"}', [2]),
        ('{"step":1}}', []),
    ],
)
def test_a_record_never_spans_lines(tmp_path, broken, good):
    path = tmp_path / "run.jsonl"
    path.write_text(f'{{"step":0}}\n{broken}\n{{"step":9}}\n')
    reader = log.LogReader(path)
    assert [record["step"] for record in reader] == [0, *good, 9]
    assert reader.num_skipped == len(broken.split("\n")) - len(good)
