"""The traps of torch's clipping and fused optimizers, and of wrapping one, that no other file of this folder shows."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from guard_helpers import (
    assert_close,
    assert_identical,
    gradients,
    guarded_model,
    loss_at,
    make_model,
    poison,
    snapshot,
    take_step,
)
from torch import nn

import fastguard


def test_trap_1_without_skipping_the_poison_is_not_spread() -> None:
    """torch's clipping makes every gradient NaN; the guard leaves the others as they are."""
    model, optimizer = guarded_model(max_norm=0.01, skip_nonfinite=False)
    loss_at(model, 0).backward()
    poison(model)
    optimizer.step()
    assert [bool(p.isfinite().all()) for p in model.parameters()] == [False, True, True, True]
    assert optimizer.guard.last.clip_coef == 1.0


def test_trap_1_float16_gradients_whose_norm_is_no_float16() -> None:
    model = nn.Linear(1000, 1, bias=False).half()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
    model.weight.grad = torch.full_like(model.weight, 6e4)
    optimizer.step()
    last = optimizer.guard.last
    assert last.norm == pytest.approx(6e4 * math.sqrt(1000), rel=1e-3)  # 6e4 is not a float16 exactly
    assert (last.skipped, last.clipped) == (False, True)
    assert float(model.weight.grad.double().norm()) == pytest.approx(1.0, rel=1e-3)


class Convolution(nn.Module):
    """Its weight's gradient is channels_last: not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3, dtype=torch.float64).contiguous())

    def set_gradient(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        gradient = torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64)
        self.weight.grad = gradient.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [1e6, 0.5])
def test_trap_1_gradients_that_are_not_contiguous(fused: bool, max_norm: float, backend: str) -> None:
    """Whatever the optimizer makes of their strides, it makes of them with the guard too."""
    plain = Convolution()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, fused=fused)
    guarded = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    fastguard.wrap(guarded, model, max_norm=max_norm, backend=backend)
    for step in range(3):
        plain.set_gradient(step)
        model.set_gradient(step)
        assert not model.weight.grad.is_contiguous()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        optimizer.step()
        guarded.step()
        assert model.weight.grad.stride() == plain.weight.grad.stride()
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=1e-12, atol=1e-14)


def test_trap_2_10_a_trainer_that_clips_to_infinity_first() -> None:
    """HF's Trainer calls clip_grad_norm_(…, inf) when clipping is off: the Inf is a NaN by the time of the step."""
    model, optimizer = guarded_model(max_norm=1.0)
    before = snapshot(model, optimizer)

    def trainer() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)

    take_step(model, optimizer, 0, bad=math.inf, before_step=trainer)
    assert optimizer.guard.last.skipped
    assert_identical(snapshot(model, optimizer), before)
    take_step(model, optimizer, 1, before_step=trainer)
    assert not optimizer.guard.last.skipped
    assert optimizer.guard.last.norm > 0.0


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_of_every_dtype(dtype: torch.dtype, backend: str) -> None:
    def make() -> nn.ParameterList:
        generator = torch.Generator().manual_seed(0)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return nn.ParameterList(
            nn.Parameter(torch.randn(s, generator=generator, dtype=wide).to(dtype)) for s in ((5, 3), (), (0,))
        )

    def set_gradients(model: nn.ParameterList, bad: Any = None) -> None:
        for p in model:
            p.grad = p.detach().clone() * 0.5
        if bad is not None:
            model[0].grad[1, 1] = bad

    plain, model = make(), make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    guarded = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fastguard.wrap(guarded, model, max_norm=1e6, backend=backend)
    for step in range(4):
        if step == 2:
            before = snapshot(model, guarded)
            set_gradients(model, math.nan)
            guarded.step()
            assert_identical(snapshot(model, guarded), before)
            continue
        set_gradients(plain)
        set_gradients(model)
        optimizer.step()
        guarded.step()
        assert_identical(gradients(model), gradients(plain))
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))
    assert guarded.guard.last.tensors.names == ("0", "1", "2")


def test_a_group_whose_parameters_are_a_tuple_is_guarded_as_torch_steps_it() -> None:
    plain, model = make_model(), make_model()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=0.01)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        for one, steps in ((model, optimizer), (plain, other)):
            steps.param_groups[0]["params"] = tuple(steps.param_groups[0]["params"])
            steps.zero_grad()
            loss_at(one, step).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizer.step()
        other.step()
    optimizer.guard.flush()
    assert optimizer.guard.history.num_clipped == 4
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0.0)
