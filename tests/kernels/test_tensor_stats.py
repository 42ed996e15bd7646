"""Every column, dtype, size, layout and nasty value, on every backend, with the same columns in each language."""

import math
import warnings

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastguard
from fastguard import GradientStats, UnsupportedTensorError, kernels, tensor_stats
from fastguard.kernels import resolve_backend, run_stats
from fastguard.records import COLUMNS, TensorRow, TensorStats, columns
from fastguard.records.columns import TABLE

import tolerances
from cases import COMPLEX, DTYPES, LAYOUTS, NASTY, SIZES, image, nasty
from truth import assert_row, expected


@pytest.mark.long_interpreted
@pytest.mark.parametrize("dtype", DTYPES + COMPLEX, ids=str)
def test_sizes(backend, dtype):
    tensors = [torch.randn(n, dtype=dtype if dtype.is_complex else torch.float64).to(dtype) for n in SIZES]
    stats = tensor_stats(tensors, backend=backend)
    assert len(stats) == len(SIZES)
    for row, tensor in zip(stats, tensors, strict=True):
        assert_row(row, tensor, f"{tensor.numel()} elements")


@pytest.mark.thinned(n=3, interpreted=10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_layouts(backend, dtype, layout):
    tensor = LAYOUTS[layout](image(dtype))
    assert_row(tensor_stats([tensor], backend=backend)[0], tensor, layout)


@pytest.mark.thinned(n=3)
@pytest.mark.long_interpreted
@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nasty_values_among_normal_ones(backend, dtype, value):
    tensor = nasty(NASTY[value], dtype)
    assert_row(tensor_stats([tensor], backend=backend)[0], tensor, value)


@pytest.mark.long_interpreted
@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nasty_values_alone(backend, dtype):
    all_of = {
        f"{size} times {name}": torch.full((size,), value, dtype=torch.float64).to(dtype)
        for name, value in NASTY.items()
        for size in (1, 16, 4096, 9001)
    }
    stats = tensor_stats(list(all_of.values()), backend=backend)
    for row, (what, tensor) in zip(stats, all_of.items(), strict=True):
        assert_row(row, tensor, what)


@pytest.mark.long_interpreted
def test_every_float16_and_bfloat16_bit_pattern(backend):
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        for start in (0, 1, 4095):
            tensor = patterns.view(dtype)[start:]
            assert_row(tensor_stats([tensor], backend=backend)[0], tensor, f"{dtype} from {start}")
        some = patterns.view(dtype)[:: 1999 if backend == "triton" else 97]
        assert tensor_stats(list(some.split(1)), backend=backend).num_nans == tuple(int(x) for x in some.isnan())


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 1e-20, 1e-14, 1e-13, 1e-12, 1e17, 1e18, 4e18, 1e19, 1e30, 1e38])
def test_no_overflow_and_no_underflow_across_the_fast_range(backend, scale):
    tensor = (torch.rand(3 * 4096 + 5, dtype=torch.float64) * scale).float()
    assert_row(tensor_stats([tensor], backend=backend)[0], tensor, f"scale {scale}")


@pytest.mark.slow
@pytest.mark.full_size
def test_counts_above_2_to_24(backend):
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
def test_norm_of_124_million_float32_values(backend, threads):
    threads(2)
    tensor = torch.randn(124_000_000)
    exact = math.sqrt(math.fsum(float((c.double() ** 2).sum()) for c in tensor.split(1 << 20)))
    assert tensor_stats([tensor], backend=backend)[0].norm == pytest.approx(exact, rel=tolerances.NORM, abs=0)


@pytest.mark.long_interpreted
def test_float64_is_summed_in_float64(backend):
    tensor = torch.randn(100_001, dtype=torch.float64)
    row = tensor_stats([tensor], backend=backend)[0]
    assert row.norm == pytest.approx(math.sqrt(expected(tensor).sum_sq), rel=tolerances.NORM_EXACT, abs=0)


