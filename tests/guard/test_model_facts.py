"""What the rules learn of model and optimizers beside the gradients, and of gradients that are never cleared."""

import copy
import gc
import itertools
import logging
import math

import pytest
import torch
from guard_helpers import guarded_model, loss_at, make_model, notes_of, take_step
from torch import nn

import fastguard
from fastguard.diagnosis.checkup import GLANCE_EVERY


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_how_the_weights_began():
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 50), torch.nn.LayerNorm(50))
    torch.nn.init.normal_(model[1].weight, std=0.25)
    model.append(torch.nn.utils.weight_norm(torch.nn.Conv1d(8, 16, 3)))
    notes = notes_of(fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model))
    assert notes.names[:5] == ("0.weight", "1.weight", "1.bias", "2.weight", "2.bias")
    assert notes.initialization.keys() == {"1.weight", "3.weight_v"}  # lookups, sizes, biases, norms are no matrices
    actual, expected = notes.initialization["1.weight"]
    assert actual == pytest.approx(float(model[1].weight.detach().double().std(correction=0)), rel=1e-6)
    assert expected == math.sqrt(2 / 8)


def test_how_the_weights_have_grown():
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 1))
    model.register_parameter("table", nn.Parameter(torch.ones(4, 4)))
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0), model, check_every=10)
    begin = {name: float(p.detach().norm()) for name, p in model.named_parameters()}
    for step in range(150):
        optimizer.zero_grad()
        (model(torch.arange(9)).sum() * 0.0 + model.table.sum() * 0.0).backward()
        optimizer.step()
        if step == 98:
            assert notes_of(optimizer).weight_growth is None  # it is first read at step 100
    assert 0.9**110 < notes_of(optimizer).weight_growth <= 0.9**99
    optimizer.guard.close()
    ends = [float(p.detach().norm()) / begin[name] for name, p in model.named_parameters() if p.dim() > 1]
    assert notes_of(optimizer).weight_growth == pytest.approx(sorted(ends)[1], rel=1e-4)


def test_frozen_missing_and_standing_still():
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    params[0].requires_grad_(False)
    groups = [{"params": params[:2]}, {"params": params[2:3], "lr": 0.0}]
    optimizer = fastguard.wrap(torch.optim.SGD(groups, lr=0.1), model)
    notes = notes_of(optimizer)
    assert notes.without_gradient == (names[0],)
    assert notes.zero_lr == (names[2],)
    assert notes.not_in_optimizer == tuple(names[3:])
    optimizer.add_param_group({"params": params[3:]})
    optimizer.param_groups[1]["lr"] = 0.1
    params[0].requires_grad_(True)
    notes = notes_of(optimizer)
    assert (notes.without_gradient, notes.zero_lr, notes.not_in_optimizer) == ((), (), ())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5), 0.05),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2), 0.02),
        (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5), 0.0),  # a part of the gradient, which is normalised
        (lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True), 0.05),
    ],
)
def test_decay(make, expected):
    model = make_model()
    notes = notes_of(fastguard.wrap(make(model.parameters()), model))
    assert notes.decay_per_step == pytest.approx(expected)


def test_schedulers_and_dropout():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.9))
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    notes = notes_of(optimizer)
    assert (notes.has_scheduler, notes.initial_lr, notes.dropout) == (False, None, {"1": 0.9})
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # made after wrap
    notes = notes_of(optimizer)
    assert (notes.has_scheduler, notes.initial_lr) == (True, 0.1)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.param_groups[0]["initial_lr"] = 0.4  # as a scheduler does that is not torch's
    notes = notes_of(optimizer)
    assert (notes.has_scheduler, notes.initial_lr) == (False, 0.4)


@pytest.mark.parametrize("passes", [1, 3])
def test_backward_passes_of_a_step_are_counted(passes):
    model, optimizer = guarded_model()
    first = next(model.parameters())
    assert notes_of(optimizer).backward_per_step is None
    for _ in range(4):
        assert first._post_accumulate_grad_hooks
        for _ in range(passes):
            model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert notes_of(optimizer).backward_per_step == passes
    for _ in range(17):
        assert len(first._post_accumulate_grad_hooks) == len(first._backward_hooks) == 1
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    assert not first._post_accumulate_grad_hooks and not first._backward_hooks
    assert notes_of(optimizer).backward_per_step == passes


