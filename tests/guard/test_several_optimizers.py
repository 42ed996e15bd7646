"""Several optimizers that share one norm and one decision, and several groups in one optimizer."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from guard_helpers import assert_close, assert_identical, gradients, loss_at, make_model, poison, snapshot
from torch import nn

import fastguard


def _matrices_and_rest(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices where torch has it, AdamW for the rest: how Muon is meant to be used."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    first = getattr(torch.optim, "Muon", torch.optim.RMSprop)
    return [first(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.05)]


def _step(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    *,
    bad_index: int | None = None,
    max_norm: float | None = None,
) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_at(model, step).backward()
    if bad_index is not None:
        poison(model, math.nan, bad_index)
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for optimizer in optimizers:
        optimizer.step()


def _pair(dtype: torch.dtype = torch.float32, **settings: object) -> tuple[nn.Module, list, nn.Module, list]:
    plain = make_model(dtype=dtype)
    model = copy.deepcopy(plain)
    optimizers = _matrices_and_rest(plain)
    guarded = fastguard.wrap(_matrices_and_rest(model), model, **settings)
    return plain, optimizers, model, guarded


def test_training_is_bit_identical_with_one_record_a_step() -> None:
    plain, optimizers, model, guarded = _pair()
    for step in range(5):
        _step(plain, optimizers, step)
        _step(model, guarded, step)
    assert_identical(snapshot(model, *guarded), snapshot(plain, *optimizers))
    guard = guarded[0].guard
    guard.flush()
    assert guard.history.step == [0, 1, 2, 3, 4]
    assert set(guard.last.tensors.names) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert guard.last.lr == 0.02  # of the first group of the first optimizer


def test_clipping_uses_the_norm_of_all_gradients(backend: str) -> None:
    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        return [torch.optim.RMSprop(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.05)]

    plain, model = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    optimizers, guarded = both(plain), fastguard.wrap(both(model), model, max_norm=0.05, backend=backend)
    for step in range(5):
        _step(plain, optimizers, step, max_norm=0.05)
        _step(model, guarded, step)
        assert guarded[0].guard.last.clipped
    assert_close(snapshot(model, *guarded), snapshot(plain, *optimizers), rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")
def test_muon_is_neither_clipped_by_a_shared_norm_nor_part_of_it(backend: str) -> None:
    plain, optimizers, model, guarded = _pair(torch.float64, max_norm=0.05, backend=backend)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_at(plain, step).backward()
        torch.nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.ndim < 2], 0.05)
        for optimizer in optimizers:
            optimizer.step()
        _step(model, guarded, step)
        last = guarded[0].guard.last
        after = float(fastguard.tensor_stats([p.grad for p in model.parameters()]).total_norm())
        assert last.clipped and last.clipped_norm == pytest.approx(after) and last.over == ()
        assert last.trigger == 0.05
    # Muon orthogonalises in bfloat16: equal to a rounding unless an element sits right between two of its values.
    assert_close(snapshot(model, *guarded), snapshot(plain, *optimizers), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bad_index", [0, 1], ids=["in-the-first", "in-the-second"])
def test_a_bad_gradient_in_one_skips_all(bad_index: int) -> None:
    plain, optimizers, model, guarded = _pair(max_norm=1e6)
    for step in (0, 1, 3, 4):
        _step(plain, optimizers, step)
    for step in range(5):
        before = snapshot(model, *guarded)
        _step(model, guarded, step, bad_index=bad_index if step == 2 else None)
        if step == 2:
            assert_identical(snapshot(model, *guarded), before)
            assert all(g is not None for g in gradients(model))
    assert_identical(snapshot(model, *guarded), snapshot(plain, *optimizers))
    guard = guarded[1].guard
    guard.flush()
    assert [entry.skipped for entry in guard.history.recent] == [False, False, True, False, False]
    assert guard.history.first_events[0].names == ("0.weight" if bad_index == 0 else "0.bias",)


def test_optimizers_wrapped_apart_that_share_parameters_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    fastguard.wrap(first, model).guard.detach()
    fastguard.wrap(second, model)
    assert not caplog.records
    fastguard.wrap(first, model)
    assert "4 parameters of this SGD are guarded with another optimizer (SGD) as well" in caplog.text


def test_differently_scaled_gradients_are_refused() -> None:
    model = make_model()
    guarded = fastguard.wrap(_matrices_and_rest(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_at(model, 0)).backward()
    scaler.unscale_(guarded[0])
    scaler.step(guarded[0])
    with pytest.raises(RuntimeError, match=r"scaled alike.*unscale_ on all"):
        scaler.step(guarded[1])


# --- one optimizer, several groups ---


@pytest.mark.parametrize("with_model", [True, False])
def test_a_group_added_later_is_watched_and_named(with_model: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    guarded = fastguard.wrap(optimizer, model if with_model else None)
    _step(model, [guarded], 0)
    first = ("0.weight", "0.bias") if with_model else ("group0.param0", "group0.param1")
    later = ("2.weight", "2.bias") if with_model else ("group1.param0", "group1.param1")
    assert guarded.guard.last.tensors.names == first
    guarded.add_param_group({"params": list(model[2].parameters()), "lr": 0.2})
    _step(model, [guarded], 1)
    assert guarded.guard.last.tensors.names == first + later
    before = snapshot(model, guarded)
    _step(model, [guarded], 2, bad_index=3)
    assert_identical(snapshot(model, guarded), before)
    assert guarded.guard.last.nonfinite == [later[1]]
