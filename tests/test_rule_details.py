"""What findings of single rules say, and of the machine; and which rules need a loss that is to fall."""

import math
from dataclasses import replace

import pytest
import torch

import fastguard
from fastguard.diagnosis import RULES, diagnose, find_causes
from fastguard.diagnosis.causes import evidence_for
from fastguard.diagnosis.rules.units import siblings
from fastguard.observers import resources
from fastguard.observers.resources import SETTLED_AFTER, ResourceUse
from fastguard.records import TrainingHistory

from faulty_runs import BAD
from made_runs import (
    activity,
    ask,
    batch,
    batches_run,
    falling_losses,
    flipped,
    machine,
    routed,
    run,
    signs_in,
    with_activities,
)
from records import make_bad_record


class TestUnits:
    def test_the_origin_of_nan_is_told_from_a_bad_input(self):
        bad_input = with_activities(activity("first", nans=1, inputs_finite=False), since=60)
        finding = ask("non-finite-activations", bad_input)
        assert "whose input was bad already" in finding.summary and finding.layers == ("first",)
        assert finding.evidence["is_origin"] is False


class TestWeights:
    @pytest.mark.parametrize("is_held", [True, False])
    def test_what_the_optimizer_does_not_have_is_not_to_be_taken_out_of_it(self, is_held):
        history = run(falling_losses(100), names=list("abcdefghij"), without_gradient=["b"])
        held = int(history.last.tensors.total_row()[0]) + 16 * is_held
        history.note_model(optimizer_settings=[{"kind": "Adam", "num_parameters": held}])
        told = ask("frozen-parameters", history)
        assert ("remove them" in told.recommendation) == is_held
        assert is_held or told.severity == "info"


DESCENT = sorted(sign.name for rule in RULES.values() for sign in rule.signs if sign.needs_descent)


class TestDescent:
    """Rules that take the loss for something that is to come down are silent where it is not."""

    @pytest.mark.thinned(n=4)
    @pytest.mark.parametrize("name", DESCENT)
    @pytest.mark.parametrize(
        ("notes", "fires"),
        [
            ({}, True),
            ({"objective": "minimise", "num_foreign_parameters": 9}, True),
            ({"objective": "game"}, False),
            ({"objective": "reward"}, False),
            ({"num_foreign_parameters": 3}, False),
            ({"num_foreign_parameters": 2}, True),
        ],
    )
    def test_objectives(self, name, notes, fires):
        history = TrainingHistory()
        history.load_state_dict(BAD[name].state_dict())
        history.has_ended = True
        history.note_model(**notes)
        assert (ask(name, history) is not None) == fires

    @pytest.mark.parametrize("name", DESCENT)
    def test_losses_below_zero(self, name):
        history = TrainingHistory()
        history.load_state_dict(BAD[name].state_dict())
        history.has_ended = True
        history.record(history.newest_step + 1, loss=-0.5, grad_norm=1.0, lr=history.clean[-1].lr or 0.0)
        assert ask(name, history) is None


def first_cause(history):
    return next((one.rule for one in find_causes(diagnose(history), history)), None)


class TestIdleExperts:
    def test_they_are_no_parameters_that_are_cut_off(self):
        assert ask("missing-gradients", routed(["experts.1.", "experts.2.", "experts.3."], absent=True)) is None

    def test_siblings_have_the_same_parameters(self):
        assert siblings(["a.0.w", "a.1.w", "a.1.b"]) == [] == siblings(["a.0.w", "b.w"])
        [layers, experts] = siblings(["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w", "l.1.e.1.w"])[:2]
        assert list(layers) == ["l.0", "l.1"] and list(experts) == ["l.0.e.0", "l.0.e.1"]


class TestLoneElement:
    def test_what_follows_is_explained_by_it(self):
        history = flipped(at=(100,), num_steps=101)
        for step in range(101, 110):
            history.add(
                make_bad_record(step, ["a.weight", "b.weight"], ["a.weight", "b.weight", "c.weight"], loss=math.nan)
            )
        assert first_cause(history) == "hardware-fault"
        history.note_model(dtypes=["float16"])
        assert first_cause(history) != "hardware-fault"


