"""A run that goes wrong is put back and goes on; one that does not is left alone, to the bit."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from typing import Any

import pytest
import torch
from guard_helpers import assert_identical, snapshot
from recovery_helpers import batch, loss_of, make, ruin, train
from torch import nn

import fastguard
from fastguard.guard import engines
from fastguard.guard.engines import TorchEngine

QUICK = fastguard.Recovery(every=10, keep=3, patience=3, quarantine=4, ramp=10)


def wrapped(model: nn.Module, recovery: Any = QUICK, *, make_optimizer: Any = None, **settings: Any) -> Any:
    kind = make_optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01))
    return fastguard.wrap(kind(model.parameters()), model, recovery=recovery, check_every=0, **settings)


slow = pytest.mark.slow


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are judged where nobody waits for it."""
    monkeypatch.setattr(engines, "engine_for", lambda device, backend: TorchEngine)


@pytest.fixture(params=["host", pytest.param("device", marks=slow)])
def way(request: pytest.FixtureRequest) -> str:
    """Where steps are judged."""
    if request.param == "device":
        request.getfixturevalue("device")
    return str(request.param)


HEALTHY: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("closure", [False, pytest.param(True, marks=slow)])
def test_a_healthy_run_is_the_same_to_the_bit(way: str, name: str, closure: bool) -> None:
    model, other = make(), make()
    guarded = wrapped(model, make_optimizer=HEALTHY[name], max_norm=1.0)
    plain = fastguard.wrap(HEALTHY[name](other.parameters()), other, max_norm=1.0)
    closure = closure or name == "LBFGS"
    steps = [7] * 30 if name == "LBFGS" else range(60)  # which needs one loss to go down
    assert train(model, guarded, steps, closure=closure) == train(other, plain, steps, closure=closure)
    assert_identical(snapshot(model, guarded), snapshot(other, plain))
    assert guarded.guard.recoveries == []


def _ruined(model: nn.Module, at: int) -> Any:
    return lambda step: ruin(model) if step == at else None


def _nan(model: nn.Module, at: int) -> Any:
    def fault(step: int) -> None:
        if step == at:
            with torch.no_grad():
                next(model.parameters())[0, 0] = math.nan

    return fault


def _buffers(model: nn.Module, at: int) -> Any:
    def fault(step: int) -> None:
        if step == at:
            model[1].running_mean[0] = math.nan  # type: ignore[index]

    return fault


@pytest.mark.parametrize("name", ["AdamW", pytest.param("AdamW-fused", marks=slow), pytest.param("SGD", marks=slow)])
@pytest.mark.parametrize("fault", [_ruined, _nan])
@pytest.mark.parametrize("closure", [False, True])
def test_ruined_parameters_are_put_back(way: str, name: str, fault: Any, closure: bool) -> None:
    model = make()
    guarded = wrapped(model, make_optimizer=HEALTHY[name])
    losses = train(model, guarded, range(100), fault=fault(model, 60), closure=closure)
    (told,) = guarded.guard.recoveries
    assert "to 50 because" in told and ("not finite" in told if fault is _nan else "the loss stood above" in told)
    assert max(losses[-20:]) < 2.0 * max(losses[40:60]) and min(losses[60:70]) != losses[59]
    assert guarded.param_groups[0]["lr"] in (0.01, 0.05)


@pytest.mark.parametrize("where", ["host", "device"])
def test_the_very_state_comes_back_and_the_data_go_on(where: str, request: pytest.FixtureRequest) -> None:
    if where == "device":
        request.getfixturevalue("device")
    model = make()
    guarded = wrapped(model)
    kept: dict[str, Any] = {}
    addresses = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]

    def fault(step: int) -> None:
        if step == 50:
            kept["then"] = copy.deepcopy((model.state_dict(), guarded.state_dict()["state"]))
        if step == 60:
            ruin(model)
        if guarded.guard.recoveries and "after" not in kept:
            kept["after"] = copy.deepcopy((model.state_dict(), guarded.state_dict()["state"]))
            kept["step"] = step

    train(model, guarded, range(80), fault=fault)
    assert_identical([dict(kept["after"][0]), kept["after"][1]], [dict(kept["then"][0]), kept["then"][1]])
    assert [t.data_ptr() for t in (*model.parameters(), *model.buffers())] == addresses
    guarded.guard.flush()
    skipped = [e.step for e in guarded.guard.history.recent if e.skipped]
    assert kept["step"] - 1 in skipped  # whose gradients were those of the ruined model
    assert guarded.guard.judge.waits is (where == "host")


