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


def _wrong(column: str) -> Any:
    def measure(self: Workspace, plan: Any, slot: Any, *arguments: Any, **others: Any) -> None:
        MEASURE(self, plan, slot, *arguments, **others)
        slot.rows[3, INDEX[column]] = slot.rows[3, INDEX[column]] * (1 + 2e-6) + (column == "num_nans")

    return measure


def _never_skips(self: Workspace, plan: Any, slot: Any, options: StepOptions = DEFAULT_OPTIONS, **others: Any) -> None:
    MEASURE(self, plan, slot, options._replace(skip_nonfinite=False), **others)


def _raises(*arguments: Any, **others: Any) -> None:
    raise RuntimeError("PTX was compiled with an unsupported toolchain\nmore")


MEASURE = Workspace.measure
FAULTS = [
    ("measure", _wrong("sum_sq"), "wrong statistics: sum_sq of tensor 3 is"),
    ("measure", _wrong("abs_max"), "wrong statistics: abs_max of tensor 3 is"),
    ("measure", _wrong("num_nans"), "wrong statistics: num_nans of tensor 3 is"),
    ("measure", _never_skips, "did not see NaN and Inf"),
    ("measure", _raises, "raised RuntimeError: PTX was compiled with an unsupported toolchain$"),
    ("scale", lambda *arguments, **others: None, "scaled torch.float32 wrongly"),
]


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize(("method", "fault", "message"), FAULTS, ids=[message for *_, message in FAULTS])
def test_what_is_wrong_is_caught_and_said(
    method: str, fault: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workspace, method, fault)
    assert re.match(rf"a trial on {DEVICE} (gave )?{message}", str(trial.problem_on(DEVICE)))


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
