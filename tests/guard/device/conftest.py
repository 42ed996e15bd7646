"""Runs guards on the CPU as they run on a GPU: records on their way, decisions where the gradients are."""

import pytest

import fastguard
from fastguard.kernels.triton import Workspace
from fastguard.step import device as engines
from fastguard.step.device import TorchEngine

ENGINES = {"reference": TorchEngine, "triton": Workspace}


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    """Every engine, taken for tensors on the CPU whatever backend a guard was given."""
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    monkeypatch.setattr(engines, "engine_for", lambda device, backend: ENGINES[request.param])
    return request.param


@pytest.fixture
def no_lag(monkeypatch):
    """`last` and `history` wait for the step just taken, as nobody should who trains on a GPU."""

    for name in ("last", "history"):
        get = getattr(fastguard.Guard, name).fget

        def waiting(guard, get=get):
            guard._judge.arrive_all()
            return get(guard)

        monkeypatch.setattr(fastguard.Guard, name, property(waiting))


@pytest.fixture
def backend():
    """Tests that ask for every backend get one: it is the engine that counts here."""
    return "auto"