def test_a_batch_norm_that_only_evaluation_reads_is_put_back() -> None:
    model = make()
    guarded = wrapped(model)
    train(model, guarded, range(80), fault=_buffers(model, 60))
    (told,) = guarded.guard.recoveries
    assert "buffers are not finite" in told and bool(model[1].running_mean.isfinite().all())


def test_a_bad_block_of_data_is_sat_out() -> None:
    model = make()
    guarded = wrapped(model)
    losses = train(model, guarded, range(120), fault=lambda step: 50.0 if 60 <= step < 90 else None)
    (told,) = guarded.guard.recoveries
    assert max(losses[90:]) < 2.0 * max(losses[40:60])
    guarded.guard.flush()
    left_out = [e.step for e in guarded.guard.history.recent if e.skipped]
    assert left_out == list(range(left_out[0], 91))  # until the loss of what was put back is as it was
    assert f"{90 - 50 + 1} batches skipped" in told


def test_a_level_that_stays_is_taken_for_a_new_one() -> None:
    model = make()
    guarded = wrapped(model)
    train(model, guarded, range(200), fault=lambda step: 50.0 if step >= 60 else None)
    assert len(guarded.guard.recoveries) == 2 and "a new level" in guarded.guard.recoveries[1]
    guarded.guard.flush()
    assert not any(e.skipped for e in list(guarded.guard.history.recent)[-50:])


def test_nan_batches_roll_nothing_back_until_there_are_too_many(way: str) -> None:
    model = make()
    guarded = wrapped(model, max_consecutive_skips=15)
    train(model, guarded, range(75), fault=lambda step: math.nan if 60 <= step < 70 else None)
    assert guarded.guard.recoveries == []
    train(model, guarded, range(75, 120), fault=lambda step: math.nan if step < 95 else None)  # no error
    (told,) = guarded.guard.recoveries
    assert "15 steps in a row were skipped" in told


@pytest.mark.parametrize("closure", [False, True])
def test_it_gives_up_at_the_best(closure: bool) -> None:
    model = make()
    guarded = wrapped(model, fastguard.Recovery(every=10, patience=3, quarantine=3, attempts=2))
    train(model, guarded, range(50), closure=closure)

    def fault(step: int) -> None:
        if step % 7 == 0:
            ruin(model)

    with pytest.raises(fastguard.RecoveryFailedError, match="the run did not recover: the loss stood above") as caught:
        train(model, guarded, range(50, 150), fault=fault, closure=closure)
    error = caught.value
    assert len(error.rollbacks) == 2 and error.step is not None and error.step <= 50
    assert "rolled back from" in error.rollbacks[0] and "learning rate x 0.5" in error.rollbacks[1]
    assert float(loss_of(model, 0).detach()) < float(loss_of(make(), 0).detach())
    assert [event["kind"] for event in guarded.guard.history.model.recoveries] == ["rollback", "rollback", "failed"]


def test_attempts_are_counted_across_resumes() -> None:
    model = make()
    settings = fastguard.Recovery(every=10, patience=3, quarantine=3, attempts=1)
    guarded = wrapped(model, settings)
    train(model, guarded, range(80), fault=_ruined(model, 50))
    state = pickle.loads(pickle.dumps(guarded.guard.state_dict()))
    other = make()
    other.load_state_dict(model.state_dict())
    resumed = wrapped(other, settings)
    resumed.load_state_dict(guarded.state_dict())
    resumed.guard.load_state_dict(state)
    with pytest.raises(fastguard.RecoveryFailedError):
        train(other, resumed, range(80, 120), fault=_ruined(other, 90))


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    model = make()
    guarded = wrapped(model)
    train(model, guarded, range(75), fault=_ruined(model, 60))
    state, weights, inner = (
        guarded.guard.state_dict(),
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(guarded.state_dict()),
    )
    other = make()
    other.load_state_dict(weights)
    resumed = wrapped(other)
    resumed.load_state_dict(inner)
    resumed.guard.load_state_dict(copy.deepcopy(state))
    assert train(model, guarded, range(75, 110)) == train(other, resumed, range(75, 110))
    assert guarded.guard.recoveries == resumed.guard.recoveries
    assert guarded.guard._rescue.ladder.state_dict() == resumed.guard._rescue.ladder.state_dict()


