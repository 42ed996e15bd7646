"""`fastguard demo --fault NAME`: what is planted comes first in the report, or the exit code says otherwise."""

from __future__ import annotations

import pytest

from fastguard.commands import cli
from fastguard.commands.demo.lab import tasks
from fastguard.commands.demo.lab.faults import FAULTS
from fastguard.commands.demo.lab.plant import Planted
from fastguard.commands.demo.lab.setup_faults import SETUP_FAULTS
from fastguard.commands.demo.trouble import TROUBLES
from fastguard.diagnosis import CAUSES, RULES
from fastguard.sinks import read_jsonl

pytestmark = pytest.mark.usefixtures("threads")  # a demo sets their number

# All of them can be shown; these take a second or two each. One stands for them where time is short.
ALWAYS = "nan"
OTHERS = ["lr-jump", "dead-relu", "lr", "warm-up", "lr-small", "fp16", "rnn", "tanh", "init-small", "frozen", "labels"]
OTHERS += ["missing", "weight-decay", "dropout", "overfit", "bad-epoch", "bad-batch"]
OTHERS += [fault.name for fault in SETUP_FAULTS]
SHOWN = [ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.mark.parametrize("name", SHOWN)
def test_a_planted_fault_is_named_first(name, tmp_path, capsys):
    code = cli.main(["demo", "--fault", name, "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert code == 0, text
    assert f"fault:    {name}: {FAULTS[name].title}" in text
    assert "$ print(optimizer.guard.report())" in text and ", which is right" in text
    log = read_jsonl(tmp_path / f"{name}.jsonl")
    assert [line["step"] for line in log] == list(range(len(log))) and len(log) >= 30
    assert text.rstrip().endswith(f": {tmp_path / f'{name}.html'}") and (tmp_path / f"{name}.html").is_file()


@pytest.mark.slow
def test_a_fault_that_is_not_there_is_not_named(tmp_path, capsys, monkeypatch):
    harmless = lambda setup, dice: Planted()  # noqa: E731
    fault = FAULTS["overfit"]
    monkeypatch.setitem(FAULTS, "overfit", type(fault)(**{**vars(fault), "plant": harmless, "task": "char-mlp"}))
    assert cli.main(["demo", "--fault", "overfit", "--out", str(tmp_path)]) == cli.EXIT_FAILED
    assert "THE DEMO FAILED: right would have been overfitting" in capsys.readouterr().out


def test_the_list_has_every_fault(capsys):
    assert cli.main(["demo", "--fault", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [*FAULTS, *TROUBLES]


def test_an_unknown_fault_is_an_error_that_lists_them(tmp_path, capsys):
    assert cli.main(["demo", "--fault", "gremlin", "--out", str(tmp_path)]) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert "--fault gremlin: unknown. The faults are:" in error and " lr, " in error
    assert len(error.splitlines()) == 2 and "\\n" not in error  # the first says that torch is loaded


@pytest.mark.parametrize("option", [["--quick"], ["--steps", "30"], ["--minutes", "1"]])
def test_a_fault_has_its_own_length(option, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["demo", "--fault", "lr", *option])
    assert left.value.code == cli.EXIT_USAGE
    assert "leave --quick, --minutes and --steps out" in capsys.readouterr().err


def test_every_fault_can_be_planted_and_is_expected_as_something_that_exists():
    families = {rule.family for rule in RULES.values()}
    for fault in FAULTS.values():
        assert fault.task in tasks.TASKS
        assert set(fault.causes) <= {*CAUSES, *RULES}, fault.name
        assert set(fault.families) <= families, fault.name


@pytest.mark.slow
@pytest.mark.parametrize("name", TROUBLES)
def test_recovery_brings_a_run_through(name, tmp_path, capsys):
    code = cli.main(["demo", "--fault", name, "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert code == 0, text
    ends = [line for line in text.splitlines() if line.startswith(("undisturbed", "without rec", "with rec"))]
    clean, alone, helped = (float(line.split()[-1]) for line in ends)
    assert alone > 1.5 * clean and helped < 1.1 * clean
    assert "rolled back from 40" in text
    assert len(read_jsonl(tmp_path / f"{name}.jsonl")) == 900
    assert (tmp_path / f"{name}.html").is_file()
