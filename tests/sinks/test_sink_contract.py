"""What every sink does, and what becomes of one that fails: it neither stops training nor fails silently."""

import logging
import os
import sys
import warnings

import pytest

from fastguard.sinks import (
    FunctionSink,
    JsonlSink,
    MemorySink,
    SafeSink,
    Sink,
    TrackerSink,
    as_sink,
    flatten,
)

from made_runs import activity
from records import make_bad_record, make_record


class Tracker(TrackerSink):
    def log(self, step, scalars, texts): ...


# How each sink is made, in a folder of its own. Sinks of trackers differ from `Tracker` in what `log` does.
SINKS = {
    "MemorySink": lambda folder: MemorySink(),
    "JsonlSink": lambda folder: JsonlSink(folder / "log.jsonl"),
    "FunctionSink": lambda folder: FunctionSink(lambda record: None),
    "SafeSink": lambda folder: SafeSink(MemorySink()),
    "TrackerSink": lambda folder: Tracker(),
}
FULL_RECORD = make_bad_record(
    7,
    ["b"],
    loss=1.5,
    val_loss=1.75,
    lr=1e-3,
    loss_scale=1024.0,
    clip_coef=0.5,
    grad_cosine=-0.5,
    trigger=2.0,
    over=("b",),
    activations=(activity("m", units=0),),
)


class Duck:
    """A sink that does not subclass `Sink`."""

    def write(self, record): ...

    def close(self): ...


def write_steps(sink, num_steps):
    for step in range(num_steps):
        sink.write(make_record(step))


@pytest.fixture(params=SINKS)
def sink(request, tmp_path):
    made = SINKS[request.param](tmp_path)
    yield made
    made.close()


class TestContract:
    def test_every_sink_is_here(self):
        ours = {kind.__name__ for kind in Sink.__subclasses__() if kind.__module__.startswith("fastguard.")}
        assert ours - {"PrometheusSink"} == SINKS.keys()  # which needs its package: see test_real_trackers.py

    def test_takes_records_notes_and_findings_and_closes_twice(self, sink):
        assert isinstance(sink, Sink) and as_sink(sink) is sink
        assert sink.write(make_record(0)) is sink.write(FULL_RECORD) is None
        assert sink.has_taken(7) is not False and sink.has_taken(8) is not True
        assert sink.note({"names": ["a"]}) is None
        finding = {"rule": "r", "severity": "info", "summary": "S.", "recommendation": "", "last_step": None}
        assert sink.tell(finding) is None
        assert type(sink).__name__ in repr(sink) and " at 0x" not in repr(sink).replace("<lambda> at", "")
        assert sink.close() is sink.close() is None

    def test_any_object_with_write_and_close_is_a_sink(self):
        duck = Duck()
        assert as_sink(duck) is duck
        safe = SafeSink(duck)
        safe.note({"a": 1})
        safe.tell({"rule": "r"})
        assert safe.last_error is None

    @pytest.mark.parametrize("target", ["run.jsonl", 3, None, MemorySink, sys.stdout])
    def test_anything_else_is_refused_with_a_remedy(self, target):
        with pytest.raises(TypeError, match=r"`sink` must be .* For a log file pass `JsonlSink\(path\)`"):
            as_sink(target)

    def test_a_subclass_needs_write_alone(self):
        class Keeping(Sink):
            def write(self, record):
                seen.append(record)

        seen, record = [], make_record(0)
        sink = SafeSink(Keeping())
        sink.write(record)
        sink.note({"names": []})
        sink.close()
        assert seen == [record] and sink.last_error is None
        with pytest.raises(TypeError, match=r"abstract class Sink .* abstract method '?write"):
            Sink()


class TestFlatten:
    def test_the_docstring_lists_the_keys_in_their_order(self):
        rows = [line for line in flatten.__doc__.splitlines() if line.strip().startswith("| `")]
        documented = [key for row in rows for key in row.split("|")[1].replace("`", "").replace(",", "").split()]
        flat = flatten(FULL_RECORD)
        assert [key for key in flat if not key.startswith("activation/")] == documented
        assert {key for key in documented if key not in flatten(make_record(0))} == {
            *("loss", "val_loss", "lr", "loss_scale", "grad/cosine", "clip/trigger"),
            *("grad/clipped_norm", "nonfinite", "clip/over"),
        }
        assert {key: value for key, value in flat.items() if key.startswith("activation/")} == {
            **{"activation/m/mean": 0.1, "activation/m/std": 0.5, "activation/m/zero_ratio": 0.3},
            **{"activation/m/saturation_ratio": 0.0},
        }


class TestMemorySink:
    def test_series(self):
        sink = MemorySink(max_records=3)
        for step, loss in enumerate([7.0, 2.0, None, 1.0]):
            sink.write(make_record(step, step + 1.0, loss=loss))
        assert sink.series("step") == [1, 2, 3] and len(sink) == 3
        assert sink.series("loss") == [2.0, None, 1.0]
        assert sink.series("grad/norm") == sink.series("grad/norm/w") == [2.0, 3.0, 4.0]
        for key in ("grad/nrom", "grad/norm/v"):
            with pytest.raises(KeyError, match=f"no record has the key '{key}'; the keys are: step, .*grad/norm"):
                sink.series(key)
        with pytest.raises(ValueError, match="`max_records` must be at least 1, or None for all, got 0"):
            MemorySink(0)


class TestFailing:
    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
    def test_full_disk_warns_once_counts_and_goes_on(self):
        sink = SafeSink(JsonlSink("/dev/full"))
        with pytest.warns(RuntimeWarning, match=r"sink JsonlSink\('/dev/full'\) could not .* No space left") as caught:
            write_steps(sink, 5)
        sink.close()
        assert len(caught) == 1 and "Training goes on" in str(caught[0].message)
        assert sink.num_lost == 5 and isinstance(sink.last_error, OSError)

    @pytest.mark.parametrize(
        ("method", "arguments", "problem"),
        [
            ("close", [], "could not be closed"),
            ("note", [{"a": 1}], "could not write what is known of the model"),
            ("tell", [{"rule": "r"}], "could not write a finding"),
        ],
    )
    def test_other_methods_warn_and_lose_no_record(self, method, arguments, problem):
        class Stubborn(MemorySink):
            pass

        def refuse(*arguments):
            raise OSError("not now")

        setattr(Stubborn, method, refuse)
        sink = SafeSink(Stubborn(), name="the log")
        with pytest.warns(RuntimeWarning, match=f"sink the log {problem}: OSError: not now"):
            getattr(sink, method)(*arguments)
        assert sink.num_lost == 0

    def test_where_warnings_are_errors_it_logs_instead(self, caplog):
        sink = SafeSink(lambda record: 1 / 0)
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "fastguard"):
            warnings.simplefilter("error")
            write_steps(sink, 3)
        assert sink.num_lost == 3
        assert [r.name for r in caplog.records] == ["fastguard"] and "ZeroDivisionError" in caplog.text

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
    def test_interrupts_pass_through(self, interrupt):
        def stop(record):
            raise interrupt

        sink = SafeSink(stop)
        with pytest.raises(interrupt):
            sink.write(make_record(0))
        assert (sink.num_lost, sink.newest) == (1, 0)
