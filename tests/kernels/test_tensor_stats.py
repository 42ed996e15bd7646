"""Every column, dtype, size, layout and nasty value, on every backend."""

from __future__ import annotations

import math
import warnings
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastguard
from fastguard import GradientStats, UnsupportedTensorError, tensor_stats
from fastguard.records.columns import TABLE

import tolerances
from cases import COMPLEX, DTYPES, LAYOUTS, NASTY, SIZES, image, nasty
from truth import assert_row, expected


@pytest.mark.long_interpreted
@pytest.mark.parametrize("dtype", DTYPES + COMPLEX, ids=str)
def test_sizes(backend: str, dtype: torch.dtype) -> None:
    tensors = [torch.randn(n, dtype=dtype if dtype.is_complex else torch.float64).to(dtype) for n in SIZES]
    stats = tensor_stats(tensors, backend=backend)
    assert len(stats) == len(SIZES)
    for row, tensor in zip(stats, tensors, strict=True):
        assert_row(row, tensor, f"{tensor.numel()} elements")


@pytest.mark.thinned(n=3, interpreted=10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_layouts(backend: str, dtype: torch.dtype, layout: str) -> None:
    tensor = LAYOUTS[layout](image(dtype))
    assert_row(tensor_stats([tensor], backend=backend)[0], tensor, layout)


@pytest.mark.thinned(n=3)
@pytest.mark.long_interpreted
@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nasty_values_among_normal_ones(backend: str, dtype: torch.dtype, value: str) -> None:
    tensor = nasty(NASTY[value], dtype)
    assert_row(tensor_stats([tensor], backend=backend)[0], tensor, value)


@pytest.mark.long_interpreted
@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nasty_values_alone(backend: str, dtype: torch.dtype) -> None:
    all_of = {
        f"{size} times {name}": torch.full((size,), value, dtype=torch.float64).to(dtype)
        for name, value in NASTY.items()
        for size in (1, 16, 4096, 9001)
    }
    stats = tensor_stats(list(all_of.values()), backend=backend)
    for row, (what, tensor) in zip(stats, all_of.items(), strict=True):
        assert_row(row, tensor, what)


@pytest.mark.long_interpreted
def test_every_float16_and_bfloat16_bit_pattern(backend: str) -> None:
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        for start in (0, 1, 4095):
            tensor = patterns.view(dtype)[start:]
            assert_row(tensor_stats([tensor], backend=backend)[0], tensor, f"{dtype} from {start}")
        some = patterns.view(dtype)[:: 1999 if backend == "triton" else 97]
        assert tensor_stats(list(some.split(1)), backend=backend).num_nans == tuple(int(x) for x in some.isnan())


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 1e-20, 1e-14, 1e-13, 1e-12, 1e17, 1e18, 4e18, 1e19, 1e30, 1e38])
def test_no_overflow_and_no_underflow_across_the_fast_range(backend: str, scale: float) -> None:
    tensor = (torch.rand(3 * 4096 + 5, dtype=torch.float64) * scale).float()
    assert_row(tensor_stats([tensor], backend=backend)[0], tensor, f"scale {scale}")


@pytest.mark.slow
@pytest.mark.full_size
def test_counts_above_2_to_24(backend: str) -> None:
    if backend == "reference":
        size = (1 << 24) + 5
    else:
        size = (1 << 25) + 12_345
    tensor = torch.zeros(size, dtype=torch.float16)
    tensor[-3:] = float("nan")
    row = tensor_stats([tensor], backend=backend)[0]
    assert (row.numel, row.num_zeros, row.num_nans) == (size, size - 3, 3)


@pytest.mark.slow
@pytest.mark.full_size
def test_norm_of_124_million_float32_values(backend: str, threads: Any) -> None:
    threads(2)
    tensor = torch.randn(124_000_000)
    exact = math.sqrt(math.fsum(float((c.double() ** 2).sum()) for c in tensor.split(1 << 20)))
    assert tensor_stats([tensor], backend=backend)[0].norm == pytest.approx(exact, rel=tolerances.NORM, abs=0)


@pytest.mark.long_interpreted
def test_float64_is_summed_in_float64(backend: str) -> None:
    tensor = torch.randn(100_001, dtype=torch.float64)
    row = tensor_stats([tensor], backend=backend)[0]
    assert row.norm == pytest.approx(math.sqrt(expected(tensor).sum_sq), rel=tolerances.NORM_EXACT, abs=0)


