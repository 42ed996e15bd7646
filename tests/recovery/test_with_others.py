"""Going back beside scalers, schedulers, several optimizers, random states and clip policies."""

import math

import pytest
import torch
from recovery_helpers import QUICK, loss_of, make, ruin, train, wrapped

import fastguard

slow = pytest.mark.slow


def test_under_a_scaler_whose_scale_goes_on():
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


def test_several_optimizers_go_back_together(way):
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


def test_what_is_given_goes_back():
    class Counter:
        def __init__(self):
            self.count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    model, counter = make(), Counter()
    guarded = wrapped(model, fastguard.Recovery(every=10, patience=3, quarantine=4, state=[counter]))
    for step in range(70):
        if step == 60:
            ruin(model)
        was = counter.count
        train(model, guarded, [step])
        if guarded.guard.recoveries and len(guarded.guard.recoveries) == 1 and counter.count < was:
            assert counter.count == 49  # as it was when the 49th step was over
            break
        counter.count += 1
    else:
        pytest.fail("it did not go back")


def test_a_policy_with_a_memory_goes_back_with_the_run():
    class Remembers(fastguard.clip.ClipPolicy):
        def __init__(self):
            self.norms = []

        def limits(self):
            return math.inf, math.inf

        def observe(self, norms, loss=None):
            self.norms.append(norms)

        def state_dict(self):
            return {"norms": self.norms}

        def load_state_dict(self, state):
            self.norms = state["norms"]

    model, policy = make(), Remembers()
    guarded = wrapped(model, clip=policy)
    train(model, guarded, range(64), fault=lambda step: ruin(model) if step == 60 else None)
    assert len(guarded.guard.recoveries) == 1 and len(policy.norms) <= 52
    assert guarded.guard.clip is policy


SCHEDULES = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1.0 + 0.01 * step)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=150),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=3, factor=0.9),
}


class _Recording(torch.optim.AdamW):
    """Writes down which learning rates its step really has."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.used = []

    def step(self, closure=None):
        self.used.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step", "ignore:.*lr_scheduler.step.*before.*")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tensor", [False, pytest.param(True, marks=slow)])
def test_no_schedule_sees_the_slower_learning_rate(name, tensor):
    model, other = make(), make()
    lr = torch.tensor(0.01) if tensor else 0.01
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


def _taken(optimizer):
    optimizer.guard.flush()
    return [not e.skipped for e in optimizer.guard.history.recent]


def test_the_learning_rate_is_back_where_a_step_raises():
    model = make()

    class Raising(torch.optim.SGD):
        fail = False

        def step(self, closure=None):
            if self.fail:
                raise OSError("no")
            return super().step(closure)

    guarded = wrapped(model, make_optimizer=lambda params: Raising(params, lr=0.05))
    guarded.guard._rescue.ladder.cut = 0.5
    train(model, guarded, range(3))
    Raising.fail = True
    with pytest.raises(OSError, match="no"):
        train(model, guarded, [3])
    assert guarded.param_groups[0]["lr"] == 0.05


def test_what_recovery_has_done_is_in_a_checkpoint(tmp_path):
    model = make()
    guarded = wrapped(model)
    train(model, guarded, range(100), fault=lambda step: ruin(model) if step == 60 else None)
    assert len(guarded.guard.recoveries) == 1
    fastguard.Checkpoints(tmp_path).save(guarded.guard, 100)
    other = make()
    again = wrapped(other)
    assert fastguard.Checkpoints(tmp_path).load(again.guard) == 100
    assert again.guard.recoveries == guarded.guard.recoveries
