"""The trial that "auto" makes of the Triton kernels on a device: it passes what is right, and catches what is not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fastguard.kernels import reference, registry
from fastguard.kernels.registry import BACKENDS
from fastguard.kernels.slots import DEFAULT_OPTIONS, StepOptions
from fastguard.kernels.triton import Workspace, activations, trial
from fastguard.records.columns import INDEX

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def anew(workspace: Workspace) -> Any:
    trial._verdicts.clear()
    yield
    trial._verdicts.clear()


@pytest.mark.parametrize("operation", ["tensor_stats", pytest.param("activation", marks=pytest.mark.slow)])
def test_right_kernels_pass(operation: str) -> None:
    assert trial.problem_on(DEVICE, operation) is None


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("column", ["sum_sq", "abs_max", "num_nans"])
def test_a_wrong_statistic_is_caught(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Workspace.measure

    def off(self: Workspace, plan: Any, slot: Any, *arguments: Any, **others: Any) -> None:
        original(self, plan, slot, *arguments, **others)
        slot.rows[3, INDEX[column]] = slot.rows[3, INDEX[column]] * (1 + 2e-6) + (column == "num_nans")

    monkeypatch.setattr(Workspace, "measure", off)
    problem = trial.problem_on(DEVICE)
    assert problem is not None and f"wrong statistics: {column} of tensor 3 is" in problem


@pytest.mark.long_interpreted
def test_a_missing_skip_and_a_scale_that_does_nothing_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Workspace.measure

    def without_skips(
        self: Workspace, plan: Any, slot: Any, options: StepOptions = DEFAULT_OPTIONS, **others: Any
    ) -> None:
        original(self, plan, slot, options._replace(skip_nonfinite=False), **others)

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "measure", without_skips)
        assert "did not see NaN and Inf" in str(trial.problem_on(DEVICE))
    trial._verdicts.clear()
    monkeypatch.setattr(Workspace, "scale", lambda *a, **k: None)
    assert "scaled torch.float32 wrongly" in str(trial.problem_on(DEVICE))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x, dim, limits: ((0.0,) * 10, None), "float32 .*: numel is 0.0 where torch says 9001.0"),
        (
            lambda x, dim, limits: reference.activation(x, dim, limits) if dim is None else ((0.0,) * 10, bytes(4480)),
            "num_near_zero of channel 0 is 0.0 where torch says",
        ),
    ],
)
def test_wrong_activations_leave_statistics_to_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, result: Any, message: str
) -> None:
    monkeypatch.setattr(activations, "activation", result)
    monkeypatch.setattr(BACKENDS["cpu"], "accepts", lambda device: False)
    registry.say_once.cache_clear()
    with caplog.at_level("WARNING", "fastguard"):
        for _ in range(2):
            assert registry.choose(DEVICE, "auto", "activation") is BACKENDS["reference"]
            assert registry.choose(DEVICE, "auto", "tensor_stats") is BACKENDS["triton"]
    (said,) = caplog.records
    assert re.search(message, said.getMessage())
    assert registry.choose(DEVICE, "triton", "activation") is BACKENDS["triton"]  # by name: as asked