def warned(history):
    """The rules that a user is told of."""
    return {name for name, finding in signs_in(history).items() if finding.severity != "info"}


class TestAsksItself:
    """A model that gives its own targets has a loss that may rise."""

    LOSSES = tuple(0.1 + 0.01 * step for step in range(200))

    def test_its_loss_may_rise(self):
        own = batches_run(self.LOSSES, batch(with_grad=False), batch())
        assert not warned(own)
        assert "loss-explosion" in warned(batches_run(self.LOSSES, batch()))

    def test_what_was_told_of_the_objective_goes_ahead(self):
        own = batches_run(self.LOSSES, batch(with_grad=False), batch(), objective="minimise")
        assert "loss-explosion" in warned(own)


class TestToldOnce:
    LOST = run([*falling_losses(100), *(0.5 * 1.1**step for step in range(40)), *[20.0] * 40], lrs=[0.1] * 180)

    def test_one_event_is_one_warning(self):
        found = signs_in(self.LOST)
        assert found["loss-explosion"].severity == "critical"
        assert found["loss-divergence"].severity == "info"
        assert found["loss-divergence"].evidence["told_by"] == "loss-explosion"

    def test_it_speaks_for_a_cause_as_before(self):
        found = list(signs_in(self.LOST).values())
        alone = [replace(one, severity="critical") if "told_by" in one.evidence else one for one in found]
        signs = [evidence_for(some, self.LOST) for some in (found, alone)]
        assert signs[0] == signs[1] != {}


OF_THE_MACHINE = {"page-faults", "starved-of-cores"}


def found(**used):
    history = run(falling_losses(50), resources=machine(**used))
    return signs_in(history).keys() & OF_THE_MACHINE


@pytest.mark.parametrize(
    ("rule", "used"),
    [
        ("page-faults", {"page_faults": 1000.0, "system_share": 0.1}),
        ("starved-of-cores", {"core_wait_share": 0.2}),
    ],
)
def test_each_limit(rule, used):
    assert found(**used) == {rule}
    for name in used:
        assert found(**{**used, name: used[name] * 0.99 if used[name] != 1.0 else 0.0}) == set()


class Machine:
    """Counters that a test turns on; as of a process."""

    def __init__(self, monkeypatch):
        self.step, self.seconds, self.faults, self.thread = 0, 0.0, 0, 1
        monkeypatch.setattr(resources, "_usage", self.usage)
        monkeypatch.setattr(resources.time, "perf_counter", lambda: self.seconds)

    def usage(self, step):
        cpu = 0.5 * self.seconds
        used = {"cpu_s": cpu, "system_s": 0.1 * cpu, "page_faults": self.faults}
        at = {"step": step, "seconds": self.seconds, "core_wait_s": 0.25 * self.seconds, "thread": self.thread}
        return {**used, **at}

    def train(self, num_steps, faults_a_step):
        self.step += num_steps
        self.seconds += 0.1 * num_steps
        self.faults += faults_a_step * num_steps


@pytest.fixture
def counters(monkeypatch):
    return Machine(monkeypatch)


def test_two_windows_are_compared_and_the_smaller_one_counts(counters):
    use = ResourceUse()
    assert use.facts(0) == {}
    counters.train(SETTLED_AFTER, 10_000)  # the first steps count for nothing
    assert use.facts(counters.step) == {}
    counters.train(40, 500)
    assert use.facts(counters.step) == {}  # one window
    counters.train(40, 200)
    facts = use.facts(counters.step)
    assert facts["page_faults"] == 200.0
    assert facts["system_share"] == pytest.approx(0.1) and facts["core_wait_share"] == pytest.approx(0.25)
    counters.train(40, 900)
    assert use.facts(counters.step)["page_faults"] == 200.0
    counters.train(40, 900)
    assert use.facts(counters.step)["page_faults"] == 900.0


def test_a_guard_notes_what_its_process_used(monkeypatch):
    monkeypatch.setattr(resources, "MIN_SECONDS", 0.0)
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1), check_every=50)
    for _ in range(300):
        p.grad = torch.ones(4)
        optimizer.step()
    used = optimizer.guard.report() and optimizer.guard.history.model.resources
    assert 0.0 <= used["system_share"] <= 1.0 and used["page_faults"] >= 0.0
