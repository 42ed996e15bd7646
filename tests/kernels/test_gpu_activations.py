"""Activations by the GPU kernels: every way through them, small enough for the interpreter, and figures that stay on
the device. On a GPU the tests of all backends run too, with tensors of every size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from activation_truth import assert_stats, expected, expected_table

import fastguard
from fastguard import ActivationStats, BackendUnavailableError, UnsupportedTensorError
from fastguard.kernels import reference, registry
from fastguard.kernels.activations import run_activation_into
from fastguard.kernels.registry import BACKENDS
from fastguard.kernels.triton import activations, trial
from fastguard.kernels.triton.activations import ActivationWorkspace
from fastguard.records.samples import EMPTY_ACTIVATION_ROW

import tolerances
from cases import DTYPES, NASTY

LIMITS = (-0.99, 0.99, 1e-6)

pytestmark = pytest.mark.usefixtures("device")


def check_row(tensor: torch.Tensor, what: str = "", limits: tuple[float, float, float] = LIMITS) -> None:
    assert_stats(
        ActivationStats.from_row(activations.activation(tensor, None, limits)[0]), expected(tensor, *limits), what
    )


def check_table(tensor: torch.Tensor, dim: int, what: str = "") -> None:
    row, found = activations.activation(tensor, dim % tensor.dim(), LIMITS)
    assert_stats(ActivationStats.from_row(row), expected(tensor), what)
    truth, table = expected_table(tensor, dim), np.frombuffer(found).reshape(-1, 4)
    assert table.shape == truth.shape, what
    np.testing.assert_array_equal(table[:, :3], truth[:, :3], what)
    np.testing.assert_allclose(table[:, 3], truth[:, 3], rtol=tolerances.SUM_ABS, atol=0, err_msg=what)


@pytest.mark.long_interpreted
# Around a thread's 16 bytes, a load's 2048, four of them, the least chunk of 16384.
@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(dtype: torch.dtype) -> None:
    load = 2048 // dtype.itemsize
    for size in (1, 2, 9, load - 1, load, load + 1, 4 * load, 4 * load + 3, 8 * load, 8 * load + 1, 20 * load + 5):
        check_row(torch.randn(size, dtype=torch.float64).to(dtype), f"{size} elements")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nasty_values(dtype: torch.dtype) -> None:
    for name, value in NASTY.items():
        tensor = torch.randn(900).to(dtype)
        for where in (0, 300, slice(500, 509), -1):
            tensor[where] = value
        check_row(tensor, f"{name} among normal ones")
        check_table(tensor.view(18, 50), 1, f"{name} among normal ones")
        if dtype == torch.float32:
            check_table(tensor.view(3, 300), 0, f"{name} among normal ones")
        check_row(torch.full((600,), value, dtype=torch.float64).to(dtype), f"all {name}")


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ratio", [3.0, 1000.0, 1e5])
def test_std_where_the_mean_dominates(ratio: float, dtype: torch.dtype) -> None:
    tensor = (torch.randn(4200, dtype=torch.float64) * 1e-3 + ratio * 1e-3).to(dtype)
    check_row(tensor)
    check_table(tensor.view(70, 60), 1)
    check_table(tensor.view(7, 600), 0)


@pytest.mark.long_interpreted
def test_std_where_the_first_elements_say_nothing_of_the_rest() -> None:
    check_row(torch.arange(0.0, 9000.0), "a ramp")
    check_row(torch.cat([torch.zeros(4000), torch.full((96,), 1e4), torch.randn(4096)]), "a jump")
    outliers = torch.randn(5000) + 5
    outliers[:600] = -1e6
    check_row(outliers, "outliers first")
    levels = torch.randn(60) * 1000
    check_table(torch.randn(90, 60) + levels, 1, "channels of different means")
    check_table(torch.randn(60, 90) + levels[:, None], 0, "channels of different means")


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("value", [0.1, -1e30, 1e-40, 3.3e38])
def test_std_of_a_constant_is_nothing(value: float) -> None:
    for size in (1, 100, 9000):
        stats = ActivationStats.from_row(activations.activation(torch.full((size,), value), None, LIMITS)[0])
        assert stats.std <= 1e-15 * abs(value)
        assert stats.mean == float(np.float32(value))


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 2e-22, 1e-14, 1e18, 1e30, 1e38])
def test_no_overflow_and_no_underflow(scale: float) -> None:
    tensor = ((torch.rand(1200, dtype=torch.float64) * 3 - 1) * scale).float()
    check_row(tensor, f"scale {scale}")
    check_table(tensor.view(30, 40), 1, f"scale {scale}")
    check_table(tensor.view(2, 600), 0, f"scale {scale}")


def test_magnitudes_whose_sum_alone_overflows() -> None:
    """Deviations are 0 and the mean of the first elements is theirs, so that nothing else would tell."""
    check_table(torch.full((2, 1024), 6e35), 0)
    check_table(torch.full((40, 30), 3e38), 1)


def test_float64_beyond_the_squares() -> None:
    """The mean and the sums of magnitudes hold where the squares no longer do; extremes and counts always."""
    tensor = torch.tensor([1.7e308, -1.7e308, 1.6e308, 1.5e308, math.nan], dtype=torch.float64)
    row = activations.activation(tensor, None, LIMITS)[0]
    assert row[1] == pytest.approx(math.fsum([1.7e308 / 4, -1.7e308 / 4, 1.6e308 / 4, 1.5e308 / 4]), rel=1e-12)
    assert (row[2], row[3:]) == (math.inf, (-1.7e308, 1.7e308, 0.0, 0.0, 4.0, 1.0, 0.0))


# [rows, channels] and images: channels side by side, few and many of them, in runs shorter and longer than 128 bytes,
# in pieces of a run; whole blocks of columns, and rests of them; rows that begin at multiples of 16 bytes, and not.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "few channels": ((37, 3), 1),
    "whole blocks of columns": ((20, 256), 1),
    "a rest of columns": ((37, 140), 1),
    "no multiple of 16 bytes": ((33, 131), 1),
    "one row": ((1, 300), 1),
    "one column": ((900, 1), 1),
    "many rows": ((1500, 4), 1),
    "channels first": ((5, 300), 0),
    "short runs": ((3, 6, 2, 2), 1),
    "runs of 16 side by side": ((3, 7, 8, 9), 1),
    "runs of 4 side by side": ((2, 9, 20, 20), 1),
    "long runs": ((1, 3, 33, 32), 1),
    "runs in pieces": ((1, 2, 4600), 1),
    "the middle one": ((4, 30, 5), 1),
    "one channel": ((4, 1, 50), 1),
}


# One of columns, one whose rows begin anywhere, one of runs: the other dtypes differ from float32 in how they are
# loaded and counted, not in where. The rest of them is slow.
_IN_ALL_DTYPES = ("whole blocks of columns", "no multiple of 16 bytes", "runs of 4 side by side")


@pytest.mark.thinned(interpreted=10)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(
            shape,
            dtype,
            id=f"{shape}-{dtype}",
            marks=[] if dtype == torch.float32 or shape in _IN_ALL_DTYPES else pytest.mark.slow,
        )
        for shape in SHAPES
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ],
)
def test_channels(shape: str, dtype: torch.dtype) -> None:
    sizes, dim = SHAPES[shape]
    tensor = torch.randn(sizes, dtype=torch.float64).to(dtype)
    check_table(tensor, dim, shape)
    if dtype == torch.float32:
        tensor.view(-1)[:: tensor.numel() // 3] = math.nan
        tensor.view(-1)[-1] = math.inf
        check_table(tensor, dim, f"{shape}, not finite")


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "a part of the channels": lambda x: x[:, 1:4],
    "every second": lambda x: x[..., ::2],
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
    "off by an element": lambda x: x.reshape(-1)[1:-2].view(3, -1, 1, 1),
    "one of size-1 dimensions": lambda x: x[1:2, 2:3, 1:2, 3:4],
}


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    tensor = LAYOUTS[layout](torch.randn(4, 9, 7, 5))
    check_row(tensor, layout)
    for dim in range(4):
        check_table(tensor if dim % 2 else tensor.half(), dim, f"{layout}, dim {dim}")


def test_every_layout_finds_its_channels() -> None:
    """Without a kernel: the element at [a, c, b] of a layout belongs to channel c."""
    shape = (2, 3, 4, 5)
    numbers = torch.arange(math.prod(shape)).view(shape)
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2), (2, 3, 0, 1)):
        back = [order.index(i) for i in range(4)]
        tensor = numbers.permute(order).contiguous().permute(back)
        in_memory = tensor.as_strided((tensor.numel(),), (1,))
        for dim in range(4):
            outer, channels, inner = activations.layout_of(tensor.shape, tensor.stride(), dim)
            assert outer * channels * inner == tensor.numel() and channels == shape[dim]
            found = in_memory.view(outer, channels, inner)
            for c in range(channels):
                assert sorted(found[:, c].flatten().tolist()) == sorted(tensor.select(dim, c).flatten().tolist())


def test_chunks_are_of_bounded_size_and_a_program_s_counts_have_room() -> None:
    """What lang/activations.py relies on."""
    cpu = torch.device("cpu")
    for dtype in DTYPES:
        for numel in (1, 10**4, 10**6, 10**9):
            chunk = activations.chunk_of(numel, dtype.itemsize)
            assert 2**14 <= chunk * dtype.itemsize <= 2**17 and chunk & (chunk - 1) == 0
        for shape in ((100, 7, 33), (3, 1000, 65), (9, 5, 400), (1, 2, 10**6), (7, 12345), (10**6, 3)):
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            for dim in (None, 0, 1):
                made = activations.divide(shape, tuple(strides), dtype, dim, cpu)
                _, width, rows, columns = made.sizes
                constants = made.launcher.constants
                columns = min(width, columns)
                assert rows * columns < 2**20
                tiles_down = -(-rows // constants["ROWS"]) if constants["BY_COLUMN"] else 1
                assert tiles_down * -(-columns // constants["COLS"]) < 2**10


@pytest.mark.long_interpreted
def test_thresholds_are_compared_by_value() -> None:
    for dtype in DTYPES:
        for low, high, near in ((0.1, 0.1, 0.1), (-1e-320, 1e-320, 5e-324), (-1e100, 1e100, 1e100), (-3.3, 0.7, 1e-45)):
            edges = torch.tensor([low, high, near, -near, 0.0, 1.0, 65504.0, 1e-45], dtype=torch.float64).to(dtype)
            up = torch.nextafter(edges.float(), torch.full_like(edges.float(), math.inf)).to(dtype)
            down = torch.nextafter(edges.float(), torch.full_like(edges.float(), -math.inf)).to(dtype)
            tensor = torch.cat([edges, up, down])
            check_row(tensor, f"{dtype} {low} {high} {near}", (low, high, near))
            check_row(tensor[tensor.isfinite()], f"{dtype} {low} {high} {near}, finite", (low, high, near))


def test_figures_land_in_their_place_and_nowhere_else(device: torch.device) -> None:
    rows = torch.full((3, 10), math.nan, dtype=torch.float64)
    table = torch.full((7, 4), math.nan, dtype=torch.float64)
    tensor = torch.randn(40, 5)
    activations.activation_into(tensor, None, LIMITS, rows[1], None)
    assert_stats(ActivationStats.from_row(rows[1].tolist()), expected(tensor))
    assert rows[0].isnan().all() and rows[2].isnan().all()
    activations.activation_into(tensor, 1, LIMITS, rows[0], table[1:6])
    assert rows[0].tolist() == pytest.approx(rows[1].tolist(), rel=1e-6)
    np.testing.assert_allclose(table[1:6].cpu().numpy(), expected_table(tensor, 1), rtol=1e-6)
    assert table[0].isnan().all() and table[6].isnan().all()
    activations.activation_into(torch.zeros(0), None, LIMITS, rows[2], None)
    assert tuple(rows[2].tolist()) == EMPTY_ACTIVATION_ROW
    activations.activation_into(torch.zeros(0, 5), 1, LIMITS, rows[2], table[2:])
    assert tuple(rows[2].tolist()) == EMPTY_ACTIVATION_ROW and not table[2:].any()


def test_in_a_steady_state_nothing_is_allocated_and_nothing_waits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = ActivationWorkspace(device)
    large, small = torch.randn(60, 70), torch.randn(3, 4, 5)
    row, table = torch.empty(10, dtype=torch.float64), torch.empty(70, 4, dtype=torch.float64)
    workspace.measure_activation(large, 1, *LIMITS, row, table)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("allocates or synchronises")

    for name in ("empty", "zeros", "full", "tensor"):
        monkeypatch.setattr(torch, name, refuse)
    for name in ("item", "tolist", "cpu", "contiguous"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    workspace.measure_activation(large, 1, *LIMITS, row, table)
    workspace.measure_activation(small, None, *LIMITS, row)
    workspace.measure_activation(small, 1, *LIMITS, row, table[:4])
    monkeypatch.undo()
    np.testing.assert_allclose(table[:4].cpu().numpy(), expected_table(small, 1), rtol=1e-6)


def test_the_same_bits_each_time_and_for_the_same_memory() -> None:
    tensor = torch.randn(6, 5, 9, 8)
    tensor[1, 2, 3, 4] = math.nan
    found = activations.activation(tensor, 1, LIMITS)
    assert activations.activation(tensor, 1, LIMITS) == found
    assert activations.activation(tensor.permute(3, 1, 0, 2), 1, LIMITS) == found
    turned = activations.activation(tensor.permute(3, 1, 0, 2), None, LIMITS)
    assert turned == activations.activation(tensor, None, LIMITS)


def test_what_cannot_take_the_figures_is_refused(device: torch.device) -> None:
    x = torch.ones(3, 4)
    good, meta = torch.empty(10, dtype=torch.float64), torch.empty(10, dtype=torch.float64, device="meta")
    for bad in (good[:9], good.float(), good.repeat(2)[::2], meta):
        with pytest.raises(
            ValueError, match=r"`row` must be float64, contiguous, of 10 elements on .*, got torch.float"
        ):
            activations.activation_into(x, None, LIMITS, bad, None)
    with pytest.raises(ValueError, match="`table` must be float64, contiguous, of 16 elements"):
        activations.activation_into(x, 1, LIMITS, good, good)
    with pytest.raises(ValueError, match="`table` must be a tensor when channels are asked for, got None"):
        ActivationWorkspace(device).measure_activation(x, 1, *LIMITS, good)
    with pytest.raises(UnsupportedTensorError, match="must hold data, got a meta"):
        activations.activation_into(x.to("meta"), None, LIMITS, good, None)


def test_by_name_through_the_public_functions() -> None:
    x = torch.relu(torch.randn(50, 6, dtype=torch.bfloat16))
    x[:, 2] = 0
    assert_stats(fastguard.activation_stats(x, backend="triton"), expected(x))
    found = fastguard.channel_stats(x, backend="triton")
    assert found.near_zero_ratios[2] == 1.0 and found.num_channels == 6
    halves = torch.randn(30).to(torch.float8_e5m2)
    assert_stats(fastguard.activation_stats(halves, backend="triton"), expected(halves.float()))
    with pytest.raises(BackendUnavailableError, match="'triton' has no magnitude_counts"):
        fastguard.magnitude_histogram([x], backend="triton")
    assert fastguard.magnitude_histogram([x]).num_zeros == int((x == 0).sum())


@pytest.mark.parametrize("backend", ["triton", "reference", "cpu"])
def test_figures_stay_on_the_device_whatever_the_backend(backend: str, device: torch.device) -> None:
    if backend == "cpu" and device.type != "cpu":
        pytest.skip("the C++ kernels read CPU tensors only")
    x = torch.randn(12, 5, 4)
    row, table = torch.full((10,), math.nan, dtype=torch.float64), torch.full((5, 4), math.nan, dtype=torch.float64)
    run_activation_into(x, *LIMITS, None, backend, row)
    assert_stats(ActivationStats.from_row(row.tolist()), expected(x))
    row.fill_(math.nan)
    run_activation_into(x, *LIMITS, 1, backend, row, table)
    assert_stats(ActivationStats.from_row(row.tolist()), expected(x))
    np.testing.assert_allclose(table.cpu().numpy(), expected_table(x, 1), rtol=tolerances.SUM_ABS)


@pytest.mark.slow
def test_a_trial_passes_where_the_kernels_are_right(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS["cpu"], "accepts", lambda device: False)
    assert trial.problem_on(device, "activation") is None
    assert registry.choose(device, "auto", "activation") is BACKENDS["triton"]


def _wrong_for_channels(x: torch.Tensor, dim: int | None, limits: tuple[float, float, float]) -> object:
    return reference.activation(x, dim, limits) if dim is None else ((0.0,) * 10, bytes(32 * 140))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "result", "message"),
    [
        (
            "activation",
            ((0.0,) * 10, None),
            "gave wrong figures for torch.float32 .*: numel is 0.0 where torch says 9001.0",
        ),
        ("activation", _wrong_for_channels, "num_near_zero of channel 0 is 0.0 where torch says"),
        ("activation", RuntimeError("no\nkernel image"), "raised RuntimeError: no$"),
    ],
)
def test_auto_passes_over_kernels_that_are_wrong_and_says_so(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    result: object,
    message: str,
) -> None:
    def wrong(*arguments: object) -> object:
        if isinstance(result, Exception):
            raise result
        return result(*arguments) if callable(result) else result

    monkeypatch.setattr(activations, name, wrong)
    monkeypatch.setattr(BACKENDS["cpu"], "accepts", lambda device: False)
    trial._verdicts.clear()
    registry.say_once.cache_clear()
    with caplog.at_level("WARNING", "fastguard"):
        for _ in range(2):
            assert registry.choose(device, "auto", name) is BACKENDS["reference"]
            assert registry.choose(device, "auto", "tensor_stats") is BACKENDS["triton"]
    trial._verdicts.clear()
    assert len(caplog.records) == 1
    assert re.search(message, trial_message(caplog))
    assert registry.choose(device, "triton", name) is BACKENDS["triton"]  # by name: as asked


def trial_message(caplog: pytest.LogCaptureFixture) -> str:
    """The reason that was logged, without what follows from it."""
    return caplog.records[0].getMessage().removesuffix(". Falling back; the results are the same, only slower.")
