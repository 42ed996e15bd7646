"""The JSONL log: every key comes back, a crash loses at most the line being written, and JSON is strict."""

import json
import math
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastguard.records import strict_json
from fastguard.sinks import JsonlSink, flatten, read_jsonl

from records import make_bad_record, make_record

FULL_RECORD = make_bad_record(7, ["b"], loss=1.5, val_loss=1.75, lr=1e-3, loss_scale=1024.0, clip_coef=0.5)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3).filter(lambda t: "N" not in t),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def steps_in(path):
    return [line["step"] for line in read_jsonl(path)]


class TestStrictJson:
    @given(PLAIN)
    def test_round_trip(self, value):
        text = strict_json.dumps(value)
        assert "\n" not in text and text.isascii()
        assert repr(strict_json.decode(json.loads(text, parse_constant=refuse))) == repr(value)

    def test_names_of_what_is_not_finite(self):
        assert strict_json.dumps({"a": [math.nan, (math.inf, -math.inf)]}) == '{"a":["NaN",["Infinity","-Infinity"]]}'
        with pytest.raises(TypeError):
            strict_json.dumps({"a": object()})


class TestWriting:
    def test_every_key_comes_back(self, tmp_path):
        path = tmp_path / "made" / "on the way" / "run.jsonl"
        before = time.time()
        with JsonlSink(path) as sink:
            sink.write(FULL_RECORD)
            assert steps_in(path) == [7]  # before it is closed
        (line,) = read_jsonl(path)
        assert before - 1 <= line.pop("time") <= time.time() + 1
        assert list(line.pop("tensors")) == ["a", "b", "c"]
        expected = flatten(FULL_RECORD)
        for key in ("grad/norm", "grad/clipped_norm"):
            assert math.isnan(line.pop(key)) and math.isnan(expected.pop(key))
        assert line == expected

    def test_tensors_may_have_any_name(self, tmp_path):
        names, path = ["NaN", "ü\ud800\u2028\n"], tmp_path / "run.jsonl"
        with JsonlSink(path) as sink:
            sink.note({"names": names})
            sink.write(make_bad_record(0, ["NaN"], names=names))
            sink.note({"decay_per_step": 0.25})
        log = read_jsonl(path)
        assert log[0]["nonfinite"] == ["NaN"] and list(log[0]["tensors"]) == names
        assert log.model == {"names": names, "decay_per_step": 0.25}

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

    def test_errors(self, tmp_path):
        with pytest.raises(OSError, match=r"directory"):
            JsonlSink(tmp_path)
        with pytest.raises(ValueError, match="`tensors_every` must be at least 0, got -1"):
            JsonlSink(tmp_path / "run.jsonl", tensors_every=-1)
        sink = JsonlSink(tmp_path / "run.jsonl")
        sink.close()
        with pytest.raises(ValueError, match=r"`JsonlSink` must be open to write, got a closed one - at .*run\.jsonl"):
            sink.write(make_record(0))

    def test_short_writes_are_completed(self, tmp_path, monkeypatch):
        write = os.write
        with JsonlSink(tmp_path / "run.jsonl") as sink:
            monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
            sink.write(make_record(0))
            sink.write(make_record(1))
        assert steps_in(sink.path) == [0, 1]

    def test_appends_or_empties_the_file(self, tmp_path):
        path = tmp_path / "run.jsonl"
        for step, append in [(0, True), (1, True), (2, False), (3, True)]:
            with JsonlSink(path, append=append) as sink:
                sink.write(make_record(step))
        assert steps_in(path) == [2, 3]


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

    def test_other_files_are_refused(self, whole):
        whole.write_text("step,loss\n0,1.0\n")
        with pytest.raises(ValueError, match=r"a log must have .* got 'step,loss' - at .*run\.jsonl, line 1"):
            read_jsonl(whole)
