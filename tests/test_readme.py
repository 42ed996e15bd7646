"""README.md does not lie: its Python runs, from top to bottom, and what it shows is what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import fastguard
from fastguard.commands import cli

README = Path(__file__).parent.parent / "README.md"
if not README.is_file():
    pytest.skip("README.md is not beside the tests: they run from a copy without it", allow_module_level=True)

TEXT = README.read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(match[1], match[2], TEXT[: match.start()].count("\n") + 2) for match in _BLOCK.finditer(TEXT)]

# What the reader has already: a model, its data and a loss.
SETUP = """
import torch
import fastguard

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
loader = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(20)]
loss_fn = torch.nn.functional.mse_loss
x, y = loader[0]
"""


def _python(kind: str, body: str) -> str:
    """The code of a block; of a diff, what it looks like once applied."""
    if kind != "diff":
        return body
    return "".join(line[2:] or "\n" for line in body.splitlines(keepends=True) if not line.startswith("-"))


def _report_in_readme() -> str:
    return next(body for kind, body, _ in BLOCKS if kind == "text" and "gradient norm" in body)


def test_every_snippet_runs_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    exec(SETUP, namespace)
    snippets = [(_python(kind, body), line) for kind, body, line in BLOCKS if kind in ("python", "diff")]
    assert len(snippets) >= 5
    for code, line in snippets:
        # Empty lines before it make a traceback point at the line of README.md.
        exec(compile("\n" * (line - 1) + code, str(README), "exec"), namespace)
    assert "HEALTHY after" in capsys.readouterr().out


def test_the_report_shown_has_the_lines_that_a_report_has():
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fastguard.wrap(optimizer, model, max_norm=1.0, activations={"every": 1}, weights=1)
    for bad in (False, False, True, False):
        loss = model(torch.full((2, 4), torch.inf if bad else 1.0)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.guard.observe(loss=loss, val_loss=loss)
    printed = str(optimizer.guard.report())
    labels, shown = (
        set(map(str.strip, re.findall(r"^([A-Za-z][A-Za-z ]{3,16}?)  ", text, re.MULTILINE)))
        for text in (printed, _report_in_readme())
    )
    assert shown and shown <= labels
    for part in ("    evidence: num_nonfinite", "    what to do: "):
        assert part in printed and part in _report_in_readme()


def test_the_info_shown_has_the_lines_that_info_prints(capsys):
    shown = next(body for kind, body, _ in BLOCKS if kind == "text" and "backends, in the order" in body)
    cli.main(["info"])
    printed = capsys.readouterr().out
    starts = [re.match(r" *\w+", line) for line in shown.splitlines() if line]
    assert len(starts) >= 10
    for start in starts:  # versions and machines differ
        assert start is not None and f"\n{start[0]}" in f"\n{printed}"
    cli.main(["info", "--json"])
    for name in json.loads(capsys.readouterr().out)["backends"]:
        assert f"  {name} " in shown


def test_every_command_shown_exists():
    for command in re.findall(r"`?fastguard ([a-z]+)\b(?: |`|$)", "\n".join(b for k, b, _ in BLOCKS if k == "sh")):
        assert command in cli.COMMANDS


def test_every_public_name_in_the_text_exists():
    for name in re.findall(r"`fastguard\.([A-Za-z_]+)", TEXT):
        assert name in fastguard.__all__ or name in ("sinks", "stats", "diagnosis"), name


def test_the_cost_table_has_its_place():
    assert TEXT.count("<!-- bench:begin -->") == TEXT.count("<!-- bench:end -->") == 1
    assert TEXT.index("<!-- bench:begin -->") < TEXT.index("<!-- bench:end -->")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http|#)([^)#]+)", TEXT))))
def test_every_file_that_is_linked_exists(target):
    assert (README.parent / target).exists()
