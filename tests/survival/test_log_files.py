"""A log whose file is deleted, moved away, emptied, or no file at all: nothing is lost in silence, nothing waits."""

import errno
import os
import shutil
import time

import pytest

import fastguard
from fastguard.sinks import SafeSink, jsonl, read_jsonl

from records import make_bad_record, make_record

posix = pytest.mark.skipif(os.name != "posix", reason="what is open cannot be deleted there")


@pytest.fixture
def clock(monkeypatch):
    """Lets the time pass after which a sink looks for its file."""
    ahead = [0.0]
    monkeypatch.setattr(jsonl, "_monotonic", lambda: time.monotonic() + ahead[0])

    def pass_():
        ahead[0] += jsonl.LOOK_EVERY_S

    return pass_


def _delete(path):
    path.unlink()


def _delete_folder(path):
    shutil.rmtree(path.parent)


def _move(path):
    path.rename(path.with_suffix(".1"))


def _replace(path):
    path.rename(path.with_suffix(".1"))
    path.touch()


def _empty(path):
    os.truncate(path, 0)


DONE = {
    "deleted": (_delete, "was deleted while"),
    "deleted with its folder": (_delete_folder, "was deleted while"),
    "moved away": (_move, "was moved away while"),
    "replaced": (_replace, "was moved away while"),
    "emptied": (_empty, "was emptied while"),
}


@posix
@pytest.mark.parametrize(("change", "said"), DONE.values(), ids=DONE)
def test_a_log_that_is_gone_goes_on_in_a_new_file(change, said, tmp_path, clock, caplog):
    path = tmp_path / "runs" / "run.jsonl"
    sink = fastguard.JsonlSink(path, tensors_every=0)
    sink.note({"names": ["w"], "decay_per_step": 0.5})
    sink.note({"decay_per_step": 0.25})
    for step in range(3):
        sink.write(make_record(step))
    clock()
    sink.write(make_record(3))  # seen
    sink.write(make_record(4))
    change(path)
    sink.write(make_record(5))  # to the old file
    clock()
    sink.write(make_record(6))
    sink.write(make_record(7))
    clock()
    sink.write(make_record(8))
    sink.close()
    log = read_jsonl(path)
    steps = [line["step"] for line in log]
    assert steps[-3:] == [6, 7, 8] and log.model == {"names": ["w"], "decay_per_step": 0.25}
    assert path.read_bytes().startswith(b'{"time":') or "emptied" in said  # with what is known of the model
    moved = path.with_suffix(".1")
    if moved.exists():
        assert steps == [6, 7, 8] and [line["step"] for line in read_jsonl(moved)] == [0, 1, 2, 3, 4, 5]
    else:
        assert steps == ([5, 6, 7, 8] if "emptied" in said else [3, 4, 5, 6, 7, 8])
    assert [r.levelname for r in caplog.records if said in r.message] == ["WARNING"]
    assert len(caplog.records) == 1


@posix
def test_facts_that_could_not_be_written_come_before_the_next_line(tmp_path, monkeypatch):
    sink = SafeSink(fastguard.JsonlSink(tmp_path / "run.jsonl"))
    write = os.write

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(RuntimeWarning, match="could not write what is known of the model"):
        sink.note({"names": ["w"]})
    sink.write(make_record(0))
    monkeypatch.setattr(os, "write", write)
    sink.write(make_record(1))
    sink.close()
    log = read_jsonl(tmp_path / "run.jsonl")
    assert (log.model, [line["step"] for line in log], sink.num_lost) == ({"names": ["w"]}, [1], 1)


@posix
class TestFifo:
    def test_it_is_refused_at_once(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(OSError, match="`path` must be a file, got a FIFO"):
            fastguard.JsonlSink(tmp_path / "fifo")


class TestAfterAnInterrupt:
    """The bytes may have gone out, or not, when Ctrl-C comes out of `os.write`."""

    @pytest.fixture
    def sink(self, tmp_path):
        sink = fastguard.JsonlSink(tmp_path / "run.jsonl", tensors_every=0)
        sink.write(make_record(0))
        return sink

    @pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("others", [False, True])
    def test_it_is_known_whether_the_line_is_there(self, sink, share, others, monkeypatch):
        write = os.write

        def interrupted(fd, data):
            monkeypatch.setattr(os, "write", write)
            if share:
                write(fd, data[: int(share * len(data))])
            if others:
                fastguard.JsonlSink(sink.path, tensors_every=0).write(make_record(100))
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "write", interrupted)
        safe = SafeSink(sink)
        with pytest.raises(KeyboardInterrupt):
            safe.write(make_bad_record(1, ["b"]))
        assert (safe.newest == 1) is (share == 1.0) and safe.num_lost == 0
        if safe.newest != 1:
            safe.write(make_bad_record(1, ["b"]))
        safe.write(make_record(2))
        assert [line["step"] for line in read_jsonl(sink.path) if line["step"] != 100] == [0, 1, 2]

    def test_where_nobody_can_say_it_counts_as_lost(self, sink, monkeypatch):
        def interrupted(fd, data):
            raise KeyboardInterrupt

        def unreadable(*arguments):
            raise OSError(errno.EBADF, "Bad file descriptor")

        safe = SafeSink(sink)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", interrupted)
            patch.setattr(os, "pread", unreadable)
            with pytest.raises(KeyboardInterrupt):
                safe.write(make_record(1))
        assert (safe.num_lost, safe.newest) == (1, 1)
