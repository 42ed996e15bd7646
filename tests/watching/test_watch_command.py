"""`fastguard watch` as it is used: in a terminal, in a pipe, in a log of a CI."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastguard.commands import cli
from fastguard.commands.watch import FollowedRun
from fastguard.sinks import JsonlSink

from records import make_bad_record, make_record

posix = pytest.mark.skipif(os.name != "posix", reason="needs signals, pipes and terminals of Unix")
HOSTILE = "a[/b]\x1b]0;owned\x07\x1b[2J\u202e\x9b[red]"


def write(path, steps, bad=(), name="b"):
    with JsonlSink(path) as sink:
        for step in steps:
            record = make_bad_record(step, [name], [name, "c"], loss=1.0) if step in bad else None
            sink.write(record or make_record(step, 1.0 + math.sin(step) / 9, loss=2.0 - step / 500))


@pytest.fixture(autouse=True, scope="module")
def _heeding_ctrl_c():
    """A shell's background job ignores SIGINT, and so would what is started here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


class TestArguments:
    def run(self, *arguments):
        return cli.main(["watch", *map(str, arguments)])

    def test_what_is_no_log(self, path, capsys):
        path.write_text("what\n")
        assert self.run(path) == 3
        out, err = capsys.readouterr()
        assert out == "" and "a log must have one JSON object per line, got 'what'" in err

    def test_a_bug_is_no_traceback(self, path, capsys, monkeypatch):
        def fail(self):
            raise TypeError("\x1b[2J")

        monkeypatch.setattr(FollowedRun, "read", fail)
        assert self.run(path) == 3
        assert "this is a bug of fastguard, please report it: TypeError: \\x1b[2J" in capsys.readouterr().err


def _command(*arguments):
    return [sys.executable, "-m", "fastguard", "watch", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}


def until(holds, what, seconds=30.0):
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, f"waited {seconds} s for {what}"
        time.sleep(0.02)


@posix
class TestLines:
    """Where stdout is no terminal."""

    @pytest.fixture
    def watching(self, path):
        """Starts watching; what it prints goes to files."""
        started = []

        def start():
            with open(f"{path}.out", "wb") as out, open(f"{path}.err", "wb") as err:
                process = subprocess.Popen(_command(path), stdout=out, stderr=err, env=ENVIRONMENT)
            started.append(process)
            return process

        yield start
        for process in started:
            process.kill()
            process.wait()

    def test_findings_as_they_come_until_ctrl_c(self, path, watching):
        process = watching()
        out, err = Path(f"{path}.out"), Path(f"{path}.err")
        until(lambda: "cannot be read: No such file" in err.read_text(), "a log that is not there")
        write(path, range(30), bad=(7,), name=HOSTILE)
        until(lambda: "non-finite-gradients" in out.read_text(), "the finding")
        assert out.read_text().count("\n") == 1 and out.read_text().strip().isprintable()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert err.read_text().endswith("fastguard watch: WARNING after 30 steps\n")
        assert "Traceback" not in err.read_text()


@posix
class TestTerminal:
    """Where it is one; a real one, as far as the process can tell."""

    @pytest.fixture
    def terminal(self, path):
        started = []

        def start(columns=80, rows=24, **environment):
            screen = Terminal(_command(path), columns, rows, environment)
            started.append(screen)
            return screen

        yield start
        for screen in started:
            screen.end()

    def test_from_a_log_that_is_not_there_to_another_run(self, path, terminal):
        screen = terminal(columns=40, rows=12)
        screen.wait_for("the log cannot be read")
        write(path, range(40), bad=(20,))
        screen.wait_for("WARNING after 40 steps")
        with open(path, "ab") as file:
            file.write(b'{"step":40,"lo')
        path.rename(f"{path}.1")
        write(path, range(40, 60))
        screen.wait_for("step 59: ")
        path.write_text("")
        write(path, range(3))
        screen.wait_for("HEALTHY after 3 steps")
        blocks = screen.text.split("\x1b[H\x1b[2J")[1:-1]
        assert all(block.count("\n") < 12 and max(map(len, block.split("\r\n"))) < 40 for block in blocks)
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(30) == 0
        screen.read()
        assert screen.text.endswith("fastguard watch: HEALTHY after 3 steps\r\n") and "Traceback" not in screen.text

    def test_a_dumb_terminal_gets_lines(self, path, terminal):
        write(path, range(30), bad=(7,))
        screen = terminal(TERM="dumb")
        screen.wait_for("[warning] non-finite-gradients")
        assert "\x1b" not in screen.text


class Terminal:
    """A process in a pseudo-terminal, and all that it wrote there."""

    def __init__(self, command, columns, rows, environment):
        import fcntl
        import pty
        import struct
        import termios

        self.text = ""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        known = {k: v for k, v in ENVIRONMENT.items() if k not in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**known, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment},
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)

    def read(self):
        try:
            while piece := os.read(self._ours, 1 << 16):
                self.text += piece.decode("utf-8", "replace")
        except OSError:  # nothing there now, or nobody
            pass
        return True

    def wait_for(self, text):
        try:
            until(lambda: self.read() and text in self.text, repr(text))
        except AssertionError as error:
            raise AssertionError(f"{error}; there was {self.text[-3000:]!r}") from None

    def end(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
