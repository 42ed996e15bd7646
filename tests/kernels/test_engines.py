"""What every engine leaves in a slot: statistics, norm, clip coefficient, skip flag, factor and loss scale."""

import math
from typing import NamedTuple

import pytest
import torch

from fastguard.kernels import reference
from fastguard.kernels.slots import Slot, StepOptions, copy_slot, make_slots
from fastguard.kernels.triton import Workspace
from fastguard.records import TensorStats
from fastguard.records.slot import CLIP_COEF, FACTOR, HEADER_BYTES, LOSS_SCALE, NORM, NORM_SQ, NOTES, STEP
from fastguard.step import device as engines
from fastguard.step.device import TorchEngine

import tolerances
from truth import assert_row, expected

WIDTHS = {"torch": torch.float64, "torch in float32": torch.float32}


@pytest.fixture(params=[*WIDTHS, pytest.param("triton", marks=pytest.mark.triton)])
def any_engine(request, monkeypatch):
    """Plain torch, on a device with float64 and on one without, and the Triton kernels."""
    if request.param == "triton":
        return Workspace(request.getfixturevalue("device"))
    for module in (reference, engines):
        monkeypatch.setattr(module, "wide_dtype", lambda device: WIDTHS[request.param])
    return TorchEngine(torch.device("cpu"))


class Found(NamedTuple):
    norm_sq: float
    norm: float
    clip_coef: float
    factor: float
    loss_scale: float
    skipped: bool
    step: float
    notes: dict[str, float]
    stats: TensorStats
    slot: Slot


def measure(engine, tensors, **options):
    first, slot = make_slots(engine.device, len(tensors) + 2, 2, engine.dtype)  # with more room than is needed
    first.words.fill_(math.nan)
    slot.words.fill_(math.nan)  # what is not written must not look right by chance
    for note in slot.notes.values():
        note.fill_(0.125)
    engine.measure(engine.plan(tensors), slot, StepOptions(**options))
    assert first.words.isnan().all()
    header = bytearray(HEADER_BYTES)
    rows, skipped = copy_slot(slot.words.cpu(), len(tensors), header, 0)
    words = memoryview(header).cast("d")
    assert (float(slot.skip_flag), slot.skip_flag.dtype, slot.skip_flag.dim()) == (float(skipped), torch.float32, 0)
    numbers = [words[i] for i in (NORM_SQ, NORM, CLIP_COEF, FACTOR, LOSS_SCALE)]
    notes = {name: words[word] for name, (word, _) in NOTES.items()}
    return Found(*numbers, skipped, words[STEP], notes, TensorStats(rows), slot)


def mixed():
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32)
    return [(torch.randn(n) * 1e-2).to(dtype) for n, dtype in zip((33_000, 5, 70_000, 100, 0), dtypes)]


def true_norm(tensors):
    return math.sqrt(math.fsum(expected(t).sum_sq for t in tensors))


def close(value):
    return pytest.approx(value, rel=tolerances.NORM, abs=0)


def test_rows_are_in_the_order_of_the_list_and_the_norm_is_theirs(any_engine):
    tensors = mixed()
    found = measure(any_engine, tensors, step=77)
    for row, tensor in zip(found.stats, tensors, strict=True):
        if any_engine.dtype is torch.float64:
            assert_row(row, tensor)
        assert (row.numel, row.norm) == (tensor.numel(), pytest.approx(true_norm([tensor]), rel=1e-5))
    assert found.norm == pytest.approx(true_norm(tensors), rel=1e-5)
    assert (found.norm_sq, found.stats.total().norm) == (close(found.norm**2), close(found.norm))
    assert (found.clip_coef, found.factor, found.loss_scale, found.skipped, found.step) == (1, 1, 1, False, 77)
    assert found.notes == {"loss": 0.125, "val_loss": 0.125, "lr": 0.125}


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1.0, 1e9, math.inf])
def test_the_coefficient_is_torch_s_formula(any_engine, max_norm):
    found = measure(any_engine, mixed(), max_norm=max_norm)
    assert found.clip_coef == found.factor == close(min(1.0, max_norm / (found.norm + 1e-6)))


@pytest.mark.thinned(interpreted=18)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 2, 3])
@pytest.mark.parametrize("skip", [True, False])
def test_what_is_not_finite(any_engine, bad, where, skip):
    tensors = mixed()
    tensors[where][-1] = bad
    found = measure(any_engine, tensors, max_norm=1e-3, skip_nonfinite=skip)
    assert found.norm == pytest.approx(abs(bad), nan_ok=True)
    assert (found.stats.nonfinite, found.skipped, found.clip_coef, found.factor) == ([where], skip, 1.0, 1.0)
    tensors[1][2], tensors[2][5] = math.inf, math.nan
    assert math.isnan(measure(any_engine, tensors).norm)  # NaN comes before Inf


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("found_inf", [0.0, 1.0, 2.0, math.nan])
def test_the_scaler_s_flag_becomes_exactly_0_or_1(any_engine, found_inf):
    given = torch.tensor(found_inf)
    found = measure(any_engine, mixed(), max_norm=1e-3, found_inf=given, skip_nonfinite=False)
    assert found.skipped is (found_inf != 0.0)
    assert (found.factor == 1.0) is found.skipped


