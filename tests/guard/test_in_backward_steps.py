"""Optimizers that step within the backward pass: when a step is over, what a guard does besides, what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_helpers import assert_identical, loss_at, make_model, snapshot, true_norm
from in_backward_helpers import NAMES, adamw, backward, each
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastguard


class Deep(nn.Module):
    """Two blocks within checkpoints, and a third beside them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(lambda h, block=block: block(h).tanh(), x, use_reentrant=self.reentrant)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_makes_no_step_of_its_own(reentrant: bool, looks: bool) -> None:
    model = Deep(reentrant)
    guard = fastguard.wrap_backward(model, each(model))
    for step in range(4):
        backward(model, step)
        if looks:
            assert (guard.last.step, len(guard.last.tensors)) == (step, 6)
    guard.flush()
    assert guard.history.step == [0, 1, 2, 3]


def test_micro_batches_of_ones_own_hooks_are_one_step() -> None:
    plain, model = make_model(), make_model()
    one, optimizers = adamw(list(plain.parameters())), each(model)
    is_last = False

    def hook(p: torch.Tensor) -> None:
        if is_last:
            optimizers[p].step()
            optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)
    guard = fastguard.wrap_backward(model, optimizers, hooks=False)
    for step in range(3):
        for part in range(4):
            is_last = part == 3
            backward(model, 4 * step + part)
            loss_at(plain, 4 * step + part).backward()
        norm = true_norm([p.grad for p in plain.parameters()])
        one.step()
        one.zero_grad()
        assert (guard.last.step, guard.last.norm) == (step, pytest.approx(norm, rel=1e-6))
    assert_identical(snapshot(model)["parameters"], snapshot(plain)["parameters"])


def test_a_backward_pass_that_raises_is_a_step_of_what_it_stepped() -> None:
    model = make_model()
    guard = fastguard.wrap_backward(model, each(model))

    def breaks(gradient: torch.Tensor) -> None:
        raise ValueError("on purpose")

    handle = model[0].weight.register_hook(breaks)
    with pytest.raises(ValueError, match="on purpose"):
        backward(model, 0)
    handle.remove()
    backward(model, 1)
    guard.flush()
    assert guard.history.step == [0, 1]
    assert len(guard.last.tensors) == 4


# --- what else a guard does ---


def test_a_resumed_run_goes_on_as_if_nothing_had_been() -> None:
    model = make_model()
    optimizers = each(model)
    settings: dict[str, Any] = {"check_every": 0}
    make_clip = lambda: fastguard.Percentile(50, window=4, min_steps=2)  # noqa: E731
    guard = fastguard.wrap_backward(model, optimizers, clip=make_clip(), **settings)
    for step in range(6):
        backward(model, step)
    saved = copy.deepcopy(guard.state_dict())
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    others = each(twin)
    for one, other in zip(optimizers.values(), others.values(), strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    resumed = fastguard.wrap_backward(twin, others, clip=make_clip(), **settings)
    resumed.load_state_dict(saved)
    for step in range(6, 12):
        backward(model, step)
        backward(twin, step)
        assert (resumed.last.step, resumed.last.clip_coef) == (step, guard.last.clip_coef)
    assert_identical(snapshot(twin), snapshot(model))


def test_detach_leaves_everything_as_it_was() -> None:
    model = make_model()
    optimizers = each(model)
    before = [vars(o).keys() for o in optimizers.values()]
    guard = fastguard.wrap_backward(model, optimizers)
    backward(model, 0)
    assert all(o.guard is guard for o in optimizers.values())
    guard.detach()
    assert [vars(o).keys() for o in optimizers.values()] == before
    assert not any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in optimizers.values())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    backward(model, 1)
    assert model[0].weight.grad is not None


def test_nothing_outlives_the_model_once_the_hooks_are_gone() -> None:
    """torch does not look into the hooks of parameters for cycles: its own recipe keeps them for ever."""
    model = make_model()
    guard = fastguard.wrap_backward(model, each(model))
    backward(model, 0)
    guard.detach()
    refs = [weakref.ref(model), weakref.ref(guard), *map(weakref.ref, model.parameters())]
    del model, guard
    gc.collect()
    assert not any(ref() for ref in refs)


