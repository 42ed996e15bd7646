"""Which judge a run gets, and how it gets another one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from device_helpers import slow
from guard_helpers import guarded_model, make_model, take_step, train
from torch import nn

import fastguard
from fastguard.kernels import registry
from fastguard.kernels.triton import Workspace
from fastguard.step import engines
from fastguard.step.device import NUM_PENDING
from fastguard.step.engines import TorchEngine


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        ("cpu", "auto", None),
        ("cpu", "cpu", None),
        ("cpu", "reference", None),
        ("cpu", "triton", Workspace),
        ("cuda", "auto", Workspace),
        ("cuda", "triton", Workspace),
        ("cuda", "reference", TorchEngine),
        ("cuda", "cpu", None),
        ("xpu", "auto", Workspace),
        ("mps", "auto", TorchEngine),
        ("mps", "reference", TorchEngine),
        ("meta", "auto", None),
    ],
)
def test_engines(device: str, backend: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = registry.BACKENDS["triton"]
    monkeypatch.setattr(triton, "accepts", lambda d: d.type in ("cuda", "xpu"))
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    monkeypatch.setattr(triton, "problem_on", lambda device, operation: None)
    assert engines.engine_for(torch.device(device), backend) is expected


@pytest.mark.parametrize("asked", ["unavailable", "problem_on"])
def test_without_triton_a_gpu_gets_plain_torch_and_one_line(
    asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    triton = registry.BACKENDS["triton"]
    monkeypatch.setattr(triton, "accepts", lambda d: d.type == "cuda")
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    monkeypatch.setattr(triton, asked, lambda *arguments: "it is Tuesday")
    registry.say_once.cache_clear()
    for _ in range(2):
        assert engines.engine_for(torch.device("cuda"), "auto") is TorchEngine
    assert [r.getMessage().split(".")[0] for r in caplog.records] == ["backend 'triton' cannot run: it is Tuesday"]


def test_an_optimizer_without_a_way_to_skip_keeps_the_host(engine: str) -> None:
    model, optimizer = guarded_model(lambda p: torch.optim.LBFGS(p, max_iter=2))
    take_step(model, optimizer, 0, closure=True)
    assert optimizer.guard._run.waits


def test_what_no_engine_can_read_goes_to_the_host(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a gradient on the CPU while the rest is on a GPU. What was on its way is delivered first."""
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), fused=True), model, sinks=[memory])
    slow(optimizer)
    train(model, optimizer, range(2))
    assert not optimizer.guard._run.waits

    def plan(tensors: Any, *, writable: bool = False) -> Any:
        raise fastguard.UnsupportedTensorError(1, "must be on cuda:0, got cpu")

    monkeypatch.setattr(optimizer.guard._judge.on_device.engine, "plan", plan)
    take_step(model, optimizer, 2)
    assert optimizer.guard._run.waits
    assert memory.series("step") == [0, 1]
    train(model, optimizer, range(3, 5))
    optimizer.guard.flush()
    assert memory.series("step") == [0, 1, 2, 3, 4]


def test_parameters_on_several_devices_go_to_the_host(engine: str) -> None:
    model = make_model()
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = fastguard.wrap(torch.optim.SGD([*model.parameters(), elsewhere], lr=0.1), model, max_norm=1.0)
    train(model, optimizer, range(2))
    assert optimizer.guard._run.waits and optimizer.guard.last.step == 1


def test_a_model_that_moves_takes_its_records_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `model.to("cuda")` after `wrap` does, and back."""
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1, fused=True), model, sinks=[memory])
    kinds = []
    for step in range(6):
        if step % 2 == 0:
            engine = TorchEngine if step == 2 else None
            monkeypatch.setattr(engines, "engine_for", lambda device, backend, engine=engine: engine)
            optimizer.guard._judge._was_on_cpu, optimizer.guard._run.is_short = None, False
        take_step(model, optimizer, step, bad=math.nan if step == 3 else None)
        kinds.append(optimizer.guard._run.waits)
    assert kinds == [True, True, False, False, True, True]
    optimizer.guard.flush()
    assert memory.series("step") == [0, 1, 2, 3, 4, 5]
    assert [r.skipped for r in memory.records] == [False, False, False, True, False, False]


def test_a_step_that_could_not_be_measured_takes_no_slot(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = guarded_model(lambda p: torch.optim.AdamW(p, fused=True))
    take_step(model, optimizer, 0)
    on_device = optimizer.guard._judge.on_device
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with monkeypatch.context() as patched:
        patched.setattr(on_device, "_measure", lambda *args: 1 / 0)
        for _ in range(2 * NUM_PENDING):
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
    take_step(model, optimizer, 1)
    optimizer.guard.flush()
    assert (optimizer.guard.last.step, optimizer.guard.history.num_steps) == (1, 2)
