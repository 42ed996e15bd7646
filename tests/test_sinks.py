"""Sinks: every key of every record comes back, and a broken one neither stops training nor fails silently."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import pytest

from fastguard.records import StepStats
from fastguard.records.samples import WeightStats
from fastguard.sinks import (
    BackgroundSink,
    FunctionSink,
    JsonlSink,
    MemorySink,
    SafeSink,
    Sink,
    as_sink,
    flatten,
    read_jsonl,
)

from made_runs import activity, attending, routing
from records import make_bad_record, make_record, make_row, make_table

ALL_KEYS = [
    *("step", "loss", "val_loss", "lr", "loss_scale"),
    *("grad/norm", "grad/max", "grad/min", "grad/mean", "grad/std"),
    *("grad/num_zeros", "grad/num_nans", "grad/num_infs", "grad/num_elements"),
    *("grad/cosine", "grad/noise_scale", "clip/coef", "clip/trigger", "grad/clipped_norm"),
    *("clipped", "skipped", "nonfinite", "clip/over"),
]
RARE = ("nonfinite", "grad/cosine", "grad/noise_scale", "clip/trigger", "grad/clipped_norm", "clip/over")
NOTES = {
    "loss": 1.5,
    "val_loss": 1.75,
    "lr": 1e-3,
    "loss_scale": 1024.0,
    "clip_coef": 0.5,
    "grad_cosine": -0.5,
    "noise_scale": 12.5,
    "trigger": 2.0,
    "over": ("b",),
}
FULL_RECORD = make_bad_record(7, ["b"], **NOTES)


# How each sink is made, in a folder of its own; all of them go through `TestContract`.
SINKS = {
    "MemorySink": lambda folder: MemorySink(),
    "JsonlSink": lambda folder: JsonlSink(folder / "log.jsonl"),
    "FunctionSink": lambda folder: FunctionSink(lambda record: None),
    "SafeSink": lambda folder: SafeSink(MemorySink()),
    "BackgroundSink": lambda folder: BackgroundSink(MemorySink()),
}


def write_steps(sink, num_steps):
    for step in range(num_steps):
        sink.write(make_record(step))


class TestContract:
    """What every sink does."""

    @pytest.fixture(params=SINKS)
    def sink(self, request, tmp_path):
        made = SINKS[request.param](tmp_path)
        yield made
        made.close()

    def test_every_sink_of_fastguard_is_here(self):
        ours = {kind.__name__ for kind in Sink.__subclasses__() if kind.__module__.startswith("fastguard.")}
        ours -= {"TrackerSink", "PrometheusSink"}  # those of trackers go through tests/sinks
        assert ours == SINKS.keys(), "say in SINKS above how each sink is made"

    def test_is_a_sink_and_is_taken_as_it_is(self, sink):
        assert isinstance(sink, Sink)
        assert as_sink(sink) is sink

    def test_takes_records_and_closes_twice(self, sink):
        assert sink.write(make_record(0)) is None
        assert sink.write(FULL_RECORD) is None
        assert sink.close() is None and sink.close() is None

    def test_takes_notes(self, sink):
        assert sink.note({"names": ["a"]}) is None

    def test_repr_names_it_without_an_address(self, sink):
        assert type(sink).__name__ in repr(sink) and " at 0x" not in repr(sink).replace("<lambda> at", "")


class TestBase:
    def test_one_method_is_enough(self):
        seen = []

        class Keeping(Sink):
            def write(self, record):
                seen.append(record)

        sink, record = SafeSink(Keeping()), make_record(0)
        sink.write(record)
        sink.note({"names": []})
        sink.close()
        assert seen == [record] and sink.last_error is None

    def test_without_write_it_cannot_be_made(self):
        class Empty(Sink):
            pass

        with pytest.raises(TypeError, match=r"abstract class Empty .* abstract method '?write"):
            Empty()

    def test_any_class_with_write_and_close_is_one(self):
        class Duck:
            def write(self, record): ...

            def close(self): ...

        class Deaf:
            def close(self): ...

        assert isinstance(Duck(), Sink) and as_sink(duck := Duck()) is duck
        assert not isinstance(Deaf(), Sink) and not isinstance(Duck(), MemorySink)


class TestAsSink:
    def test_function(self):
        seen = []
        record = make_record(0)
        as_sink(seen.append).write(record)
        assert seen == [record]

    @pytest.mark.parametrize("target", ["run.jsonl", 3, None, MemorySink, sys.stdout])
    def test_anything_else_is_refused_with_a_remedy(self, target):
        with pytest.raises(TypeError, match=r"`sink` must be .* For a log file pass `JsonlSink\(path\)`"):
            as_sink(target)


class TestFlatten:
    def test_what_was_sampled_has_keys_by_module_and_tensor(self):
        dead, plain = activity("relu", zero=0.5, dead=0.25), activity("norm", "norm", saturated=0.1, units=0)
        moved = WeightStats("w", 4, 2.0, 0.5, 1.0, grad_norm=1.0, update_norm=0.5)
        flat = flatten(make_record(3, activations=(dead, plain), weights=(moved, WeightStats("b", 4, 2.0, 0.5, 1.0))))
        sampled = {key: value for key, value in flat.items() if key.startswith(("activation/", "weight/"))}
        choices = flatten(make_record(3, activations=(attending("a", entropy=0.5), routing([1.5, 0.5, 0.0], "r"))))
        assert {key: value for key, value in choices.items() if key.startswith("activation/")} == {
            **{"activation/a/entropy": 0.5, "activation/a/max_logit": 8.0, "activation/r/entropy": 0.5},
            **{"activation/r/max_load": 1.5, "activation/r/dead_unit_ratio": 1 / 3},
        }
        assert sampled == {
            **{"activation/relu/mean": 0.1, "activation/relu/std": 0.5, "activation/relu/zero_ratio": 0.5},
            **{"activation/relu/saturation_ratio": 0.0, "activation/relu/dead_unit_ratio": 0.25},
            **{"activation/norm/mean": 0.1, "activation/norm/std": 0.5, "activation/norm/zero_ratio": 0.3},
            **{"activation/norm/saturation_ratio": 0.1},
            **{
                "weight/w/norm": 2.0,
                "weight/w/std": 0.5,
                "weight/w/gradient_ratio": 0.5,
                "weight/w/update_ratio": 0.25,
            },
            **{"weight/b/norm": 2.0, "weight/b/std": 0.5},
        }
        assert flatten(make_record(3)).items() <= flat.items()

    def test_every_key_in_its_order(self):
        assert list(flatten(FULL_RECORD)) == ALL_KEYS

    def test_table_in_the_docstring_has_every_key_and_no_other(self):
        rows = [line for line in flatten.__doc__.splitlines() if line.strip().startswith("| `")]
        documented = [key for row in rows for key in row.split("|")[1].replace("`", "").replace(",", "").split()]
        assert documented == ALL_KEYS

    def test_unknown_values_have_no_key(self):
        assert not {"loss", "val_loss", "lr", "loss_scale", "grad/cosine", "nonfinite"} & flatten(make_record(0)).keys()

    def test_values(self):
        flat = flatten(StepStats(2, make_table([make_row(5.0, 4, num_zeros=1)]), clip_coef=0.2))
        assert (flat["step"], flat["grad/norm"], flat["clip/coef"], flat["clipped"]) == (2, 5.0, 0.2, True)
        assert (flat["grad/max"], flat["grad/num_zeros"], flat["grad/num_elements"]) == (2.5, 1, 4)


class TestMemorySink:
    def test_keeps_all(self):
        sink = MemorySink()
        records = [make_record(step) for step in range(5)]
        for record in records:
            sink.write(record)
        assert list(sink.records) == records and len(sink) == 5

    def test_keeps_the_newest(self):
        sink = MemorySink(max_records=2)
        write_steps(sink, 5)
        assert sink.series("step") == [3, 4]

    def test_series(self):
        sink = MemorySink()
        for step, loss in enumerate([2.0, None, 1.0]):
            sink.write(make_record(step, step + 1.0, loss=loss))
        assert sink.series("grad/norm") == [1.0, 2.0, 3.0]
        assert sink.series("loss") == [2.0, None, 1.0]
        assert sink.series("grad/norm/w") == [1.0, 2.0, 3.0]
        assert set(sink.keys) == set(ALL_KEYS) - {"val_loss", "lr", "loss_scale", *RARE}

    @pytest.mark.parametrize("key", ["grad/nrom", "grad/norm/v"])
    def test_unknown_key_lists_the_known_ones(self, key):
        sink = MemorySink()
        sink.write(make_record(0))
        with pytest.raises(KeyError, match=f"no record has the key '{key}'; the keys are: step, grad/norm"):
            sink.series(key)

    def test_max_records_must_be_positive(self):
        with pytest.raises(ValueError, match="`max_records` must be at least 1, or None for all, got 0"):
            MemorySink(0)


class TestBrokenSinks:
    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
    def test_full_disk_warns_once_counts_and_goes_on(self):
        sink = SafeSink(JsonlSink("/dev/full"))
        with pytest.warns(RuntimeWarning, match=r"sink JsonlSink\('/dev/full'\) could not .* No space left") as caught:
            write_steps(sink, 5)
        sink.close()
        assert len(caught) == 1 and "Training goes on" in str(caught[0].message)
        assert sink.num_lost == 5
        assert isinstance(sink.last_error, OSError)

    def test_a_closed_file(self, tmp_path):
        sink = SafeSink(JsonlSink(tmp_path / "run.jsonl"), name="the log")
        sink.sink.close()
        with pytest.warns(RuntimeWarning, match=r"sink the log could not write a record: ValueError: .* closed"):
            sink.write(make_record(0))
        assert sink.num_lost == 1

    def test_a_bug_in_a_function_loses_only_its_records(self):
        def fussy(record):
            if record.step % 2:
                raise KeyError(record.step)
            seen.append(record.step)

        seen = []
        sink = SafeSink(fussy)
        with pytest.warns(RuntimeWarning, match="fussy.*could not write a record: KeyError: 1") as caught:
            write_steps(sink, 6)
        assert (seen, sink.num_lost, len(caught)) == ([0, 2, 4], 3, 1)

    def test_a_close_that_fails(self):
        class Stubborn(MemorySink):
            def close(self):
                raise OSError("not now")

        sink = SafeSink(Stubborn())
        with pytest.warns(RuntimeWarning, match="could not be closed: OSError: not now"):
            sink.close()
        assert sink.num_lost == 0

    def test_where_warnings_are_errors_it_logs_instead(self, caplog):
        sink = SafeSink(lambda record: 1 / 0)
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "fastguard"):
            warnings.simplefilter("error")
            write_steps(sink, 3)
        assert sink.num_lost == 3
        assert [r.name for r in caplog.records] == ["fastguard"] and "ZeroDivisionError" in caplog.text

    @pytest.mark.parametrize("signal_like", [KeyboardInterrupt, SystemExit])
    def test_interrupts_pass_through(self, signal_like):
        def stop(record):
            raise signal_like

        sink = SafeSink(stop)
        with pytest.raises(signal_like):
            sink.write(make_record(0))
        assert (sink.num_lost, sink.newest) == (1, 0)


class TestNotes:
    def test_what_is_known_of_the_model_has_lines_of_its_own(self, tmp_path):
        path = tmp_path / "run.jsonl"
        with JsonlSink(path) as sink:
            sink.note({"names": ["a", "NaN"], "decay_per_step": 0.5})
            sink.write(make_record(0))
            sink.note({"decay_per_step": 0.25})
        log = read_jsonl(path)
        assert [line["step"] for line in log] == [0]
        assert log.model == {"names": ["a", "NaN"], "decay_per_step": 0.25}

    def test_only_sinks_that_take_notes_are_told(self, caplog):
        told = []

        class Taking:
            write = close = staticmethod(lambda *record: None)
            note = staticmethod(told.append)

        SafeSink(Taking()).note({"a": 1})
        SafeSink(MemorySink()).note({"a": 1})
        SafeSink(lambda record: None).note({"a": 1})
        assert told == [{"a": 1}]

    def test_a_failing_one_warns_and_training_goes_on(self, tmp_path):
        sink = SafeSink(JsonlSink(tmp_path / "run.jsonl"))
        sink.close()
        with pytest.warns(RuntimeWarning, match="could not write what is known of the model: ValueError"):
            sink.note({"a": 1})
        assert sink.num_lost == 0
