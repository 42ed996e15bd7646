"""Nothing of the guard comes out of `step()`, and a saved state is loaded whole or refused with nothing changed."""

import copy
import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from guard_helpers import assert_identical, guarded_model, make_model, needs_extension, snapshot, take_step, train
from torch import nn

import fastguard
from fastguard.clip import ClipPolicy
from fastguard.diagnosis import CAUSES, RULES, Finding, cause, rule
from fastguard.names import Namer
from fastguard.observers.facts import ModelFacts
from fastguard.observers.loss_gradient import OutputSample
from fastguard.observers.weights import WeightSampler
from fastguard.records import strict_json
from fastguard.records.failures import describe


def _sgd(model, **settings):
    return fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **settings)


def _failed(report, kind="failed-parts"):
    return next(finding for finding in report.findings if finding.rule == kind)


@pytest.fixture
def odd_rule():
    """Registers a rule `odd` that does what it is given; at most one a test."""

    def register(check):
        rule("odd", remedy="Look.")(check)

    yield register
    RULES.pop("odd", None)
    CAUSES.pop("odd-cause", None)


class WordlessError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def _raising(error):
    def check(history):
        raise error

    return check


@pytest.mark.parametrize(
    "check",
    [
        _raising(KeyError("x")),
        _raising(WordlessError()),
        _raising(RecursionError()),
        lambda history: True,
        lambda history: Finding("odd", confidence=2.0),
        lambda history: Finding(7),
        lambda history: Finding("odd", layers="w"),
        lambda history: Finding("odd", first_step="one"),
    ],
)
def test_a_rule_that_fails(check, odd_rule, caplog):
    odd_rule(check)
    model, plain = make_model(), make_model()
    optimizer, unguarded = _sgd(model, check_every=2), torch.optim.SGD(plain.parameters(), lr=0.1)
    train(model, optimizer, range(9))
    train(plain, unguarded, range(9))
    assert_identical(snapshot(model, optimizer), snapshot(plain, unguarded))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "rule 'odd' failed" in told[0] and "Its check was skipped" in told[0]
    report = optimizer.guard.report()
    assert report.status == "warning"  # not healthy: nobody knows what that rule would have seen
    finding = _failed(report, "failed-rules")
    assert finding.summary.startswith("1 rule failed and was not checked. rule 'odd': ")
    assert finding.evidence["num_failed"] == 1 and finding.evidence["num_asked"] == len(RULES)
    assert "1 rule failed" in str(report) and len(caplog.records) == 1
    json.dumps(report.to_dict(), allow_nan=False)
    assert optimizer.guard._run.failures.counts()["rule 'odd'"] == 5  # at four checkups, and now


def test_a_cause_that_fails_is_left_out(odd_rule, caplog):
    odd_rule(lambda history: Finding("odd"))
    cause("odd-cause", "Odd.", "Look.", {"odd": lambda finding, history, found: 1 / 0})
    model, optimizer = guarded_model()
    train(model, optimizer, range(3))
    report = optimizer.guard.report()
    assert "odd" in [finding.rule for finding in report.findings]
    assert "cause 'odd-cause'" in _failed(report, "failed-rules").summary


def test_the_report_shows_what_could_not_be_made(monkeypatch):
    monkeypatch.setattr("fastguard.report.report.module_rows", lambda history: 1 / 0)
    monkeypatch.setattr("fastguard.report.report.numbers_of", lambda history: [][1])
    model, optimizer = guarded_model()
    train(model, optimizer, range(3))
    report = optimizer.guard.report()
    assert report.status == "warning" and "2 parts failed" in str(report) and "IndexError" in str(report)
    assert report.to_dict()["numbers"]["num_steps"] == 3


PARTS = {
    "weights, before": (WeightSampler, "before", {"weights": 1}, "weight sampler"),
    "weights, after": (WeightSampler, "after", {"weights": 1}, "weight sampler"),
    "facts, at first": (ModelFacts, "at_first", {"check_every": 1}, "model facts"),
    "facts": (ModelFacts, "now", {"check_every": 1}, "model facts"),
    "activations": (fastguard.ActivationMonitor, "end_step", {"activations": True}, "activation sampler"),
    "loss gradient": (OutputSample, "loss_of", {}, "loss gradient"),
    "names": (Namer, "names", {}, "naming of the parameters"),
}


