"""Every figure of an activation, dtype, size, layout and nasty value, on every backend."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from activation_truth import assert_stats, expected

import fastguard
from fastguard import ActivationStats, UnsupportedTensorError, activation_stats
from fastguard.records.samples import EMPTY_ACTIVATION_ROW, merge_activation_rows

from cases import DTYPES, LAYOUTS, NASTY, SIZES, image, nasty

pytestmark = pytest.mark.full_size  # test_gpu_activations.py has smaller tensors for the interpreter


def check(tensor: torch.Tensor, backend: str, what: str = "") -> ActivationStats:
    stats = activation_stats(tensor, backend=backend)
    assert_stats(stats, expected(tensor), what)
    return stats


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(backend: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        check(torch.randn(size, dtype=torch.float64).to(dtype), backend, f"{size} elements")


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(backend: str, dtype: torch.dtype, layout: str) -> None:
    check(LAYOUTS[layout](image(dtype)), backend, layout)


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nasty_values(backend: str, dtype: torch.dtype, value: str) -> None:
    check(nasty(NASTY[value], dtype), backend, f"{value} among normal ones")
    for size in (1, 16, 4096, 9001):
        check(torch.full((size,), NASTY[value], dtype=torch.float64).to(dtype), backend, f"{size} of {value}")


def test_every_float16_and_bfloat16_bit_pattern(backend: str) -> None:
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        for start in (0, 1, 4095):
            check(patterns.view(dtype)[start:], backend, f"{dtype} from {start}")


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 1e-20, 1e-14, 1e-12, 1e17, 1e18, 4e18, 1e19, 1e30, 1e38])
def test_no_overflow_and_no_underflow(backend: str, scale: float) -> None:
    values = torch.rand(3 * 4096 + 5, dtype=torch.float64) * 2 - 0.7
    check((values * scale).float(), backend, f"scale {scale}")
    check((values * scale + 3 * scale).float().clamp(max=3e38), backend, f"scale {scale}, away from zero")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ratio", [0.0, 1.0, 3.0, 30.0, 1000.0, 1e5])
def test_std_where_the_mean_dominates(backend: str, ratio: float, dtype: torch.dtype) -> None:
    check((torch.randn(50_000, dtype=torch.float64) + ratio).to(dtype), backend)
    check((torch.randn(50_000, dtype=torch.float64) * 1e-3 - ratio).to(dtype), backend)


@pytest.mark.parametrize("outlier", [-1e6, 1e3, 3e38])
def test_std_does_not_depend_on_what_stands_first(backend: str, outlier: float) -> None:
    """A value near the mean is taken off every element; it must not come from one that lies far off."""
    tensor = torch.randn(20_000) + 5
    tensor[[0, 4096, 8192]] = outlier
    check(tensor, backend)
    tensor[:32] = outlier
    check(tensor, backend)


def test_std_where_the_level_changes(backend: str) -> None:
    steps = torch.arange(40.0).repeat_interleave(2500) * 100
    check(steps + torch.randn(100_000), backend, "steps")
    check(torch.arange(300_000.0), backend, "a ramp")
    check(torch.cat([torch.zeros(4000), torch.full((96,), 1e4), torch.randn(4096)]), backend, "one late jump")


@pytest.mark.parametrize("size", [1, 100, 4096, 70_000])
@pytest.mark.parametrize("value", [0.1, -1e30, 1e-40])
def test_std_of_a_constant_is_nothing(backend: str, size: int, value: float) -> None:
    stats = activation_stats(torch.full((size,), value), backend=backend)
    assert stats.std <= 1e-15 * abs(value)
    assert stats.mean == pytest.approx(float(np.float32(value)), rel=1e-15, abs=0)


def test_activations_as_they_come(backend: str) -> None:
    x = torch.randn(64, 300)
    for name in ("relu", "gelu", "tanh", "sigmoid", "silu", "softmax"):
        function = getattr(torch.nn.functional, name, None) or getattr(torch, name)
        for dtype in (torch.float32, torch.bfloat16):
            out = (function(x * 4, -1) if name == "softmax" else function(x * 4)).to(dtype)
            check(out, backend, name)


THRESHOLDS = [
    (0.99, 1e-6),
    ((0.0, 1.0), 0.0),
    ((-0.1, math.inf), 1e-3),
    ((-math.inf, math.inf), math.inf),
    ((0.1, 0.1), 0.1),
    (0.0, 1e-45),
    (1e-320, 1e-320),
    (1e100, 1e100),
    (3.0, 65504.0),
]


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("saturation", "near_zero"), THRESHOLDS)
def test_thresholds_are_compared_by_value(backend: str, saturation, near_zero: float, dtype: torch.dtype) -> None:
    low, high = saturation if isinstance(saturation, tuple) else (-saturation, saturation)
    around = [low, high, near_zero, -near_zero, 1.0, 0.1, 0.99, 65504.0, 1e-45, 3e38, 1e-40]
    near = torch.tensor([y for y in around if math.isfinite(y)], dtype=torch.float64).to(dtype)
    infinity = torch.full_like(near, math.inf)
    values = torch.cat([near, torch.nextafter(near.float(), infinity.float()).to(dtype), -near, infinity, -infinity])
    tensor = torch.cat(
        [values, near, torch.nextafter(near.float(), -infinity.float()).to(dtype), torch.randn(300).to(dtype)]
    )
    for x in (tensor, tensor[tensor.isfinite()]):
        stats = activation_stats(x, saturation=saturation, near_zero=near_zero, backend=backend)
        assert_stats(stats, expected(x, low, high, near_zero))


def test_inf_is_saturated_and_nan_is_not(backend: str) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 2.0])
    stats = activation_stats(x, saturation=(-math.inf, math.inf), backend=backend)
    assert (stats.num_saturated, stats.num_infs, stats.num_nans, stats.num_near_zero) == (2, 2, 1, 1)
    assert not stats.is_finite
    assert activation_stats(x, saturation=1.5, backend=backend).num_saturated == 3
    assert (stats.mean, stats.std, stats.min_val, stats.max_val) == (1.0, 1.0, 0.0, 2.0)


def test_nothing_and_nothing_finite(backend: str) -> None:
    for x in (torch.zeros(0), torch.zeros(3, 0, 2), torch.full((5,), math.nan), torch.full((600,), math.inf)):
        stats = check(x, backend)
        assert math.isnan(stats.mean) and math.isnan(stats.abs_max)
    assert activation_stats(torch.zeros(0), backend=backend).zero_ratio == 0.0
    assert check(torch.tensor(-0.0), backend).num_zeros == 1


@pytest.mark.slow
def test_counts_above_2_to_24(backend: str) -> None:
    size = (1 << 24) + 5
    tensor = torch.zeros(size, dtype=torch.float16)
    tensor[-3:] = math.nan
    stats = activation_stats(tensor, backend=backend)
    assert (stats.total_elements, stats.num_zeros, stats.num_near_zero, stats.num_nans) == (size, size - 3, size - 3, 3)


def test_kinds_of_tensors(backend: str) -> None:
    check(torch.nn.Parameter(torch.randn(10)), backend)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 3]]), torch.tensor([1.0, 2.0, -1.0]), (4,), check_invariants=False
    )
    assert activation_stats(sparse, backend=backend).max_val == 3.0
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        small = torch.randn(3000).to(dtype)
        assert_stats(activation_stats(small, backend=backend), expected(small.float()))
    negative = torch.randn(50, dtype=torch.complex64).conj().imag
    check(negative, backend)
    with torch.inference_mode():
        assert activation_stats(torch.ones(4), backend=backend).mean == 1.0


def test_a_tensor_inside_vmap_is_refused(backend: str) -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        for measure in (activation_stats, fastguard.channel_stats):
            with pytest.raises(UnsupportedTensorError, match="functorch"):
                measure(x, backend=backend)
        return x

    torch.vmap(inside)(torch.randn(3, 4))


def test_arrays() -> None:
    array = np.arange(20, dtype=np.float32).reshape(4, 5)
    for view in (
        array,
        array[:, ::2],
        array[::-1],
        array.astype(np.float16),
        array.astype(np.float64),
        np.float64(2.0),
    ):
        assert_stats(activation_stats(view), expected(torch.tensor(np.array(view))))
    array.flags.writeable = False
    assert activation_stats(array).max_val == 19.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.arange(3), r"`x` must be float16, .* got torch.int64\. Convert it.*at activation_stats\(x\)"),
        (lambda: torch.zeros(3, dtype=torch.bool), "got torch.bool"),
        (lambda: np.arange(3), "got torch.int64"),
        (
            lambda: torch.zeros(3, dtype=torch.complex64),
            "`x` must be real, got torch.complex64. Call torch.view_as_real",
        ),
        (lambda: torch.zeros(3, device="meta"), "`x` must hold data, got a meta or fake tensor"),
        (lambda: "text", "`x` must be a torch.Tensor or an ndarray of numbers, got str"),
        (lambda: None, "`x` must be a torch.Tensor or an ndarray of numbers, got NoneType"),
    ],
    ids=["integers", "bools", "an array of integers", "complex", "meta", "text", "None"],
)
def test_what_cannot_be_read_is_refused(backend: str, make, message: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=message):
        activation_stats(make(), backend=backend)


def test_arguments(backend: str) -> None:
    x = torch.zeros(2)
    for saturation in (-1.0, math.nan, (1.0, 0.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="`saturation` must be"):
            activation_stats(x, saturation=saturation, backend=backend)
    for near_zero in (-1e-9, math.nan):
        with pytest.raises(ValueError, match="`near_zero` must be >= 0"):
            activation_stats(x, near_zero=near_zero, backend=backend)
    with pytest.raises(ValueError, match=r"`backend` must be one of \[auto"):
        activation_stats(x, backend="gpu")


def test_rows_of_parts_merge_to_the_row_of_the_whole(backend: str) -> None:
    whole = torch.randn(10_000) + 100
    whole[[5, 7000]] = torch.tensor([math.nan, math.inf])
    rows = [
        fastguard.kernels.activations.run_activation(part, -0.99, 0.99, 1e-6, None, backend)[0]
        for part in whole.split([0, 1, 17, 6, 5000, 4976])
    ]
    assert_stats(ActivationStats.from_row(merge_activation_rows(rows)), expected(whole))
    assert merge_activation_rows([]) == EMPTY_ACTIVATION_ROW


def test_the_public_door_gives_the_same_function() -> None:
    assert fastguard.activation_stats is fastguard.kernels.activation_stats