def frozen_run(check_every, num_steps, caplog):
    model = make_model()
    list(model.parameters())[2].requires_grad_(False)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model, check_every=check_every)
    with caplog.at_level(logging.WARNING, "fastguard"):
        for step in range(num_steps):
            take_step(model, optimizer, step)
    return optimizer, [r.getMessage().split()[0] for r in caplog.records if "untrained-parameters" in r.getMessage()]


@pytest.mark.parametrize(
    ("check_every", "num_steps", "told"), [(None, 51, 1), (5, 5, 1), (5, 30, 1), (5, 4, 0), (0, 120, 0)]
)
def test_a_finding_is_told_once(check_every, num_steps, told, caplog):
    optimizer, messages = frozen_run(check_every, num_steps, caplog)
    assert len(messages) == told
    assert any(f.rule == "untrained-parameters" for f in optimizer.guard.report().findings)


def test_kinds_of_modules_and_dtypes():
    normed = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
    with pytest.warns(DeprecationWarning, match="jit"):
        script = torch.jit.trace(torch.nn.Linear(4, 4), torch.ones(1, 4))
    layers = (torch.nn.Linear(4, 4), torch.nn.ReLU(), normed, torch.nn.ReLU(), torch.nn.Softmax(-1), script)
    model = torch.nn.Sequential(*layers, torch.nn.ModuleList([torch.nn.Linear(4, 2).to(torch.bfloat16)]))
    notes = notes_of(fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model))
    assert notes.module_kinds == {"Linear": 4, "ReLU": 2, "Softmax": 1}
    assert notes.dtypes == ("float32", "bfloat16")
    assert notes_of(fastguard.wrap(torch.optim.SGD(torch.nn.Linear(2, 2).double().parameters()))).dtypes == ("float64",)


def test_settings_of_the_optimizers():
    model = make_model()
    weights, biases = (list(model.parameters())[i::2] for i in range(2))
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.5}]
    optimizer = fastguard.wrap(torch.optim.AdamW(groups, lr=0.1, eps=1e-6, maximize=True), model)
    first, second = notes_of(optimizer).optimizer_settings
    assert first == {
        **{"kind": "AdamW", "lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.01, "amsgrad": False},
        **{"maximize": True, "num_parameters": 6 * 8 + 8 * 4},
    }
    assert (second["lr"], second["weight_decay"], second["num_parameters"]) == (0.5, 0.0, 8 + 4)
    changes = optimizer.guard.history.model.num_changes
    optimizer.param_groups[0]["lr"] = 0.01  # as a schedule does at every step: no news
    assert notes_of(optimizer).num_changes == changes
    optimizer.param_groups[1]["betas"] = (0.5, 0.9)
    first, second = notes_of(optimizer).optimizer_settings
    assert (first["lr"], second["betas"]) == (0.01, [0.5, 0.9])


def test_scaler_and_clip_limit():
    model, optimizer = guarded_model(max_norm=0.5)
    assert (notes_of(optimizer).has_scaler, notes_of(optimizer).clip_limit) == (None, 0.5)
    take_step(model, optimizer, 0)
    assert notes_of(optimizer).has_scaler is False
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert notes_of(optimizer).has_scaler is True
    assert notes_of(fastguard.wrap(torch.optim.SGD(make_model().parameters()))).clip_limit is None


@pytest.mark.parametrize("objective", ["minimise", "game", "reward"])
def test_the_objective_is_told(objective):
    _, optimizer = guarded_model(torch.optim.SGD, objective=objective)
    assert notes_of(optimizer).objective == objective
    state = optimizer.guard.state_dict()
    resumed = fastguard.wrap(torch.optim.SGD(make_model().parameters()), objective=None)
    resumed.guard.load_state_dict(state)
    assert notes_of(resumed).objective == objective  # as before; what is told anew goes first
    other = fastguard.wrap(torch.optim.SGD(make_model().parameters()), objective="minimise")
    other.guard.load_state_dict(state)
    assert notes_of(other).objective == "minimise"


def test_what_cannot_be_read_is_left_out():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LazyLinear(3), torch.nn.Linear(4, 4, device="meta"))
    notes = notes_of(fastguard.wrap(torch.optim.SGD(model[0].parameters(), lr=0.1), model))
    assert notes.initialization.keys() == {"0.weight"}
    assert set(notes.not_in_optimizer) == {"1.weight", "1.bias", "2.weight", "2.bias"}


def left_of(guard):
    guard.report()
    notes = guard.history.model
    return notes.num_left_gradients, notes.num_watched_backwards


