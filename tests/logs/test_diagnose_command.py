"""What `fastguard diagnose` prints: for bugs and wrong arguments, in any encoding, into closed pipes."""

import io
import json
import os
import subprocess
import sys

import pytest

from fastguard.commands import cli, diagnose

from log_lines import ROW, healthy_log, line


class TestTheCommand:
    def test_a_bug_is_not_a_diagnosis(self, told, monkeypatch):
        def fail(*arguments, **options):
            raise TypeError("\x1b[2J\nHEALTHY after 9 steps")

        monkeypatch.setattr(diagnose, "build_report", fail)
        code, out, err = told(healthy_log(40))
        assert (code, out) == (3, "") and err.count("\n") == 1
        assert r"this is a bug of fastguard, please report it: TypeError: \x1b[2J HEALTHY" in err
        assert "(test_diagnose_command.py:" in err

    def test_names_in_json_are_ascii_and_in_full(self, told):
        name = "\x7f\x9b\u202e" + "n" * 10_000
        log = healthy_log(40) + line(step=40, grad__norm="NaN", nonfinite=[name]) + "\n"
        code, out, _ = told(log, "--json")
        assert code == 2 and out.isascii() and "\x7f" not in out
        assert [name] in [finding["layers"] for finding in json.loads(out)["findings"]]
        code, out, _ = told(log)
        assert code == 2 and out.isascii() and out.replace("\n", "").isprintable() and len(out.splitlines()) < 60

    def test_arguments_are_escaped(self, capsys):
        for arguments in (["diagnose", "a", "\x1b[2J\n"], ["diagnose", "a", "--set", "\x1b]0;x\x07"], ["\x1b[2J"]):
            try:
                code = cli.main(arguments)
            except SystemExit as leaving:
                code = leaving.code
            err = capsys.readouterr().err
            assert code == 64 and err.count("\n") == 1 and err.replace("\n", "").isprintable()

    def test_a_pipe_that_was_closed_changes_no_code(self, told, monkeypatch):
        class Closed(io.StringIO):
            def flush(self):
                raise BrokenPipeError

        monkeypatch.setattr(sys, "stdout", Closed())
        assert told(healthy_log(40))[0] == 0

    def test_a_report_that_cannot_be_written(self, told, monkeypatch):
        class Full(io.StringIO):
            def flush(self):
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(sys, "stdout", Full())
        code, _, err = told(healthy_log(40))
        assert code == 3 and "the report cannot be written: [Errno 28] No space left" in err


@pytest.fixture(scope="module")
def nasty_log(tmp_path_factory):
    path = tmp_path_factory.mktemp("logs") / "l\u00f6g\u91cd.jsonl"
    name = "caf\u00e9.\u91cd.\ud800.\x9b2J"
    path.write_text(
        healthy_log(40) + line(step=40, grad__norm="NaN", nonfinite=[name], tensors={name: [*ROW[:6], 1, 0]})
    )
    return path


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1:strict"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "latin-1", "LC_ALL=C"],
)
def test_any_encoding_of_the_terminal(nasty_log, environment):
    known = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONIO"))}
    code = (
        "import sys; from fastguard.commands.cli import main; path = sys.argv[1]\n"
        "print(main(['diagnose', path]), main(['diagnose', path + '.not']), main(['rules']), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, nasty_log],
        capture_output=True,
        env={**known, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(b"2 3 0\n") and b"Traceback" not in done.stderr
    assert done.stdout.isascii() and rb"caf\xe9.\u91cd.\ud800.\x9b2J" in done.stdout