def test_sparse_tensors_are_read_as_their_coalesced_values(backend):
    indices = torch.tensor([[0, 3, 3, 3], [1, 2, 2, 0]])
    uncoalesced = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, -2.0, 5.0]), (4, 4))
    row = tensor_stats([uncoalesced], backend=backend)[0]
    assert (row.numel, row.norm, row.num_zeros) == (3, math.sqrt(26), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once a process that these layouts are in beta
        compressed = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr()
    assert tensor_stats([compressed], backend=backend)[0].norm == math.sqrt(13)


def test_float8_is_read_exactly(backend):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.randn(3000).to(dtype)
        assert_row(tensor_stats([tensor], backend=backend)[0], tensor.float())


def test_kinds_of_tensors(backend):
    class Labelled(torch.Tensor):
        pass

    p = torch.nn.Parameter(torch.randn(10))
    for tensor in (p, p * 2, torch.randn(100).as_subclass(Labelled)):
        assert_row(tensor_stats([tensor], backend=backend)[0], torch.Tensor(tensor.detach()))
    with torch.inference_mode():
        tensor = torch.ones(4)
        assert tensor_stats([tensor], backend=backend)[0].norm == 2.0
    assert tensor_stats([tensor], backend=backend)[0].norm == 2.0


@pytest.mark.usefixtures("one_process")
def test_a_dtensor_is_read_as_its_local_shard(backend):
    if torch.get_default_device().type != "cpu":
        pytest.skip("the process group of this test is one of CPUs")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.randn(8, 4)
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
    assert_row(tensor_stats([sharded], backend=backend)[0], whole)


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
def test_what_cannot_be_read_is_named(backend, make, message):
    with pytest.raises(UnsupportedTensorError, match=message) as caught:
        tensor_stats([torch.zeros(2), make()], names=["good", "bad one"], backend=backend)
    assert str(caught.value).startswith("`bad one`")
    assert str(caught.value).endswith("at tensors[1]")
    with pytest.raises(UnsupportedTensorError, match=r"`tensors\[0\]`"):
        tensor_stats([make()], backend=backend)


def test_a_tensor_inside_vmap_and_a_fake_one_are_refused(backend):
    from torch._subclasses import FakeTensorMode

    def inside(x):
        with pytest.raises(UnsupportedTensorError, match="functorch"):
            tensor_stats([x], backend=backend)
        return x

    torch.vmap(inside)(torch.randn(3, 4))
    with FakeTensorMode():
        fake = torch.randn(3)
    with pytest.raises(UnsupportedTensorError, match="fake"):
        tensor_stats([fake], backend=backend)


def test_arguments(backend):
    assert fastguard.tensor_stats is tensor_stats
    assert len(tensor_stats([], backend=backend)) == 0
    assert tensor_stats([], backend=backend).total().norm == 0.0
    assert len(tensor_stats(torch.zeros(3), backend=backend)) == 1
    assert len(tensor_stats((torch.zeros(3) for _ in range(4)), backend=backend)) == 4
    with pytest.raises(ValueError, match="`names` must have one name a tensor \\(1\\), got 2"):
        tensor_stats([torch.zeros(1)], names=["a", "b"], backend=backend)
    with pytest.raises(TypeError, match="`tensors` must be tensors, got int"):
        tensor_stats(3, backend=backend)


def test_from_gradients_takes_arrays_of_any_kind():
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
def test_any_float32(backend, values):
    tensor = torch.as_tensor(values)
    assert_row(tensor_stats([tensor], backend=backend)[0], tensor)


@pytest.mark.long_interpreted
@given(values=_finite, power=st.integers(-20, 20))
def test_scaling_by_a_power_of_two_scales_the_row(backend, values, power):
    factor = 2.0**power
    tensor = torch.as_tensor(values)
    scaled = tensor.double() * factor
    row, other = tensor_stats([tensor.double(), scaled], backend=backend)
    for column, before, after in zip(TABLE, row, other, strict=True):
        assert after == before * factor**column.power, column.name


MAGNITUDES = (5e-324, 1e-310, 1e-300, 1e-200, 1e-170, 1e-160, 1e-150, 1e150, 1e154, 1e160, 1e200, 1e300)


def exact_std(values):
    """With the mean in twice the digits, as float64 alone has none to spare."""
    shifted = values - values[0]
    mean = math.fsum(shifted) / len(shifted)
    return math.sqrt(math.fsum((shifted - mean) ** 2) / len(shifted))


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize(
    ("mean", "spread", "dtype", "tolerance"),
    [
        (1e9, 1.0, torch.float64, 1e-6),
        (1.0, 1e-9, torch.float64, 1e-4),  # of a sum of 70 000 ones float64 has 1e-12 to spare
        (-3e150, 1e147, torch.float64, 1e-6),
        (1e4, 1e-2, torch.float32, 1e-5),
        (-300.0, 1.0, torch.bfloat16, 1e-6),
    ],
)
def test_std_does_not_cancel(backend, mean, spread, dtype, tolerance):
    parts = [(mean + spread * torch.randn(n, dtype=torch.float64)).to(dtype) for n in (3, 100, 5000, 70_001)]
    stats = tensor_stats(parts, backend=backend)
    for row, part in zip(stats, parts, strict=True):
        assert row.std == pytest.approx(exact_std(part.double().cpu().numpy()), rel=tolerance), len(part)
    whole = torch.cat(parts).double().cpu().numpy()
    assert stats.total().std == pytest.approx(exact_std(whole), rel=tolerance)


def test_std_of_groups_with_different_means(backend):
    parts = [torch.full((n,), float(value)) for n, value in ((10, 1.0), (5000, 1.0), (70_000, 3.0), (4, 2.0))]
    stats = tensor_stats(parts, backend=backend)
    assert [row.std for row in stats] == [0.0] * 4
    assert stats.total().std == pytest.approx(torch.cat(parts).double().std(correction=0).item(), rel=1e-12)


def test_std_leaves_out_what_is_not_finite(backend):
    x = torch.randn(9000, dtype=torch.float64) + 1e8
    x[::1000], x[7] = math.nan, -math.inf
    finite = x[x.isfinite()].cpu().numpy()
    assert tensor_stats([x], backend=backend)[0].std == pytest.approx(exact_std(finite), rel=1e-7)
    assert tensor_stats([x.float() * 1e-30], backend=backend)[0].std <= 1e-29


@pytest.mark.thinned(interpreted=4)
@pytest.mark.parametrize(
    "size", [pytest.param(s, marks=pytest.mark.slow) if i % 4 else s for i, s in enumerate(MAGNITUDES)]
)
def test_norms_of_any_magnitude(backend, size):
    tensors = [torch.randn(n, dtype=torch.float64) * size for n in (1, 3, 4097, 70_001)]
    tensors.append((torch.randn(30, 40, dtype=torch.float64) * size)[:, ::3])
    tensors.append(torch.randn(9, dtype=torch.complex128) * size)
    host = [torch.view_as_real(t).cpu() if t.is_complex() else t.cpu() for t in tensors]
    shares = [t / size for t in host]  # a GPU would multiply by 1 / size, which may be Inf
    stats = tensor_stats(tensors, backend=backend)
    for row, share in zip(stats, shares, strict=True):
        assert row.norm == pytest.approx(float(share.norm()) * size, rel=1e-12, abs=5e-324)
        assert row.is_finite
    total = math.sqrt(math.fsum(float(share.norm()) ** 2 for share in shares)) * size
    assert stats.total().norm == pytest.approx(total, rel=1e-12, abs=5e-324)
    std = torch.cat([share.reshape(-1) for share in shares]).std(correction=0).item() * size
    assert stats.total().std == pytest.approx(std, rel=1e-9, abs=1e-323)


def test_norms_of_tensors_of_all_magnitudes_together(backend):
    tensors = [torch.tensor([size], dtype=torch.float64) for size in (1e-300, 1e-170, 3.0, 4.0)]
    assert tensor_stats(tensors, backend=backend).total().norm == 5.0
    tensors += [torch.tensor([3e200, 1.0], dtype=torch.float64), torch.tensor([4e200], dtype=torch.float64)]
    assert tensor_stats(tensors, backend=backend).total().norm == pytest.approx(5e200, rel=1e-15)
    assert tensor_stats([torch.full((9,), 1.7e308, dtype=torch.float64)], backend=backend)[0].norm == math.inf


def test_non_finite_elements_among_extremes(backend):
    x = torch.tensor([3e-200, math.inf, 4e-200], dtype=torch.float64)
    row = tensor_stats([x], backend=backend)[0]
    assert (row.norm, row.num_infs) == (math.inf, 1)
    assert row.finite_norm == pytest.approx(5e-200, rel=1e-15, abs=0)


def test_unscaling_multiplies_norms_of_any_magnitude(backend):
    x = [torch.tensor([3e-150, 4e-150], dtype=torch.float64)]
    table, _ = run_stats(x, resolve_backend(backend), 1e-20)
    assert TensorStats(table)[0].norm == pytest.approx(5e-170, rel=1e-12, abs=0)


def test_cpp_has_the_same_columns():
    if kernels.backends()["cpu"].reason is not None:
        pytest.skip("there is no extension")
    from fastguard import _C

    assert _C.columns == columns.TABLE


def test_triton_has_the_same_columns():
    pytest.importorskip("triton", reason="Triton is not installed")
    from fastguard.kernels.triton.lang import stats

    numbers = {name: getattr(stats, name.upper()).value for name in COLUMNS}
    assert numbers == columns.INDEX
    assert stats.COLUMNS.value == len(COLUMNS)


def test_rows_fold_to_the_row_of_all(backend):
    parts = [torch.tensor([1.5, -2.0, math.nan]), torch.zeros(3), torch.tensor([0.25, math.inf]), torch.zeros(0)]
    stats = kernels.tensor_stats(parts, backend=backend)
    whole = kernels.tensor_stats([torch.cat(parts)], backend=backend)[0]
    assert columns.fold_rows(stats) == stats.total_row()
    for column, folded in zip(columns.TABLE, stats.total_row(), strict=True):
        assert folded == pytest.approx(getattr(whole, column.name), rel=0 if column.power == 0 else 1e-15), column
    assert columns.fold_rows([]) == columns.EMPTY_ROW


def test_a_row_of_plain_numbers():
    row = columns.as_row((2.0, 9.0, 3.0))
    assert row == TensorRow(numel=2, sum_sq=9.0, sum=3.0, sum_sq_dev=4.5, finite_norm=3.0)
    assert type(row.numel) is type(row.num_nans) is int


@pytest.mark.parametrize(("number", "seed"), [(40, 11), pytest.param(2000, 12, marks=pytest.mark.slow)])
def test_random_lists(number, seed):
    """Some of those that `make fuzz` tries."""
    random_lists = pytest.importorskip("benchmarks.reliability.kernels", reason="no benchmarks/ here")
    found = random_lists.run(number, seed=seed)
    assert found["wrong"] == [] and found["num_refused"] > 1


@pytest.mark.skipif(kernels.backends()["cpu"].reason is not None, reason="there is no extension")
def test_threads_get_the_figures_of_one():
    assert pytest.importorskip("benchmarks.reliability.threads", reason="no benchmarks/ here").work(rounds=1) == 0
