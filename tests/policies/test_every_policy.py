"""Every clip policy through the same tests, on the host and where nobody waits."""

import copy
import inspect
import json
import math
from unittest import mock

import pytest
import torch
from device_helpers import watched
from guard_helpers import assert_close, assert_identical, loss_at, make_model, poison, snapshot, take_step, train

import fastguard
from fastguard import clip as policies
from fastguard.clip import ClipPolicy, GlobalNorm, as_policy
from fastguard.step import device as engines
from fastguard.step.device import TorchEngine

# How to make it, so that it acts now and then within a few steps.
POLICIES = {
    "AGC": lambda: policies.AGC(0.1),
    "AdaGC": lambda: policies.AdaGC(warmup=2),
    "GlobalNorm": lambda: GlobalNorm(1.0),
    "PerGroup": lambda: policies.PerGroup({"*.weight": policies.Spikes(max_norm=0.5), "*": 0.1}),
    "Percentile": lambda: policies.Percentile(50, min_steps=2),
    "SkipSpikes": lambda: policies.SkipSpikes(0.5, 8, min_steps=2, loss=False),
    "Spikes": lambda: policies.Spikes(max_norm=0.8),
    "Value": lambda: policies.Value(0.05),
    "ZClip": lambda: policies.ZClip(0.5, warmup=2),
}
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
STEPS = 10
NUM_ON_DEVICE = 8
BAD = 4  # the step whose gradients hold a NaN


def _guarded(make, **settings):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, fastguard.wrap(optimizer, model, clip=make(), check_every=0, **settings)


def test_every_policy_is_tried():
    exported = {name for name in policies.__all__ if inspect.isclass(getattr(policies, name))}
    assert exported - {"ClipPolicy", "Place"} == set(POLICIES)


@pytest.mark.thinned(n=3)
@every_policy
def test_in_a_guard(make, backend):
    """It acts, a step that is not finite is skipped as ever, and the record says what it did."""
    model, optimizer = _guarded(make, backend=backend)
    clipped = skipped = 0
    for step in range(STEPS):
        take_step(model, optimizer, step, bad=math.nan if step == BAD else None)
        optimizer.guard.flush()
        last = optimizer.guard.last
        assert last.skipped == (step == BAD or last.is_skipped_by_policy)
        assert last.clip_coef == 1.0 if last.skipped else 0.0 < last.clip_coef <= 1.0
        if last.trigger is not None and last.norm > last.trigger and make().scope == "model":
            assert last.clipped or last.skipped or last.norm <= last.trigger + 1e-5
        clipped += last.clipped
        skipped += last.is_skipped_by_policy
        if last.clipped:
            gradients = [p.grad for p in model.parameters()]
            after = float(fastguard.tensor_stats(gradients).total_norm())
            assert last.clipped_norm == pytest.approx(after, rel=1e-5)
    assert (skipped if type(make()) is policies.SkipSpikes else clipped) > 0
    assert not len(optimizer.guard._run.failures)
    assert repr(optimizer.guard.clip) == repr(make())


@pytest.mark.thinned(n=2)
@every_policy
def test_a_resumed_run_goes_on_to_the_bit(make):
    """State as JSON holds it; nothing that was not finite is in there."""
    model, optimizer = _guarded(make)
    for step in range(STEPS):
        take_step(model, optimizer, step, bad=math.inf if step == BAD else None)
        optimizer.guard.observe(loss=1.0 + 0.1 * step)
        if step == BAD + 1:
            text = json.dumps(optimizer.guard.state_dict()["clip"], allow_nan=False)
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), optimizer.guard.state_dict()))
            states[2]["clip"] = json.loads(text)
    resumed, again = _guarded(make)
    resumed.load_state_dict(states[0])
    again.load_state_dict(states[1])
    again.guard.load_state_dict(states[2])
    for step in range(BAD + 2, STEPS):
        take_step(resumed, again, step)
        again.guard.observe(loss=1.0 + 0.1 * step)
    assert_identical(snapshot(resumed, again), snapshot(model, optimizer))
    assert again.guard.state_dict()["clip"] == optimizer.guard.state_dict()["clip"]