class Releasing(torch.optim.SGD):
    """In the manner of optimi's: one optimizer, whose step takes one parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.defaults["gradient_release"] = True

    @torch.no_grad()
    def step(self, closure: Any = None, param: torch.Tensor | None = None) -> None:  # type: ignore[override]
        if param is not None:
            buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
            param -= 0.1 * buffer.mul_(0.9).add_(param.grad)


@pytest.mark.parametrize("hooks", [True, False])
def test_an_optimizer_that_steps_one_parameter_of_many(hooks: bool) -> None:
    plain, model = make_model(), make_model()
    alone, optimizer = Releasing(plain.parameters()), Releasing(model.parameters())
    for o, hooked in ((alone, True), (optimizer, not hooks)):
        for p in o.param_groups[0]["params"] if hooked else ():

            def hook(p: torch.Tensor, o: Any = o) -> None:
                o.step(param=p)
                p.grad = None

            p.register_post_accumulate_grad_hook(hook)
    guard = fastguard.wrap_backward(model, optimizer, hooks=hooks)
    for step in range(5):
        backward(plain, step)
        backward(model, step)
        optimizer.step()  # as a training loop goes on to do; nothing is left to step
        assert (guard.last.step, guard.last.tensors.names) == (step, NAMES)
    assert_identical(snapshot(model, optimizer), snapshot(plain, alone))
    before = snapshot(model)["parameters"]
    backward(model, 5, bad=0)
    after = snapshot(model)["parameters"]
    assert_identical(after["0.weight"], before["0.weight"])
    assert guard.last.nonfinite == ["0.weight"] and not torch.equal(after["2.bias"], before["2.bias"])


def _refused() -> Iterator[Any]:
    model = make_model()
    params = list(model.parameters())
    yield model, {}, ValueError, "got an empty dict"
    yield model, {"3.weight": adamw(params[:1])}, ValueError, "'3.weight', which it does not have"
    yield model, {params[0]: adamw(params[1:2])}, ValueError, "an optimizer of it alone, got one of 1 for '0.weight'"
    yield model, {params[0]: adamw(params)}, ValueError, "got one of 4 for '0.weight'"
    yield model, adamw(params), ValueError, r"steps all of its parameters at once. Write \{p: AdamW"
    yield model, {params[0]: 3}, TypeError, r"must be a torch\.optim\.Optimizer, got int"
    yield make_model(), {p: adamw([p]) for p in params}, ValueError, "`model` must hold parameters of `optimizer`"


@pytest.mark.parametrize(("model", "optimizers", "error", "message"), list(_refused()))
def test_what_is_refused(model: Any, optimizers: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fastguard.wrap_backward(model, optimizers)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    for given in optimizers.values() if isinstance(optimizers, dict) else [optimizers]:
        assert not isinstance(given, torch.optim.Optimizer) or "_guard" not in vars(given)


def test_paused_steps_are_no_part_of_the_run() -> None:
    model = make_model()
    guard = fastguard.wrap_backward(model, each(model))
    with guard.paused():
        backward(model, 0)
    assert guard.last is None and model[0].weight.grad is None


def test_a_cell_that_is_run_again(tmp_path: Path) -> None:
    model = make_model()
    optimizers = each(model)
    guard = fastguard.wrap_backward(model, optimizers, max_norm=1.0)
    assert fastguard.wrap_backward(model, optimizers, max_norm=1.0) is guard
    with pytest.raises(fastguard.AlreadyGuardedError, match="another clip"):
        fastguard.wrap_backward(model, optimizers, max_norm=2.0)
    other = fastguard.wrap_backward(model, optimizers, max_norm=2.0, on_guarded="replace")
    backward(model, 0)
    assert guard.last is None and other.last.step == 0
