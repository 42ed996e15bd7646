"""wrap(..., weights=...): the sampled steps of a guarded run."""

import math

import pytest
import torch
from guard_helpers import guarded_model, loss_at, make_model

import fastguard
from fastguard.observers.weights import WeightSampler


def copies(model):
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def differences(model, before):
    return {name: float((p.detach().double() - before[name]).norm()) for name, p in model.named_parameters()}


def assert_updates(record, truth):
    found = {w.name: w.update_norm for w in record.weights}
    assert found == {name: pytest.approx(t, rel=1e-4, abs=1e-7) for name, t in truth.items()}
    assert all(w.grad_norm == record.tensors[w.name].norm for w in record.weights)


MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_sampled_records_of_a_clipped_run(make, scaled):
    model = make_model()
    optimizer = fastguard.wrap(make(model.parameters()), model, max_norm=0.05, weights=3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    for step in range(7):
        optimizer.zero_grad()
        before = copies(model)
        scaler.scale(loss_at(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        record = optimizer.guard.last
        assert record.step == step and record.clipped
        if step % 3:
            assert record.weights == ()
        else:
            assert_updates(record, differences(model, before))
            assert {w.name: w.norm for w in record.weights} == {
                name: pytest.approx(float(b.norm()), rel=1e-6) for name, b in before.items()
            }
        schedule.step()


def test_a_skipped_step_has_no_update_and_the_next_one_makes_up_for_it():
    model = make_model()
    optimizer = fastguard.wrap(torch.optim.Adam(model.parameters()), model, weights={"every": 4})
    for step in range(8):
        optimizer.zero_grad()
        before = copies(model)
        loss_at(model, step).backward()
        if step == 4:
            model[0].bias.grad[0] = math.nan
        optimizer.step()
        record = optimizer.guard.last
        assert [bool(record.weights), record.skipped] == [step in (0, 4, 5), step == 4]
        if step == 4:
            assert all(w.update_norm is None for w in record.weights)
            assert math.isnan(next(w for w in record.weights if w.name == "0.bias").grad_norm)
        elif record.weights:
            assert_updates(record, differences(model, before))


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.LBFGS])
def test_closures(cls):
    model = make_model()
    optimizer = fastguard.wrap(cls(model.parameters(), lr=0.1), model, weights=1)

    def closure():
        optimizer.zero_grad()
        loss = loss_at(model, 0)
        loss.backward()
        return loss

    for _ in range(2):
        before = copies(model)
        optimizer.step(closure)
        found = {w.name: w.update_norm for w in optimizer.guard.last.weights}
        assert found == {name: pytest.approx(t, rel=1e-4) for name, t in differences(model, before).items()}


def test_several_optimizers_under_one_guard():
    model = make_model()
    both = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.NAdam(model[2].parameters())]
    fastguard.wrap(both, model, weights=2)
    for step in range(4):
        before = copies(model)
        for optimizer in both:
            optimizer.zero_grad()
        loss_at(model, step).backward()
        for optimizer in both if step < 2 else reversed(both):
            optimizer.step()
        record = both[0].guard.last
        assert record.step == step and len(record.weights) == (0 if step % 2 else 4)
        if record.weights:
            assert_updates(record, differences(model, before))


def test_a_parameter_without_a_gradient():
    model = make_model()
    optimizer = fastguard.wrap(torch.optim.Adam(model.parameters()), model, weights=1)
    for step in range(2):
        loss_at(model, step).backward()
        if step:
            model[0].weight.grad = None
        optimizer.step()
    first = optimizer.guard.last.weights[0]
    assert (first.name, first.grad_norm, first.update_norm) == ("0.weight", None, 0.0)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_sampling_changes_no_bit_of_the_run(make):
    models = []
    for weights in (None, 1, {"every": 2}):
        model = make_model()
        optimizer = fastguard.wrap(make(model.parameters()), model, weights=weights)
        for step in range(4):
            optimizer.zero_grad()
            loss_at(model, step).backward()
            optimizer.step()
        models.append(model)
    first, *others = [list(model.parameters()) for model in models]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_step_that_raises_leaves_no_sample_behind():
    model = make_model()
    optimizer = fastguard.wrap(torch.optim.NAdam(model.parameters()), model, weights=1)
    fail = optimizer.register_step_pre_hook(lambda *args: 1 / 0)
    loss_at(model, 0).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    fail.remove()
    before = copies(model)
    optimizer.step()
    assert_updates(optimizer.guard.last, differences(model, before))


def test_a_resumed_run_samples_on_its_schedule():
    model, optimizer = guarded_model(weights=4)
    loss_at(model, 0).backward()
    optimizer.step()
    state = optimizer.guard.state_dict()
    optimizer.guard.detach()
    fastguard.wrap(optimizer, model, weights=4)
    optimizer.guard.load_state_dict(state)
    sampled = []
    for _ in range(8):
        optimizer.step()
        sampled += [optimizer.guard.last.step] if optimizer.guard.last.weights else []
    assert sampled == [4, 8]


def _overhead(optimizer):
    ring = optimizer.guard._run.ring
    return ring.header(ring.newest).overhead_s


def test_what_sampling_costs_is_counted(monkeypatch):
    model, optimizer = guarded_model(weights=1)
    loss_at(model, 0).backward()
    optimizer.step()
    plain = _overhead(optimizer)
    optimizer.guard.flush()
    take = WeightSampler.after
    monkeypatch.setattr(WeightSampler, "after", lambda *args, **kw: (sum(range(10**6)), take(*args, **kw))[1])
    optimizer.step()
    assert _overhead(optimizer) > plain + 5e-3


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (0, ValueError, "`every` must be an integer >= 1, got 0"),
        ("all", TypeError, "`weights` must be True, a number of steps or a dict, got 'all'"),
        ({"often": 3}, TypeError, r"`weights` must have keys among \['backend', 'every'\], got \['often'\]"),
    ],
)
def test_refusals(weights, error, message):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=message):
        fastguard.wrap(optimizer, model, weights=weights)
    assert not optimizer._optimizer_step_pre_hooks
