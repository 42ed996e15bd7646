"""What all sinks of trackers share: names, which steps and tensors, findings, ranks; and the thread for slow ones."""

from __future__ import annotations

import collections
import math
import os
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
    def test_those_of_logs_and_what_has_no_section_in_one_of_its_own(self):
        sink, record = Keeping(layers=0), make_record(3, loss=1.5, lr=0.1, clip_coef=0.5)
        sink.write(record)
        flat = flatten(record)
        expected = {key if "/" in key else f"fastguard/{key}": float(flat[key]) for key in flat if key != "step"}
        extra = {"grad/num_zero_tensors": 0.0, "grad/num_nonfinite_tensors": 0.0}
        assert sink.rows[0][:2] == (3, expected | extra)
        assert expected["fastguard/clipped"] == 1.0 and type(sink.scalars["fastguard/clipped"]) is float

    def test_the_prefix_is_before_all_of_them(self):
        sink = Keeping(prefix="train/")
        sink.write(make_bad_record(0, ["b"], loss=1.0))
        sink.tell({"rule": "r", "severity": "warning", "summary": "s", "recommendation": "", "last_step": 0})
        names = {*sink.scalars, *sink.texts, *sink.histograms}
        assert {"train/grad/norm", "train/fastguard/loss", "train/fastguard/finding/r"} <= names
        assert {"train/grad/norm/b", "train/fastguard/event", "train/grad/log10_norm"} <= names
        assert all(name.startswith("train/") for name in names)

    def test_groups_that_are_clipped_each_and_no_infinite_trigger(self):
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
    def test_every_so_many_and_each_bad_one(self):
        sink = Keeping(every=5)
        for step in range(12):
            sink.write(make_record(step, math.nan if step == 7 else 1.0, skipped=step in (7, 8)))
        assert sink.steps == [0, 5, 7, 8, 10]
        assert math.isnan(sink.rows[2][1]["grad/norm"]) and sink.rows[2][1]["fastguard/skipped"] == 1.0
        assert sink.texts["fastguard/event"].startswith("step 8: the norm of the gradients was 1; the step was skipped")

    def test_a_clean_step_that_is_not_due_needs_no_record(self):
        sink = Keeping(every=4)
        optimizer = guarded(sink, 9)
        assert optimizer.guard._ledger.writes_lines
        optimizer.guard.close()
        assert sink.steps == [0, 4, 8]
        assert [sink.write_line(step, b"") for step in (0, 1, 4)] == [False, True, False]

    def test_an_event_says_what_was_not_finite(self):
        sink = Keeping()
        sink.write(make_bad_record(5, ["a", "c"]))
        event = sink.texts["fastguard/event"]
        assert event == "step 5: gradients are not finite, first in c, a; the step was skipped"

    def test_a_name_in_a_text_is_shown_not_obeyed(self):
        sink = Keeping()
        sink.write(make_bad_record(5, ["a\x1b[2J"], names=["a\x1b[2J"]))
        assert r"a\x1b[2J" in sink.texts["fastguard/event"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"every": 0}, "`every` must be an integer >= 1, got 0"),
            ({"tensors_every": -1}, "`tensors_every` must be an integer >= 0"),
            ({"layers": -1}, "`layers` must be at least 0, got -1"),
            ({"layers": "("}, "`layers` must be a regular expression"),
        ],
    )
    def test_odd_options_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            Keeping(**options)

    @pytest.mark.parametrize("options", [{"layers": None}, {"layers": True}, {"prefix": 3}])
    def test_odd_types_are_refused(self, options):
        with pytest.raises(TypeError, match="must be"):
            Keeping(**options)


NORMS = {f"l{i}": float(i + 1) for i in range(100)}


