"""The decision: norm, clip coefficient, skip flag, factor, loss scale; and the slot that they end up in."""

from __future__ import annotations

import math

import pytest
import torch

from fastguard.kernels.slots import Slot, SlotContents, StepOptions, make_slots, read_slot
from fastguard.kernels.triton import Workspace, launch
from fastguard.records import TensorStats

import tolerances
from truth import assert_row, expected


def mixed() -> list[torch.Tensor]:
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32)
    sizes = (33_000, 5, 70_000, 100, 0)
    return [(torch.randn(n) * 1e-2).to(dtype) for n, dtype in zip(sizes, dtypes)]


def run(workspace: Workspace, tensors: list[torch.Tensor], **options) -> tuple[SlotContents, TensorStats, list[Slot]]:
    slots = make_slots(workspace.device, len(tensors), count=2)
    for slot in slots:
        slot.words.fill_(math.nan)  # what is not written must not look right by chance
    workspace.measure(workspace.plan(tensors), slots[1], StepOptions(**options))
    assert slots[0].words.isnan().all()
    assert not slots[1].words[5:7].isnan().any()
    found = read_slot(slots[1].words.cpu(), len(tensors))
    return found, TensorStats(found.rows), slots


def true_norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(math.fsum(expected(t).sum_sq for t in tensors))


def test_rows_are_in_the_order_of_the_list_and_the_norm_is_theirs(workspace: Workspace) -> None:
    tensors = mixed()
    header, stats, _ = run(workspace, tensors, step=77)
    for row, tensor in zip(stats, tensors, strict=True):
        assert_row(row, tensor)
    assert header.norm == pytest.approx(true_norm(tensors), rel=tolerances.NORM)
    assert header.norm == pytest.approx(stats.total().norm, rel=1e-14)
    assert header.norm_sq == pytest.approx(header.norm**2, rel=1e-14)
    assert (header.clip_coef, header.factor, header.loss_scale, header.skipped, header.step) == (1, 1, 1, False, 77)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_elements_compared_two_at_once(
    workspace: Workspace, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs from sm_90 on. The interpreter runs the instructions' text."""
    launch.stats_launcher.cache_clear()
    monkeypatch.setattr(launch, "has_packed_integers", lambda device: True)
    tensors = [(torch.randn(n) * 1e-2).to(dtype) for n in (70_000, 4096, 4099)]
    tensors.append(torch.zeros(9000, dtype=dtype))
    tensors[0][::3] = 0.0
    tensors[1][7], tensors[1][8], tensors[1][9] = -9.5, 3e-6, -0.0
    tensors.append(tensors[0][1:].clone())
    tensors[-1][5], tensors[-1][6] = math.nan, -math.inf
    assert launch.stats_launcher(dtype, workspace.device).constants["PACKED"]
    _, stats, _ = run(workspace, [*tensors, tensors[0][1:]])  # the last begins off a multiple of 16 bytes
    launch.stats_launcher.cache_clear()
    for row, tensor in zip(stats, [*tensors, tensors[0][1:]], strict=True):
        assert_row(row, tensor)


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1.0, 1e9, math.inf])
def test_the_coefficient_is_torch_s_formula(workspace: Workspace, max_norm: float) -> None:
    header, _, _ = run(workspace, mixed(), max_norm=max_norm)
    assert header.clip_coef == min(1.0, max_norm / (header.norm + 1e-6))
    assert header.factor == header.clip_coef


@pytest.mark.thinned(interpreted=10)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 2, 3])
@pytest.mark.parametrize("skip", [True, False])
def test_what_is_not_finite(workspace: Workspace, bad: float, where: int, skip: bool) -> None:
    tensors = mixed()
    tensors[where][-1] = bad
    header, stats, slots = run(workspace, tensors, max_norm=1e-3, skip_nonfinite=skip)
    assert math.isnan(header.norm) if math.isnan(bad) else header.norm == math.inf
    assert stats.nonfinite == [where]
    assert header.skipped is skip
    assert (header.clip_coef, header.factor) == (1.0, 1.0)
    flag = slots[1].skip_flag
    assert (flag.dtype, flag.dim(), float(flag)) == (torch.float32, 0, float(skip))


def test_nan_comes_before_inf(workspace: Workspace) -> None:
    tensors = mixed()
    tensors[0][3], tensors[2][5] = math.inf, math.nan
    assert math.isnan(run(workspace, tensors)[0].norm)


def test_a_norm_that_overflows_is_infinite(workspace: Workspace) -> None:
    header, stats, _ = run(workspace, [torch.full((3,), 1.7e308, dtype=torch.float64)])
    assert (header.norm, header.skipped) == (math.inf, True)
    assert stats[0].num_infs == 0 and not stats[0].is_finite


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e200, 1e300])
def test_a_norm_whose_square_leaves_the_range_of_float64(workspace: Workspace, size: float) -> None:
    tensors = [torch.full((n,), size, dtype=torch.float64) for n in (3, 40_000)]
    header, stats, _ = run(workspace, tensors, max_norm=size)
    assert header.norm == pytest.approx(size * math.sqrt(40_003), rel=1e-12, abs=0)
    assert not header.skipped and header.clip_coef == min(1.0, size / (header.norm + 1e-6))
    assert stats[1].norm == pytest.approx(size * 200, rel=1e-12, abs=0)
    header, _, _ = run(workspace, [*tensors, torch.tensor([math.inf])], max_norm=size)
    assert header.norm == math.inf and header.skipped


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize(("found_inf", "skipped"), [(0.0, False), (1.0, True), (2.0, True), (math.nan, True)])
def test_the_scaler_s_flag_becomes_exactly_0_or_1(workspace: Workspace, found_inf: float, skipped: bool) -> None:
    given = torch.tensor([found_inf])
    header, _, slots = run(workspace, mixed(), max_norm=1e-3, found_inf=given, skip_nonfinite=False)
    assert header.skipped is skipped
    assert float(slots[1].skip_flag) == float(skipped)
    assert (header.factor == 1.0) is skipped


