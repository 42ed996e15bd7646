"""Every figure of an activation and of its channels: dtypes, sizes, layouts, nasty values, thresholds, on every
backend. Triton's interpreter gets smaller tensors."""

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from activation_truth import assert_stats, expected, expected_table
from hypothesis import given
from hypothesis import strategies as st

import fastguard
from fastguard import ActivationStats, UnsupportedTensorError, _env, activation_stats
from fastguard.kernels import resolve_backend, run_activation, thresholds
from fastguard.records.samples import EMPTY_ACTIVATION_ROW, merge_activation_rows

import tolerances
from cases import DTYPES, LAYOUTS, NASTY, SIZES, image, nasty

LIMITS = (-0.99, 0.99, 1e-6)


def is_slow(backend):
    return backend == "triton" and _env.triton_interpreter()


def channel_table(tensor, dim, backend, limits=LIMITS):
    """The row, and the table [channels, 4], as the sampler of activations has them read."""
    dim %= max(1, tensor.dim())
    low, high, near = limits
    limits = thresholds((low, high), near)
    row, table = run_activation(tensor.detach(), limits, dim, resolve_backend(backend))
    return ActivationStats.from_row(row), np.frombuffer(table).reshape(-1, 4)


def check(tensor, backend, dims=(), what="", limits=LIMITS):
    """The row of `tensor` is right, and the table of its channels for each of `dims`."""
    low, high, near = limits
    settings = {"saturation": (low, high), "near_zero": near, "backend": backend}
    stats = activation_stats(tensor, **settings)
    assert_stats(stats, expected(tensor, low, high, near), what)
    for dim in dims:
        whole, table = channel_table(tensor, dim, backend, limits)
        assert_stats(whole, expected(tensor, low, high, near), f"{what}, dim {dim}")
        truth = expected_table(tensor, dim, low, high, near)
        np.testing.assert_array_equal(table[:, :3], truth[:, :3], f"{what}, dim {dim}")
        np.testing.assert_allclose(table[:, 3], truth[:, 3], tolerances.SUM_ABS, 0, err_msg=f"{what}, dim {dim}")
    return stats


@pytest.mark.long_interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(backend, dtype):
    load = 2048 // dtype.itemsize  # of a program of the Triton kernels, which reads 16 of them
    some = (1, 9, load - 1, load, load + 1, 4 * load + 3, 16 * load, 16 * load + 1, 40 * load + 5)
    for size in some if is_slow(backend) else SIZES:
        check(torch.randn(size, dtype=torch.float64).to(dtype), backend, what=f"{size} elements")


# [rows, channels]. The C++ loops: around 16 channels side by side, panels of 512, 8 rows read together, groups of rows.
# Triton's: few channels, whole blocks of columns and rests of them, rows that begin at no multiple of 16 bytes.
SMALL_SHAPES = [(37, 3), (20, 256), (17, 140), (9, 131), (1, 300), (200, 1), (400, 4)]
SHAPES = [
    *SMALL_SHAPES,
    *((n, c) for n in (1, 7, 8, 9, 100) for c in (1, 3, 15, 16, 17, 31, 33)),
    *((n, c) for n in (1, 8, 13) for c in (511, 512, 513, 1030, 4099)),
    *((5000, 16), (5000, 3), (70_001, 1), (3, 70_001), (2000, 130)),
]


