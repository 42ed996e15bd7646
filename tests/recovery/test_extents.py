"""The largest elements: exact, on the host and where nobody waits, and what follows from them."""

from __future__ import annotations

import math

import pytest
import torch

from fastguard.recovery import snapshots


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_what_is_not_finite_is_found_wherever_it_is(bad: float, where: int) -> None:
    tensors = [
        torch.full((600, 1000), -0.5),  # with the next one more than is looked at together
        torch.full((700, 1000), 2.0).t(),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
    ]
    odd = [torch.zeros(2, dtype=torch.int64), torch.zeros(0), torch.empty(2, device="meta"), torch.eye(3).to_sparse()]
    found = snapshots.largest([*tensors, *odd])
    assert found is not None and found.tolist() == [0.5, 2.0, 0.0, 1.0]
    assert snapshots.are_finite([*tensors, *odd])
    tensors[where][-1] = bad
    found = snapshots.largest([*tensors, *odd])
    assert found is not None and found.isfinite().tolist() == [i != where for i in range(4)]
    assert not snapshots.are_finite([*tensors, *odd])


def test_what_has_grown() -> None:
    before = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for now, is_so in (([15.9, 0.15], True), ([16.1, 0.0], False), ([1.0, 0.17], False), ([math.nan, 0.0], False)):
        flag = snapshots.have_not_grown(torch.tensor(now, dtype=torch.float64), before)
        assert flag is not None and bool(flag) is is_so
    assert snapshots.have_not_grown(before[:1], before) is None and snapshots.have_not_grown(None, before) is None
    assert snapshots.largest([]) is None and snapshots.are_finite([])