@every_policy
def test_a_state_that_is_none_is_refused(make):
    _, optimizer = _guarded(make)
    before = optimizer.guard.state_dict()
    if before["clip"] == {} or type(make()) is GlobalNorm:
        return
    with pytest.raises(ValueError, match="does not suit the clip policy"):
        optimizer.guard.load_state_dict({**before, "clip": {"nothing": 1}})
    assert optimizer.guard.state_dict()["clip"] == before["clip"]


@every_policy
def test_what_is_written(make, tmp_path):
    """A log holds the norm before and after, and who was over; it reads back as it was."""
    memory, path = fastguard.MemorySink(), tmp_path / "log.jsonl"
    model, optimizer = _guarded(make, sinks=[memory, fastguard.JsonlSink(path)])
    train(model, optimizer, range(STEPS))
    optimizer.guard.close()
    lines = fastguard.sinks.read_jsonl(path)
    lines = [line for line in lines if "step" in line]
    history = fastguard.TrainingHistory.from_jsonl(path)
    assert [e.norm * e.clip_coef for e in history.recent] == [r.clipped_norm for r in memory.records]
    assert history.model.clip_policy == repr(make())
    for record, line in zip(memory.records, lines, strict=True):
        assert line.get("clip/trigger") == record.trigger
        assert line.get("grad/clipped_norm", line["grad/norm"]) == record.clipped_norm
        assert tuple(line.get("clip/over", ())) == record.over
        assert {g.name: list(g[1:]) for g in record.groups} == line.get("clip/groups", {})
        assert history.recent[record.step].step == record.step


def test_a_formula_of_ones_own_is_not_taken_for_the_parents():
    class Half(GlobalNorm):
        def limits(self):
            return 1.0, 0.5

    assert GlobalNorm(2.0).limit == 2.0 and Half(2.0).limit is None
    assert as_policy(Half(2.0)).next_limits()[:2] == (1.0, 0.5)


class Empty(ClipPolicy):
    """Says nothing."""


@pytest.mark.parametrize("clip", [GlobalNorm, 1.0, "norm", object(), Empty()])
def test_what_is_no_policy_is_refused(clip):
    with pytest.raises(TypeError, match="`clip` must be a clip policy such as"):
        as_policy(clip)


def _train(make, fused, scale):
    memory, model, waits = fastguard.MemorySink(), make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    fastguard.wrap(optimizer, model, clip=make(), check_every=0, sinks=[memory])
    guard = optimizer.guard
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    for step in range(NUM_ON_DEVICE):
        optimizer.zero_grad()
        loss = loss_at(model, step)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step == BAD:
            poison(model)
        with watched() as watch:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if step > 1 and fused and scaler is None:
            waits += watch.waits
        if scaler is not None:
            scaler.update()
        guard._judge.arrive_all()  # so that the policy knows as much as on the host
    guard.flush()
    assert not len(guard._run.failures)
    return snapshot(model, optimizer), list(memory.records), waits


@pytest.mark.thinned(n=5, interpreted=5)
@pytest.mark.parametrize(("fused", "scale"), [(True, None), (True, 1024.0), (False, None), (False, 1024.0)])
@every_policy
def test_on_a_device_as_on_the_host_and_without_waiting(make, fused, scale):
    expected, told, _ = _train(make, fused, scale)
    with mock.patch.object(engines, "engine_for", return_value=TorchEngine):
        found, records, waits = _train(make, fused, scale)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert waits == []
    for ours, theirs in zip(records, told, strict=True):
        assert ours.clip_coef == pytest.approx(theirs.clip_coef, rel=1e-4)
        assert (ours.skipped, ours.is_skipped_by_policy) == (theirs.skipped, theirs.is_skipped_by_policy)
        assert ours.trigger == (None if theirs.trigger is None else pytest.approx(theirs.trigger, rel=1e-4))
        assert [g.name for g in ours.groups] == [g.name for g in theirs.groups]
        if make().scope in ("model", "group", "tensor"):
            assert ours.over == theirs.over
    assert math.isnan(told[BAD].norm) and told[BAD].skipped
