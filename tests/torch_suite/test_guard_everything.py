"""The plug-in guards what it says it does, and the comparison can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_everything import MODES, guarding
from test_torchs_optimizers import OPTIMIZERS, in_all_modes
from torch import optim

import fastguard

HERE = Path(__file__).parent


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "off"])
def test_every_step_is_judged(mode: str) -> None:
    inits = {cls: cls.__init__ for cls in (optim.Optimizer, *OPTIMIZERS.values())}
    with guarding(MODES[mode]) as guards:
        for cls in (optim.SGD, optim.AdamW, optim.Adafactor):
            p = torch.nn.Parameter(torch.ones(2, 3))
            optimizer = cls([p])
            assert isinstance(optimizer.guard, fastguard.Guard) and guards[-1]() is optimizer.guard
            for _ in range(2):
                p.grad = torch.ones_like(p)
                optimizer.step()
            assert (optimizer.guard.last.step, len(optimizer.guard.last.tensors)) == (1, 1)
    assert {cls: cls.__init__ for cls in inits} == inits and "__init_subclass__" not in vars(optim.Optimizer)
    assert not hasattr(optim.SGD([p]), "guard")


def test_classes_made_within_are_guarded_once() -> None:
    with guarding({}) as guards:

        class Late(optim.Adam):
            def __init__(self, params: Any) -> None:
                super().__init__(params)
                assert not hasattr(self, "guard")  # not before the outermost constructor is over

        class Heir(Late):
            pass

        for cls in (Late, Heir):
            assert isinstance(cls([torch.nn.Parameter(torch.ones(2))]).guard, fastguard.Guard)
    assert len(guards) == 2
    assert not hasattr(Late([torch.nn.Parameter(torch.ones(2))]), "guard")


def test_a_difference_is_found() -> None:
    """Also one of a single bit in a hundred steps."""

    def differs() -> Any:
        value = torch.ones(100)
        if hasattr(optim.SGD([torch.nn.Parameter(torch.ones(3))]), "guard"):
            value[57] = torch.nextafter(value[57], torch.tensor(2.0))
        return [value]

    with pytest.raises(AssertionError, match="is not tensor"):
        in_all_modes(differs)


_ELSEWHERE = """
import torch

def test_it():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    p.grad = torch.tensor([1.0, float("nan"), 1.0])
    optimizer.step()
    assert not p.isnan().any()
    assert optimizer.guard.last.skipped and optimizer.guard.clip.max_norm == 1e9
"""


def _run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE), str(Path(fastguard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
def test_tests_from_elsewhere(tmp_path: Path) -> None:
    """The plug-in is given to a pytest that knows nothing of this folder."""
    (tmp_path / "test_elsewhere.py").write_text(_ELSEWHERE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ran = _run("-m", "pytest", "-p", "guard_everything", "--guard-everything", "max_norm=1e9", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ", max_norm=1e9; torch" in ran.stdout and "1 passed" in ran.stdout
