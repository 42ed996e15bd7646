"""Slots: what the torch engine leaves in them, and that it is read back as it was, in either width."""

from __future__ import annotations

import math

import pytest
import torch

from fastguard.kernels import fold_rows, reference
from fastguard.kernels.registry import BACKENDS
from fastguard.kernels.slots import StepOptions, make_slots, read_slot
from fastguard.records import COLUMNS, TensorStats
from fastguard.records import fold_rows as fold_in_python
from fastguard.step import engines
from fastguard.step.engines import TorchEngine

WIDTHS = [torch.float64, torch.float32]
every_width = pytest.mark.parametrize("width", WIDTHS, ids=str)


@pytest.fixture
def workspace(width: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    """On a device that has float64, and on one that has not."""
    for module in (reference, engines):
        monkeypatch.setattr(module, "wide_dtype", lambda device: width)
    return TorchEngine(torch.device("cpu"))


def _tensors() -> list[torch.Tensor]:
    return [torch.tensor([3.0, 0.0, -4.0]), torch.zeros(0), torch.full((2, 2), 6.0, dtype=torch.bfloat16)]


@every_width
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("max_norm", [math.inf, 1.3])
@pytest.mark.parametrize("unscales_itself", [False, True])
def test_what_is_decided(workspace: TorchEngine, scale: float | None, max_norm: float, unscales_itself: bool) -> None:
    slot = make_slots(workspace.device, 5, 2, workspace.dtype)[1]  # with more room than is needed
    tensors = [t * (scale or 1.0) for t in _tensors()]
    question = StepOptions(7, None if scale is None else torch.tensor(scale), None, max_norm, True, unscales_itself)
    workspace.measure(workspace.plan(tensors), slot, question)
    slot.notes["loss"].fill_(2.5)
    slot.notes["lr"].fill_(0.125)
    header = read_slot(slot.words.clone(), 3)
    norm = 13.0
    coefficient = min(1.0, max_norm / (norm + 1e-6))
    assert (header.step, header.norm, header.skipped) == (7, norm, False)
    assert header.clip_coef == pytest.approx(coefficient, rel=1e-7)
    assert header.loss_scale == (scale or 1.0)
    assert header.factor == pytest.approx(coefficient / (1.0 if unscales_itself else scale or 1.0), rel=1e-7)
    assert (float(slot.skip_flag), slot.skip_flag.dtype, slot.skip_flag.dim()) == (0.0, torch.float32, 0)
    assert float(slot.divisor) == pytest.approx((scale or 1.0) / coefficient, rel=1e-7)
    stats = TensorStats(header.rows)
    assert (stats.norm, stats.numel, stats.num_zeros) == ((5.0, 0.0, 12.0), (3, 0, 4), (1, 0, 0))
    assert (stats.abs_max, stats.abs_min_nonzero, stats.sum) == ((4.0, 0.0, 6.0), (3.0, 0.0, 6.0), (-1.0, 0.0, 24.0))
    assert header.notes == {"loss": 2.5, "val_loss": 0.0, "lr": 0.125}
    workspace.scale(workspace.plan(tensors), slot)
    for got, expected in zip(tensors, _tensors()):
        factor = coefficient * ((scale or 1.0) if unscales_itself else 1.0)
        torch.testing.assert_close(got.float(), expected.float() * factor, rtol=4e-3, atol=0.0)


@every_width
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("skip_nonfinite", [True, False])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0, 2.0, math.nan])
def test_what_is_skipped(workspace: TorchEngine, value: float, skip_nonfinite: bool, found_inf: float | None) -> None:
    slot = make_slots(workspace.device, 3, 1, workspace.dtype)[0]
    tensors = _tensors()
    tensors[0][1] = value
    flag = None if found_inf is None else torch.tensor(found_inf)
    workspace.measure(workspace.plan(tensors), slot, StepOptions(0, torch.tensor(2.0), flag, 0.5, skip_nonfinite))
    header = read_slot(slot.words, 3)
    skips = skip_nonfinite or found_inf not in (None, 0.0)
    assert (header.skipped, float(slot.skip_flag)) == (skips, float(skips))
    assert (header.norm, header.clip_coef) == (pytest.approx(value, nan_ok=True), 1.0)
    assert header.factor == (1.0 if skips else 0.5)
    stats = TensorStats(header.rows)
    assert (stats.num_nans[0], stats.num_infs[0]) == (value != value, value == math.inf)


def test_the_fold_is_that_of_the_rows() -> None:
    rows, _ = BACKENDS["reference"].tensor_stats([*_tensors(), torch.tensor([math.nan, 1e-30, math.inf])])
    assert fold_rows(rows) == fold_in_python(TensorStats(rows))
    assert fold_rows(bytearray()) == (0.0,) * len(COLUMNS)
