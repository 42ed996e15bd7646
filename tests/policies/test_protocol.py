"""What a guard does for a policy, and with one: users' own, among them those that fail."""

import logging
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from guard_helpers import assert_identical, guarded_model, loss_at, make_model, snapshot, take_step, train, twins
from torch import nn

import fastguard
from fastguard import ClipPolicy, PerGroup, SkipSpikes, Spikes
from fastguard.diagnosis import RULES, diagnose


class Says(ClipPolicy):
    """Gives the limits that it is given, and keeps what it is told."""

    def __init__(self, answer, scope="model"):
        self.answer, self.scope = answer, scope
        self.seen = []

    def limits(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def observe(self, norms, loss=None):
        self.seen.append((norms if isinstance(norms, float) else list(norms), loss))


def _wrap(model, clip, **settings):
    return fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), model, clip=clip, check_every=0, **settings)


def test_it_is_told_what_was_before_clipping_and_is_finite():
    model, policy = make_model(), Says((0.5, 0.25))
    optimizer = _wrap(model, policy)
    norms = []
    for step, bad in enumerate([None, None, math.nan, None, math.inf, None, None]):
        take_step(model, optimizer, step, bad=bad)
        optimizer.guard.observe(loss=math.nan if step == 1 else 10.0 + step)
        last = optimizer.guard.last
        norms.append(last.norm)
        assert last.skipped is (bad is not None) and last.trigger == 0.5
        if bad is None:
            assert last.clip_coef == 0.25 / last.norm and last.clipped_norm == pytest.approx(0.25)
    assert [norm for norm, _ in policy.seen] == [norms[i] for i in (0, 1, 3, 5, 6)]
    assert [loss for _, loss in policy.seen] == [None, 10.0, 12.0, 14.0, 15.0]


def test_a_closure_is_judged_by_the_same_limits():
    model, policy = make_model(), Says((0.5, 0.25))
    optimizer = _wrap(model, policy)
    for step in range(3):
        loss = take_step(model, optimizer, step, closure=True)
    assert [seen for _, seen in policy.seen][2] == float(loss) and optimizer.guard.last.clipped
    lbfgs = fastguard.wrap(torch.optim.LBFGS(make_model().parameters(), max_iter=3), clip=Says((0.0, 0.0)))
    assert lbfgs.guard.clip.seen == []


def test_a_dropped_step_is_a_skip(backend, caplog):
    """Parameters, state and groups stay to the bit; it is counted, and said to be the policy's doing."""
    model, policy = make_model(), Says((math.inf, math.inf))
    optimizer = _wrap(model, policy, backend=backend)
    train(model, optimizer, range(3))
    before, policy.answer = snapshot(model, optimizer), (0.1, 0.0)
    train(model, optimizer, range(3, 5))
    assert_identical(snapshot(model, optimizer), before)
    assert all(p.grad is not None for p in model.parameters())
    policy.answer = (math.inf, 0.0)
    take_step(model, optimizer, 5)
    guard = optimizer.guard
    guard.flush()
    assert [e.skipped for e in guard.history.recent] == [False] * 3 + [True, True, False]
    assert guard.history.num_skipped == 2 and guard.history.num_nonfinite == 0 and len(policy.seen) == 6
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and "step 3: skipped by the clip policy" in said[0] and "above 0.1" in said[0]
    assert not any("not finite" in text for text in said)
    assert "; 2 by the clip policy" in str(guard.report()) and guard.report().numbers["num_skipped_by_policy"] == 2


def test_too_many_in_a_row_say_whose_they_are():
    model, policy = make_model(), Says((0.1, 0.0))
    optimizer = _wrap(model, policy, max_consecutive_skips=4)
    for step, bad in enumerate([None, math.nan, None]):
        take_step(model, optimizer, step, bad=bad)
    resumed = _wrap(model, policy, max_consecutive_skips=4)
    resumed.guard.load_state_dict(optimizer.guard.state_dict())
    with pytest.raises(
        fastguard.PolicySkipsError, match=r"3 by the clip policy .*Says.*, 1 for gradients that are not"
    ) as e:
        take_step(model, resumed, 3)
    assert (e.value.steps, e.value.by_policy, e.value.tensors) == ([0, 1, 2, 3], [0, 2, 3], ["0.weight"])
    assert isinstance(e.value, fastguard.NonFiniteGradientsError)
    other = _wrap(make_model(), Says((math.inf, 0.0)), max_consecutive_skips=1)
    p = other.param_groups[0]["params"][0]
    p.grad = torch.full_like(p, math.nan)
    with pytest.raises(fastguard.NonFiniteGradientsError) as plain:
        other.step()
    assert type(plain.value) is fastguard.NonFiniteGradientsError


