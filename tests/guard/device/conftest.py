"""Runs guards on the CPU as they run on a GPU: records on their way, decisions where the gradients are."""

from __future__ import annotations

from typing import Any

import pytest

import fastguard
from fastguard import devices, kernels
from fastguard.devices.engines import ReferenceEngine, TritonEngine

ENGINES = {"reference": ReferenceEngine, "triton": TritonEngine}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every engine, taken for tensors on the CPU whatever backend a guard was given."""
    status = kernels.backends()[request.param]
    if not status.available:
        pytest.skip(f"engine {request.param!r} cannot run here: {status.reason}")
    monkeypatch.setattr(devices, "engine_for", lambda device, backend: ENGINES[request.param])
    return request.param


@pytest.fixture
def no_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """`last` and `history` wait for the step just taken, as nobody should who trains on a GPU."""

    def waiting(name: str) -> property:
        def get(guard: fastguard.Guard) -> Any:
            guard.judges.now.catch_up()
            return getattr(guard.recorder, name)

        return property(get)

    for name in ("last", "history"):
        monkeypatch.setattr(fastguard.Guard, name, waiting(name))


@pytest.fixture
def backend() -> str:
    """Tests that ask for every backend get one: it is the engine that counts here."""
    return "auto"
