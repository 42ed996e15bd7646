"""Each check fires on a set-up with its fault, speaks for its cause, and is silent on the same set-up without."""

import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastguard
from fastguard.diagnosis import RULES
from fastguard.tools.preflight import CHECKS, losses

N, FEATURES, CLASSES = 48, 6, 3


def net(*last, act=nn.ReLU, out=CLASSES):
    return nn.Sequential(nn.Linear(FEATURES, 16), act(), nn.Linear(16, out), *last)


def classes():
    x = torch.randn(N, FEATURES)
    return {"model": net(), "loss_fn": nn.CrossEntropyLoss(), "batch": (x, x[:, :CLASSES].argmax(1)), "make": adam}


def yes_or_no():
    x = torch.randn(N, FEATURES)
    y = (x[:, :1] > 0).float()
    return {"model": net(nn.Sigmoid(), out=1), "loss_fn": nn.BCELoss(), "batch": (x, y), "make": adam}


def numbers():
    x = torch.randn(N, FEATURES)
    return {"model": net(out=1), "loss_fn": nn.MSELoss(), "batch": (x, x[:, :1] - x[:, 1:2]), "make": adam}


class Words(nn.Module):
    def __init__(self, bidirectional=False):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.mixing = nn.GRU(8, 8, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(16 if bidirectional else 8, 9)

    def forward(self, ids):
        return self.head(self.mixing(self.embedding(ids))[0]).transpose(1, 2)


def words():
    ids = torch.randint(9, (8, 11))
    return {"model": Words(), "loss_fn": nn.CrossEntropyLoss(), "batch": (ids[:, :-1], ids[:, 1:]), "make": adam}


def normed():
    found = classes()
    found["model"] = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    return found


def adam(model):
    return torch.optim.Adam(model.parameters(), 1e-2)


def using(kind, **settings):
    return {"make": lambda model: kind(model.parameters(), **settings)}


def changed_weights(change):
    def with_weights(s):
        for p in s["model"].parameters():
            if p.dim() == 2:
                change(p)

    return with_weights


def of(name, index):
    """A change of one part of the batch."""

    def changing(function):
        def change(s):
            batch = list(s["batch"])
            batch[index] = function(batch[index].clone())
            return {"batch": tuple(batch)}

        return change

    return changing


inputs, targets = of("inputs", 0), of("targets", 1)


def nan_at(value):
    value[3, 2] = math.nan
    return value


def stale(s):
    old = net()
    return {"make": lambda model: adam(old)}


def detached(s):
    first, *rest = s["model"]

    class Cut(nn.Module):
        def forward(self, x):
            return x.detach()

    return {"model": nn.Sequential(first, Cut(), *rest)}


def centered(s):
    first, *rest = s["model"]

    class Centered(nn.Module):
        def forward(self, x):
            return x - x.mean(0, keepdim=True)

    return {"model": nn.Sequential(first, Centered(), *rest)}


def dead(s):
    nn.init.constant_(s["model"][0].bias, -100.0)


def root_of_zero(s):
    return {"loss_fn": lambda output, target: (output - output.detach()).square().sum(1).sqrt().mean()}


def log_of_zero(s):
    return {"loss_fn": lambda output, target: -F.relu(-output.square()).log().mean()}


def overflowing(s):
    s["model"].half()
    nn.init.constant_(s["model"][0].weight, 3e4)
    return {"batch": (s["batch"][0].half() * 100, s["batch"][1])}


def raises(s):
    return {"loss_fn": lambda output, target: F.cross_entropy(output @ output, target)}


def last(module):
    return lambda s: {"model": nn.Sequential(*list(s["model"])[:-1], module)}


def added(module):
    return lambda s: {"model": nn.Sequential(*s["model"], module)}


def loss(function):
    return lambda s: {"loss_fn": function}


def setting(kind, **settings):
    return lambda s: using(kind, **settings)


SGD, ADAM = torch.optim.SGD, torch.optim.Adam
BAD = {
    "softmax-before-cross-entropy": (classes, added(nn.Softmax(1))),
    "nll-without-log-softmax": (classes, loss(nn.NLLLoss())),
    "softmax-over-batch": (classes, lambda s: {**added(nn.LogSoftmax(0))(s), "loss_fn": nn.NLLLoss()}),
    "targets-out-of-reach": (numbers, added(nn.ReLU())),
    "trial-pass-fails": (classes, raises),
    "loss-prefers-wrong-answers": (numbers, loss(lambda o, t: -(o - t).abs().mean())),
    "wrong-elements-in-loss": (numbers, loss(lambda o, t: F.mse_loss(o[:9], t[:9]))),
    "non-finite-inputs": (classes, inputs(nan_at)),
    "inputs-out-of-scale": (classes, inputs(lambda x: 255 * x)),
    "targets-out-of-scale": (numbers, targets(lambda y: 1000 + 50 * y)),
    "gradient-does-not-arrive": (classes, detached),
    "left-out-of-optimizer": (classes, lambda s: {"make": lambda model: adam(model[2])}),
    "all-gradients-zero": (yes_or_no, last(nn.Softmax(1))),
    "samples-mixed": (classes, centered),
    "leaks-from-the-future": (words, lambda s: {"model": Words(bidirectional=True)}),
    "weights-out-of-scale": (classes, changed_weights(lambda p: p.data.mul_(1e-3))),
    "dead-units-at-start": (classes, dead),
    "non-finite-at-start": (classes, log_of_zero),
    "unusual-optimizer-settings": (classes, setting(ADAM, lr=1e-2, eps=1.0)),
    "heavy-weight-decay": (classes, setting(SGD, lr=0.1, weight_decay=1.0)),
    "eval-mode-in-training": (normed, lambda s: s["model"].eval() and None),
    "trial-steps-overshoot": (classes, setting(SGD, lr=1000.0)),
    "trial-steps-too-short": (classes, setting(SGD, lr=1e-12)),
    "nothing-is-learnt": (classes, inputs(lambda x: x * 0 + torch.ones(()) * 0.5)),
}  # fmt: skip


def asked(setup, name, **options):
    options = {"num_steps": 25, "seconds": 60.0, "checks": [name], **options}
    return fastguard.preflight(
        setup["model"], setup["make"](setup["model"]), setup["loss_fn"], setup["batch"], **options
    )


def test_there_is_a_fault_for_every_check_and_names_are_its_own():
    assert BAD.keys() == CHECKS.keys()
    assert not CHECKS.keys() & RULES.keys()


@pytest.mark.parametrize("name", CHECKS)
class TestCheck:
    def test_fires_where_its_fault_is(self, name):
        make, change = BAD[name]
        setup = make()
        setup |= change(setup) or {}
        report = asked(setup, name)
        assert [finding.rule for finding in report.findings] == [name], str(report)
        finding = report.findings[0]
        assert finding.link == f"docs/rules/{name}.md" and finding.recommendation
        if finding.severity == "info":
            assert not report.causes and report.status == "healthy"
        else:
            assert [cause.rule for cause in report.causes] == [finding.evidence.get("cause", CHECKS[name].cause[0])]
            assert report.status == finding.severity
        assert json.dumps(report.to_dict(), allow_nan=False) and name in str(report)

    def test_is_silent_where_it_is_not(self, name):
        report = asked(BAD[name][0](), name)
        assert not report.findings and report.status == "healthy" and report.numbers["num_failed"] == 0


def test_roots_of_zero_are_seen_in_gradients_alone():
    setup = classes() | root_of_zero(None)
    report = asked(setup, "non-finite-at-start")
    assert math.isfinite(report.numbers["loss"]) and report.causes[0].rule == "singular-operation"


@pytest.mark.parametrize(
    ("name", "make", "change", "cause"),
    [
        ("non-finite-at-start", classes, overflowing, "half-precision-overflow"),
        ("softmax-before-cross-entropy", yes_or_no, loss(nn.BCEWithLogitsLoss()), "wrong-output-layer"),
        ("softmax-before-cross-entropy", classes, added(nn.ReLU()), "wrong-output-layer"),
        ("weights-out-of-scale", classes, changed_weights(nn.init.ones_), "poor-initialisation"),
        ("trial-pass-fails", classes, last(nn.Linear(16, CLASSES - 1)), "wrong-output-layer"),
        ("trial-pass-fails", classes, loss(nn.CrossEntropyLoss(reduction="none")), "wrong-loss"),
        ("trial-steps-too-short", classes, setting(SGD, lr=0.0), "learning-rate-too-low"),
        ("left-out-of-optimizer", classes, stale, "parameters-missing-from-optimizer"),
    ],
)
def test_another_fault_that_a_check_knows(name, make, change, cause):
    setup = make()
    report = asked(setup | (change(setup) or {}), name)
    assert [finding.rule for finding in report.findings] == [name]
    assert [cause.rule for cause in report.causes] == [cause]


def test_a_busy_machine_takes_no_steps_away(monkeypatch):
    """Whatever the time, a rate is tried for ten steps; a clock that runs a minute a look once left one."""
    monkeypatch.setattr(losses.time, "perf_counter", itertools.count(0.0, 60.0).__next__)
    assert asked(classes(), "trial-steps-overshoot").numbers["num_trial_steps"] == 10