def guarded(model, make=torch.optim.SGD, **settings):
    return fastguard.wrap(make(model.parameters(), lr=1e-3), model, **settings)


def run(model, optimizer, before, after, num_steps, num_passes=1):
    for number in range(num_steps):
        before(optimizer)
        for _ in range(num_passes):
            loss_at(model, number).backward()
        optimizer.step()
        after(optimizer)


def nothing(optimizer):
    pass


def zero(optimizer):
    optimizer.zero_grad(set_to_none=False)


def by_hand(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad = torch.zeros_like(p.grad)


set_to_none = torch.optim.Optimizer.zero_grad
CLEARINGS = [set_to_none, zero, by_hand]


@pytest.mark.parametrize("clear", CLEARINGS)
@pytest.mark.parametrize("where", ["before", "after", "within"])
@pytest.mark.parametrize("num_passes", [1, 3])
def test_cleared(clear, where, num_passes):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if where == "within":
        optimizer.register_step_post_hook(lambda one, args, kwargs: clear(one))  # called ahead of the guard's own
    fastguard.wrap(optimizer, model)
    run(model, optimizer, *(clear if where == at else nothing for at in ("before", "after")), 25, num_passes)
    assert left_of(optimizer.guard) == (0, 20)


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1e-3}, {"skip_nonfinite": False}])
@pytest.mark.parametrize(("every", "expected"), [(100, 20), (4, 15)])
def test_never_cleared_and_every_fourth_time(settings, every, expected):
    model, optimizer = guarded_model(**settings)
    for number in range(21):
        run(model, optimizer, nothing, zero if number % every == every - 1 else nothing, 1)
    assert left_of(optimizer.guard) == (expected, 20)


def test_without_a_backward_pass_it_is_given_up():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1))
    for _ in range(70):
        p.grad = torch.ones(3)
        optimizer.step()
    assert left_of(optimizer.guard) == (None, None)
    assert not p._backward_hooks


def test_the_hooks_go_after_twenty_steps_and_with_the_guard():
    model, optimizer = guarded_model()
    params = list(model.parameters())
    assert params[0]._backward_hooks and params[-1]._backward_hooks and not params[1]._backward_hooks
    twin = copy.deepcopy(model)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in twin.parameters())
    run(model, optimizer, set_to_none, nothing, 21)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params)
    other = make_model()
    guarded(other)
    gc.collect()
    assert not any(p._backward_hooks for p in other.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_ahead_of_the_step(set_to_none):
    model, optimizer = guarded_model()
    for number in range(12):
        loss_at(model, number).backward()
        if number != 7:
            optimizer.zero_grad(set_to_none)
        optimizer.step()
    optimizer.guard.report()
    assert optimizer.guard.history.model.num_cleared_gradients == 11


def test_a_learning_rate_that_the_host_would_have_to_wait_for_is_not_asked():
    model = make_model()
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0, device="meta")  # float() of it would raise
    facts = optimizer.guard._facts.now([optimizer])
    assert (facts["decay_per_step"], facts["zero_lr"]) == (0.0, [])


def test_what_looks_ahead_is_asked_more_often_than_the_others(monkeypatch):
    asked = []
    model = nn.Linear(8, 4)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    checkup = optimizer.guard._checkup
    monkeypatch.setattr(checkup, "glance", lambda: asked.append(optimizer.guard.history.num_steps) or [])
    for step in range(200):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.guard.observe(loss=1.0 if step < 50 else 1.1)  # before it rises there is nothing to see ahead
    gaps = {b - a for a, b in itertools.pairwise(asked) if a > 50}
    assert len(asked) >= 5 and gaps == {GLANCE_EVERY}


@pytest.mark.parametrize(("factor", "gap"), [(1.0, None), (1.1, 16), (math.nan, 16)])
def test_late_steps_are_looked_at_where_the_loss_is_above_its_best(monkeypatch, factor, gap):
    asked = []
    model = nn.Linear(8, 4)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    guard = optimizer.guard
    monkeypatch.setattr(guard._checkup, "glance", lambda: asked.append(guard.history.newest_step) or [])
    for step in range(1250):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + step % 3)
        optimizer.step()
        guard.observe(loss=0.5 if step < 1100 else 0.5 * factor)
    late = [step for step in asked if step >= 1120]
    assert {b - a for a, b in itertools.pairwise(late)} == ({gap} if gap else set()) and (len(late) >= 4) is bool(gap)
    assert guard.history.num_steps == 1249
