"""Puts the helpers of the guard's tests on the path."""

import sys
from pathlib import Path

import pytest

from fastguard.step import device as engines
from fastguard.step.device import TorchEngine

sys.path.insert(0, str(Path(__file__).parents[1] / "guard"))


@pytest.fixture
def device(monkeypatch):
    """Steps are judged where nobody waits for it."""
    monkeypatch.setattr(engines, "engine_for", lambda device, backend: TorchEngine)


@pytest.fixture(params=["host", pytest.param("device", marks=pytest.mark.slow)])
def way(request):
    """Where steps are judged."""
    if request.param == "device":
        request.getfixturevalue("device")
    return str(request.param)
