"""Fixtures that all tests share."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from fastguard import BackendUnavailableError, _env, kernels
from fastguard.kernels.registry import BACKENDS

import interpreting

STATUS = kernels.backends()
# Where Triton can neither compile for a GPU nor interprets, kernels/test_gpu_interpreted.py runs its share.
NAMES = [name for name, status in STATUS.items() if status.available or name != "triton"]
INTERPRETING = _env.triton_interpreter() and STATUS["triton"].available

if INTERPRETING:
    interpreting.mend()


def is_here(device: str) -> bool:
    """Whether tensors can be made on `device`."""
    return device == "cpu" or getattr(torch, device).is_available()


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend; one that cannot run is skipped, with its reason. Tensors are made where it reads them: on a GPU if
    it is a compiled one's turn."""
    status = STATUS[request.param]
    if not status.available:
        pytest.skip(f"backend {request.param!r} cannot run here: {status.reason}")
    accepts = BACKENDS[request.param].accepts
    device = next(name for name in ("cpu", "cuda", "xpu", "mps") if accepts(torch.device(name)) and is_here(name))
    with torch.device(device), warnings.catch_warnings():
        if INTERPRETING:  # NumPy computes: it warns of overflows and NaNs, and of what the interpreter asks of it
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
        yield request.param


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """A test of an operation that a backend does not have is skipped, with the reason."""
    try:
        return (yield)
    except BackendUnavailableError as error:
        if "backend" in pyfuncitem.fixturenames and " has no " in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def full_size(backend: str) -> None:
    """For tests with so many elements that interpreting them would take minutes."""
    if backend == "triton" and INTERPRETING:
        pytest.skip("as many elements as this test has are for a GPU, not for Triton's interpreter")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240)
