"""Parameters that somebody overwrites between steps, and how gradients turn from step to step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_helpers import loss_at, make_model, notes_of, poison, take_step
from torch import nn

import fastguard
from fastguard.observers.sketches import sample
from fastguard.records import ModelNotes


def guarded(model: nn.Module, make: Any = None, **settings: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if make is None else make(model.parameters())
    return fastguard.wrap(optimizer, model, **settings)


def run(model: nn.Module, optimizer: Any, num_steps: int, between: Callable[[int], None]) -> ModelNotes:
    for number in range(num_steps):
        take_step(model, optimizer, number)
        between(number)
    return notes_of(optimizer)


def nothing(number: int) -> None:
    pass


# --- overwritten ---


def changes(model: nn.Module) -> dict[str, Callable[[int], Any]]:
    other = make_model(seed=3)
    first = model[0].weight

    def replace(number: int) -> None:
        first.data = first.data * 1.1

    @torch.no_grad()
    def copy_(number: int) -> None:
        first.copy_(other[0].weight)

    return {
        "data.mul_": lambda number: first.data.mul_(0.99),
        "copy_": copy_,
        "data": replace,
        "NaN": lambda number: number == 3 and first.data.fill_(math.nan),
        "clipping": lambda number: first.data.clamp_(-0.01, 0.01),
    }


@pytest.mark.parametrize("change", changes(make_model()))
def test_a_changed_parameter_is_named(change: str) -> None:
    model = make_model()
    notes = run(model, guarded(model, skip_nonfinite=False), 16, changes(model)[change])
    assert notes.overwritten == ("0.weight",)
    assert notes.num_compared == 3 and notes.num_overwritten in (1, 3)


def _innocent(kind: str) -> tuple[nn.Module, Callable[[int], Any]]:
    """A model, and what happens to it between steps that is nobody's overwriting."""
    model, average = make_model(), make_model(seed=3)
    anchors = [torch.randn_like(p) for p in model.parameters()]
    if kind == "reparametrised":
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2] = nn.utils.parametrizations.spectral_norm(model[2])
        model[4].weight = model[3].weight

    @torch.no_grad()
    def between(number: int) -> None:
        if kind == "swapped and put back":
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.state_dict())
            model.load_state_dict(own)
        elif kind == "averaged as schedule-free does":  # which goes back within rounding
            for p, z in zip(model.parameters(), anchors, strict=True):
                p.lerp_(z, 1 - 1 / 0.9)
                p.lerp_(z, 0.1)
        elif kind == "reparametrised":
            model(torch.ones(2, 6))

    return model, between


@pytest.mark.parametrize(
    "kind", ["nothing", "swapped and put back", "averaged as schedule-free does", "reparametrised"]
)
def test_what_is_no_overwriting(kind: str) -> None:
    model, between = _innocent(kind)
    optimizer = guarded(model)
    if kind == "nothing":
        model.load_state_dict(make_model(seed=9).state_dict())  # before the first step: a start
    notes = run(model, optimizer, 40, between)
    assert (notes.overwritten, notes.num_overwritten, notes.num_compared) == ((), 0, 6)


def test_another_guards_optimizer_may_hold_the_same_parameters() -> None:
    model = make_model()
    optimizer, other = guarded(model), guarded(model[0])
    notes = run(model, optimizer, 24, lambda number: take_step(model, other, number))
    assert notes.overwritten == () and notes.num_compared
    stranger = torch.optim.SGD(model[2].parameters(), lr=0.1)  # which nobody guards
    notes = run(model, optimizer, 40, lambda number: take_step(model, stranger, number))
    assert set(notes.overwritten) == {"2.weight", "2.bias"}


def test_steps_while_paused_and_of_several_optimizers() -> None:
    model = make_model()
    optimizers = fastguard.wrap([torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)], model)
    for number in range(30):
        loss_at(model, number).backward()
        for optimizer in optimizers[:: 1 if number % 2 else -1]:  # in either order
            optimizer.step()
        with optimizers[0].guard.paused():
            if number == 11:
                optimizers[0].step()  # nobody is to wonder that this has moved something
    notes = notes_of(optimizers[0])
    assert notes.overwritten == () and notes.num_compared == 5
    assert len(optimizers[0].guard.history.grad_cosines) > 15


