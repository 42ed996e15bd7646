"""`read_jsonl` of a log that is too large to keep: the same records, read again from the file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading

import pytest

from fastguard.records import log
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


@pytest.fixture
def both(path, monkeypatch):
    """The log as it is kept, and as it is where nothing is."""
    kept = read_jsonl(path)
    monkeypatch.setattr(log, "KEPT_BYTES", 2000)
    return kept, read_jsonl(path)


def same(one: object, other: object) -> bool:
    return json.dumps(one) == json.dumps(other)  # NaN is not equal to itself


def test_is_the_same_sequence(both):
    kept, read = both
    assert isinstance(read, JsonlLog) and len(read) == len(kept) == 61 and read[2] is not read[2]
    assert same(list(read), list(kept)) and same(read[-1], kept[-1]) and same(read[3:50:5], kept[3:50:5])
    assert math.isnan(read[9]["loss"]) and read[-1]["loss"] == math.inf
    assert (read.skipped_lines, read.num_skipped, read.model) == ([62], 1, {"names": ["w"]})
    assert (kept.skipped_lines, kept.num_skipped, kept.model) == ([62], 1, {"names": ["w"]})
    for index in (61, -62):
        with pytest.raises(IndexError):
            read[index]


def test_equality_is_that_of_lists(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step":0}\n{"step":1}\n')
    kept = read_jsonl(path)
    monkeypatch.setattr(log, "KEPT_BYTES", -1)
    assert kept == read_jsonl(path) == [{"step": 0}, {"step": 1}] != [{"step": 0}]
    assert kept != "text" and kept != [{"step": 0}, {"step": 2}]


def test_lines_that_come_later_are_not_in_it(both, path):
    _, read = both
    with JsonlSink(path) as sink:
        sink.write(make_record(62))
    assert len(list(read)) == 61 and read[-1]["step"] == 61
    assert len(read_jsonl(path)) == 62


@pytest.mark.parametrize("how", ["emptied", "written anew"])
def test_a_file_that_is_another_one_now_is_told(both, path, how):
    text = path.read_text()
    path.write_text("" if how == "emptied" else text.replace('"loss":0.33', '"loss":0.34'))
    kept, read = both
    assert len(list(kept)) == 61
    with pytest.raises(ValueError, match=r"was emptied or written anew after it was read - at .*run\.jsonl"):
        list(read)


def test_a_deleted_file_is_still_read(both, path):
    path.unlink()
    assert len(list(both[1])) == 61


def test_a_mark_at_the_beginning(path, tmp_path, monkeypatch):
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf" + b'{"step":5}\r\n {"step":6}\r\n')
    monkeypatch.setattr(log, "KEPT_BYTES", -1)
    assert read_jsonl(tmp_path / "marked") == [{"step": 5}, {"step": 6}]


def test_what_is_nested_too_deeply_is_left_out_all_the_same(path, monkeypatch):
    path.write_text(f'{{"step":0}}\n{{"step":1,"x":{"[" * 2000}{"]" * 2000}}}\n{{"step":2}}\n')
    monkeypatch.setattr(log, "KEPT_BYTES", -1)
    read = read_jsonl(path)
    assert ([record["step"] for record in read], read.skipped_lines) == ([0, 2], [2])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe(path, tmp_path, monkeypatch):
    monkeypatch.setattr(log, "KEPT_BYTES", 2000)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()))
    writer.start()
    read = read_jsonl(pipe)
    writer.join()
    assert same(list(read), list(read_jsonl(path)))


READ = """
import re, sys
from pathlib import Path
from fastguard.sinks import read_jsonl
log = read_jsonl(sys.argv[1])
total = sum(record["loss"] for record in log)
assert len(log) == int(sys.argv[2]) and total == len(log) / 2, total
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux for the most memory of a process")
def test_memory_does_not_grow_with_the_log(tmp_path):
    """What is kept of 10^5 lines is what 8 MiB of records take, and 12 bytes a line."""
    path = tmp_path / "run.jsonl"
    with JsonlSink(path, tensors_every=0) as sink:
        sink.write(make_record(0, loss=0.5, lr=1e-3))
        line = path.read_text()
    num_steps = 100_000
    with path.open("w") as file:
        file.writelines(line.replace('{"step":0,', f'{{"step":{step},') for step in range(num_steps))
    done = subprocess.run([sys.executable, "-c", READ, path, str(num_steps)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100_000, f"{done.stdout.strip()} KB"  # a list of all records: 184 MB
