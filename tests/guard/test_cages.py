"""Nothing of the guard comes out of `step()`: what raises is told once, counted, and named in the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from guard_helpers import assert_identical, guarded_model, make_model, needs_extension, snapshot, take_step, train
from torch import nn

import fastguard
from fastguard.diagnosis import CAUSES, RULES, Finding, cause, rule
from fastguard.names import Namer
from fastguard.observers.facts import ModelFacts
from fastguard.observers.loss_kind import OutputSample
from fastguard.observers.weights import WeightSampler
from fastguard.records import TrainingHistory
from fastguard.records.failures import describe


def _sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **settings)


def _failed(report: Any, kind: str = "failed-parts") -> Finding:
    return next(finding for finding in report.findings if finding.rule == kind)


@pytest.fixture
def odd_rule() -> Iterator[Callable[..., None]]:
    """Registers a rule `odd` that does what it is given; at most one a test."""

    def register(check: Callable[[TrainingHistory], Any]) -> None:
        rule("odd", remedy="Look.")(check)

    yield register
    RULES.pop("odd", None)
    CAUSES.pop("odd-cause", None)


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raising(error: BaseException) -> Callable[..., Any]:
    def check(history: TrainingHistory) -> Any:
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
def test_a_rule_that_fails(check: Any, odd_rule: Any, caplog: pytest.LogCaptureFixture) -> None:
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
    assert optimizer.guard._run.failures.known("rule 'odd'").times == 5  # at four checkups, and now


def test_a_cause_that_fails_is_left_out(odd_rule: Any, caplog: pytest.LogCaptureFixture) -> None:
    odd_rule(lambda history: Finding("odd"))
    cause("odd-cause", "Odd.", "Look.", {"odd": lambda finding, history, found: 1 / 0})
    model, optimizer = guarded_model()
    train(model, optimizer, range(3))
    report = optimizer.guard.report()
    assert "odd" in [finding.rule for finding in report.findings]
    assert "cause 'odd-cause'" in _failed(report, "failed-rules").summary


def test_the_report_shows_what_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastguard.report.report.module_rows", lambda history: 1 / 0)
    monkeypatch.setattr("fastguard.report.report.numbers_of", lambda history: [][1])
    model, optimizer = guarded_model()
    train(model, optimizer, range(3))
    report = optimizer.guard.report()
    assert report.status == "warning" and "2 parts failed" in str(report) and "IndexError" in str(report)
    assert report.to_dict()["numbers"]["num_steps"] == 3


PARTS: dict[str, tuple[Any, str, dict[str, Any], str]] = {
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
def test_a_part_that_fails(
    owner: Any, method: str, settings: Any, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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

    def items(self) -> Any:
        raise RuntimeError("not to be looked into")


class Returns(nn.Module):
    def forward(self, x: torch.Tensor) -> OddOutput:
        return OddOutput(x=x)


def test_a_forward_pass_is_not_stopped_by_its_watchers(caplog: pytest.LogCaptureFixture) -> None:
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
def test_a_learning_rate_that_is_no_number(lr: Any) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": lr, "weight_decay": "much"})

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad)

    for backend in ("auto", "reference"):
        model, optimizer = guarded_model(Own, check_every=1, backend=backend)
        train(model, optimizer, range(4))
        assert optimizer.guard.last.lr is None and not optimizer.guard.report().findings


@pytest.mark.parametrize("value", ["1.0", 1j, torch.tensor(1j), [1.0], object(), 10**400, np.ones(2), torch.ones(2)])
def test_odd_losses_are_refused_and_nothing_is_lost(value: Any) -> None:
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


def test_an_error_is_described_in_a_line() -> None:
    try:
        raise ValueError("several\nlines " + "x" * 500)
    except ValueError as error:
        said = describe(error)
    assert said.startswith("ValueError: several lines xxx") and said.endswith(f".py:{_line()})")
    assert len(said) < 260 and "\n" not in said
    assert describe(WordlessError()) == "WordlessError: its message cannot be shown"


def _line() -> int:
    return test_an_error_is_described_in_a_line.__code__.co_firstlineno + 2