WRONG = [
    (1.0, math.nan), (math.nan, 1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, math.inf), (1.0,), None, "ab",
    (None, None), ([1.0], [1.0]), ValueError("no idea"), (10**400, 1.0), ("0.5", 1.0), (True, 1.0), (1j, 1.0),
]  # fmt: skip


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("scope", ["model", "tensor", "group"])
@pytest.mark.parametrize("answer", WRONG, ids=repr)
def test_what_is_no_limits_clips_nothing(answer, scope, caplog):
    if scope == "group" and answer == ([1.0], [1.0]):
        answer = ([1.0], [math.nan])
    if scope == "tensor":
        answer = ([1.0] * 4, [1.0, 1.0, math.inf, 1.0]) if answer == ([1.0], [1.0]) else answer
    model, plain = make_model(), make_model()
    optimizer = _wrap(model, Says(answer, scope))
    rival = torch.optim.AdamW(plain.parameters(), lr=0.1)
    train(model, optimizer, range(4))
    train(plain, rival, range(4))
    assert_identical(snapshot(model, optimizer), snapshot(plain, rival))
    assert optimizer.guard._run.failures.counts()["clip policy Says"] == 4
    assert sum("clip policy Says failed" in r.getMessage() for r in caplog.records) == 1


RIGHT = [0.5, Fraction(1, 2), Decimal("0.5"), np.float32(0.5), np.float64(0.5), torch.tensor(0.5), np.array(0.5)]


@pytest.mark.parametrize("answer", RIGHT, ids=repr)
def test_a_policy_may_say_any_real_number(answer):
    model, optimizer = guarded_model(clip=Says((answer, answer)))
    train(model, optimizer, range(2))
    last = optimizer.guard.last
    assert (last.trigger, type(last.trigger), last.clipped_norm) == (0.5, float, pytest.approx(0.5))
    assert not len(optimizer.guard._run.failures)


@pytest.mark.parametrize("limit", [math.nan, -1.0, "1", RuntimeError("none")], ids=repr)
def test_a_policy_whose_limit_is_none(limit):
    class Limited(ClipPolicy):
        @property
        def limit(self):
            if isinstance(limit, Exception):
                raise limit
            return limit

    plain, rival, model, optimizer = twins(torch.optim.SGD, clip=Limited())
    train(model, optimizer, range(4))
    train(plain, rival, range(4))
    assert_identical(snapshot(model)["parameters"], snapshot(plain)["parameters"])
    assert optimizer.guard._run.failures.counts()["clip policy Limited"] >= 3
    (finding,) = (finding for finding in optimizer.guard.report().findings if finding.rule == "failed-parts")
    assert "clip policy Limited" in finding.summary


class Tensors(Says):
    """Scales tensor 1 to a tenth of what it is, by name."""

    def begin(self, names):
        super().begin(names)
        self.answer = (
            [0.0 if n == "0.bias" else math.inf for n in names],
            [1e-3 if n == "0.bias" else 0.0 for n in names],
        )


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_only_tensors_above_their_limits_are_written(backend):
    model = make_model()
    optimizer = _wrap(model, Tensors((0, 0), "tensor"), backend=backend)
    for step in range(3):
        versions = []
        take_step(
            model, optimizer, step, before_step=lambda v=versions: v.extend(p.grad._version for p in model.parameters())
        )
        written = [p.grad._version - v for p, v in zip(model.parameters(), versions, strict=True)]
        assert [bool(w) for w in written] == [False, True, False, False]
        assert float(model[0].bias.grad.norm()) == pytest.approx(1e-3)
        last = optimizer.guard.last
        assert last.over == ("0.bias",) and last.trigger is None
        assert last.clipped_norm == pytest.approx(
            float(fastguard.tensor_stats([p.grad for p in model.parameters()]).total_norm())
        )
    seen = optimizer.guard.clip.seen
    assert len(seen) == 3 and seen[-1][0] == list(last.tensors.norm)


def test_parameters_without_a_gradient_and_new_ones():
    """A tensor without a gradient has no norm; a group that is added later has one from its first step on."""
    model = make_model()
    params = list(model.parameters())
    policy = Tensors((0, 0), "tensor")
    optimizer = fastguard.wrap(torch.optim.SGD(params[:2], lr=0.1), model, clip=policy, check_every=0)
    take_step(model, optimizer, 0)
    take_step(model, optimizer, 1, before_step=lambda: setattr(params[0], "grad", None))
    assert policy.seen[1][0][0] == -1.0 < policy.seen[1][0][1]
    optimizer.add_param_group({"params": params[2:]})
    take_step(model, optimizer, 2)
    assert policy.names == ("0.weight", "0.bias", "2.weight", "2.bias") and len(policy.seen[-1][0]) == 4
    assert optimizer.guard.last.over == ("0.bias",) and not len(optimizer.guard._run.failures)


