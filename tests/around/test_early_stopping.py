"""EarlyStopping: patience, what is never the best, putting the best back, rollbacks and resumes."""

import io
import math

import pytest
import torch
from torch import nn

import fastguard
from fastguard import EarlyStopping

MODEL = nn.Linear(1, 1)


def stops_at(stop, values):
    """The number of the check that stopped the run."""
    return next((i for i, value in enumerate(values, 1) if stop(MODEL, value)), None)


@pytest.mark.parametrize(
    ("settings", "values", "check"),
    [
        ({"patience": 1}, [3.0, 2.0, 2.0], 3),  # equal is no better
        ({"patience": 2}, [3.0, 2.0, 2.5, 1.9, 2.0], None),
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.0], 4),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.5], 3),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.4, 2.3], None),
        ({"patience": 1, "mode": "max"}, [0.1, 0.2, 0.2], 3),
        ({"patience": 2, "mode": "max", "min_delta": 0.1}, [0.1, 0.15, 0.19], 3),
        ({"patience": 2}, [-1.0, -2.0, -1.5, -1.9], 4),
    ],
)
def test_patience_counts_checks_without_a_better_value(settings, values, check):
    assert stops_at(EarlyStopping(**settings), values) == check


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("values", [[bad] for bad in BAD] + [[1.0, 0.5, bad] for bad in BAD], ids=str)
def test_trap_27_it_stops_at_once_where_a_value_is_not_finite(values):
    stop = EarlyStopping(9)
    assert stops_at(stop, values) == len(values) and stop.reason == f"the value of check {len(values)} is {values[-1]}"


def test_once_stopped_it_stays_so():
    stop = EarlyStopping(1)
    assert [stop(MODEL, v) for v in (1.0, 2.0, 0.1)] == [False, True, True] and stop.num_checks == 2


def make_guarded():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
    return model, fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)


def fill(model, value):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)


@pytest.mark.parametrize("values", [[3.0, 1.0, 2.0, 2.0], [3.0, 1.0, math.nan]], ids=["patience", "nan"])
@pytest.mark.parametrize("what", ["guard", "optimizer", "model"])
def test_the_best_model_is_put_back_in_place(values, what):
    model, optimizer = make_guarded()
    given = {"guard": optimizer.guard, "optimizer": optimizer, "model": model}[what]
    stop = EarlyStopping(2, restore_best=True)
    places = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    for i, value in enumerate(values):
        fill(model, i)
        assert stop(given, value) is (i == len(values) - 1)
    for tensor in (*model.parameters(), *model.buffers()):
        assert (tensor == 1).all()  # those of the second check, non-persistent buffers too
    assert places == [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    fill(model, 7)  # a model that never was good is left alone
    assert EarlyStopping(1, restore_best=True)(model, math.nan) and (model[0].weight == 7).all()


def test_trap_27_after_a_rollback_patience_begins_anew():
    _, optimizer = make_guarded()

    def note(*kinds):
        events = [{"kind": kind, "reason": "", "step": 2, "to": 1, "num_batches": 1} for kind in kinds]
        optimizer.guard.history.note_model(recoveries=events)

    stop = EarlyStopping(2)
    assert [stop(optimizer.guard, v) for v in (1.0, 5.0)] == [False, False]
    note("new-level")
    assert stop.num_bad == 1 and not stop(optimizer.guard, 0.9) and not stop(optimizer.guard, 5.0)
    note("new-level", "rollback")  # the model of the check before is gone
    assert [stop(optimizer.guard, v) for v in (1.1, 1.2)] == [False, True]
    assert stop.best == 0.9


def test_trap_26_patience_and_best_model_are_resumed():
    model, _ = make_guarded()
    whole, first = EarlyStopping(3, restore_best=True), EarlyStopping(3, restore_best=True)
    values = [3.0, 1.0, 2.0, 2.0, 2.0]
    for i, value in enumerate(values[:3]):
        fill(model, i)
        assert whole(model, value) is first(model, value) is False
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    again = EarlyStopping(3, restore_best=True)
    again.load_state_dict(torch.load(buffer, weights_only=True))
    assert [again(model, v) for v in values[3:]] == [False, True] and (model[0].weight == 1).all()
    assert [whole(model, v) for v in values[3:]] == [False, True] and whole.reason == again.reason
    longer = EarlyStopping(5)
    longer.load_state_dict(whole.state_dict())
    assert not longer.reason and stops_at(longer, [2.0, 2.0]) == 2


def test_what_does_not_suit_is_refused():
    stop = EarlyStopping(1)
    stop(MODEL, 1.0)
    for state, message in (
        ({}, "'best'"),
        ({**stop.state_dict(), "num_bad": -1}, "num_bad"),
        ({**stop.state_dict(), "kept": 1}, "kept"),
        ({**stop.state_dict(), "best": 9.0, "kept": {"w": 1}}, "must be a tensor, got 1 - at `state..kept....w"),
    ):
        with pytest.raises(ValueError, match=message):
            stop.load_state_dict(state)
    assert stop.best == 1.0
    for settings, message in (
        ({"patience": 0}, "`patience` must be an integer >= 1"),
        ({"patience": 1, "mode": "low"}, "`mode` must be"),
        ({"patience": 1, "min_delta": -1.0}, "`min_delta` must be"),
        ({"patience": 1, "min_delta": math.nan}, "`min_delta` must be"),
    ):
        with pytest.raises(ValueError, match=message):
            EarlyStopping(**settings)
    with pytest.raises(ValueError, match="`value` must be"):
        stop(MODEL, "low")
    bare = fastguard.wrap(torch.optim.SGD(MODEL.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="must have a model for restore_best"):
        EarlyStopping(1, restore_best=True)(bare.guard, 1.0)
    with pytest.raises(fastguard.NotGuardedError):
        EarlyStopping(1)(torch.optim.SGD(MODEL.parameters(), lr=0.1), 1.0)