@pytest.mark.thinned(interpreted=10)
@pytest.mark.parametrize("scale", [65536.0, 3.0, 0.1])
@pytest.mark.parametrize("unscales_itself", [False, True])
def test_a_loss_scale(any_engine, scale, unscales_itself):
    tensors = [t * 7 for t in mixed()]
    held = torch.tensor(scale)
    scale = float(held)
    inverse = float(torch.tensor(scale, dtype=torch.float64).reciprocal().float())
    plain = measure(any_engine, tensors).stats
    found = measure(any_engine, tensors, scale=held, max_norm=1e-4, unscales_itself=unscales_itself)
    assert found.loss_scale == scale
    assert found.norm == pytest.approx(true_norm(tensors) * inverse, rel=1e-5)
    assert found.clip_coef == close(1e-4 / (found.norm + 1e-6))
    assert found.factor == close(found.clip_coef * (1.0 if unscales_itself else inverse))
    assert float(found.slot.divisor) == close(scale / found.clip_coef)
    for row, unscaled in zip(found.stats, plain, strict=True):
        assert row.sum_sq == close(unscaled.sum_sq * inverse * inverse)
        assert (row.sum, row.abs_max) == (close(unscaled.sum * inverse), close(unscaled.abs_max * inverse))
        assert (row.numel, row.num_zeros) == (unscaled.numel, unscaled.num_zeros)


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize(("share", "target"), [(0.5, 0.25), (0.5, 2.0), (2.0, 0.25), (0.5, 0.0)])
def test_a_trigger_and_a_target(any_engine, share, target):
    """Above the trigger the norm becomes the target, without the 1e-6 of torch's formula; a target of 0 is a skip."""
    tensors = mixed()
    norm = measure(any_engine, tensors).norm
    found = measure(any_engine, tensors, trigger=share * norm, max_norm=target * norm)
    assert found.skipped is (share < 1.0 and target == 0.0)
    wanted = min(1.0, target) if share < 1.0 and not found.skipped else 1.0
    assert found.clip_coef == found.factor == close(wanted)


def test_no_tensors_at_all(any_engine):
    found = measure(any_engine, [])
    assert (found.norm, found.skipped, found.factor, len(found.stats)) == (0.0, False, 1.0, 0)
    found = measure(any_engine, [torch.zeros(0), torch.zeros(0, 3, dtype=torch.float16)])
    assert (found.norm, found.stats.numel) == (0.0, (0, 0))


@pytest.mark.parametrize("is_skipped", [False, True])
def test_scaling_by_the_factor_of_a_slot(any_engine, is_skipped):
    tensors = mixed()
    if is_skipped:
        tensors[1][2] = math.nan
    found = measure(any_engine, tensors, max_norm=1e-2, scale=torch.tensor(2.0))
    assert found.factor == 1.0 if is_skipped else found.factor < 0.1
    wanted = [t.clone().mul_(found.factor) for t in tensors]
    any_engine.scale(any_engine.plan(tensors), found.slot)
    for got, want in zip(tensors, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=4e-3 if got.itemsize == 2 else 1e-6, atol=0.0, equal_nan=True)


def test_a_norm_that_overflows_is_infinite(workspace):
    found = measure(workspace, [torch.full((3,), 1.7e308, dtype=torch.float64)])
    assert (found.norm, found.skipped) == (math.inf, True)
    assert found.stats[0].num_infs == 0 and not found.stats[0].is_finite


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e200, 1e300])
def test_a_norm_whose_square_leaves_the_range_of_float64(workspace, size):
    tensors = [torch.full((n,), size, dtype=torch.float64) for n in (3, 40_000)]
    found = measure(workspace, tensors, max_norm=size)
    assert found.norm == pytest.approx(size * math.sqrt(40_003), rel=1e-12, abs=0)
    assert not found.skipped and found.clip_coef == min(1.0, size / (found.norm + 1e-6))
    assert found.stats[1].norm == pytest.approx(size * 200, rel=1e-12, abs=0)
    found = measure(workspace, [*tensors, torch.tensor([math.inf])], max_norm=size)
    assert found.norm == math.inf and found.skipped


@pytest.mark.long_interpreted
def test_every_alignment(workspace):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        base = torch.randn(40_000).to(dtype)
        views = [base[i : i + n] for i in range(9) for n in (3, 4100, 36_000)]
        for row, view in zip(measure(workspace, views).stats, views, strict=True):
            assert_row(row, view)


@pytest.mark.long_interpreted
def test_a_row_has_the_same_bits_whatever_else_is_in_the_list(workspace):
    tensors = mixed()
    tensors[2][40_000] = math.nan  # that chunk reads itself again, which leaves the others alone
    together = measure(workspace, tensors).stats
    assert_row(together[2], tensors[2])
    assert list(together) == [measure(workspace, [t]).stats[0] for t in tensors]
    assert list(together) == list(measure(workspace, tensors).stats)