class TestPerGroup:
    def test_each_pattern_by_its_own_norm(self):
        model, plain = make_model(), make_model()
        memory = fastguard.MemorySink()
        optimizer = _wrap(model, PerGroup({"*.bias": 0.05, "0.*": Spikes(max_norm=0.2)}), sinks=[memory])
        rival = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for step in range(4):
            take_step(model, optimizer, step)

            def clip():
                nn.utils.clip_grad_norm_([plain[0].bias, plain[2].bias], 0.05)
                nn.utils.clip_grad_norm_([plain[0].weight], 0.2)

            take_step(plain, rival, step, before_step=clip)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # without the 1e-6 of torch's formula
        optimizer.guard.flush()
        last = memory.records[-1]
        weight, biases = last.groups
        assert (weight.name, biases.name, last.over) == ("0.*", "*.bias", ("0.*", "*.bias"))
        assert biases.norm == pytest.approx(math.hypot(last.tensors["0.bias"].norm, last.tensors["2.bias"].norm))
        assert biases.clipped_norm == pytest.approx(0.05) and weight.clipped_norm == pytest.approx(0.2)
        assert weight.trigger == 0.2

    @pytest.mark.parametrize("by", ["param_group", "tensor", "optimizer"])
    def test_by_what_holds_the_parameters(self, by):
        model = make_model()
        parts = [[p for n, p in model.named_parameters() if n.endswith(e)] for e in ("weight", "bias")]
        held = parts if by == "optimizer" else [[{"params": part} for part in parts]]
        optimizers = [torch.optim.SGD(one, lr=0.1) for one in held]
        fastguard.wrap(optimizers, model, clip=PerGroup(0.01, by=by))
        loss_at(model, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
        groups = optimizers[0].guard.last.groups
        placed = [f"{'group' if by == 'param_group' else by}{i}" for i in range(2)]
        expected = ["0.weight", "2.weight", "0.bias", "2.bias"] if by == "tensor" else placed
        assert [(g.name, g.clipped_norm) for g in groups] == [(name, pytest.approx(0.01)) for name in expected]
        assert all(group.norm > 0.01 and group.trigger == 0.01 for group in groups)
        if by == "tensor":
            assert all(float(p.grad.norm()) == pytest.approx(0.01, rel=1e-5) for p in model.parameters())

    def test_a_group_that_skips_has_all_skipped(self):
        model = make_model()
        optimizer = _wrap(model, PerGroup({"0.*": SkipSpikes(min_steps=2, window=4), "*": 1e9}))
        for step in range(4):
            take_step(model, optimizer, step)
        before = snapshot(model, optimizer)
        take_step(model, optimizer, 4, before_step=lambda: model[0].weight.grad.mul_(1e4))
        assert_identical(snapshot(model, optimizer), before)
        last = optimizer.guard.last
        assert (
            last.is_skipped_by_policy and last.over == ("0.*",) and last.groups[0].clipped_norm == last.groups[0].norm
        )

    def test_wrong_ones(self):
        with pytest.raises(ValueError, match=r"got 'embed\*', which is not the first match of any. Param"):
            _wrap(make_model(), PerGroup({"embed*": 0.1, "*": 1.0}))
        for given in (fastguard.AdaGC(), fastguard.Value(1.0), PerGroup(1.0), "1.0"):
            with pytest.raises(TypeError, match="must be"):
                PerGroup({"*": given})
        for wrong in ({"policies": {}}, {"policies": 1.0, "by": "name"}, {"policies": 0.0}):
            with pytest.raises((ValueError, TypeError)):
                PerGroup(**wrong)


def test_a_policy_of_a_users_within_groups_is_counted(caplog):
    model = make_model()
    optimizer = _wrap(model, PerGroup({"*": Says(ValueError("no idea"))}))
    with caplog.at_level(logging.WARNING):
        train(model, optimizer, range(3))
    assert optimizer.guard._run.failures.counts()["clip policy Says"] == 3


def _trained(clip, steps=70, *, before=None, **settings):
    """A guarded run, whose gradients somebody clips to `before` ahead of the guard."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **settings)
    fastguard.wrap(optimizer, model, clip=clip, check_every=0)
    for step in range(steps):
        optimizer.zero_grad()
        loss_at(model, step).backward()
        if before is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), before)
        optimizer.step()
    optimizer.guard.flush()
    return optimizer.guard


def _said(history, rule):
    return next(iter(diagnose(history, rules=[RULES[rule]])), None)


@pytest.mark.parametrize("make", [lambda: fastguard.GlobalNorm(0.1), lambda: fastguard.Spikes(max_norm=0.1)])
def test_already_clipped_is_not_the_guards_own_clipping(make):
    guard = _trained(make())
    assert guard.history.num_clipped == 70 and _said(guard.history, "already-clipped") is None
    twice = _trained(make(), before=0.5)
    finding = _said(twice.history, "already-clipped")
    assert finding is not None and repr(make()) in finding.summary and repr(make()) in finding.recommendation
    assert "give the guard max_norm" not in finding.recommendation


def test_clipping_at_every_step_is_what_some_are_for():
    assert _said(_trained(fastguard.GlobalNorm(0.01)).history, "clip-rate-high") is not None
    for policy in (fastguard.AGC(1e-4), fastguard.Value(1e-4)):
        guard = _trained(policy)
        assert guard.history.num_clipped == 70 and _said(guard.history, "clip-rate-high") is None
