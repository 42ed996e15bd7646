"""A growing log, line by line: none lost, none torn, none twice, whatever becomes of the file."""

from __future__ import annotations

import os
import random

import pytest

from fastguard.commands import watch
from fastguard.commands.watch import LogTail, log_at


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def lines(log: LogTail, budget: int = 10**6) -> list[bytes]:
    """What there is to be had now."""
    log.budget = budget
    return list(iter(log.readline, b""))


def append(path, text: bytes) -> None:
    with open(path, "ab") as file:
        file.write(text)


class TestGrowing:
    def test_a_line_is_given_when_it_is_whole(self, path):
        log = LogTail(path)
        append(path, b"a\nb")
        assert lines(log) == [b"a\n"]
        append(path, b"bb")
        assert lines(log) == []
        append(path, b"\n\nc\r\nd")
        assert lines(log) == [b"bbb\n", b"\n", b"c\r\n"]
        assert log.num_opened == 1

    def test_a_budget(self, path):
        append(path, b"1\n2\n3\n")
        log = LogTail(path)
        assert lines(log, 2) == [b"1\n", b"2\n"] and not log.budget
        assert lines(log, 2) == [b"3\n"] and log.budget

    @pytest.mark.parametrize("seed", range(3))
    def test_pieces_of_any_size(self, path, seed):
        rng = random.Random(seed)
        wanted = [rng.randbytes(rng.choice((0, 3, 49, 50, 300))).replace(b"\n", b"-") + b"\n" for _ in range(60)]
        text, log, found = b"".join(wanted), LogTail(path), []
        while text:
            size = rng.choice((1, 7, 100, 1000))
            append(path, text[:size])
            text = text[size:]
            found += lines(log, rng.choice((1, 10**6)))
        assert found + lines(log) == wanted

    def test_a_line_without_end_has_a_limit(self, path, monkeypatch):
        monkeypatch.setattr(watch, "MAX_LINE_BYTES", 100)
        log = LogTail(path)
        append(path, b"x" * 1000)
        found = lines(log)
        assert found == [b"x" * 100] * 10


class TestNotThere:
    def test_yet_and_any_more(self, path):
        log = LogTail(path)
        assert lines(log) == [] and log.problem == "is not there yet"
        append(path, b"a\n")
        assert lines(log) == [b"a\n"] and log.problem == ""
        path.unlink()
        assert lines(log) == [] and log.problem == "is not there any more"
        append(path, b"b\n")
        assert lines(log) == [b"b\n"] and (log.problem, log.num_opened) == ("", 2)

    def test_a_folder_on_the_way_is_a_file(self, path):
        append(path, b"")
        log = LogTail(path / "run.jsonl")
        assert lines(log) == [] and log.problem == "is not there yet"

    def test_what_is_no_file_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="must be a file, or a folder"):
            lines(LogTail(tmp_path))

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
    def test_not_to_be_read(self, path):
        append(path, b"a\n")
        path.chmod(0)
        log = LogTail(path)
        assert lines(log) == [] and "cannot be read" in log.problem
        path.chmod(0o600)
        assert lines(log) == [b"a\n"] and log.problem == ""


class TestReplaced:
    def test_moved_away(self, path):
        """The old file is read to its end, also what is written to it after it was moved; then the new one."""
        log = LogTail(path)
        append(path, b"1\n")
        assert lines(log) == [b"1\n"]
        path.rename(f"{path}.1")
        append(f"{path}.1", b"2\ntorn")
        assert lines(log) == [b"2\n"]
        append(path, b"3\n")
        assert lines(log) == [b"3\n"] and log.num_opened == 2

    def test_moved_away_while_behind(self, path):
        append(path, b"1\n2\n3\n")
        log = LogTail(path)
        assert lines(log, 1) == [b"1\n"]
        path.rename(f"{path}.1")
        append(path, b"4\n")
        assert lines(log) == [b"2\n", b"3\n", b"4\n"]

    @pytest.mark.parametrize("text", [b"", b"9\n"], ids=["emptied", "shorter"])
    def test_written_anew_in_place(self, path, text):
        append(path, b"1\n2\n3\n")
        log = LogTail(path)
        assert len(lines(log)) == 3
        path.write_bytes(text)
        assert b"".join(lines(log)) == text and log.num_opened == 2
        append(path, b"10\n")
        assert lines(log) == [b"10\n"]

    def test_a_link_that_points_elsewhere(self, path, tmp_path):
        append(tmp_path / "a", b"1\n")
        append(tmp_path / "b", b"2\n")
        path.symlink_to(tmp_path / "a")
        log = LogTail(path)
        assert lines(log) == [b"1\n"]
        path.unlink()
        path.symlink_to(tmp_path / "b")
        assert lines(log) == [b"2\n"]

    def test_a_file_system_without_lasting_numbers(self, path, monkeypatch):
        monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
        append(path, b"1\n")
        log = LogTail(path)
        assert lines(log) == [b"1\n"]
        append(path, b"2\n")
        assert lines(log) == [b"2\n"] and log.num_opened == 1


def test_the_newest_log_of_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no \*\.jsonl in"):
        log_at(tmp_path)
    for age, name in enumerate(["b/new.jsonl", "a.jsonl", "newest.txt", "b/c/deeper.jsonl"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("")
        os.utime(path, (1e9 - age, 1e9 - age))
    assert log_at(tmp_path) == tmp_path / "b/new.jsonl"
    assert log_at(tmp_path / "any") == tmp_path / "any"
