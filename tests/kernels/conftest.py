"""Fixtures for what needs the GPU kernels themselves: compiled on a GPU, or interpreted on CPU tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from fastguard import _env
from fastguard.kernels import triton


@pytest.fixture
def device() -> Iterator[torch.device]:
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
def workspace(device: torch.device) -> triton.Workspace:
    return triton.Workspace(device)


@pytest.fixture
def compiles() -> None:
    """For tests that compile; they are left out where Triton interprets."""
    pytest.importorskip("triton", reason="Triton is not installed")
