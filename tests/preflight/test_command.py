"""`fastguard preflight module:function`: exit codes, and one line for whatever is wrong; never a traceback."""

import json
import sys

import pytest

from fastguard.commands import cli

SOURCE = """
import torch
from torch import nn

def sound():
    x = torch.randn(48, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.optim.Adam(model.parameters(), 1e-2), nn.CrossEntropyLoss(), (x, x[:, :3].argmax(1))

def warned():
    model, _, loss_fn, batch = sound()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1.0)
    checks = ["unusual-optimizer-settings"]
    return dict(model=model, optimizer=optimizer, loss_fn=loss_fn, batch=batch, checks=checks, num_steps=2)

def softmax():
    model, _, loss_fn, batch = sound()
    model = nn.Sequential(model, nn.Softmax(1))
    return model, torch.optim.Adam(model.parameters(), 1e-2), loss_fn, batch

def broken(): return 1 / 0
def ending(): raise SystemExit(7)
def short(): return sound()[:3]
def odd(): return 3
def lacking(): return {"model": 1}
def strange(): return {**warned(), "rates": 1}
def wrong(): return sound()[:2] + (5,) + sound()[3:]
number = 5
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "made_here.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "not_python.py").write_text("def f(:\n", encoding="utf-8")
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("made_here", "not_python", "needs_more"):
        sys.modules.pop(name, None)


def run(*arguments):
    try:
        return cli.main(["preflight", *arguments])
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("function", "code", "said"), [("sound", 0, "HEALTHY"), ("warned", 1, "WARNING"), ("softmax", 2, "CRITICAL")]
)
def test_exit_codes_say_how_bad_it_is(function, code, said, capsys):
    assert run(f"made_here:{function}") == code
    out = capsys.readouterr()
    assert out.out.startswith(f"{said} before the first step") and not out.err


def test_json_is_the_report(capsys):
    assert run("made_here:warned", "--json") == 1
    plain = json.loads(capsys.readouterr().out)
    assert plain["causes"][0]["rule"] == "wrong-optimizer-settings" and plain["numbers"]["num_checks"] == 1


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("made_here", 64, "the target must be module:function"),
        ("made_here:", 64, "the target must be module:function"),
        ("nowhere:make", 64, "there is no module 'nowhere'"),
        ("made_here:warnd", 64, "has no 'warnd'. Did you mean `warned`?"),
        ("made_here:number", 64, "must be a function, got int"),
        ("not_python:f", 3, "cannot be imported: SyntaxError"),
        ("needs_more:f", 3, "cannot be imported: ModuleNotFoundError"),
        ("made_here:broken", 3, "raised ZeroDivisionError"),
        ("made_here:ending", 3, "raised it ended Python (7)"),
        (
            "made_here:short",
            3,
            "must return (model, optimizer, loss_fn, batch) or a dict with these keys, got tuple of 3",
        ),
        ("made_here:odd", 3, "got int"),
        ("made_here:lacking", 3, "lacks optimizer, loss_fn, batch"),
        ("made_here:strange", 3, "holds rates"),
        ("made_here:wrong", 3, "`loss_fn` must be a function or a module, got int"),
    ],
)
def test_what_is_wrong_is_one_line(target, code, said, capsys):
    assert run(target) == code
    out = capsys.readouterr()
    assert said in out.err and out.err.count("\n") == 1 and "Traceback" not in out.err and not out.out
