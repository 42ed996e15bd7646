"""Rules that had spoken in sound runs: for each a run in which it must stay silent, and one in which it must speak."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fastguard.diagnosis.causes import evidence_for

from faulty_runs import BAD
from made_runs import (
    batch,
    batches_run,
    bend,
    falling_losses,
    flat_losses,
    lost_losses,
    noisy_norms,
    run,
    signs_in,
    weights_run,
)

SPIKES = range(27, 300, 44)


def restless(level, spread, count, seed=2):
    """Losses around `level`, a factor of e^`spread` above or below it."""
    rng = random.Random(seed)
    return [level * rng.lognormvariate(0.0, spread) for _ in range(count)]


GROWING = [norm * (1.0 if step < 200 else 2.0) for step, norm in enumerate(noisy_norms(280))]
OVERWRITTEN = {"overwritten": ["a", "b"], "num_overwritten": 5, "num_compared": 6}
SILENT = {
    # The noise of now is as large as the turn.
    "divergence-ahead": run([*falling_losses(200, noise=0.01, pace=30.0), *restless(0.8, 0.5, 80)], GROWING),
    # It has only begun.
    "weights-overwritten": run(flat_losses(60), **OVERWRITTEN),
    # The loss falls all the same.
    "periodic-loss-spikes": run(bend(falling_losses(300), SPIKES, lambda value: value + 2.0)),
    # Little was gained yet, and more is being gained.
    "update-ratio-high": weights_run(lambda step, name: 0.6, falling_losses(200, pace=400.0), num_steps=200),
}
SPEAKS = {
    "divergence-ahead": BAD["divergence-ahead"],
    "weights-overwritten": run(flat_losses(200), **OVERWRITTEN),
    "periodic-loss-spikes": run(bend(lost_losses(300, 200), SPIKES, lambda value: value + 2.0)),
    "update-ratio-high": weights_run(lambda step, name: 0.6, flat_losses(200)),
}


def warned(history):
    """The rules that a user is told of."""
    return {name for name, finding in signs_in(history).items() if finding.severity != "info"}


@pytest.mark.parametrize("name", SILENT)
def test_it_stays_silent(name):
    assert name not in warned(SILENT[name])


@pytest.mark.parametrize("name", SPEAKS)
def test_it_speaks(name):
    assert name in warned(SPEAKS[name])


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
