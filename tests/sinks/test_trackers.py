"""What all sinks of trackers share: names, which steps and tensors, findings; and the thread for slow sinks."""

import collections
import math
import re
import subprocess
import sys
import threading
import time

import pytest
import torch

import fastguard
from fastguard.records import ClippedGroup, StepStats
from fastguard.records.samples import WeightStats
from fastguard.sinks import MemorySink, SafeSink, TrackerSink, flatten, mlflow

from made_runs import activity
from records import make_bad_record, make_record, make_row, make_table


class Keeping(TrackerSink):
    """A tracker in memory."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rows = []

    def log(self, step, scalars, texts):
        self.rows.append((step, scalars, texts))

    steps = property(lambda self: [row[0] for row in self.rows])
    scalars = property(lambda self: {k: v for row in self.rows for k, v in row[1].items()})
    texts = property(lambda self: {k: v for row in self.rows for k, v in row[2].items()})


def make_layers(norms, step=0, **fields):
    rows = [make_row(norm) for norm in norms.values()]
    return StepStats(step, make_table(rows, list(norms)), **fields)


def guarded(sink, num_steps=3, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, sinks=[sink], **options)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.guard.observe(loss=loss)
    return optimizer


class TestNames:
    def test_keys_of_logs_get_a_section_and_the_prefix(self):
        plain, prefixed = Keeping(), Keeping(prefix="train/")
        record = make_bad_record(3, ["b"], loss=1.5, lr=0.1, clip_coef=0.5)
        for sink in (plain, prefixed):
            sink.write(record)
            sink.tell({"rule": "r", "severity": "warning", "summary": "S.", "recommendation": "", "last_step": 0})
        flat = {key: value for key, value in flatten(record).items() if key != "step" and not isinstance(value, list)}
        expected = {key if "/" in key else f"fastguard/{key}" for key in flat} | {"grad/norm/b"}
        assert plain.rows[0][0] == 3 and expected <= plain.scalars.keys()
        assert set(map(type, plain.scalars.values())) == {float} and plain.scalars["fastguard/clipped"] == 1.0
        assert plain.texts == {
            "fastguard/event": "step 3: gradients are not finite, first in b; the step was skipped",
            "fastguard/finding/r": "[warning, step 0] S.",
        }
        for kind in ("scalars", "texts"):
            assert {f"train/{name}" for name in getattr(plain, kind)} == getattr(prefixed, kind).keys()

    def test_groups_that_are_clipped_separately_and_no_infinite_trigger(self):
        sink = Keeping()
        sink.write(make_record(groups=(ClippedGroup("head", 2.0, 1.0, math.inf), ClippedGroup("body", 3.0, 3.0, 4.0))))
        found = {key: value for key, value in sink.scalars.items() if key.startswith("clip/") and key != "clip/coef"}
        assert found == {
            **{"clip/head/norm": 2.0, "clip/head/clipped_norm": 1.0},
            **{"clip/body/norm": 3.0, "clip/body/clipped_norm": 3.0, "clip/body/trigger": 4.0},
        }

    def test_samples_of_the_chosen_tensors_and_their_modules(self):
        weight, other = WeightStats("net.w", 4, 2.0, 0.5, 1.0), WeightStats("b", 4, 2.0, 0.5, 1.0)
        samples = {"activations": (activity("net"), activity("far")), "weights": (weight, other)}
        one, both = Keeping(layers=1), Keeping(layers=2)
        for sink in (one, both):
            sink.write(make_layers({"net.w": 2.0, "b": 1.0}))
            sink.write(make_layers({"net.w": 2.0, "b": 1.0}, 1, **samples))
        assert {"weight/net.w/norm", "activation/net/mean"} <= one.scalars.keys()
        assert not {"weight/b/norm", "activation/far/mean", "grad/norm/b"} & one.scalars.keys()
        both.write(make_layers({"net.w": 2.0, "b": 3.0}, 100, **samples))
        assert {"weight/b/norm", "activation/net/mean", "grad/norm/b"} <= both.scalars.keys()


class TestWhichSteps:
    def test_every_fifth_and_each_bad_one(self):
        sink = Keeping(every=5)
        for step in range(12):
            sink.write(make_record(step, math.nan if step == 7 else 1.0, skipped=step in (7, 8)))
        assert sink.steps == [0, 5, 7, 8, 10]
        assert math.isnan(sink.rows[2][1]["grad/norm"]) and sink.rows[2][1]["fastguard/skipped"] == 1.0
        assert sink.texts["fastguard/event"].startswith("step 8: the norm of the gradients was 1; the step was skipped")

    def test_in_a_guarded_training(self):
        sink = Keeping(every=4)
        optimizer = guarded(sink, 9)
        optimizer.guard.close()
        assert sink.steps == [0, 4, 8]
        dropped = Keeping(tensors_every=1)
        guarded(dropped, 2)  # this guard is collected at once, and delivers its last record
        assert dropped.steps == [0, 1]

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"every": 0}, ValueError, "`every` must be an integer >= 1, got 0"),
            ({"tensors_every": -1}, ValueError, "`tensors_every` must be an integer >= 0"),
            ({"layers": -1}, ValueError, "`layers` must be an integer >= 0, got -1"),
            ({"prefix": 3}, TypeError, "`prefix` must be text, got 3"),
        ],
    )
    def test_options_that_do_not_fit_are_refused(self, options, error, message):
        with pytest.raises(error, match=message):
            Keeping(**options)


NORMS = {f"l{i}": float(i + 1) for i in range(100)}


class TestTensors:
    def curves(self, sink):
        return {key.removeprefix("grad/norm/") for key in sink.scalars if key.startswith("grad/norm/")}

    def test_a_run_has_at_most_the_wanted_number_of_curves(self):
        sink = Keeping(tensors_every=1, layers=4)
        sink.write(make_layers(NORMS))
        assert self.curves(sink) == {"l99", "l98"}
        for step in range(1, 50):  # another one is the largest each time
            sink.write(make_layers({**NORMS, f"l{step}": 1e3}, step))
        assert self.curves(sink) == {"l99", "l98", "l1", "l2"}

    def test_they_come_every_ten_steps_and_again_where_steps_go_back(self):
        sink = Keeping(tensors_every=10, every=3)
        for step in (*range(25), *range(6, 20)):
            sink.write(make_record(step))
        assert [row[0] for row in sink.rows if "grad/norm/w" in row[1]] == [0, 12, 24, 6, 18]


class Slow(MemorySink):
    """A sink whose work a thread does, as that of MLflow."""

    def __init__(self, work):
        super().__init__()
        self._worker = mlflow.Worker(self, work)

    def write(self, record):
        self._worker.put(record)

    def close(self):
        self._worker.close()

    num_lost = property(lambda self: self._worker.num_lost)
    last_error = property(lambda self: self._worker.last_error)


class TestWorker:
    def test_training_does_not_wait(self):
        go, seen = threading.Event(), []
        sink = Slow(lambda records: go.wait(10) and seen.extend(record.step for record in records))
        for step in range(5):
            sink.write(make_record(step))
        assert not seen
        go.set()
        sink.close()
        assert seen == [0, 1, 2, 3, 4] and sink.num_lost == 0
        with pytest.raises(ValueError, match="must be open to write, got a closed one"):
            sink.write(make_record(0))

    @pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
    def test_records_that_it_loses_are_counted_and_reported(self, error):
        def fail(records):
            raise error

        inner = Slow(fail)
        inner.write(make_record(0))
        inner.write(make_record(1))
        sink = SafeSink(inner, name="slow one")
        with pytest.warns(RuntimeWarning, match=f"slow one could not write a record: {error.__name__}"):
            sink.close()
        assert sink.num_lost == sink.cost()["num_lost"] == 2

    def test_a_tracker_that_is_too_slow_loses_records_and_memory_does_not_grow(self, monkeypatch):
        monkeypatch.setattr(mlflow, "_MAX_RECORDS", 3)
        go = threading.Event()
        sink = SafeSink(Slow(lambda records: go.wait(10)))
        with pytest.warns(RuntimeWarning, match="3 records wait for the tracker already"):
            collections.deque(map(sink.write, map(make_record, range(10))))
        go.set()
        sink.close()
        assert sink.num_lost == 7

    def test_one_that_hangs_does_not_hold_up_the_end(self, monkeypatch):
        monkeypatch.setattr(mlflow, "_WAIT_S", 0.0)
        go = threading.Event()
        worker = mlflow.Worker(sink := MemorySink(), lambda items: go.wait(10))
        worker.put(1)
        with pytest.raises(TimeoutError, match=r"longer than 0\.05 s .*; records lost by that: 1"):
            worker.close(0.05)
        assert worker.num_lost == 1 and sink is not None
        go.set()

    def test_a_process_that_ends_waits(self):
        code = (
            "from fastguard.sinks import MemorySink\nfrom fastguard.sinks.mlflow import Worker\n"
            "sink = MemorySink()\nworker = Worker(sink, lambda items: print(*items, flush=True))\n"
            "worker.put(1); worker.put(2)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == ["1", "2"]


def test_the_report_says_what_each_sink_costs_and_lost(tmp_path):
    def broken(record):
        if record.step == 1:
            raise OSError("disk full")
        time.sleep(0.002)

    with pytest.warns(RuntimeWarning, match="disk full"):
        optimizer = guarded(broken, 20)
    optimizer.guard.flush()
    report = optimizer.guard.report()
    (cost,) = report.sinks
    assert cost["num_steps"] == 20 and cost["mean_us"] > 1800 and cost["total_s"] >= 0.036
    words = " ".join(str(report).split())
    assert re.search(r"cost of sinks mean [\d.]+ ms a step, ", words) and ", 1 of 20 steps lost: " in words
    optimizer = guarded(fastguard.JsonlSink(tmp_path / "run.jsonl"), 40)
    optimizer.guard.close()
    (cost,) = optimizer.guard.report().to_dict()["sinks"]
    assert cost["num_steps"] == 40 and 0 < cost["mean_us"] < 1e5 and cost["num_lost"] == 0