def test_sparse_tensors_are_read_as_their_coalesced_values(backend: str) -> None:
    indices = torch.tensor([[0, 3, 3, 3], [1, 2, 2, 0]])
    uncoalesced = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, -2.0, 5.0]), (4, 4))
    row = tensor_stats([uncoalesced], backend=backend)[0]
    assert (row.numel, row.norm, row.num_zeros) == (3, math.sqrt(26), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once a process that these layouts are in beta
        compressed = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr()
    assert tensor_stats([compressed], backend=backend)[0].norm == math.sqrt(13)


def test_float8_is_read_exactly(backend: str) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.randn(3000).to(dtype)
        assert_row(tensor_stats([tensor], backend=backend)[0], tensor.float())


def test_kinds_of_tensors(backend: str) -> None:
    class Labelled(torch.Tensor):
        pass

    p = torch.nn.Parameter(torch.randn(10))
    for tensor in (p, p * 2, torch.randn(100).as_subclass(Labelled)):
        assert_row(tensor_stats([tensor], backend=backend)[0], torch.Tensor(tensor.detach()))
    with torch.inference_mode():
        tensor = torch.ones(4)
        assert tensor_stats([tensor], backend=backend)[0].norm == 2.0
    assert tensor_stats([tensor], backend=backend)[0].norm == 2.0


def test_a_dtensor_is_read_as_its_local_shard(backend: str, tmp_path) -> None:
    if torch.get_default_device().type != "cpu":
        pytest.skip("the process group of this test is one of CPUs")
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        whole = torch.randn(8, 4)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert_row(tensor_stats([sharded], backend=backend)[0], whole)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.arange(3), "must be float16, bfloat16, float32, float64 or complex, got torch.int64"),
        (lambda: torch.zeros(3, dtype=torch.bool), "got torch.bool"),
        (lambda: torch.zeros(3, device="meta"), "must hold data, got a meta or fake tensor"),
        (lambda: 3.5, "must be a torch.Tensor, got float"),
        (lambda: None, "must be a torch.Tensor, got NoneType"),
    ],
    ids=["integers", "bools", "meta", "float", "None"],
)
def test_what_cannot_be_read_is_named(backend: str, make, message: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=message) as caught:
        tensor_stats([torch.zeros(2), make()], names=["good", "bad one"], backend=backend)
    assert str(caught.value).startswith("`bad one`")
    assert str(caught.value).endswith("at tensors[1]")
    with pytest.raises(UnsupportedTensorError, match=r"`tensors\[0\]`"):
        tensor_stats([make()], backend=backend)


def test_a_tensor_inside_vmap_and_a_fake_one_are_refused(backend: str) -> None:
    from torch._subclasses import FakeTensorMode

    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedTensorError, match="functorch"):
            tensor_stats([x], backend=backend)
        return x

    torch.vmap(inside)(torch.randn(3, 4))
    with FakeTensorMode():
        fake = torch.randn(3)
    with pytest.raises(UnsupportedTensorError, match="fake"):
        tensor_stats([fake], backend=backend)


def test_arguments(backend: str) -> None:
    assert fastguard.tensor_stats is tensor_stats
    assert len(tensor_stats([], backend=backend)) == 0
    assert tensor_stats([], backend=backend).total().norm == 0.0
    assert len(tensor_stats(torch.zeros(3), backend=backend)) == 1  # type: ignore[arg-type]
    assert len(tensor_stats((torch.zeros(3) for _ in range(4)), backend=backend)) == 4  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`names` must have one name a tensor \\(1\\), got 2"):
        tensor_stats([torch.zeros(1)], names=["a", "b"], backend=backend)
    with pytest.raises(TypeError, match="`tensors` must be tensors, got int"):
        tensor_stats(3, backend=backend)  # type: ignore[arg-type]


def test_from_gradients_takes_arrays_of_any_kind() -> None:
    arrays = [np.array([3.0, 4.0]), np.zeros((2, 2), dtype=np.float32), torch.tensor([12.0]), np.float64(0.0)]
    stats = GradientStats.from_gradients(arrays)
    assert (stats.norm, stats.num_zeros, stats.total_elements, stats.max_val, stats.min_val) == (13.0, 5, 8, 12.0, 3.0)
    strided = np.arange(20, dtype=np.float32).reshape(4, 5)[:, ::2]
    assert GradientStats.from_gradients([strided]).norm == pytest.approx(float(np.linalg.norm(strided)), rel=1e-6)
    backwards = np.arange(5.0)[::-1]
    assert GradientStats.from_gradients([backwards]).max_val == 4.0
    with pytest.raises(UnsupportedTensorError, match="int64"):
        GradientStats.from_gradients([np.arange(3)])


_float32 = hnp.arrays(
    np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
)
_finite = hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**50), 2.0**50, width=32))


@pytest.mark.long_interpreted
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
