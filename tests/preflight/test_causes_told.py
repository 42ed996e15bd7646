"""What preflight as a whole says: one cause where there is one fault, none where there is none."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fastguard
from fastguard.diagnosis import Finding
from fastguard.tools.preflight.asking import find_causes as find


def found(*names, severity="critical", confidence=0.9):
    return [Finding(name, rule=name, severity=severity, confidence=confidence) for name in names]


def test_what_follows_from_a_cause_is_its_symptom():
    causes = find(found("softmax-before-cross-entropy", "nothing-is-learnt", "trial-steps-too-short"))
    assert [cause.rule for cause in causes] == ["wrong-output-layer"]
    assert len(causes[0].symptoms) == 3


def test_a_critical_finding_is_not_explained_by_a_warning():
    causes = find([*found("inputs-out-of-scale", severity="warning"), *found("non-finite-at-start")])
    assert [cause.rule for cause in causes] == ["singular-operation", "unnormalised-inputs"]


def test_a_warm_up_that_begins_at_zero_is_no_low_rate():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    x = torch.randn(48, 6)
    report = fastguard.preflight(
        model, optimizer, nn.CrossEntropyLoss(), (x, x[:, :3].argmax(1)), num_steps=25, seconds=60.0
    )
    assert report.status == "healthy" and optimizer.param_groups[0]["lr"] == 0.0


def named(model, batch):
    return model(batch[0]).square().mean()


def annotated(m: nn.Module, batch):
    return m(batch[0]).square().mean()


X, Y = torch.randn(32, 6), torch.randint(3, (32,))


@pytest.mark.parametrize(
    ("loss_fn", "batch"),
    [
        (nn.functional.cross_entropy, (X, Y)),
        (lambda o, t: o.square().mean(), (X, Y)),
        (named, (X, Y)),
        (annotated, (X, Y)),
        (lambda m, b: m(b[0]).square().mean(), (X, Y)),
        (nn.CrossEntropyLoss(), [(X, Y), (X, Y)]),
        (nn.CrossEntropyLoss(), ({"input": X}, Y)),
        (nn.CrossEntropyLoss(), ((X,), Y)),
        (lambda model, batch: model(batch["x"]).mean(), {"x": X}),
        (lambda model, batch: model(batch).mean(), X),
    ],
)
def test_the_form_of_a_loss_function_is_found(loss_fn, batch):
    model = nn.Linear(6, 3)
    report = fastguard.preflight(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, batch, checks=[])
    assert "loss" in report.numbers


@pytest.mark.parametrize("is_guarded", [False, True])
def test_closures_and_guards(is_guarded):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5)
    if is_guarded:
        optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), 0.1), model, max_norm=1.0)
    report = fastguard.preflight(model, optimizer, nn.CrossEntropyLoss(), (X, Y), num_steps=2)
    assert report.numbers["num_failed"] == 0 and "num_trial_steps" in report.numbers


class TestErrors:
    def ask(self, **changes):
        model = nn.Linear(6, 3)
        given = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), 0.1),
            "loss_fn": nn.CrossEntropyLoss(),
            "batch": (torch.randn(8, 6), torch.randint(3, (8,))),
            **changes,
        }
        return fastguard.preflight(**given)

    @pytest.mark.parametrize(
        ("changes", "kind", "message"),
        [
            ({"model": 3}, TypeError, "`model` must be a torch.nn.Module, got int"),
            ({"model": nn.LazyLinear(3)}, ValueError, "`model` must have values in all parameters"),
            ({"optimizer": 3}, TypeError, "`optimizer` must be"),
            ({"loss_fn": 3}, TypeError, "`loss_fn` must be a function or a module, got int"),
            ({"loss_fn": nn.MSELoss}, TypeError, "got the class MSELoss. Write MSELoss()."),
            (
                {"batch": torch.ones(8, 6)},
                ValueError,
                "must be a pair (inputs, targets) for CrossEntropyLoss, got Tensor",
            ),
            ({"batch": 3}, TypeError, "`batch` must be a batch or give batches, got int"),
            ({"batch": []}, ValueError, "must give at least one batch"),
            ({"batch": iter([1])}, ValueError, "an iterator, which would be used up"),
            ({"num_steps": 0}, ValueError, "`num_steps` must be an integer >= 1, got 0"),
            ({"seconds": 0}, ValueError, "`seconds` must be a number > 0"),
            ({"checks": ["odd"]}, ValueError, "`checks` must name checks, got 'odd'"),
            ({"thresholds": {"odd": {}}}, ValueError, "`thresholds` must name rules, got 'odd'"),
            ({"thresholds": {"dead-units-at-start": {"odd": 1}}}, TypeError, "`odd` must be a threshold"),
        ],
    )
    def test_say_what_is_wrong(self, changes, kind, message):
        with pytest.raises(kind, match=re.escape(message)):
            self.ask(**changes)