@pytest.mark.thinned(interpreted=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(backend, dtype):
    for shape in SMALL_SHAPES if is_slow(backend) else SHAPES[:: 1 if backend == "cpu" else 3]:
        check(torch.randn(shape, dtype=torch.float64).to(dtype), backend, (0, 1), str(shape))


SPATIAL = {
    **LAYOUTS,
    "a part of the channels": lambda x: x[:, 3:20],
    "a part of the channels, channels_last": lambda x: x.to(memory_format=torch.channels_last)[:, 3:20],
    "every second channel": lambda x: x[:, ::2],
    "a crop": lambda x: x[:, :, 1:-1, 2:-3],
    "a crop, channels_last": lambda x: x.to(memory_format=torch.channels_last)[:, :, 1:-1, 2:-3],
    "large images": lambda x: x[:1].repeat(1, 1, 5, 9),
    "long runs": lambda x: x.repeat(1, 1, 2, 3),
    "long runs, a part of the channels": lambda x: x.repeat(1, 1, 2, 3)[:, 5:9, :-2],
    "runs in pieces": lambda x: x[:1, :2].repeat(1, 1, 11, 14),
    "short runs": lambda x: x[:3, :6, :2, :2],
    "permuted": lambda x: x.permute(3, 2, 1, 0),
    "expanded channels": lambda x: x[:, :1].expand(-1, 7, -1, -1),
    "one channel": lambda x: x[:, 4:5],
}


@pytest.mark.thinned(n=3, interpreted=15)
@pytest.mark.parametrize("layout", SPATIAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(backend, dtype, layout):
    tensor = SPATIAL[layout](image(dtype, (4, 9, 7, 6)) if is_slow(backend) else image(dtype))
    check(tensor, backend, range(max(1, tensor.dim())), layout)


@pytest.mark.thinned(n=3, interpreted=40)
@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nasty_values(backend, dtype, value):
    size = 900 if is_slow(backend) else 19_800
    among = nasty(NASTY[value], dtype, size)
    alone = torch.full((size,), NASTY[value], dtype=torch.float64).to(dtype)
    for tensor in (among, alone, alone[:1], alone[:4096]):
        check(tensor, backend, what=value)
    for tensor in (among, alone):
        for shape in ((-1, 450), (-1, 10), (3, 30, -1)):
            check(tensor.view(shape), backend, (-1, 1), f"{value}, {shape}")


@pytest.mark.full_size
def test_every_float16_and_bfloat16_bit_pattern(backend):
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        for start in (0, 1, 4095):
            check(patterns.view(dtype)[start:], backend, what=f"{dtype} from {start}")


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 2e-22, 1e-14, 1e-12, 1e17, 1e18, 4e18, 1e19, 1e30, 1e38])
def test_no_overflow_and_no_underflow(backend, scale):
    size = 1200 if is_slow(backend) else 12_300
    values = torch.rand(size, dtype=torch.float64) * 2 - 0.7
    for tensor in ((values * scale).float(), (values * scale + 3 * scale).float().clamp(max=3e38)):
        check(tensor, backend, what=f"scale {scale}")
        check(tensor.view(-1, 60), backend, (0, 1), f"scale {scale}")


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ratio", [0.0, 1.0, 3.0, 30.0, 1000.0, 1e5])
def test_std_where_the_mean_dominates(backend, ratio, dtype):
    x = torch.randn(4200 if is_slow(backend) else 63_000, dtype=torch.float64)
    check((x * 1e-3 - ratio).to(dtype), backend)
    check((x + ratio).to(dtype).view(-1, 60), backend, (0, 1))
    check((x.view(-1, 60) + torch.randn(60) * 5 * ratio).to(dtype), backend, (0, 1), "channels of different means")


