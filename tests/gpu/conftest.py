"""What the tests on a GPU share. Where there is none they are left out, and a line says so."""

import warnings
from contextlib import contextmanager

import pytest
import torch

from fastguard.kernels import triton


@pytest.fixture(autouse=True)
def device():
    """The GPU, with its index."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["triton", "reference"])
def backend(request, device):
    """Either way to measure there."""
    if request.param == "triton" and triton.unavailable() is not None:
        pytest.skip(f"the kernels cannot run here: {triton.unavailable()}")
    return request.param


@contextmanager
def _syncs_are(mode):
    try:
        with warnings.catch_warnings():  # torch says once that the mode is a prototype
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_sync():
    """`with no_sync():` any operation that waits for the device is an error."""
    return lambda: _syncs_are("error")
