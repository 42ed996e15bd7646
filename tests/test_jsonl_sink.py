"""The JSONL log: every key comes back, a crash loses at most the line being written, and other files are refused."""

from __future__ import annotations

import json
import math
import os
import time

import pytest

from fastguard.sinks import JsonlSink, flatten, read_jsonl

from records import make_bad_record, make_record

FULL_RECORD = make_bad_record(7, ["b"], loss=1.5, val_loss=1.75, lr=1e-3, loss_scale=1024.0, clip_coef=0.5)


def strict_lines(path):
    """The lines of `path`, each through a parser that refuses what is not JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_bytes().splitlines()]


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
        for key in ("grad/norm", "grad/clipped_norm"):
            assert math.isnan(line.pop(key)) and math.isnan(expected.pop(key))
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
        numpy = pytest.importorskip("numpy", reason="needs numpy")
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
        with pytest.raises(ValueError, match=r"a log must have .* got 'step,loss' - at .*run\.jsonl, line 1"):
            read_jsonl(whole)
