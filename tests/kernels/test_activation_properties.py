"""Laws that hold for any activations."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from activation_truth import EXACT, assert_stats, expected, expected_table
from hypothesis import given
from hypothesis import strategies as st

from fastguard import ActivationStats, activation_stats, channel_stats, magnitude_histogram
from fastguard.kernels.activations import run_activation
from fastguard.records.samples import merge_activation_rows

import tolerances

pytestmark = pytest.mark.full_size  # test_gpu_activations.py has smaller tensors for the interpreter

_float32 = hnp.arrays(
    np.float32, st.integers(0, 700), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
)
_matrix = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 20), st.integers(1, 60)),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)
_threshold = st.floats(0, allow_nan=False)


@given(values=_float32, high=_threshold, near=_threshold)
def test_any_float32(backend: str, values: np.ndarray, high: float, near: float) -> None:
    tensor = torch.as_tensor(values)
    stats = activation_stats(tensor, saturation=high, near_zero=near, backend=backend)
    assert_stats(stats, expected(tensor, -high, high, near))


@given(values=hnp.arrays(np.uint32, st.integers(4096, 4200)))
def test_any_float32_bits_in_a_full_block(backend: str, values: np.ndarray) -> None:
    tensor = torch.as_tensor(values.view(np.float32))
    assert_stats(activation_stats(tensor, backend=backend), expected(tensor))


@given(
    mean=st.floats(-1e6, 1e6), spread=st.floats(1e-3, 1e6), seed=st.integers(0, 2**32 - 1), size=st.integers(256, 9000)
)
def test_any_mean_and_spread(backend: str, mean: float, spread: float, seed: int, size: int) -> None:
    tensor = torch.as_tensor((np.random.default_rng(seed).normal(size=size) * spread + mean).astype(np.float32))
    assert_stats(activation_stats(tensor, backend=backend), expected(tensor))


@given(values=_matrix, dim=st.integers(-2, 1))
def test_any_channels(backend: str, values: np.ndarray, dim: int) -> None:
    tensor = torch.as_tensor(values)
    found = channel_stats(tensor, dim, backend=backend)
    assert_stats(found.stats, expected(tensor))
    table, truth = np.frombuffer(found.table).reshape(-1, 4), expected_table(tensor, dim)
    np.testing.assert_array_equal(table[:, :3], truth[:, :3])
    np.testing.assert_allclose(table[:, 3], truth[:, 3], rtol=tolerances.SUM_ABS, atol=0)


@given(values=_matrix, data=st.data())
def test_channels_add_up_to_the_whole(backend: str, values: np.ndarray, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, 1))
    tensor = torch.as_tensor(values)
    found = channel_stats(tensor, dim, backend=backend)
    assert sum(found.num_near_zero) == found.stats.num_near_zero
    assert sum(found.num_saturated) == found.stats.num_saturated
    assert sum(found.num_nonfinite) == found.stats.num_nans + found.stats.num_infs
    order = torch.randperm(tensor.shape[dim])
    shuffled = channel_stats(tensor.index_select(dim, order), dim, backend=backend)
    assert shuffled.num_near_zero == [found.num_near_zero[i] for i in order.tolist()]


@given(values=_float32, seed=st.integers(0, 2**32 - 1))
def test_permutation_keeps_counts_and_extremes(backend: str, values: np.ndarray, seed: int) -> None:
    shuffled = np.random.default_rng(seed).permutation(values)
    a = activation_stats(torch.as_tensor(values), backend=backend)
    b = activation_stats(torch.as_tensor(shuffled), backend=backend)
    assert [str(getattr(a, field)) for field in EXACT] == [str(getattr(b, field)) for field in EXACT]


@given(values=_float32, data=st.data())
def test_splitting_and_merging_is_the_whole(backend: str, values: np.ndarray, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    rows = [
        run_activation(torch.as_tensor(part), -0.99, 0.99, 1e-6, None, backend)[0] for part in np.split(values, cuts)
    ]
    assert_stats(ActivationStats.from_row(merge_activation_rows(rows)), expected(torch.as_tensor(values)))


@given(values=hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**50), 2.0**50, width=32)))
@pytest.mark.parametrize("power", [-20, 13])
def test_scaling_by_a_power_of_two_scales_everything(backend: str, values: np.ndarray, power: int) -> None:
    tensor = torch.as_tensor(values).double()
    a, b = activation_stats(tensor, backend=backend), activation_stats(tensor * 2.0**power, backend=backend)
    factor = 2.0**power
    assert (b.mean, b.std, b.min_val, b.max_val) == (
        a.mean * factor,
        a.std * factor,
        a.min_val * factor,
        a.max_val * factor,
    )
    shifted = {e + power: n for e, n in magnitude_histogram([tensor]).counts.items()}
    assert magnitude_histogram([tensor * factor]).counts == shifted