def test_std_does_not_depend_on_what_stands_first(backend):
    """A value near the mean is taken off every element; it must not come from one that lies far off."""
    for outlier in (-1e6, 1e3, 3e38):
        tensor = torch.randn(5000 if is_slow(backend) else 20_000) + 5
        tensor[[0, 4096]] = outlier
        check(tensor, backend)
        tensor[:600] = outlier
        check(tensor, backend)
    size = 9000 if is_slow(backend) else 270_000
    check(torch.arange(float(size)), backend, what="a ramp")
    check(torch.arange(9.0).repeat_interleave(size // 9) * 100 + torch.randn(size), backend, what="steps")
    check(torch.cat([torch.zeros(4000), torch.full((96,), 1e4), torch.randn(4096)]), backend, what="one late jump")


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("value", [0.1, -1e30, 1e-40, 3.3e38, 6e35])
def test_std_of_a_constant_is_nothing(backend, value):
    for size in (1, 100, 9000, 70_000)[: 3 if is_slow(backend) else 4]:
        stats = activation_stats(torch.full((size,), value), backend=backend)
        assert stats.std <= 1e-15 * abs(value)
        assert stats.mean == pytest.approx(float(np.float32(value)), rel=1e-15, abs=0)
    check(torch.full((2, 1024), value), backend, (0, 1))  # whose magnitudes' sum may overflow float32


def test_float64_beyond_the_squares(backend):
    """Extremes and counts hold where the squares no longer do."""
    for size in (10, 5000):
        stats = activation_stats(torch.full((size,), 1e200, dtype=torch.float64), backend=backend)
        assert (stats.mean, stats.std) == (1e200, 0.0)
    far = torch.tensor([1e200, -1e200] * 50, dtype=torch.float64)
    stats = activation_stats(far, backend=backend)
    assert (stats.std, stats.min_val, stats.max_val) == (math.inf, -1e200, 1e200)


THRESHOLDS = [
    (-0.99, 0.99, 1e-6),
    (0.0, 1.0, 0.0),
    (-0.1, math.inf, 1e-3),
    (-math.inf, math.inf, math.inf),
    (0.1, 0.1, 0.1),
    (0.0, 0.0, 1e-45),
    (-1e-320, 1e-320, 1e-320),
    (-1e100, 1e100, 1e100),
    (-3.3, 0.7, 65504.0),
]


@pytest.mark.thinned(n=3, interpreted=5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limits", THRESHOLDS)
def test_thresholds_are_compared_by_value(backend, limits, dtype):
    around = [*limits, -limits[2], 1.0, 0.1, 0.99, 65504.0, 1e-45, 3e38, 1e-40]
    near = torch.tensor([y for y in around if math.isfinite(y)], dtype=torch.float64).to(dtype)
    infinity = torch.full_like(near, math.inf)
    values = [near, -near, infinity, -infinity, torch.randn(300).to(dtype)]
    values += [torch.nextafter(near.float(), sign * infinity.float()).to(dtype) for sign in (1, -1)]
    tensor = torch.cat(values)
    for x in (tensor, tensor[tensor.isfinite()]):
        check(x, backend, (0,), limits=limits)


def test_what_the_figures_mean(backend):
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 2.0])
    stats = activation_stats(x, saturation=(-math.inf, math.inf), backend=backend)
    assert (stats.num_saturated, stats.num_infs, stats.num_nans, stats.num_near_zero) == (2, 2, 1, 1)
    assert not stats.is_finite and activation_stats(x, saturation=1.5, backend=backend).num_saturated == 3
    assert (stats.mean, stats.std, stats.min_val, stats.max_val) == (1.0, 1.0, 0.0, 2.0)
    x = torch.tensor([[0.0, 5.0, math.nan], [0.0, -5.0, math.nan], [0.0, 5.0, 0.5]])
    _, table = channel_table(x, -1, backend)
    assert table.T.tolist() == [[3, 0, 0], [0, 3, 0], [0, 0, 2], [0.0, 15.0, 0.5]]


def test_nothing_and_nothing_finite(backend):
    for x in (torch.zeros(0), torch.zeros(3, 0, 2), torch.full((5,), math.nan), torch.full((600,), math.inf)):
        stats = check(x, backend)
        assert math.isnan(stats.mean) and math.isnan(stats.abs_max)
    assert activation_stats(torch.zeros(0), backend=backend).zero_ratio == 0.0
    assert check(torch.tensor(-0.0), backend, (0, -1)).num_zeros == 1
    for shape, dim, num_channels in (((0, 5), 1, 5), ((0, 5), 0, 0), ((3, 0, 2), 1, 0), ((3, 0, 2), -1, 2)):
        stats, table = channel_table(torch.zeros(shape), dim, backend)
        assert stats.total_elements == 0 and table.tolist() == [[0.0] * 4] * num_channels


@pytest.mark.slow
@pytest.mark.full_size
def test_counts_above_2_to_24(backend):
    size = (1 << 24) + 5
    tensor = torch.zeros(size, dtype=torch.float16)
    tensor[-3:] = math.nan
    stats = activation_stats(tensor, backend=backend)
    assert (stats.total_elements, stats.num_zeros, stats.num_near_zero, stats.num_nans) == (size, size - 3, size - 3, 3)


def test_kinds_of_tensors(backend):
    check(torch.nn.Parameter(torch.randn(10, 20)), backend, (0, 1))
    check(torch.randn(40, 30, dtype=torch.complex64).conj().imag, backend, (0, 1))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        small = torch.randn(30, 100).to(dtype)
        assert_stats(activation_stats(small, backend=backend), expected(small.float()))
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0, 3]]), torch.tensor([1.0, 2.0, -1.0]), (4,))
    assert activation_stats(sparse, backend=backend).max_val == 3.0
    with torch.inference_mode():
        assert activation_stats(torch.ones(4), backend=backend).mean == 1.0


