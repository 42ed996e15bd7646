"""Sinks: every key of every record comes back, and a broken one neither stops training nor fails silently."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest

from fastguard.sinks import FunctionSink, JsonlSink, MemorySink, SafeSink, Sink, as_sink, flatten, read_jsonl
from fastguard.stats import StepStats
from fastguard.stats.samples import WeightStats

from faulty_runs import activity
from records import make_bad_record, make_record, make_row, make_table

ALL_KEYS = [
    *("step", "loss", "val_loss", "lr", "loss_scale"),
    *("grad/norm", "grad/max", "grad/min", "grad/mean", "grad/std"),
    *("grad/num_zeros", "grad/num_nans", "grad/num_infs", "grad/num_elements"),
    *("clip/coef", "clipped", "skipped", "nonfinite"),
]
FULL_RECORD = make_bad_record(7, ["b"], loss=1.5, val_loss=1.75, lr=1e-3, loss_scale=1024.0, clip_coef=0.5)
HERE = Path(__file__).parent


def strict_lines(path):
    """The lines of `path`, each through a parser that refuses what is not JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_bytes().splitlines()]


def run_python(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def write_steps(sink, num_steps):
    for step in range(num_steps):
        sink.write(make_record(step))


class TestContract:
    """What every sink does."""

    @pytest.fixture(params=["memory", "jsonl", "function", "safe"])
    def sink(self, request, tmp_path):
        made = {
            "memory": MemorySink,
            "jsonl": lambda: JsonlSink(tmp_path / "log.jsonl"),
            "function": lambda: FunctionSink(lambda record: None),
            "safe": lambda: SafeSink(MemorySink()),
        }[request.param]()
        yield made
        made.close()

    def test_is_a_sink_and_is_taken_as_it_is(self, sink):
        assert isinstance(sink, Sink)
        assert as_sink(sink) is sink

    def test_takes_records_and_closes_twice(self, sink):
        assert sink.write(make_record(0)) is None
        assert sink.write(FULL_RECORD) is None
        assert sink.close() is None and sink.close() is None

    def test_repr_names_it_without_an_address(self, sink):
        assert type(sink).__name__ in repr(sink) and " at 0x" not in repr(sink).replace("<lambda> at", "")


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
        assert not {"loss", "val_loss", "lr", "loss_scale", "nonfinite"} & flatten(make_record(0)).keys()

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
        assert set(sink.keys) == set(ALL_KEYS) - {"val_loss", "lr", "loss_scale", "nonfinite"}

    @pytest.mark.parametrize("key", ["grad/nrom", "grad/norm/v"])
    def test_unknown_key_lists_the_known_ones(self, key):
        sink = MemorySink()
        sink.write(make_record(0))
        with pytest.raises(KeyError, match=f"no record has the key '{key}'; the keys are: step, grad/norm"):
            sink.series(key)

    def test_max_records_must_be_positive(self):
        with pytest.raises(ValueError, match="`max_records` must be at least 1, or None for all, got 0"):
            MemorySink(0)


class TestJsonlSink:
    def test_every_key_comes_back(self, tmp_path):
        path = tmp_path / "made" / "on the way" / "run.jsonl"
        before = time.time()
        with JsonlSink(path) as sink:
            sink.write(FULL_RECORD)
        (line,) = read_jsonl(path)
        assert before - 1 <= line.pop("time") <= time.time() + 1
        assert list(line.pop("tensors")) == ["a", "b", "c"]
        expected = flatten(FULL_RECORD)
        assert math.isnan(line.pop("grad/norm")) and math.isnan(expected.pop("grad/norm"))
        assert line == expected

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("field", ["loss", "val_loss", "lr", "loss_scale", "clip_coef"])
    def test_nonfinite_values_are_strings_in_strict_json(self, tmp_path, field, bad):
        path = tmp_path / "run.jsonl"
        with JsonlSink(path) as sink:
            sink.write(make_record(0, **{field: bad}))
        key = "clip/coef" if field == "clip_coef" else field
        (written,), (read,) = strict_lines(path), read_jsonl(path)
        assert written[key] == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(bad)]
        assert repr(read[key]) == repr(bad)

    def test_a_tensor_may_be_called_nan(self, tmp_path):
        path = tmp_path / "run.jsonl"
        with JsonlSink(path) as sink:
            sink.write(make_bad_record(0, ["NaN"], names=["NaN", "ü\ud800\u2028\n"]))
        (line,) = read_jsonl(path)
        assert line["nonfinite"] == ["NaN"]
        assert list(line["tensors"]) == ["NaN", "ü\ud800\u2028\n"]

    def test_numbers_of_other_libraries(self, tmp_path):
        numpy = pytest.importorskip("numpy")
        path = tmp_path / "run.jsonl"
        with JsonlSink(path) as sink:
            sink.write(make_record(0, loss=numpy.float32(0.5), lr=numpy.float64("nan"), val_loss=numpy.float32("inf")))
        (line,) = strict_lines(path)
        assert (line["loss"], line["lr"], line["val_loss"]) == (0.5, "NaN", "Infinity")

    @pytest.mark.parametrize(("every", "expected"), [(0, [5]), (1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 5, 6])])
    def test_tables_when_due_and_when_not_finite(self, tmp_path, every, expected):
        path = tmp_path / "run.jsonl"
        with JsonlSink(path, tensors_every=every) as sink:
            for step in range(7):
                sink.write(make_record(step, math.inf if step == 5 else 2.0))
        log = read_jsonl(path)
        assert [line["step"] for line in log if "tensors" in line] == expected
        if every:
            assert log[0]["tensors"]["w"][:8] == [4, 4.0, 4.0, 1.0, 1.0, 0, 0, 0]

    def test_appends_or_starts_anew(self, tmp_path):
        path = tmp_path / "run.jsonl"
        for step, append in [(0, True), (1, True), (2, False), (3, True)]:
            with JsonlSink(path, append=append) as sink:
                sink.write(make_record(step))
        assert [line["step"] for line in read_jsonl(path)] == [2, 3]

    def test_is_on_disk_before_close(self, tmp_path):
        sink = JsonlSink(tmp_path / "run.jsonl")
        sink.write(make_record(0))
        assert [line["step"] for line in read_jsonl(sink.path)] == [0]
        sink.close()

    def test_writing_after_close_says_so(self, tmp_path):
        sink = JsonlSink(tmp_path / "run.jsonl")
        sink.close()
        with pytest.raises(ValueError, match=r"`JsonlSink` must be open to write, got a closed one - at .*run\.jsonl"):
            sink.write(make_record(0))

    def test_a_path_that_cannot_be_written_fails_at_once(self, tmp_path):
        with pytest.raises(OSError, match=r"directory"):
            JsonlSink(tmp_path)

    def test_tensors_every_must_not_be_negative(self, tmp_path):
        with pytest.raises(ValueError, match="`tensors_every` must be at least 0, got -1"):
            JsonlSink(tmp_path / "run.jsonl", tensors_every=-1)

    def test_short_writes_are_completed(self, tmp_path, monkeypatch):
        sink = JsonlSink(tmp_path / "run.jsonl")
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        sink.write(make_record(0))
        sink.write(make_record(1))
        sink.close()
        assert [line["step"] for line in read_jsonl(sink.path)] == [0, 1]