@pytest.mark.parametrize("broken", [{"ladder": {}}, {"ladder": None, "events": []}, 3])
def test_a_broken_state_changes_nothing(broken: Any) -> None:
    guarded = wrapped(make())
    state = guarded.guard.state_dict()
    with pytest.raises(ValueError, match="recovery"):
        guarded.guard.load_state_dict({**state, "recovery": broken})


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1.0 + 0.01 * step)),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 150),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=20), torch.optim.lr_scheduler.CosineAnnealingLR(o, 130)],
        [20],
    ),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=150),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 30, 0.8),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.99),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=3, factor=0.9),
}


class _Recording(torch.optim.AdamW):
    """Writes down which learning rates its step really has."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.used: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.used.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step", "ignore:.*lr_scheduler.step.*before.*")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tensor", [False, pytest.param(True, marks=slow)])
def test_no_schedule_sees_the_slower_learning_rate(name: str, tensor: bool) -> None:
    model, other = make(), make()
    lr: Any = torch.tensor(0.01) if tensor else 0.01
    optimizer = wrapped(
        model,
        fastguard.Recovery(every=10, patience=3, quarantine=3, ramp=10),
        make_optimizer=lambda params: _Recording(params, lr=lr.clone() if tensor else lr),
    )
    plain = torch.optim.AdamW(other.parameters(), lr=lr.clone() if tensor else lr)
    schedulers = SCHEDULES[name](optimizer), SCHEDULES[name](plain)
    seen, used = [], optimizer.used
    for step in range(80):
        if step in (40, 55):
            ruin(model)
        train(model, optimizer, [step])
        plain.step()
        for one in schedulers:
            one.step(*([1.0 + (step // 20) * 0.1] if name == "ReduceLROnPlateau" else []))
        seen.append(float(optimizer.param_groups[0]["lr"]))
        assert seen[-1] == float(plain.param_groups[0]["lr"])
    assert len(optimizer.guard.recoveries) == 2
    slow = [u / s for u, s in zip(used[1:], [seen[i] for i, e in enumerate(_taken(optimizer)) if e][: len(used) - 1])]
    assert min(slow) < 0.8 and used[-1] == pytest.approx(seen[-2], rel=1e-6)


def _taken(optimizer: Any) -> list[bool]:
    optimizer.guard.flush()
    return [not e.skipped for e in optimizer.guard.history.recent]


def test_the_learning_rate_is_back_where_a_step_raises() -> None:
    model = make()

    class Raising(torch.optim.SGD):
        fail = False

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise OSError("no")
            return super().step(closure)

    guarded = wrapped(model, make_optimizer=lambda params: Raising(params, lr=0.05))
    guarded.guard._rescue.ladder._factor, guarded.guard._rescue.ladder._start = 0.5, 0
    train(model, guarded, range(3))
    Raising.fail = True
    with pytest.raises(OSError, match="no"):
        train(model, guarded, [3])
    assert guarded.param_groups[0]["lr"] == 0.05


def test_under_a_scaler_whose_scale_goes_on() -> None:
    model = make()
    guarded = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=20)
    for step in range(90):
        if step == 60:
            ruin(model)
        guarded.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(guarded)
        scaler.step(guarded)
        scaler.update()
        guarded.guard.observe(loss=loss)
    assert len(guarded.guard.recoveries) == 1 and scaler.get_scale() >= 1024.0 * 8
    assert not {"grad_scale", "found_inf"} & {k for k, v in vars(guarded).items() if v is not None}


def test_several_optimizers_go_back_together(way: str) -> None:
    model = make(norm=False)
    pair = [torch.optim.AdamW(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.05)]
    fastguard.wrap(pair, model, recovery=QUICK, check_every=0)
    guard = pair[0].guard
    losses = []
    for step in range(100):
        if step == 60:
            ruin(model)
        model.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in pair:
            optimizer.step()
        guard.observe(loss=loss)
        losses.append(float(loss.detach()))
    assert len(guard.recoveries) == 1 and max(losses[-20:]) < 2.0 * max(losses[40:60])


def test_accumulated_gradients_of_the_abandoned_model_are_not_taken() -> None:
    model = make()
    guarded = wrapped(model)
    for step in range(80):
        if step == 60:
            ruin(model)
        guarded.zero_grad()
        for micro in range(3):
            loss = loss_of(model, 3 * step + micro) / 3
            loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        told = len(guarded.guard.recoveries)
        guarded.step()
        guarded.guard.observe(loss=loss)
        if len(guarded.guard.recoveries) > told:
            kept = guarded.guard._rescue._keeper.snapshots.best()
            assert kept is not None
            now = [p.detach().clone() for p in model.parameters()]
            assert not any(torch.equal(a, b) for a, b in zip(now, before, strict=True))
    assert len(guarded.guard.recoveries) == 1


def test_the_random_state_and_what_is_given_go_back_on_demand() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    for replay in (False, True):
        model, counter = make(), Counter()
        settings = fastguard.Recovery(every=10, patience=3, quarantine=4, replay=replay, state=[counter])
        guarded = wrapped(model, settings)
        drawn: dict[int, float] = {}
        for step in range(70):
            if step == 60:
                with torch.random.fork_rng():
                    ruin(model)
            was = counter.count
            train(model, guarded, [step])
            if guarded.guard.recoveries and len(guarded.guard.recoveries) == 1 and counter.count < was:
                assert counter.count == 49  # as it was when the 49th step was over
                assert (float(torch.rand(())) == drawn[50]) is replay
                break
            counter.count += 1
            drawn[step + 1] = float(torch.rand(()))
        else:
            pytest.fail("it did not go back")


def test_a_policy_with_a_memory_goes_back_with_the_run() -> None:
    class Remembers(fastguard.guard.policies.ClipPolicy):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def coefficient(self, norm: float) -> float:
            self.norms.append(norm)
            return 1.0

        def state_dict(self) -> dict[str, Any]:
            return {"norms": self.norms}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.norms = state["norms"]

    model, policy = make(), Remembers()
    guarded = wrapped(model, clip=policy)
    train(model, guarded, range(64), fault=_ruined(model, 60))
    assert len(guarded.guard.recoveries) == 1 and len(policy.norms) <= 52
    assert guarded.guard.clip is policy


def test_the_gradients_are_clipped_to_their_median_on_the_way_down() -> None:
    model = make()
    guarded = wrapped(model, fastguard.Recovery(every=10, patience=6))
    train(model, guarded, range(64), fault=lambda step: 30.0 if step >= 60 else None)
    guarded.guard.flush()
    entries = list(guarded.guard.history.recent)
    assert not any(e.clip_coef != 1.0 for e in entries[:63]) and entries[63].clip_coef < 0.1
    assert guarded.guard.clip is None


def test_paused_steps_and_other_ways_to_leave() -> None:
    model = make()
    guarded = wrapped(model)
    train(model, guarded, range(30))
    with guarded.guard.paused():
        ruin(model)
        for step in range(10):
            guarded.zero_grad()
            loss_of(model, step).backward()
            guarded.step()
    assert guarded.guard.recoveries == []
    guarded.guard.detach()
    train(model, guarded, range(3))


def test_a_report_tells_and_a_log_too(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    sink = fastguard.JsonlSink(tmp_path / "log.jsonl")
    with caplog.at_level(logging.WARNING, "fastguard"):
        guarded = wrapped(model, sinks=[sink])
        train(model, guarded, range(80), fault=_ruined(model, 60))
    assert "rolled back from 6" in caplog.text
    report = guarded.guard.report()
    (finding,) = [f for f in report.findings if f.rule == "rolled-back"]
    assert "rolled back from" in str(report) and "batches skipped" in finding.summary
    guarded.guard.close()
    loaded = fastguard.TrainingHistory.from_jsonl(tmp_path / "log.jsonl")
    assert loaded.model.recoveries == guarded.guard.history.model.recoveries


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "`every`"),
        ({"keep": 1}, "`keep`"),
        ({"attempts": True}, "`attempts`"),
        ({"lr_factor": 0.0}, "`lr_factor`"),
        ({"spread": math.nan}, "`spread`"),
        ({"quarantine": -1}, "`quarantine`"),
        ({"state": 3}, "`state`"),
    ],
)
def test_settings_out_of_range(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fastguard.Recovery(**settings)


def test_what_is_no_recovery() -> None:
    model = make()
    with pytest.raises(TypeError, match="`recovery` must be"):
        fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, recovery="yes")  # type: ignore[type-var]


class Flips(nn.Module):
    """Flips bits of the gradient that passes through, once it is told to: a fault of the machine."""

    flips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(self._flip)
        return x

    def _flip(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self.flips:
            return None
        self.flips = False
        flipped = gradient.clone()
        bits = flipped.view(torch.int32)
        bits[0, 0] = 0x7F800000  # exponent: all ones
        return flipped


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("machine", [False, True])
def test_a_fault_of_the_machine_is_told_from_bad_data(automatic: bool, machine: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Flips(), nn.Linear(8, 3))
    flips: Any = model[3]
    guarded = wrapped(model, fastguard.Recovery(recompute=True))
    for step in range(6):
        x, y = batch(step)
        if step == 4:
            flips.flips = machine
            x[0, 0] = x[0, 0] if machine else math.nan

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            guarded.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss.detach()

        if automatic:
            guarded.step(closure)
        else:
            closure()
            guarded.step()
        if step == 4:
            assert guarded.guard.last.skipped
            before = [p.grad.clone() for p in model.parameters()]
            buffers, random = [b.clone() for b in model.buffers()], torch.get_rng_state()
            if not automatic:
                found = guarded.guard.recompute(closure)
                assert found.verdict == ("machine" if machine else "data or model") and found.is_finite is machine
                assert found.step == 4 and bool(found.tensors) is machine
            for p, gradient in zip(model.parameters(), before, strict=True):
                torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0, equal_nan=True)
            assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
            assert torch.equal(torch.get_rng_state(), random)
    (told,) = guarded.guard.recoveries
    assert ("a transient fault of the machine" in told) is machine
    rules = [f.rule for f in guarded.guard.report().findings]
    assert ("hardware-fault" in rules) is machine


def test_when_nothing_can_be_recomputed() -> None:
    model = make()
    guarded = wrapped(model)
    with pytest.raises(RuntimeError, match="must have been asked for"):
        guarded.guard.recompute(lambda: None)
    other = wrapped(make(), fastguard.Recovery(recompute=True))
    with pytest.raises(RuntimeError, match="must follow a step that was skipped"):
        other.guard.recompute(lambda: None)


def test_a_model_without_losses_is_left_alone_but_for_what_is_not_finite() -> None:
    model = make()
    guarded = wrapped(model)
    for step in range(80):
        if step == 40:
            _nan(model, 40)(40)
        guarded.zero_grad()
        loss_of(model, step).backward()
        guarded.step()
    assert len(guarded.guard.recoveries) == 1
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdamW-fused"])
def test_compiled_steps(name: str) -> None:
    found = {}
    for guarded in (False, True):
        torch._dynamo.reset()
        model = make()
        optimizer: Any = HEALTHY[name](model.parameters())
        if guarded:
            optimizer = fastguard.wrap(optimizer, model, recovery=QUICK, check_every=0)
        step = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="eager")
        losses = []
        for number in range(100):
            if guarded and number in (60, 75):
                found[number] = losses[-1]
                ruin(model)
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            step()
            if guarded:
                optimizer.guard.observe(loss=loss)
            losses.append(float(loss.detach()))
        found[guarded] = losses
    assert found[False][:60] == found[True][:60]
    assert len(optimizer.guard.recoveries) == 2 and "learning rate x 0.5" in optimizer.guard.recoveries[1]
    assert max(found[True][-8:]) < 2.0 * max(found[True][40:60])
    assert optimizer.param_groups[0]["lr"] in (0.01, 0.05)
    torch._dynamo.reset()


def test_what_rules_find_in_losses_of_the_model_that_was_given_up_is_no_reason_again() -> None:
    model = make(norm=False)
    recovery = fastguard.Recovery(every=10, patience=3, quarantine=4, window=400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = fastguard.wrap(optimizer, model, recovery=recovery, check_every=50)

    def fault(step: int) -> None:
        if step == 60:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(300.0)

    train(model, optimizer, range(160), fault=fault)
    told = optimizer.guard.recoveries
    assert len(told) == 1 and told[0].startswith("rolled back from 6")
    assert any(finding.rule == "loss-explosion" for finding in optimizer.guard.report().findings)
