"""The helpers of the guard's own tests are found here too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_GUARD = str(Path(__file__).resolve().parents[1] / "guard")
if _GUARD not in sys.path:
    sys.path.insert(0, _GUARD)


@pytest.fixture(autouse=True, scope="session")
def _sparse_tensors_unchecked() -> Iterator[None]:
    """Said in so many words, since torch warns where it is not."""
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield
