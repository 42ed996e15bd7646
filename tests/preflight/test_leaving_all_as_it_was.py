"""`fastguard.preflight` leaves everything as it was, to the bit, also when something raises."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch
from guard_helpers import is_identical
from torch import nn

import fastguard
from fastguard.tools.preflight import CHECKS
from fastguard.tools.preflight.evidence import Evidence

SHORT = {"num_steps": 4}


class Counting(nn.Module):
    """Keeps in Python and in a buffer what it has seen; dropout and BatchNorm change on the way as well."""

    def __init__(self) -> None:
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
