"""Each channel by itself, for every dimension of every layout, on every backend."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from activation_truth import assert_stats, channels, expected, expected_table

import fastguard
from fastguard import UnsupportedTensorError, channel_stats

import tolerances
from cases import DTYPES, LAYOUTS, NASTY, image, nasty

pytestmark = pytest.mark.full_size  # test_gpu_activations.py has smaller tensors for the interpreter


def check(tensor: torch.Tensor, dim: int, backend: str, what: str = "") -> None:
    found = channel_stats(tensor, dim, backend=backend)
    truth = expected_table(tensor, dim)
    assert_stats(found.stats, expected(tensor), what)
    assert (found.num_channels, found.elements_per_channel) == channels(tensor, dim).shape, what
    table = np.frombuffer(found.table).reshape(-1, 4)
    assert table.shape == truth.shape, what
    np.testing.assert_array_equal(table[:, :3], truth[:, :3], what)
    np.testing.assert_allclose(table[:, 3], truth[:, 3], rtol=tolerances.SUM_ABS, atol=0, err_msg=what)


# [rows, channels]: around the 16 channels side by side, the panels of 512, the 8 rows read together, groups of rows.
SHAPES = [
    *((n, c) for n in (1, 7, 8, 9, 100) for c in (1, 3, 15, 16, 17, 31, 33)),
    *((n, c) for n in (1, 8, 13) for c in (511, 512, 513, 1030, 4099)),
    *((5000, 16), (5000, 3), (70_001, 1), (3, 70_001), (2000, 130)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(backend: str, dtype: torch.dtype) -> None:
    for shape in SHAPES[:: 1 if backend == "cpu" else 3]:  # it is the C++ loops whose edges these are
        tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
        for dim in (0, 1):
            check(tensor, dim, backend, f"{shape}, dim {dim}")


SPATIAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "[N, C, H, W]": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "a part of the channels": lambda x: x[:, 3:20],
    "a part of the channels, channels_last": lambda x: x.to(memory_format=torch.channels_last)[:, 3:20],
    "every second channel": lambda x: x[:, ::2],
    "a crop": lambda x: x[:, :, 1:-1, 2:-3],
    "a crop, channels_last": lambda x: x.to(memory_format=torch.channels_last)[:, :, 1:-1, 2:-3],
    "large images": lambda x: x[:1].repeat(1, 1, 5, 9),
    "long runs": lambda x: x.repeat(1, 1, 2, 3),
    "long runs, a part of the channels": lambda x: x.repeat(1, 1, 2, 3)[:, 5:9, :-2],
    "permuted": lambda x: x.permute(3, 2, 1, 0),
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "expanded channels": lambda x: x[:, :1].expand(-1, 7, -1, -1),
    "one channel": lambda x: x[:, 4:5],
}


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("layout", SPATIAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_images(backend: str, dtype: torch.dtype, layout: str) -> None:
    tensor = SPATIAL[layout](image(dtype))
    for dim in (1, -1, 0):
        check(tensor, dim, backend, f"{layout}, dim {dim}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend: str, layout: str) -> None:
    for dtype in (torch.float32, torch.float16):
        tensor = LAYOUTS[layout](image(dtype))
        for dim in range(max(1, tensor.dim())):
            check(tensor, dim, backend, f"{layout}, dim {dim}")


@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nasty_values(backend: str, dtype: torch.dtype, value: str) -> None:
    among = nasty(NASTY[value], dtype)
    alone = torch.full((20_000,), NASTY[value], dtype=torch.float64).to(dtype)
    for tensor in (among, alone):
        for shape in ((40, 500), (20, 10, 100), (2000, 10)):
            for dim in (-1, 1):
                check(tensor.view(shape), dim, backend, f"{value}, {shape}, dim {dim}")


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-20, 1e18, 1e30, 1e38])
def test_no_overflow_and_no_underflow(backend: str, scale: float) -> None:
    tensor = (torch.rand(60, 300, dtype=torch.float64) * 3 * scale).float()
    for dim in (0, 1):
        check(tensor, dim, backend, f"scale {scale}, dim {dim}")
    check(tensor.clamp(min=2.9 * scale), 1, backend, f"scale {scale}, a large mean")


@pytest.mark.parametrize("ratio", [1.0, 30.0, 1000.0])
def test_std_where_the_mean_dominates_and_where_channels_differ(backend: str, ratio: float) -> None:
    level = torch.randn(700) * ratio * 5
    for tensor in (torch.randn(90, 700) + ratio, torch.randn(90, 700) + level, torch.randn(90, 700) * level):
        for dim in (0, 1):
            check(tensor, dim, backend)


def test_a_dead_unit_stands_out(backend: str) -> None:
    hidden = torch.relu(torch.randn(200, 64) * torch.linspace(0.1, 3.0, 64) + 0.1)
    hidden[:, 7] = 0.0
    hidden[:, 9] = 5.0
    found = channel_stats(hidden, backend=backend)
    assert found.near_zero_ratios[7] == 1.0
    assert found.saturation_ratios[9] == 1.0
    assert found.mean_abs[7] == 0.0
    assert found.mean_abs[9] == 5.0
    assert sum(ratio == 1.0 for ratio in found.near_zero_ratios) == 1
    hidden[:, 7] = math.nan
    found = channel_stats(hidden, backend=backend)
    assert found.num_nonfinite == [200 * (c == 7) for c in range(64)]
    assert math.isnan(found.mean_abs[7])
    assert found.num_near_zero[7] == 0


def test_thresholds(backend: str) -> None:
    x = torch.tensor([[0.0, 0.5, 1.0, math.inf], [1.5, -0.5, 1e-3, math.nan]])
    found = channel_stats(x, saturation=(0.0, 1.0), near_zero=1e-3, backend=backend)
    assert found.num_saturated == [1, 1, 0, 1]
    assert found.num_near_zero == [1, 0, int(float(x[1, 2]) < 1e-3), 0]
    assert channel_stats(x, 0, near_zero=0.0, backend=backend).num_near_zero == [1, 0]


def test_nothing(backend: str) -> None:
    for shape, dim, num_channels in (((0, 5), 1, 5), ((0, 5), 0, 0), ((3, 0, 2), 1, 0), ((3, 0, 2), -1, 2)):
        found = channel_stats(torch.zeros(shape), dim, backend=backend)
        assert (found.num_channels, found.stats.total_elements) == (num_channels, 0)
        assert found.num_near_zero == [0] * num_channels
        assert found.near_zero_ratios == [0.0] * num_channels
        assert all(math.isnan(x) for x in found.mean_abs)
    check(torch.tensor(3.0), 0, backend)
    check(torch.tensor(0.0), -1, backend)


def test_kinds_of_tensors(backend: str) -> None:
    check(torch.nn.Parameter(torch.randn(10, 20)), 1, backend)
    check(torch.randn(40, 30, dtype=torch.complex64).conj().imag, 1, backend)
    small = torch.randn(30, 40).to(torch.float8_e5m2)
    assert channel_stats(small, backend=backend).table == channel_stats(small.float(), backend=backend).table


def test_arrays() -> None:
    array = np.arange(20, dtype=np.float32).reshape(4, 5)[::-1]
    assert channel_stats(array, 0).mean_abs == [17.0, 12.0, 7.0, 2.0]


def test_what_cannot_be_read_is_refused(backend: str) -> None:
    sparse = torch.zeros(3, 4).to_sparse()
    with pytest.raises(UnsupportedTensorError, match=r"`x` must be dense, got layout torch.sparse_coo.*channel_stats"):
        channel_stats(sparse, backend=backend)
    with pytest.raises(UnsupportedTensorError, match=r"got torch\.int64"):
        channel_stats(torch.arange(4), backend=backend)
    with pytest.raises(UnsupportedTensorError, match="must be real"):
        channel_stats(torch.zeros(4, dtype=torch.complex64), backend=backend)
    with pytest.raises(UnsupportedTensorError, match="meta"):
        channel_stats(torch.zeros(4, 4, device="meta"), backend=backend)
    for dim in (2, -3):
        with pytest.raises(IndexError, match=rf"`dim` must be in \[-2, 1\], got {dim} - at channel_stats"):
            channel_stats(torch.zeros(3, 4), dim, backend=backend)


def test_the_public_door_gives_the_same_function() -> None:
    assert fastguard.channel_stats is fastguard.kernels.channel_stats