@pytest.mark.parametrize(
    ("owner", "method", "settings", "part"),
    [pytest.param(*part, id=id, marks=needs_extension if id == "loss gradient" else ()) for id, part in PARTS.items()],
)
def test_a_part_that_fails(owner, method, settings, part, monkeypatch, caplog):
    monkeypatch.setattr(owner, method, lambda *args, **kwargs: 1 / 0)
    model, plain = make_model(), make_model()
    optimizer, unguarded = _sgd(model, **settings), torch.optim.SGD(plain.parameters(), lr=0.1)
    train(model, optimizer, range(4))
    train(plain, unguarded, range(4))
    assert_identical(snapshot(model, optimizer), snapshot(plain, unguarded))
    assert (optimizer.guard.activations is None) is (part != "activation sampler")
    if part == "naming of the parameters":
        assert optimizer.guard.last.tensors.names == ("param0", "param1", "param2", "param3")
    assert part in _failed(optimizer.guard.report()).summary and optimizer.guard.history.num_steps >= 3
    assert len([r for r in caplog.records if f"{part} failed: ZeroDivisionError" in r.getMessage()]) == 1


class OddOutput(dict):
    """What a module may return, and nobody can look into."""

    def items(self):
        raise RuntimeError("not to be looked into")


class Returns(nn.Module):
    def forward(self, x):
        return OddOutput(x=x)


def test_a_forward_pass_is_not_stopped_by_its_watchers(caplog):
    model = nn.Sequential(nn.Linear(6, 4), Returns())
    optimizer = _sgd(model, activations={"modules": "all", "every": 1, "overhead_budget": None})
    for _ in range(3):
        model(torch.ones(2, 6))["x"].sum().backward()
        optimizer.step()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all("not to be looked into" in text for text in told)  # each of the two says it once
    assert "activation sampler failed" in told[0] and "batch sampler failed" in told[1]
    assert optimizer.guard.last.activations  # the other modules were seen
    assert "activation sampler" in _failed(optimizer.guard.report()).summary


@pytest.mark.parametrize("lr", [None, "0.1", [0.1], torch.ones(2), 1j])
def test_a_learning_rate_that_is_no_number(lr):
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": lr, "weight_decay": "much"})

        def step(self, closure=None):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad)

    for backend in ("auto", "reference"):
        model, optimizer = guarded_model(Own, check_every=1, backend=backend)
        train(model, optimizer, range(4))
        assert optimizer.guard.last.lr is None and not optimizer.guard.report().findings


@pytest.mark.parametrize("value", ["1.0", 1j, torch.tensor(1j), [1.0], object(), 10**400, np.ones(2), torch.ones(2)])
def test_odd_losses_are_refused_and_nothing_is_lost(value):
    model, optimizer = guarded_model()
    train(model, optimizer, range(3))
    optimizer.guard.observe(loss=0.5, val_loss=0.25)
    for odd in ({"loss": value}, {"val_loss": value}, {"loss": 9.0, "val_loss": value}):
        with pytest.raises(ValueError, match=f"`{list(odd)[-1]}` must be a (number|scalar|real number)"):
            optimizer.guard.observe(**odd)
    assert (optimizer.guard.last.loss, optimizer.guard.last.val_loss) == (0.5, 0.25)
    optimizer.guard.flush()
    assert optimizer.guard.history.num_steps == 3
    take_step(model, optimizer, 3)
    for fine in (Fraction(1, 2), np.float32(0.5), np.array([0.5]), torch.tensor([0.5]), Decimal("0.5")):
        optimizer.guard.observe(loss=fine)
        assert (optimizer.guard.last.loss, type(optimizer.guard.last.loss)) == (0.5, float)


def test_an_error_is_described_in_a_line():
    try:
        raise ValueError("several\nlines " + "x" * 500)
    except ValueError as error:
        said = describe(error)
    assert said.startswith("ValueError: several lines xxx") and said.endswith(f".py:{_line()})")
    assert len(said) < 260 and "\n" not in said
    assert describe(WordlessError()) == "WordlessError: its message cannot be shown"


def _line():
    return test_an_error_is_described_in_a_line.__code__.co_firstlineno + 2


def _state_of_a_run():
    model, optimizer = guarded_model(max_norm=0.5, weights=2)
    for step in range(6):
        take_step(model, optimizer, step, bad=math.nan if step in (2, 5) else None)
        optimizer.guard.observe(loss=1.0, val_loss=2.0)
    return model, optimizer, strict_json.encode(optimizer.guard.state_dict())


