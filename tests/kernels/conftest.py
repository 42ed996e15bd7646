"""Fixtures for what needs the GPU kernels themselves: compiled on a GPU, or interpreted on CPU tensors."""

import sys
import threading
import time
import warnings

import pytest
import torch

from fastguard import _env
from fastguard.kernels import cpu, triton


@pytest.fixture
def device():
    """Where the kernels run here; tensors are made there. Where they cannot run, these tests are left out."""
    place = "cpu"
    if not _env.triton_interpreter():
        place = "cuda" if torch.cuda.is_available() else "xpu"
    with torch.device(place), warnings.catch_warnings():
        if place == "cpu":
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
        yield torch.empty(0).device


@pytest.fixture
def isa():
    """The extension; afterwards it uses the instruction set that it used before."""
    used = cpu._C.isa()
    yield cpu._C
    cpu._C.select_isa(used)


@pytest.fixture
def ticks_during():
    """How often another thread runs while a function is called five times that releases the GIL by itself."""
    switch = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # the interpreter makes no thread give up the lock

    def count(function):
        running, ticks = True, 0

        def tick():
            nonlocal ticks
            while running:
                ticks += 1
                time.sleep(0)

        other = threading.Thread(target=tick)
        other.start()
        before = ticks
        for _ in range(5):
            function()
        during = ticks - before
        running = False
        other.join()
        return during

    yield count
    sys.setswitchinterval(switch)


@pytest.fixture
def workspace(device):
    return triton.Workspace(device)


@pytest.fixture
def compiles():
    """For tests that compile; they are left out where Triton interprets."""
    pytest.importorskip("triton", reason="Triton is not installed")
