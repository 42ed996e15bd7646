"""Fixtures that all tests share."""

from __future__ import annotations

import pytest
import torch

from fastguard import kernels

BACKENDS = ("cpu", "reference")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that serves CPU tensors; one that cannot run is skipped, with its reason."""
    status = kernels.backends()[request.param]
    if not status.available:
        pytest.skip(f"backend {request.param!r} cannot run here: {status.reason}")
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240)