REFUSED = {
    "integers": (lambda: torch.arange(3), r"`x` must be .*got torch\.int64\. Convert it.*at {}\(x\)"),
    "bools": (lambda: torch.zeros(3, dtype=torch.bool), "got torch.bool"),
    "an array of integers": (lambda: np.arange(3), "got torch.int64"),
    "complex": (lambda: torch.zeros(3, dtype=torch.complex64), "must be real, got torch.complex64. Call torch.view"),
    "meta": (lambda: torch.zeros(3, 4, device="meta"), "`x` must hold data, got a meta or fake tensor"),
    "text": (lambda: "text", "`x` must be a torch.Tensor or an ndarray of numbers, got str"),
    "None": (lambda: None, "`x` must be a torch.Tensor or an ndarray of numbers, got NoneType"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused(backend, what):
    make, message = REFUSED[what]
    with pytest.raises(UnsupportedTensorError, match=message.format("activation_stats")):
        activation_stats(make(), backend=backend)


def test_arguments(backend):
    x = torch.zeros(3, 4)
    for saturation in (-1.0, math.nan, (1.0, 0.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="`saturation` must be"):
            activation_stats(x, saturation=saturation, backend=backend)
    for near_zero in (-1e-9, math.nan):
        with pytest.raises(ValueError, match="`near_zero` must be >= 0"):
            activation_stats(x, near_zero=near_zero, backend=backend)
    with pytest.raises(ValueError, match=r"`backend` must be one of \[auto"):
        activation_stats(x, backend="gpu")
    assert fastguard.activation_stats is activation_stats


_float32 = hnp.arrays(np.float32, st.integers(0, 700), elements=st.floats(width=32))
_matrix = hnp.arrays(np.float32, st.tuples(st.integers(1, 20), st.integers(1, 60)), elements=st.floats(width=32))
_threshold = st.floats(0, allow_nan=False)


@pytest.mark.full_size
@given(values=_matrix, high=_threshold, near=_threshold)
def test_any_float32(backend, values, high, near):
    check(torch.as_tensor(values), backend, (0, 1), limits=(-high, high, near))


@pytest.mark.full_size
@given(values=_float32, data=st.data())
def test_splitting_and_merging_is_the_whole(backend, values, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    rows = [run_activation(torch.as_tensor(part), LIMITS, None, backend)[0] for part in np.split(values, cuts)]
    assert_stats(ActivationStats.from_row(merge_activation_rows(rows)), expected(torch.as_tensor(values)))
    assert merge_activation_rows([]) == EMPTY_ACTIVATION_ROW
