"""Laws that hold for any input."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastguard import tensor_stats
from fastguard.records.columns import TABLE

import tolerances
from truth import assert_row

_float32 = hnp.arrays(
    np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
)
_finite = hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**50), 2.0**50, width=32))


@given(values=_float32)
def test_any_float32(backend: str, values: np.ndarray) -> None:
    tensor = torch.as_tensor(values)
    assert_row(tensor_stats([tensor], backend=backend)[0], tensor)


@pytest.mark.long_interpreted
@given(values=hnp.arrays(np.uint32, st.integers(4096, 4200)))
def test_any_float32_bits_in_a_full_block(backend: str, values: np.ndarray) -> None:
    tensor = torch.as_tensor(values.view(np.float32))
    assert_row(tensor_stats([tensor], backend=backend)[0], tensor)


@pytest.mark.long_interpreted
@given(values=_float32, data=st.data())
def test_splitting_and_merging_is_the_whole(backend: str, values: np.ndarray, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    parts = [torch.as_tensor(part) for part in np.split(values, cuts)]
    whole = tensor_stats([torch.as_tensor(values)], backend=backend).total()
    merged = tensor_stats(parts, backend=backend).total()
    for field in ("max_val", "min_val", "num_zeros", "num_nans", "num_infs", "total_elements"):
        assert getattr(merged, field) == getattr(whole, field)
    assert merged.norm == pytest.approx(whole.norm, rel=tolerances.NORM, abs=0, nan_ok=True)


@pytest.mark.long_interpreted
@given(values=_finite, power=st.integers(-20, 20))
def test_scaling_by_a_power_of_two_scales_the_row(backend: str, values: np.ndarray, power: int) -> None:
    factor = 2.0**power
    tensor = torch.as_tensor(values)
    scaled = tensor.double() * factor
    row, other = tensor_stats([tensor.double(), scaled], backend=backend)
    for column, before, after in zip(TABLE, row, other, strict=True):
        assert after == before * factor**column.power, column.name