@pytest.mark.thinned(interpreted=10)
@pytest.mark.parametrize("scale", [65536.0, 3.0, 0.1])
@pytest.mark.parametrize("unscales_itself", [False, True])
def test_a_loss_scale(workspace: Workspace, scale: float, unscales_itself: bool) -> None:
    tensors = [t * 7 for t in mixed()]
    held = torch.tensor(scale)
    scale = float(held)
    inverse = float(torch.tensor(scale, dtype=torch.float64).reciprocal().float())
    _, plain, _ = run(workspace, tensors)
    header, stats, slots = run(workspace, tensors, scale=held, max_norm=1e-4, unscales_itself=unscales_itself)
    assert header.loss_scale == scale
    assert header.norm == pytest.approx(true_norm(tensors) * inverse, rel=tolerances.NORM)
    assert header.clip_coef == 1e-4 / (header.norm + 1e-6)
    assert header.factor == header.clip_coef * (1.0 if unscales_itself else inverse)
    assert float(slots[1].divisor) == float(torch.tensor(scale / header.clip_coef, dtype=torch.float64).float())
    for row, unscaled in zip(stats, plain, strict=True):
        assert row.sum_sq == unscaled.sum_sq * inverse * inverse
        assert (row.sum, row.abs_max) == (unscaled.sum * inverse, unscaled.abs_max * inverse)
        assert (row.numel, row.num_zeros) == (unscaled.numel, unscaled.num_zeros)


def test_no_tensors_at_all(workspace: Workspace) -> None:
    header, stats, _ = run(workspace, [])
    assert (header.norm, header.skipped, header.factor, len(stats)) == (0.0, False, 1.0, 0)
    header, stats, _ = run(workspace, [torch.zeros(0), torch.zeros(0, 3, dtype=torch.float16)])
    assert (header.norm, stats.numel) == (0.0, (0, 0))


def test_scaling_by_the_factor_of_a_slot(workspace: Workspace) -> None:
    tensors = mixed()
    header, _, slots = run(workspace, tensors, max_norm=1e-2)
    assert header.factor < 0.1
    wanted = [t.clone().mul_(header.factor) for t in tensors]
    workspace.scale(workspace.plan(tensors), slots[1])
    assert all(torch.equal(got, want) for got, want in zip(tensors, wanted))


def test_a_skipped_step_scales_nothing(workspace: Workspace) -> None:
    tensors = mixed()
    tensors[1][2] = math.nan
    kept = [t.clone() for t in tensors]
    held = torch.tensor(1024.0)
    _, _, slots = run(workspace, tensors, max_norm=1e-9, scale=held)
    workspace.scale(workspace.plan(tensors), slots[1])
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(tensors, kept))


@pytest.mark.long_interpreted
def test_every_alignment(workspace: Workspace) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        base = torch.randn(40_000).to(dtype)
        views = [base[i : i + n] for i in range(9) for n in (3, 4100, 36_000)]
        _, stats, _ = run(workspace, views)
        for row, view in zip(stats, views, strict=True):
            assert_row(row, view)


def read_rows(workspace: Workspace, tensors: list[torch.Tensor]) -> bytes:
    slots = make_slots(workspace.device, len(tensors))
    workspace.measure(workspace.plan(tensors), slots[0])
    return bytes(read_slot(slots[0].words.cpu(), len(tensors)).rows)


@pytest.mark.long_interpreted
def test_a_row_does_not_depend_on_what_else_is_in_the_list(workspace: Workspace) -> None:
    tensors = mixed()
    together = read_rows(workspace, tensors)
    assert together == b"".join(read_rows(workspace, [t]) for t in tensors)
    assert together == read_rows(workspace, tensors)  # and has the same bits each time


def test_a_chunk_that_reads_itself_again_leaves_the_others_alone(workspace: Workspace) -> None:
    calm = torch.randn(3 * 32768)
    odd = calm.clone()
    odd[40_000] = math.nan
    _, stats, _ = run(workspace, [calm, odd])
    assert_row(stats[1], odd)
    assert stats[1].num_nans == 1
    assert stats[1].sum == pytest.approx(stats[0].sum - float(calm[40_000]), abs=1e-3)


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize(("share", "target"), [(0.5, 0.25), (0.5, 2.0), (1.0, 0.25), (2.0, 0.25), (0.5, 0.0)])
def test_a_trigger_and_a_target(workspace: Workspace, share: float, target: float) -> None:
    """Above the trigger the norm becomes the target, without the 1e-6 of torch's formula; a target of 0 is a skip."""
    tensors = mixed()
    norm = run(workspace, tensors)[0].norm
    header, _, _ = run(workspace, tensors, trigger=share * norm, max_norm=target * norm)
    is_over = norm > share * norm
    assert header.skipped is (is_over and target == 0.0)
    expected = min(1.0, target * norm / norm) if is_over and not header.skipped else 1.0
    assert header.clip_coef == header.factor == expected
