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
from fastguard.sinks import BackgroundSink, MemorySink, SafeSink, TrackerSink, flatten
from fastguard.sinks.background import Worker
from fastguard.sinks.tracker import MAX_BUCKETS, Buckets

from made_runs import activity
from records import make_bad_record, make_record, make_row, make_table


class Keeping(TrackerSink):
    """A tracker in memory."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rows = []

    def log(self, step, scalars, texts, histograms):
        self.rows.append((step, scalars, texts, histograms))

    steps = property(lambda self: [row[0] for row in self.rows])
    scalars = property(lambda self: {k: v for row in self.rows for k, v in row[1].items()})
    texts = property(lambda self: {k: v for row in self.rows for k, v in row[2].items()})
    histograms = property(lambda self: {k: v for row in self.rows for k, v in row[3].items()})


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
        expected |= {"grad/num_zero_tensors", "grad/num_nonfinite_tensors"}
        assert plain.rows[0][0] == 3 and expected <= plain.scalars.keys()
        assert set(map(type, plain.scalars.values())) == {float} and plain.scalars["fastguard/clipped"] == 1.0
        assert plain.texts == {
            "fastguard/event": "step 3: gradients are not finite, first in b; the step was skipped",
            "fastguard/finding/r": "[warning, step 0] S.",
        }
        for kind in ("scalars", "texts", "histograms"):
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
        one, both = Keeping(layers=1), Keeping(layers="^(net|b)")
        for sink in (one, both):
            sink.write(make_layers({"net.w": 2.0, "b": 1.0}))
            sink.write(make_layers({"net.w": 2.0, "b": 1.0}, 1, **samples))
        assert {"weight/net.w/norm", "activation/net/mean"} <= one.scalars.keys()
        assert not {"weight/b/norm", "activation/far/mean", "grad/norm/b"} & one.scalars.keys()
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
            ({"layers": "("}, ValueError, "`layers` must be a regular expression"),
            ({"layers": None}, TypeError, "`layers` must be a number or a regular expression"),
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
        assert [row[0] for row in sink.rows if row[3]] == [0, 12, 24, 6, 18]

    def test_histograms(self):
        sink = Keeping()
        sink.write(make_layers({"a": 0.0, "b": 1.0, "c": 1.5, "d": 1e-3, "e": 2.0}))
        counts, edges = sink.histograms["grad/log10_norm"]
        assert sum(counts) == 4 and edges[0] == -3.0 and len(edges) == len(counts) + 1
        assert counts[0] == 1 and counts[edges.index(0.0)] == 2 and counts[edges.index(0.25)] == 1
        assert sink.scalars["grad/num_zero_tensors"] == 1.0

    def test_no_more_buckets_than_trackers_take(self):
        counts, edges = Buckets.from_counts({-2000: 1, 0: 2, 5: 1})
        assert len(counts) == MAX_BUCKETS and sum(counts) == 4 and (edges[-1], counts[0], counts[-1]) == (6.0, 1, 1)
        assert Buckets.from_counts({}) is None
        assert Buckets([1, 3], [0.0, 1.0, 2.0]).moments() == (4, 5.0, 7.0)


class TestBackground:
    def test_training_does_not_wait(self):
        go, seen = threading.Event(), []
        sink = BackgroundSink(lambda record: go.wait(10) and seen.append(record.step))
        for step in range(5):
            sink.write(make_record(step))
        assert not seen
        go.set()
        sink.close()
        assert seen == [0, 1, 2, 3, 4] and sink.num_lost == 0
        with pytest.raises(ValueError, match="must be open to write, got a closed one"):
            sink.write(make_record(0))

    @pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
    def test_records_that_the_other_sink_loses_are_counted_and_reported(self, error):
        def fail(record):
            raise error

        inner = BackgroundSink(fail)
        inner.write(make_record(0))
        inner.write(make_record(1))
        sink = SafeSink(inner, name="slow one")
        with pytest.warns(RuntimeWarning, match=f"slow one could not write a record: {error.__name__}"):
            sink.close()
        assert sink.num_lost == sink.cost()["num_lost"] == 2

    def test_a_tracker_that_is_too_slow_loses_records_and_memory_does_not_grow(self):
        go = threading.Event()
        sink = SafeSink(BackgroundSink(lambda record: go.wait(10), max_records=3))
        with pytest.warns(RuntimeWarning, match="3 records wait for the tracker already"):
            collections.deque(map(sink.write, map(make_record, range(10))))
        go.set()
        sink.close()
        assert sink.num_lost == 7
        with pytest.raises(ValueError, match="`max_records` must be an integer >= 1, got 0"):
            BackgroundSink(print, 0)

    def test_one_that_hangs_does_not_hold_up_the_end(self):
        go = threading.Event()
        worker = Worker(sink := MemorySink(), "a tracker", lambda items: go.wait(10), 10)
        worker.put(1)
        with pytest.raises(TimeoutError, match=r"longer than 0\.05 s .*; records lost by that: 1"):
            worker.close(0.05)
        assert worker.num_lost == 1 and sink is not None
        go.set()

    def test_findings_and_facts_keep_their_order_and_a_process_that_ends_waits(self):
        code = (
            "import time\nfrom fastguard.sinks import BackgroundSink, Sink\n"
            "class Slow(Sink):\n"
            "    def write(self, record): time.sleep(0.05); print('record', record, flush=True)\n"
            "    def tell(self, finding): print('finding', finding, flush=True)\n"
            "    def note(self, facts): print('facts', facts, flush=True)\n"
            "sink = BackgroundSink(Slow())\n"
            "sink.note({'a': 1}); sink.write(1); sink.write(2); sink.tell({'rule': 'r'})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines() == ["facts {'a': 1}", "record 1", "record 2", "finding {'rule': 'r'}"]


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
