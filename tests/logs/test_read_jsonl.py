"""`read_jsonl`: a list of records."""

from __future__ import annotations

import math
import os
import threading

import pytest

from fastguard.sinks import JsonlLog, JsonlSink, read_jsonl

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


def test_is_a_list_that_knows_what_it_left_out(path):
    log = read_jsonl(path)
    assert isinstance(log, JsonlLog) and isinstance(log, list) and len(log) == 61
    assert math.isnan(log[9]["loss"]) and log[-1]["loss"] == math.inf
    assert (log.skipped_lines, log.num_skipped, log.model) == ([62], 1, {"names": ["w"]})
    assert repr(log) == f"JsonlLog({str(path)!r}, 61 records)"


def test_a_mark_at_the_beginning(tmp_path):
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf" + b'{"step":5}\r\n {"step":6}\r\n')
    assert read_jsonl(tmp_path / "marked") == [{"step": 5}, {"step": 6}]


def test_what_is_nested_too_deeply_is_left_out(path):
    path.write_text(f'{{"step":0}}\n{{"step":1,"x":{"[" * 2000}{"]" * 2000}}}\n{{"step":2}}\n')
    log = read_jsonl(path)
    assert ([record["step"] for record in log], log.skipped_lines) == ([0, 2], [2])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe(path, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()))
    writer.start()
    log = read_jsonl(pipe)
    writer.join()
    assert [record["step"] for record in log] == [record["step"] for record in read_jsonl(path)]
