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
@given(values=_finite, power=st.integers(-20, 20))
def test_scaling_by_a_power_of_two_scales_the_row(backend: str, values: np.ndarray, power: int) -> None:
    factor = 2.0**power
    tensor = torch.as_tensor(values)
    scaled = tensor.double() * factor
    row, other = tensor_stats([tensor.double(), scaled], backend=backend)
    for column, before, after in zip(TABLE, row, other, strict=True):
        assert after == before * factor**column.power, column.name
