"""A run that goes wrong is put back and goes on; one that does not is left alone, to the bit."""

import copy
import logging
import math
import pickle

import pytest
import torch
from guard_helpers import assert_identical, snapshot
from recovery_helpers import QUICK, batch, loss_of, make, ruin, train, wrapped

import fastguard

slow = pytest.mark.slow


HEALTHY = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("closure", [False, pytest.param(True, marks=slow)])
def test_a_healthy_run_is_the_same_to_the_bit(way, name, closure):
    model, other = make(), make()
    guarded = wrapped(model, make_optimizer=HEALTHY[name], max_norm=1.0)
    plain = fastguard.wrap(HEALTHY[name](other.parameters()), other, max_norm=1.0)
    closure = closure or name == "LBFGS"
    steps = [7] * 30 if name == "LBFGS" else range(60)  # which needs one loss to go down
    assert train(model, guarded, steps, closure=closure) == train(other, plain, steps, closure=closure)
    assert_identical(snapshot(model, guarded), snapshot(other, plain))
    assert guarded.guard.recoveries == []


def _ruined(model, at):
    return lambda step: ruin(model) if step == at else None


def _nan(model, at):
    def fault(step):
        if step == at:
            with torch.no_grad():
                next(model.parameters())[0, 0] = math.nan

    return fault


@pytest.mark.parametrize("name", ["AdamW", pytest.param("AdamW-fused", marks=slow), pytest.param("SGD", marks=slow)])
@pytest.mark.parametrize("fault", [_ruined, _nan])
@pytest.mark.parametrize("closure", [False, True])
def test_ruined_parameters_are_put_back(way, name, fault, closure):
    model = make()
    guarded = wrapped(model, make_optimizer=HEALTHY[name])
    losses = train(model, guarded, range(100), fault=fault(model, 60), closure=closure)
    (told,) = guarded.guard.recoveries
    assert "to 50 because" in told and ("not finite" in told if fault is _nan else "the loss stood above" in told)
    assert max(losses[-20:]) < 2.0 * max(losses[40:60]) and min(losses[60:70]) != losses[59]
    assert guarded.param_groups[0]["lr"] in (0.01, 0.05)


@pytest.mark.parametrize("where", ["host", "device"])
def test_the_very_state_comes_back_and_the_data_go_on(where, request):
    if where == "device":
        request.getfixturevalue("device")
    model = make()
    guarded = wrapped(model)
    kept = {}
    addresses = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]

    def fault(step):
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
    assert guarded.guard._run.waits is (where == "host")


def test_a_bad_block_of_data_is_sat_out():
    model = make()
    guarded = wrapped(model)
    losses = train(model, guarded, range(120), fault=lambda step: 50.0 if 60 <= step < 90 else None)
    (told,) = guarded.guard.recoveries
    assert max(losses[90:]) < 2.0 * max(losses[40:60])
    guarded.guard.flush()
    left_out = [e.step for e in guarded.guard.history.recent if e.skipped]
    assert left_out == list(range(left_out[0], 91))  # until the loss of what was put back is as it was
    assert f"{90 - 50 + 1} batches skipped" in told


def test_a_level_that_stays_is_taken_for_a_new_one():
    model = make()
    guarded = wrapped(model)
    train(model, guarded, range(200), fault=lambda step: 50.0 if step >= 60 else None)
    assert len(guarded.guard.recoveries) == 2 and "a new level" in guarded.guard.recoveries[1]
    guarded.guard.flush()
    assert not any(e.skipped for e in list(guarded.guard.history.recent)[-50:])


def test_nan_batches_roll_nothing_back_until_there_are_too_many(way):
    model = make()
    guarded = wrapped(model, max_consecutive_skips=15)
    train(model, guarded, range(75), fault=lambda step: math.nan if 60 <= step < 70 else None)
    assert guarded.guard.recoveries == []
    train(model, guarded, range(75, 120), fault=lambda step: math.nan if step < 95 else None)  # no error
    (told,) = guarded.guard.recoveries
    assert "15 steps in a row were skipped" in told


@pytest.mark.parametrize("closure", [False, True])
def test_it_gives_up_at_the_best(closure):
    model = make()
    guarded = wrapped(model, fastguard.Recovery(every=10, patience=3, quarantine=3, attempts=2))
    train(model, guarded, range(50), closure=closure)

    def fault(step):
        if step % 7 == 0:
            ruin(model)

    with pytest.raises(fastguard.RecoveryFailedError, match="the run did not recover: the loss stood above") as caught:
        train(model, guarded, range(50, 150), fault=fault, closure=closure)
    error = caught.value
    assert len(error.rollbacks) == 2 and error.step is not None and error.step <= 50
    assert "rolled back from" in error.rollbacks[0] and "learning rate x 0.5" in error.rollbacks[1]
    assert float(loss_of(model, 0).detach()) < float(loss_of(make(), 0).detach())
    assert [event["kind"] for event in guarded.guard.history.model.recoveries] == ["rollback", "rollback", "failed"]


def _resumed(model, guarded, settings=QUICK):
    """Another model and optimizer that go on from a copy of the state of these."""
    other = make()
    other.load_state_dict(model.state_dict())
    resumed = wrapped(other, settings)
    resumed.load_state_dict(copy.deepcopy(guarded.state_dict()))
    resumed.guard.load_state_dict(pickle.loads(pickle.dumps(guarded.guard.state_dict())))
    return other, resumed


def test_a_resumed_run_goes_on_to_the_bit():
    model = make()
    guarded = wrapped(model)
    train(model, guarded, range(75), fault=_ruined(model, 60))
    other, resumed = _resumed(model, guarded)
    assert train(model, guarded, range(75, 110)) == train(other, resumed, range(75, 110))
    assert guarded.guard.recoveries == resumed.guard.recoveries
    assert guarded.guard._rescue.ladder.state() == resumed.guard._rescue.ladder.state()


@pytest.mark.parametrize("broken", [{"ladder": {}}, {"ladder": None, "events": []}, 3])
def test_a_broken_state_changes_nothing(broken):
    guarded = wrapped(make())
    state = guarded.guard.state_dict()
    with pytest.raises(ValueError, match="recovery"):
        guarded.guard.load_state_dict({**state, "recovery": broken})


def test_a_report_tells_and_a_log_too(tmp_path, caplog):
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
        ({"quarantine": -1}, "`quarantine`"),
        ({"state": 3}, "`state`"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        fastguard.Recovery(**settings)
    model = make()
    with pytest.raises(TypeError, match="`recovery` must be"):
        fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, recovery="yes")


@slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdamW-fused"])
def test_compiled_steps(name):
    found = {}
    for guarded in (False, True):
        torch._dynamo.reset()
        model = make()
        optimizer = HEALTHY[name](model.parameters())
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


def test_a_statistic_that_overflows_at_a_step_that_is_taken_is_found_at_the_next_snapshot():
    model = make(dtype=torch.float16)
    optimizer = wrapped(model, make_optimizer=lambda params: torch.optim.SGD(params, lr=1e-3))
    for step in range(45):
        x, y = batch(step)
        loss = (model((2000 * x if step == 25 else x).half()) - y.half()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.guard.observe(loss=loss)
        if step == 25:
            assert optimizer.guard.history.num_skipped == 0 and not model[1].running_var.isfinite().all()
    assert "buffers are not finite" in optimizer.guard.recoveries[0]
    assert all(buffer.isfinite().all() for buffer in model.buffers())