@pytest.mark.parametrize("make", [lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2), torch.optim.AdamW])
def test_closures(make: Any) -> None:
    model = make_model()
    optimizer = guarded(model, make)
    for number in range(24):
        take_step(model, optimizer, number, closure=True)
        if number == 7:
            model[2].bias.data.add_(1.0)
    assert notes_of(optimizer).overwritten == ("2.bias",)
    assert [step for step, _ in optimizer.guard.history.grad_cosines] == list(range(1, 21))


# --- cosines ---


@pytest.mark.parametrize("settings", [{}, {"max_norm": 0.01}])
def test_cosines_are_those_of_the_gradients(settings: Any) -> None:
    model = make_model()
    optimizer = guarded(model, **settings)
    expected, before = [], None
    for number in range(21):
        optimizer.zero_grad()
        loss_at(model, number).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        if before is not None:
            expected.append(float(torch.cosine_similarity(gradient, before, dim=0)))
        before = gradient
        optimizer.step()
    optimizer.guard.flush()
    found = optimizer.guard.history.grad_cosines
    assert [step for step, _ in found] == list(range(1, 21))
    assert [cosine for _, cosine in found] == pytest.approx(expected, abs=1e-5)


def test_steps_without_a_usable_gradient_have_no_cosine() -> None:
    model = make_model()
    optimizer = guarded(model)
    for number in range(12):
        optimizer.zero_grad()
        loss_at(model, number).backward()
        if number == 3:
            poison(model)
        elif number == 6:
            for p in model.parameters():
                p.grad.zero_()
        elif number == 9:
            model[0].weight.grad = None
        optimizer.step()
    optimizer.guard.flush()
    steps = [step for step, _ in optimizer.guard.history.grad_cosines]
    assert steps == [1, 2, 5, 8, 10, 11]  # at 10, of what there was at 9


@pytest.mark.parametrize("kind", ["sparse", "bfloat16", "float8"])
def test_what_cannot_be_sketched_is_left_out(kind: str) -> None:
    model = make_model("embedding" if kind == "sparse" else "mlp")
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    if kind == "float8":
        model[2].base = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    optimizer = guarded(model)
    for number in range(24):
        take_step(model, optimizer, number)
    notes = notes_of(optimizer)
    assert not len(optimizer.guard._run.failures) and notes.overwritten == ()
    assert len(optimizer.guard.history.grad_cosines) == (0 if kind == "sparse" else 20)


def test_memory_that_was_freed_is_not_read() -> None:
    """As sharded training frees it: what is looked at beside the gradients must not end the process."""
    model = nn.Linear(64, 64)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model)
    flat = torch.randn(64 * 64 + 64)
    model.weight.grad, model.bias.grad = flat[: 64 * 64].view(64, 64), flat[64 * 64 :]
    for _ in range(5):
        optimizer.step()
    flat.untyped_storage().resize_(0)
    for _ in range(3):
        with pytest.raises(fastguard.UnsupportedTensorError, match="freed or cut short"):
            optimizer.step()
    model.weight.grad = model.bias.grad = None
    model.weight.data.untyped_storage().resize_(0)
    optimizer.step()
    optimizer.step()
    assert not notes_of(optimizer).overwritten


# --- samples ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_samples_are_evenly_over_memory_and_exact(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(numel).to(dtype) for numel in (1, 3, 1023, 1024, 1025, 5000)]
    tensors.append(torch.tensor([math.nan, math.inf, -math.inf, -0.0, 6e-8, 1e-7, 6e4]).to(dtype))
    tensors.append(torch.randn(2, 3, 5, 5).to(dtype).to(memory_format=torch.channels_last))
    for number in (4, 1024):
        found = sample(tensors, number)
        counts = [min(number, x.numel()) for x in tensors]
        parts = [torch.as_strided(x, (n,), (x.numel() // n,)).double() for x, n in zip(tensors, counts)]
        assert found is not None
        assert str([*memoryview(found).cast("d")]) == str(torch.cat(parts).tolist())


@pytest.mark.parametrize("odd", [torch.ones(4, 4)[:, :2], torch.ones(0), torch.ones(3, dtype=torch.int64)])
def test_what_is_not_plain_is_not_sampled(odd: torch.Tensor) -> None:
    assert sample([torch.ones(3), odd], 4) is None