class TestCutOffLines:
    @pytest.fixture
    def whole(self, tmp_path):
        path = tmp_path / "run.jsonl"
        with JsonlSink(path, tensors_every=0) as sink:
            sink.write(make_record(0))
            sink.write(make_record(1, loss=math.nan))
        return path

    def test_cut_at_every_byte(self, whole):
        content = whole.read_bytes()
        first_line = content.index(b"\n") + 1
        for size in range(first_line, len(content)):
            whole.write_bytes(content[:size])
            with JsonlSink(whole) as sink:
                sink.write(make_record(2))
            log = read_jsonl(whole)
            is_torn = first_line < size < len(content) - 1
            assert [line["step"] for line in log] == ([0, 2] if size < len(content) - 1 else [0, 1, 2])
            assert log.skipped_lines == ([2] if is_torn else []) and log.num_skipped == int(is_torn)

    def test_zeros_left_by_a_file_system(self, whole):
        whole.write_bytes(whole.read_bytes() + bytes(100))
        with JsonlSink(whole) as sink:
            sink.write(make_record(2))
        log = read_jsonl(whole)
        assert ([line["step"] for line in log], log.skipped_lines) == ([0, 1, 2], [3])

    def test_other_files_are_not_skipped_through(self, whole):
        whole.write_text("step,loss\n0,1.0\n")
        with pytest.raises(ValueError, match=r"`path` must be a log .* got b'step,loss' - at .*run\.jsonl, line 1"):
            read_jsonl(whole)

    @pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
    def test_kill_9_loses_at_most_the_line_being_written(self, tmp_path):
        path = tmp_path / "run.jsonl"
        code = """
            import itertools, sys
            from fastguard.sinks import JsonlSink
            from records import make_record
            sink = JsonlSink(sys.argv[1], tensors_every=1)
            for step in itertools.count():
                sink.write(make_record(step))
                print(step, flush=True)
        """
        writer = run_python(code, path)
        for _ in range(200):
            assert writer.stdout.readline(), writer.stderr.read()
        writer.kill()
        said = writer.communicate()[0].splitlines()
        num_finished = int(said[-1]) if said else 199  # write() of this step had returned
        with JsonlSink(path) as sink:
            sink.write(make_record(10**6))
        log = read_jsonl(path)
        steps = [line["step"] for line in log]
        assert steps[:-1] == list(range(len(steps) - 1)) and steps[-1] == 10**6
        assert len(steps) - 1 > num_finished
        assert log.num_skipped <= 1


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

    @pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
    def test_a_disk_that_recovers_goes_on_with_whole_lines(self, tmp_path):
        path = tmp_path / "run.jsonl"
        code = """
            import resource, sys
            from fastguard.sinks import JsonlSink, SafeSink
            from records import make_record
            sink = SafeSink(JsonlSink(sys.argv[1], tensors_every=0))
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
            for step in range(10):
                sink.write(make_record(step))
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            for step in range(10, 15):
                sink.write(make_record(step))
            sink.close()
            print(sink.num_lost)
        """
        writer = run_python(code, path)
        out, err = writer.communicate(timeout=60)
        assert writer.returncode == 0, err
        num_lost = int(out)
        assert 0 < num_lost < 10 and err.count("RuntimeWarning: sink JsonlSink") == 1
        log = read_jsonl(path)
        steps = [line["step"] for line in log]
        assert steps == [*range(10 - num_lost), *range(10, 15)]
        assert log.num_skipped == 1  # the part of a line that had still fitted

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
        assert sink.num_lost == 0


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
