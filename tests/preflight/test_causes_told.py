"""What preflight as a whole says, one cause where there is one fault; and that it leaves everything as it was."""

import copy
import dataclasses
import random
import re

import pytest
import torch
from guard_helpers import is_identical
from torch import nn

import fastguard
from fastguard.diagnosis import Finding
from fastguard.tools.preflight import CHECKS
from fastguard.tools.preflight.asking import find_causes as find
from fastguard.tools.preflight.evidence import Evidence


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


def annotated(m, batch):
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


SHORT = {"num_steps": 4}


class Counting(nn.Module):
    """Keeps in Python and in a buffer what it has seen; dropout and BatchNorm change on the way as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        self.register_buffer("seen", torch.zeros(()))
        self.num_calls, self.sizes, self.last = 0, [], None

    def forward(self, x):
        self.seen += len(x)
        self.num_calls += 1
        self.sizes.append(len(x))
        self.last = x
        x.mul_(1.0)  # writes to its input
        return self.layers(x)


def make():
    torch.manual_seed(1)
    model = Counting()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    nn.functional.cross_entropy(model(batch[0].clone()), batch[1]).backward()
    optimizer.step()  # a state; gradients of an accumulation under way stay
    model.layers[3].eval()
    return model, optimizer, batch


def state(model, optimizer, batch):
    return copy.deepcopy(
        {
            "model": {name: value.clone() for name, value in model.state_dict().items()},
            "gradients": [p.grad for p in model.parameters()],
            "requires_grad": [p.requires_grad for p in model.parameters()],
            "modes": [m.training for m in model.modules()],
            "attributes": [model.num_calls, model.sizes, model.last],
            "optimizer": optimizer.state_dict(),
            "batch": batch,
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
        }
    )


def versions(model):
    return [p._version for p in model.parameters()]


class TestEverythingIsPutBack:
    def test_after_a_report(self):
        model, optimizer, batch = make()
        before, pointers = state(model, optimizer, batch), [p.grad.data_ptr() for p in model.parameters()]
        counted = versions(model)
        report = fastguard.preflight(model, optimizer, nn.CrossEntropyLoss(), batch, **SHORT)
        assert report.numbers["num_failed"] == 0
        assert is_identical(before, state(model, optimizer, batch))
        assert pointers == [p.grad.data_ptr() for p in model.parameters()]
        assert counted == versions(model)

    def test_after_an_error_in_the_loss(self):
        model, optimizer, batch = make()
        before = state(model, optimizer, batch)

        def broken(output, target):
            raise RuntimeError("no loss today")

        report = fastguard.preflight(model, optimizer, broken, batch, **SHORT)
        assert report.status == "critical" and "no loss today" in str(report)
        assert is_identical(before, state(model, optimizer, batch))

    def test_after_a_check_that_raises(self, monkeypatch, caplog):
        model, optimizer, batch = make()
        before = state(model, optimizer, batch)

        def odd(evidence):
            evidence.bench.step(evidence.batches[0])
            raise KeyError("odd")

        one = CHECKS["non-finite-inputs"]
        monkeypatch.setitem(CHECKS, "non-finite-inputs", dataclasses.replace(one, check=odd))
        report = fastguard.preflight(model, optimizer, nn.CrossEntropyLoss(), batch, **SHORT)
        assert report.numbers["num_failed"] == 1 and "KeyError" in str(report)
        assert "rule 'non-finite-inputs' failed" in caplog.text
        assert is_identical(before, state(model, optimizer, batch))

    def test_after_ctrl_c(self, monkeypatch):
        model, optimizer, batch = make()
        before = state(model, optimizer, batch)

        def interrupted(self):
            self.bench.step(self.batches[0])
            raise KeyboardInterrupt

        monkeypatch.setattr(Evidence, "fit", property(interrupted))
        with pytest.raises(KeyboardInterrupt):
            fastguard.preflight(model, optimizer, nn.CrossEntropyLoss(), batch, **SHORT)
        assert is_identical(before, state(model, optimizer, batch))


def test_a_guarded_training_goes_on_as_if_nothing_had_been():
    """To the bit: also what samplers, recovery and the rules know."""
    runs = []
    for with_preflight in (False, True):
        model, _, _ = make()
        sink = fastguard.MemorySink()
        optimizer = fastguard.wrap(
            torch.optim.Adam(model.parameters(), 1e-2),
            model,
            max_norm=1.0,
            sinks=[sink],
            activations={"every": 2, "overhead_budget": None},
            weights=2,
            recovery=True,
        )
        for step in range(12):
            torch.manual_seed(step)
            batch = torch.randn(16, 6), torch.randint(3, (16,))
            if with_preflight and step in (0, 7):
                fastguard.preflight(model, optimizer, nn.CrossEntropyLoss(), batch, **SHORT)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.guard.observe(loss=loss)
        optimizer.guard.flush()
        seen = [(r.norm, r.loss, r.activations, r.weights, r.batches) for r in sink.records]
        runs.append((repr(seen), model.state_dict(), optimizer.guard.history.num_steps))
    assert is_identical(*runs) and runs[0][2] == 12