class TestTensors:
    def test_no_more_curves_in_a_run_than_were_asked_for(self):
        sink = Keeping(tensors_every=1, layers=4)
        sink.write(make_layers(NORMS))
        assert {key for key in sink.scalars if key.startswith("grad/norm/")} == {"grad/norm/l99", "grad/norm/l98"}
        for step in range(1, 50):  # another one is the largest each time
            sink.write(make_layers({**NORMS, f"l{step}": 1e3}, step))
        chosen = {key for key in sink.scalars if key.startswith("grad/norm/")}
        assert chosen == {"grad/norm/l99", "grad/norm/l98", "grad/norm/l1", "grad/norm/l2"}

    def test_sixteen_by_default_and_bad_ones_among_them(self):
        sink = Keeping()
        sink.write(make_layers(NORMS))
        sink.write(make_bad_record(1, ["l3", "l5"], names=list(NORMS)))
        chosen = {key for key in sink.scalars if key.startswith("grad/norm/")}
        assert len(chosen) == 11 and {"grad/norm/l3", "grad/norm/l5"} < chosen
        assert math.isnan(sink.scalars["grad/norm/l5"])
        assert sink.scalars["grad/num_nonfinite_tensors"] == 2.0

    def test_an_expression_takes_all_that_it_is_found_in(self):
        sink = Keeping(layers=r"l\d$")
        sink.write(make_layers(NORMS))
        assert sum(key.startswith("grad/norm/") for key in sink.scalars) == 10

    def test_they_come_every_so_many_steps_and_anew_where_steps_go_back(self):
        sink = Keeping(tensors_every=10, every=3)
        for step in (*range(25), *range(6, 20)):
            sink.write(make_record(step))
        assert [row[0] for row in sink.rows if row[3]] == [0, 12, 24, 6, 18]

    def test_one_histogram_stands_for_all_norms(self):
        sink = Keeping()
        sink.write(make_layers({"a": 0.0, "b": 1.0, "c": 1.5, "d": 1e-3, "e": 2.0}))
        counts, edges = sink.histograms["grad/log10_norm"]
        assert sum(counts) == 4 and edges[0] == -3.0 and len(edges) == len(counts) + 1
        assert counts[0] == 1 and counts[edges.index(0.0)] == 2 and counts[edges.index(0.25)] == 1
        assert sink.scalars["grad/num_zero_tensors"] == 1.0

    def test_none_at_all(self):
        sink = Keeping(tensors_every=0)
        sink.write(make_layers(NORMS))
        sink.write(make_bad_record(1, ["a"]))
        assert not sink.histograms and not any(key.startswith("grad/norm/") for key in sink.scalars)

    def test_magnitudes_of_the_gradients_come_by_themselves_on_the_cpu(self):
        sink = Keeping()
        optimizer = guarded(sink)
        optimizer.guard.close()
        counts, edges = sink.histograms["grad/log2_magnitude"]
        assert 0 < sum(counts) <= 4 * 8 + 8 + 8 + 1 and edges == [
            float(x) for x in range(int(edges[0]), int(edges[-1]) + 1)
        ]
        total = optimizer.guard.magnitudes()
        sink.write_magnitudes(7, total)
        assert sink.rows[-1][0] == 7 and sum(sink.rows[-1][3]["grad/log2_magnitude"].counts) == total.num_nonzero

    def test_a_loss_scale_is_taken_out_of_magnitudes(self):
        sink = Keeping()
        sink.measure = lambda: fastguard.MagnitudeHistogram({10: 3})
        sink.write(make_record(0, loss_scale=1024.0))
        assert sink.histograms["grad/log2_magnitude"] == ([3], [0.0, 1.0])

    def test_a_guard_that_is_dropped_hands_over_its_last_record(self):
        sink = Keeping(tensors_every=1)
        guarded(sink, 2)
        assert sink.steps == [0, 1]

    def test_no_more_buckets_than_trackers_take(self):
        counts, edges = Buckets.from_counts({-2000: 1, 0: 2, 5: 1})
        assert len(counts) == MAX_BUCKETS and sum(counts) == 4 and (edges[-1], counts[0], counts[-1]) == (6.0, 1, 1)
        assert Buckets.from_counts({}) is None
        assert Buckets([1, 3], [0.0, 1.0, 2.0]).moments() == (4, 5.0, 7.0)


class TestFindings:
    def test_what_rules_find_is_told_once(self):
        sink = Keeping()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, sinks=[sink], check_every=5)
        for _ in range(20):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        optimizer.guard.close()
        text = sink.texts["fastguard/finding/gradients-not-cleared"]
        assert text.startswith("[") and "zero_grad()" in text
        assert sum("fastguard/finding/gradients-not-cleared" in row[2] for row in sink.rows) == 1

    def test_a_sink_by_duck_typing_need_not_take_them(self):
        class Duck:
            write = close = staticmethod(lambda *record: None)

        SafeSink(Duck()).tell({"rule": "r"})

    def test_one_that_fails_is_warned_of(self):
        class Fussy(MemorySink):
            def tell(self, finding):
                raise KeyError(finding["rule"])

        with pytest.warns(RuntimeWarning, match="could not write a finding: KeyError: 'r'"):
            SafeSink(Fussy()).tell({"rule": "r"})