BROKEN = {
    "not a dict": (lambda s: [s], "`state` must be a dict"),
    "older": (lambda s: s.update(version=0), "of version 0"),
    "newer": (lambda s: s.update(version=2), "of version 2"),
    "an older history": (
        lambda s: s["history"].update(version=1),
        r"version 3, got 1 - at `state\['history'\]\['version'\]`",
    ),
    "without a step": (lambda s: s.pop("step"), r"without \['step'\]"),
    "a step of text": (lambda s: s.update(step="6"), r"must be a whole number, got '6' - at `state\['step'\]`"),
    "a step beyond counting": (lambda s: s.update(step=2**60), r"below 2\*\*53"),
    "a step of NaN": (lambda s: s.update(step=math.nan), r"`state\['step'\]`"),
    "names that are none": (lambda s: s.update(skipped_tensors=[1]), r"`state\['skipped_tensors'\]\[0\]`"),
    "a run that is none": (lambda s: s.update(skipped_run=None), r"a list, got None - at `state\['skipped_run'\]`"),
    "without the clean steps": (lambda s: s["history"].pop("clean"), r"missing - at `state\['history'\]\['clean'\]`"),
    "a counter of text": (lambda s: s["history"].update(num_steps="6"), r"\['history'\]\['num_steps'\]`"),
    "a norm of text": (
        lambda s: s["history"]["recent"][1].__setitem__(1, "x"),
        r"must be a number, got 'x' - at `state\['history'\]\['recent'\]\[1\]\['norm'\]`",
    ),
    "a short entry": (lambda s: s["history"]["clean"][0].pop(), r"must have 9 entries, got 8 - at .*\['clean'\]\[0\]`"),
    "a tensor without its numbers": (lambda s: s["history"]["tensors"][-1].pop(), r"\['tensors'\]\['_data'\]`"),
    "a tensor seen less than never": (
        lambda s: s["history"]["tensors"][-1].__setitem__(3, -1.0),
        r"must be finite and >= 0, got -1.0 - at .*\['tensors'\]\['_data'\]\[3\]`",
    ),
    "a sample that is none": (
        lambda s: s["history"]["weights"][3]["0.weight"][1][1].pop("norm"),
        r"\['weights'\]\['_windows'\]\['0.weight'\]\[1\]\[1\]\['norm'\]`",
    ),
    "events that do not fit": (lambda s: s["history"].update(last_events=[]), r"\['history'\]\['num_nonfinite'\]`"),
    "a model of text": (lambda s: s["history"].update(model="m"), r"\['history'\]\['model'\]`"),
    "a severity of one's own": (
        lambda s: s["checkup"]["severities"].update(odd="bad"),
        r"\['checkup'\]\['severities'\]\['odd'\]`",
    ),
    "a policy of text": (lambda s: s.update(clip="x"), r"`state\['clip'\]`"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_state_is_loaded_whole_or_not_at_all(damage, message):
    _, _, state = _state_of_a_run()
    other = make_model()
    optimizer = _sgd(other, max_norm=0.5)
    train(other, optimizer, range(3))
    before = copy.deepcopy(optimizer.guard.state_dict())
    result = damage(state)
    with pytest.raises(ValueError, match=message):
        optimizer.guard.load_state_dict(result if isinstance(result, list) and result[:1] == [state] else state)
    assert optimizer.guard.state_dict() == before
    optimizer.guard.observe(loss=1.0)  # the step just taken is still held
    assert optimizer.guard.last.loss == 1.0
    train(other, optimizer, range(3, 6))
    assert optimizer.guard.last.step == 5


def test_a_policy_that_refuses_its_state_changes_nothing():
    class Counting(ClipPolicy):
        count = 0

        def limits(self):
            return math.inf, math.inf

        def observe(self, norms, loss=None):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = -1
            self.count = state["count"]

    model, optimizer = guarded_model(clip=Counting())
    train(model, optimizer, range(3))
    state = copy.deepcopy(optimizer.guard.state_dict())
    train(model, optimizer, range(3, 5))
    before = copy.deepcopy(optimizer.guard.state_dict())
    with pytest.raises(ValueError, match=r"clip policy .*count"):
        optimizer.guard.load_state_dict({**state, "clip": {}})
    assert optimizer.guard.state_dict() == before and optimizer.guard.clip.count == 5
    optimizer.guard.load_state_dict(state)
    assert optimizer.guard.clip.count == 3 and optimizer.guard._run.step == 3
