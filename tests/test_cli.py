"""The command: every answer is readable, every error one line, and help costs no import of torch."""

import os
import subprocess
import sys

import pytest
import torch

from fastguard import kernels
from fastguard.commands import cli, info


def run(*arguments, **environment):
    """`python -m fastguard` in a fresh process."""
    return subprocess.run(
        [sys.executable, "-m", "fastguard", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def check_one_line(stderr, *parts):
    assert stderr.count("\n") == 1, stderr
    for part in parts:
        assert part in stderr


def test_info_shows_versions_and_backends(capsys):
    assert cli.main(["info"]) == 0
    facts = info.collect()
    assert torch.__version__ in capsys.readouterr().out
    assert facts["torch"] == torch.__version__
    assert facts["problem"] is None
    assert facts["backends"] == {name: status._asdict() for name, status in kernels.backends().items()}
    asked = {f"FASTGUARD_{name}" for name in ("BACKEND", "ISA", "DLPACK", "KEEP_MEMORY", "SIGTERM")} | {
        "TRITON_INTERPRET"
    }
    assert facts["environment"].keys() == asked


def test_info_with_a_bad_environment_still_shows_the_rest(capsys, monkeypatch):
    monkeypatch.setenv("FASTGUARD_BACKEND", "abacus")
    assert cli.main(["info"]) == 1
    text = capsys.readouterr().out
    assert "problem: `FASTGUARD_BACKEND` must be one of" in text
    assert "reference" in text


def test_info_without_torch(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["info"]) == 1
    assert "problem: torch cannot be imported" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["info", "--help"], ["demo", "--help"]], ids=" ".join)
def test_help_does_not_import_torch(arguments):
    code = (
        "import sys\nfrom fastguard.commands.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_of_its_own(name, capsys):
    if name == "bench":
        pytest.importorskip("numpy", reason="needs numpy")
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    assert f"usage: fastguard {name}" in capsys.readouterr().out


def test_no_command_shows_the_help_and_fails(capsys):
    assert cli.main([]) == 64
    assert "commands:" in capsys.readouterr().out


def test_an_unknown_command_is_one_line_and_exit_code_64():
    done = run("inof")
    assert done.returncode == 64
    assert not done.stdout
    check_one_line(done.stderr, "unknown command 'inof'. Did you mean `info`?")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["diagnose", "x", "--jsn"], "arguments: --jsn. Did you mean `--json`? See `fastguard diagnose --help`."),
        (["info", "more"], "unrecognized arguments: more"),
        (["demo", "--steps", "3"], "must be at least 20, got 3"),
        (["demo", "--steps", "many"], "invalid int value: 'many'"),
        (["report", "a", "--fail-on", "critcal"], "argument --fail-on: got 'critcal'. Did you mean `critical`?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_argument_is_one_line_and_exit_code_64(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 64
    check_one_line(capsys.readouterr().err, message, "--help`")


def test_a_command_whose_package_is_missing_says_so_in_one_line(capsys, monkeypatch, tmp_path):
    (tmp_path / "a_command.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "new", cli.Command("a new one", "a_command:main"))
    assert cli.main(["new"]) == 64
    check_one_line(capsys.readouterr().err, "`fastguard new` needs no_such_package: pip install no_such_package")


def test_a_closed_pipe_is_no_traceback():
    code = "import sys, fastguard.commands.cli as c\nc.COMMANDS['info'] = c.Command('', 'm:main')\n"
    code += "import types; m = sys.modules['m'] = types.ModuleType('m')\n"
    code += "def main(argv):\n    while True: print('x' * 1000)\nm.main = main\nsys.exit(c.main(['info']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert not stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("names", [[], ["dead-relu-units"]], ids=["more than a buffer", "less than one"])
def test_a_full_disk_behind_stdout_is_no_traceback(names):
    command = [sys.executable, "-m", "fastguard", "rules", *names]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 64
    assert done.stderr.startswith("fastguard: error: ") and "No space left" in done.stderr
    assert done.stderr.count("\n") == 1
