"""Optimizers that step within the backward pass: one record a step, tensors left out, gradients let go at once."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import pytest
import torch
from guard_helpers import assert_identical, make_model, snapshot, train, true_norm
from in_backward_helpers import MAKERS, NAMES, Make, adamw, backward, each, gradients_of, plain_copy, release
from torch import nn

import fastguard
from fastguard.clip import ClipPolicy


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("whose", ["wrap_backward's", "the user's, before", "the user's, after", "only the user's"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_idle_guarding_is_bit_identical_whoever_sets_the_hooks(make: Make, whose: str) -> None:
    plain, model = make_model(), make_model()
    alone, optimizers = each(plain, make), each(model, make)
    release(alone)
    if whose in ("the user's, before", "only the user's"):
        release(optimizers)
    guard = fastguard.wrap_backward(model, optimizers, max_norm=1e9, hooks=whose != "only the user's")
    if whose == "the user's, after":
        release(optimizers)
    for step in range(8):
        backward(plain, step)
        norm = true_norm(gradients_of(plain_copy(model), step))
        loss = backward(model, step)
        guard.observe(loss=loss)
        assert (guard.last.step, guard.last.norm, guard.last.loss) == (step, pytest.approx(norm, rel=1e-6), float(loss))
        assert guard.last.tensors.names == NAMES and not guard.last.clipped
    assert_identical(snapshot(model, *optimizers.values()), snapshot(plain, *alone.values()))
    assert guard.history.num_steps == 7
    assert [p.grad for p in model.parameters()] == [None] * 4


def test_the_norm_of_the_step_before_or_of_what_has_come_if_that_is_more() -> None:
    """The definition, in plain torch."""
    model, plain = make_model(), make_model()
    optimizers = each(model, lambda p: torch.optim.SGD(p, lr=0.1))
    guard = fastguard.wrap_backward(model, optimizers, max_norm=0.3)
    last = 0.0
    for step in range(6):
        running, coefficients = 0.0, []
        gradients = gradients_of(plain, step)
        for p, gradient in reversed(list(zip(plain.parameters(), gradients, strict=True))):
            running = math.hypot(running, true_norm([gradient]))
            factor = min(1.0, 0.3 / (max(last, running) + 1e-6))
            coefficients.append(factor * true_norm([gradient]))
            with torch.no_grad():
                p -= 0.1 * factor * gradient
        last = true_norm(gradients)
        backward(model, step)
        assert guard.last.norm == pytest.approx(last, rel=1e-5)
        assert guard.last.clip_coef == pytest.approx(math.hypot(*coefficients) / last, rel=1e-5)
        assert guard.last.clipped and guard.last.trigger == 0.3
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "clip",
    [
        lambda: fastguard.AdaGC(warmup=2, max_norm=None),
        lambda: fastguard.AGC(0.01),
        lambda: fastguard.Value(0.02),
    ],
)
def test_policies_of_tensors_units_and_elements_are_exact(clip: Any) -> None:
    plain, model = make_model(), make_model()
    one = fastguard.wrap(adamw(list(plain.parameters())), plain, clip=clip())
    guard = fastguard.wrap_backward(model, each(model), clip=clip())
    clipped = []
    for step in range(12):
        train(plain, one, [step])
        backward(model, step)
        got, expected = guard.last, one.guard.last
        assert (got.norm, set(got.over)) == (expected.norm, set(expected.over))
        assert got.clip_coef == pytest.approx(expected.clip_coef, rel=1e-12)
        clipped.append(got.clipped)
    assert any(clipped)
    assert_identical(snapshot(model)["parameters"], snapshot(plain)["parameters"])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_tensor_that_is_not_finite_is_left_out_alone(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    plain, model = make_model(), make_model()
    alone, optimizers = each(plain, make), each(model, make)
    release(alone)
    memory = fastguard.MemorySink()
    guard = fastguard.wrap_backward(model, optimizers, sinks=[memory])
    for step in range(3):
        backward(plain, step)
        backward(model, step)
    bad = list(model.parameters())[2]
    before, state = snapshot(model)["parameters"], copy.deepcopy(optimizers[bad].state_dict())
    backward(plain, 3)  # finite: what became of the other three
    backward(model, 3, bad=2)
    after = snapshot(model)["parameters"]
    assert_identical(after["2.weight"], before["2.weight"])
    assert_identical(optimizers[bad].state_dict(), state)
    for name in ("0.weight", "0.bias", "2.bias"):
        assert_identical(after[name], snapshot(plain)["parameters"][name])
    assert bad.grad is None
    assert guard.last.skipped and guard.last.nonfinite == ["2.weight"] and math.isnan(guard.last.norm)
    assert (
        "step 3: gradients are not finite (first in '2.weight', 1 tensor in all); the step was skipped" in caplog.text
    )
    backward(model, 4)
    guard.flush()
    assert [r.skipped for r in memory.records] == [False, False, False, True, False]


def test_a_policy_leaves_out_what_it_wants_left_out() -> None:
    class Drop(ClipPolicy):
        scope = "tensor"

        def limits(self) -> tuple[list[float], list[float]]:
            return [0.0, math.inf, math.inf, math.inf], [0.0, math.inf, math.inf, math.inf]

    model = make_model()
    before = snapshot(model)["parameters"]
    guard = fastguard.wrap_backward(model, each(model), clip=Drop())
    backward(model, 0)
    after = snapshot(model)["parameters"]
    assert_identical(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["0.bias"], before["0.bias"])
    assert guard.last.is_skipped_by_policy and guard.last.over == ("0.weight",)


def test_too_many_in_a_row_raise_from_backward() -> None:
    model = make_model()
    guard = fastguard.wrap_backward(model, each(model), max_consecutive_skips=2)
    backward(model, 0, bad=1)
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        backward(model, 1, bad=1, value=math.inf)
    assert (caught.value.steps, caught.value.tensors) == ([0, 1], ["0.bias"])
    backward(model, 2)
    assert (guard.last.step, guard.last.skipped) == (2, False)


def test_no_gradient_lives_longer_than_before() -> None:
    """How many there are at a time, with torch's recipe and with a guard that measures, clips and leaves out."""

    def most(guarded: bool) -> int:
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)])
        optimizers = each(model)
        alive: weakref.WeakSet[Any] = weakref.WeakSet()
        counts = []

        def count(p: torch.Tensor) -> None:
            alive.add(_Watched.of(p.grad))
            counts.append(len(alive))

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(count)
        if guarded:
            guard = fastguard.wrap_backward(model, optimizers, clip=fastguard.Spikes(max_norm=1e-3))
        else:
            release(optimizers)
        for step in range(3):
            x = torch.ones(4, 16) * (math.nan if step == 1 else 1.0)
            model(x).sum().backward()
            assert not guarded or guard.last.skipped is (step == 1)
        assert not alive
        return max(counts)

    assert most(guarded=True) <= most(guarded=False) <= 2


class _Watched:
    """Lives as long as a tensor does: WeakSet compares what it holds, and tensors do not compare."""

    @staticmethod
    def of(tensor: Any) -> _Watched:
        tensor._watched = _Watched()
        return tensor._watched  # type: ignore[no-any-return]


def test_groups_are_clipped_by_what_is_known_of_each() -> None:
    model = make_model()
    groups = fastguard.PerGroup({"*.bias": 0.05, "*": 1e9})
    guard = fastguard.wrap_backward(model, each(model), clip=groups)
    for step in range(4):
        backward(model, step)
    bias, rest = sorted(guard.last.groups, key=lambda group: group.trigger)
    assert bias.norm > 0.05 and guard.last.over == (bias.name,) and rest.clipped_norm == rest.norm
    assert guard.last.norm == pytest.approx(math.hypot(bias.norm, rest.norm))