class TestBackground:
    def test_training_does_not_wait(self):
        go, seen = threading.Event(), []

        def slow(record):
            go.wait(10)
            seen.append(record.step)

        sink = BackgroundSink(slow)
        for step in range(5):
            sink.write(make_record(step))
        assert not seen
        go.set()
        sink.close()
        assert seen == [0, 1, 2, 3, 4] and sink.num_lost == 0

    @pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
    def test_what_the_other_sink_loses_is_counted_and_told(self, error):
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
        inner = BackgroundSink(lambda record: go.wait(10), max_records=3)
        sink = SafeSink(inner)
        records = map(make_record, range(10))
        with pytest.warns(RuntimeWarning, match="3 records wait for the tracker already"):
            collections.deque(map(sink.write, records))
        go.set()
        sink.close()
        assert sink.num_lost == 7

    def test_one_that_hangs_does_not_hold_up_the_end(self):
        go = threading.Event()
        worker = Worker(sink := MemorySink(), "a tracker", lambda items: go.wait(10), 10)
        worker.put(1)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"longer than 0\.05 s .*; records lost by that: 1"):
            worker.close(0.05)
        assert time.monotonic() - started < 5 and worker.num_lost == 1 and sink is not None
        go.set()

    def test_closed_is_closed(self):
        sink = BackgroundSink(MemorySink())
        sink.close()
        with pytest.raises(ValueError, match="must be open to write, got a closed one"):
            sink.write(make_record(0))

    def test_findings_and_facts_go_along_and_a_process_that_ends_waits(self):
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

    def test_odd_numbers_are_refused(self):
        with pytest.raises(ValueError, match="`max_records` must be an integer >= 1, got 0"):
            BackgroundSink(print, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_can_close_a_prometheus_sink():
    code = (
        "import os, signal, sys, threading\nfrom http.server import BaseHTTPRequestHandler, ThreadingHTTPServer\n"
        "from unittest.mock import Mock\nfrom fastguard.sinks import PrometheusSink\n"
        "def start(port, addr, registry):\n"
        "    server = ThreadingHTTPServer((addr, port), BaseHTTPRequestHandler)\n"
        "    thread = threading.Thread(target=server.serve_forever, daemon=True)\n"
        "    thread.start()\n    return server, thread\n"
        "client = Mock(start_http_server=start)\n"
        "sys.modules.update({'prometheus_client': client, 'prometheus_client.core': client})\n"
        "sink = PrometheusSink(0)\nsink._serve()\n"
        "child = os.fork()\nsignal.alarm(30)\nsink.close()\n"
        "sys.exit(os.waitpid(child, 0)[1] if child else 0)"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60).returncode == 0


class TestCost:
    def test_the_report_says_what_each_sink_costs(self, tmp_path):
        def slow(record):
            time.sleep(0.002)

        log = fastguard.JsonlSink(tmp_path / "run.jsonl")
        optimizer = guarded(slow, 20)
        optimizer.guard.close()
        (cost,) = optimizer.guard.report().sinks
        assert cost["num_steps"] == 20 and cost["mean_us"] > 2000 and cost["total_s"] >= 0.04
        assert re.search(r"^cost of sinks +mean [\d.]+ ms a step, ", str(optimizer.guard.report()), re.MULTILINE)
        optimizer = guarded(log, 40)
        optimizer.guard.close()
        (cost,) = optimizer.guard.report().to_dict()["sinks"]
        assert cost["num_steps"] == 40 and 0 < cost["mean_us"] < 1e5 and cost["num_lost"] == 0

    def test_lost_records_are_counted_by_sink(self):
        def broken(record):
            if record.step == 1:
                raise OSError("disk full")

        with pytest.warns(RuntimeWarning, match="disk full"):
            optimizer = guarded(broken, 4)
        optimizer.guard.flush()
        assert ", 1 of 4 steps lost: " in " ".join(str(optimizer.guard.report()).split())
