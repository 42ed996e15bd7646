"""Optimizers that step within the backward pass: one record a step, tensors left out, gradients let go at once."""

import contextlib
import copy
import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from foreign_optimizers import WantsGradients
from guard_helpers import adamw, assert_identical, loss_at, make_model, snapshot, train, true_norm
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fastguard
from fastguard.clip import ClipPolicy

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


MAKERS = {
    "AdamW": adamw,
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "one that needs gradients": lambda p: WantsGradients(p),
}


def each(model, make=adamw):
    return {p: make([p]) for p in model.parameters()}


def release(optimizers):
    """Torch's recipe."""

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)


def backward(model, step, bad=None, value=math.nan):
    """One training step; with `bad`, an element of that parameter's gradient is `value`."""
    loss = loss_at(model, step)

    def poisoned(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    with contextlib.ExitStack() as stack:
        if bad is not None:
            stack.enter_context(list(model.parameters())[bad].register_hook(poisoned))
        loss.backward()
    return loss.detach()


def gradients_of(model, step):
    twin = copy.deepcopy(model)  # without its hooks
    return list(torch.autograd.grad(loss_at(twin, step), list(twin.parameters())))


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("whose", ["wrap_backward's", "the user's, before", "the user's, after", "only the user's"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_idle_guarding_is_bit_identical_whoever_sets_the_hooks(make, whose):
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
        norm = true_norm(gradients_of(model, step))
        loss = backward(model, step)
        guard.observe(loss=loss)
        assert (guard.last.step, guard.last.norm, guard.last.loss) == (step, pytest.approx(norm, rel=1e-6), float(loss))
        assert guard.last.tensors.names == NAMES and not guard.last.clipped
    assert_identical(snapshot(model, *optimizers.values()), snapshot(plain, *alone.values()))
    assert guard.history.num_steps == 7
    assert [p.grad for p in model.parameters()] == [None] * 4


def test_the_norm_of_the_step_before_or_of_what_has_come_if_that_is_more():
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
def test_policies_of_tensors_units_and_elements_are_exact(clip):
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
def test_a_tensor_that_is_not_finite_is_left_out_alone(make, caplog):
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


def test_a_policy_leaves_out_what_it_wants_left_out():
    class Drop(ClipPolicy):
        scope = "tensor"

        def limits(self):
            return [0.0, math.inf, math.inf, math.inf], [0.0, math.inf, math.inf, math.inf]

    model = make_model()
    before = snapshot(model)["parameters"]
    guard = fastguard.wrap_backward(model, each(model), clip=Drop())
    backward(model, 0)
    after = snapshot(model)["parameters"]
    assert_identical(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["0.bias"], before["0.bias"])
    assert guard.last.is_skipped_by_policy and guard.last.over == ("0.weight",)


def test_too_many_in_a_row_raise_from_backward():
    model = make_model()
    guard = fastguard.wrap_backward(model, each(model), max_consecutive_skips=2)
    backward(model, 0, bad=1)
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        backward(model, 1, bad=1, value=math.inf)
    assert (caught.value.steps, caught.value.tensors) == ([0, 1], ["0.bias"])
    backward(model, 2)
    assert (guard.last.step, guard.last.skipped) == (2, False)


def test_no_gradient_lives_longer_than_before():
    """How many there are at a time, with torch's recipe and with a guard that measures, clips and leaves out."""

    def most(guarded):
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)])
        optimizers = each(model)
        made, counts = [], []

        def num_alive():
            return sum(not storage.expired() for storage in made)

        def count(p):
            made.append(StorageWeakRef(p.grad.untyped_storage()))
            counts.append(num_alive())

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
        assert not num_alive()
        return max(counts)

    assert most(guarded=True) <= most(guarded=False) <= 2


def test_groups_are_clipped_by_what_is_known_of_each():
    model = make_model()
    groups = fastguard.PerGroup({"*.bias": 0.05, "*": 1e9})
    guard = fastguard.wrap_backward(model, each(model), clip=groups)
    for step in range(4):
        backward(model, step)
    bias, rest = sorted(guard.last.groups, key=lambda group: group.trigger)
    assert bias.norm > 0.05 and guard.last.over == (bias.name,) and rest.clipped_norm == rest.norm
    assert guard.last.norm == pytest.approx(math.hypot(bias.norm, rest.norm))


class Deep(nn.Module):
    """Two blocks within checkpoints, and a third beside them."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 4)
        self.reentrant = reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(lambda h, block=block: block(h).tanh(), x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_makes_no_step_of_its_own(reentrant, looks):
    model = Deep(reentrant)
    guard = fastguard.wrap_backward(model, each(model))
    for step in range(4):
        backward(model, step)
        if looks:
            assert (guard.last.step, len(guard.last.tensors)) == (step, 6)
    guard.flush()
    assert guard.history.step == [0, 1, 2, 3]


def test_micro_batches_of_ones_own_hooks_are_one_step():
    plain, model = make_model(), make_model()
    one, optimizers = adamw(list(plain.parameters())), each(model)
    is_last = False

    def hook(p):
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


def test_a_backward_pass_that_raises_is_a_step_of_what_it_stepped():
    model = make_model()
    guard = fastguard.wrap_backward(model, each(model))
    with model[0].weight.register_hook(lambda gradient: 1 / 0), pytest.raises(ZeroDivisionError):
        backward(model, 0)
    backward(model, 1)
    guard.flush()
    assert guard.history.step == [0, 1]
    assert len(guard.last.tensors) == 4


def test_a_resumed_run_goes_on_as_if_nothing_had_been():
    model = make_model()
    optimizers = each(model)
    settings = {"check_every": 0}
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


def test_detach_leaves_everything_as_it_was():
    model = make_model()
    optimizers = each(model)
    before = [set(vars(o)) for o in optimizers.values()]
    guard = fastguard.wrap_backward(model, optimizers)
    with guard.paused():
        backward(model, 0)
    assert guard.last is None and all(p.grad is None for p in model.parameters())  # no part of the run
    backward(model, 0)
    assert all(o.guard is guard for o in optimizers.values())
    guard.detach()
    assert [set(vars(o)) for o in optimizers.values()] == before
    assert not any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in optimizers.values())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    backward(model, 1)
    assert all(p.grad is not None for p in model.parameters())
    # torch does not look into the hooks of parameters for cycles: its own recipe keeps them for ever.
    refs = [weakref.ref(model), weakref.ref(guard), *map(weakref.ref, model.parameters())]
    del model, guard, optimizers
    gc.collect()
    assert not any(ref() for ref in refs)


class Releasing(torch.optim.SGD):
    """In the manner of optimi's: one optimizer, whose step takes one parameter."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.defaults["gradient_release"] = True

    @torch.no_grad()
    def step(self, closure=None, param=None):
        if param is not None:
            buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
            param -= 0.1 * buffer.mul_(0.9).add_(param.grad)


@pytest.mark.parametrize("hooks", [True, False])
def test_an_optimizer_that_steps_one_parameter_of_many(hooks):
    plain, model = make_model(), make_model()
    alone, optimizer = Releasing(plain.parameters()), Releasing(model.parameters())
    for o, hooked in ((alone, True), (optimizer, not hooks)):
        for p in o.param_groups[0]["params"] if hooked else ():

            def hook(p, o=o):
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
