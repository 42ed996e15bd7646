"""What torch's tests say of sparse tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _sparse_tensors_unchecked() -> Iterator[None]:
    """Said in so many words, since torch warns where it is not."""
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield
