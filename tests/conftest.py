"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from fastguard import _env, kernels

import interpreting
from left_out import LeftOut

settings.register_profile(
    "fastguard",
    max_examples=60 if os.environ.get("CI") else 25,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # `backend` is the same for all examples
)
settings.load_profile("fastguard")

# Where Triton can neither compile for a GPU nor interprets, there are no tests of it: see left_out.py.
BACKENDS = ("cpu", *(["triton"] if kernels.triton.unavailable() is None else []), "reference")
INTERPRETING = _env.triton_interpreter() and kernels.triton.unavailable() is None

if INTERPRETING:
    interpreting.mend()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeftOut())


def pytest_collection_finish() -> None:
    gc.freeze()  # what is there by now stays: tests that collect garbage need not look through it


def pytest_unconfigure() -> None:
    if "triton" in sys.modules:  # as Python ends, its bindings list on stderr what they never free
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend; one that cannot run is skipped, with its reason. Tensors are made where it reads them: on a GPU if
    it is a compiled one's turn."""
    status = kernels.backends()[request.param]
    if not status.available:
        pytest.skip(f"backend {request.param!r} cannot run here: {status.reason}")
    device = "cpu"
    if request.param == "triton" and not INTERPRETING:
        device = "cuda" if torch.cuda.is_available() else "xpu"
    with torch.device(device), warnings.catch_warnings():
        if INTERPRETING:  # NumPy computes: it warns of overflows and NaNs, and of what the interpreter asks of it
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
        yield request.param


@pytest.fixture
def interpreted() -> Iterator[None]:
    """For tests that run the GPU kernels on CPU tensors; they are left out where Triton does not interpret."""
    with warnings.catch_warnings():  # NumPy computes, and warns of overflows and NaNs
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Most tensors here are tiny: threads that wait for one another would only cost time."""
    used = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(used)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, for tests that are about threads or set it; afterwards it is one again."""
    yield torch.set_num_threads
    torch.set_num_threads(1)
