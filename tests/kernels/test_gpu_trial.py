"""The trial that "auto" makes of the Triton kernels on a device: it passes what is right, and catches what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastguard.kernels import registry
from fastguard.kernels.registry import BACKENDS
from fastguard.kernels.slots import DEFAULT_OPTIONS, StepOptions
from fastguard.kernels.triton import Workspace, trial
from fastguard.records.columns import COLUMNS, INDEX

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def anew(workspace: Workspace) -> Any:
    trial._verdicts.clear()
    yield
    trial._verdicts.clear()


def test_right_kernels_pass() -> None:
    assert trial.problem_on(DEVICE) is None


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("column", ["sum_sq", "abs_max", "num_nans"])
def test_a_wrong_statistic_is_caught(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, place = trial.read_slot, INDEX[column]

    def off(slot: torch.Tensor, num_rows: int) -> Any:
        found = original(slot, num_rows)
        table = memoryview(found.rows).cast("d")
        table[3 * len(COLUMNS) + place] = table[3 * len(COLUMNS) + place] * (1 + 2e-6) + (column == "num_nans")
        return found

    monkeypatch.setattr(trial, "read_slot", off)
    problem = trial.problem_on(DEVICE)
    assert problem is not None and f"wrong statistics: {column} of tensor 3 is" in problem


@pytest.mark.long_interpreted
def test_a_missing_skip_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Workspace.measure

    def without_skips(
        self: Workspace, plan: Any, slot: Any, options: StepOptions = DEFAULT_OPTIONS, **others: Any
    ) -> None:
        original(self, plan, slot, options._replace(skip_nonfinite=False), **others)

    monkeypatch.setattr(Workspace, "measure", without_skips)
    problem = trial.problem_on(DEVICE)
    assert problem is not None and "did not see NaN and Inf" in problem


@pytest.mark.long_interpreted
def test_a_scale_that_does_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "scale", lambda *a, **k: None)
    problem = trial.problem_on(DEVICE)
    assert problem is not None and "scaled torch.float32 wrongly" in problem


def test_whatever_a_driver_raises_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("PTX was compiled with an unsupported toolchain\nmore")

    monkeypatch.setattr(Workspace, "measure", fail)
    problem = trial.problem_on(DEVICE)
    assert problem == f"a trial on {DEVICE} raised RuntimeError: PTX was compiled with an unsupported toolchain"


@pytest.mark.long_interpreted
def test_a_full_device_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 MiB")

    with monkeypatch.context() as full:
        full.setattr(Workspace, "measure", fail)
        assert "OutOfMemoryError" in str(trial.problem_on(DEVICE))
    assert trial.problem_on(DEVICE) is None


def test_a_trial_that_fails_leaves_the_work_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS["triton"], "problem_on", lambda device, operation: "it was wrong")
    monkeypatch.setattr(BACKENDS["cpu"], "accepts", lambda device: False)
    registry.say_once.cache_clear()
    assert registry.choose(DEVICE, "auto") is BACKENDS["reference"]
    monkeypatch.setattr(BACKENDS["triton"], "problem_on", lambda device, operation: None)
    assert registry.choose(DEVICE, "auto") is BACKENDS["triton"]
