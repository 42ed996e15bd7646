"""Asking the rules while a run goes on."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import Watch
from fastguard.diagnosis.signals import median
from fastguard.records import TrainingHistory
from fastguard.records.running import quantiles

from faulty_runs import BAD


class TestWatch:
    def test_tells_each_finding_once_and_again_when_it_gets_worse(self):
        history, told = TrainingHistory(), []
        watch = Watch(history, check_every=10, tell=told.append)
        for step in range(60):
            bad = step == 12 or step >= 38
            history.record(step, loss=math.nan if bad else 1.0 - step / 100, grad_norm=1.0 + step % 5, lr=0.1)
            watch.step()
        assert [(f.rule, f.severity) for f in told] == [("non-finite-loss", "warning"), ("non-finite-loss", "critical")]
        assert watch.findings["non-finite-loss"].last_step == 59

    def test_a_resumed_watch_does_not_repeat_itself(self):
        watch, told = Watch(BAD["loss-explosion"], tell=lambda finding: None), []
        watch.check()
        resumed = Watch(BAD["loss-explosion"], tell=told.append)
        resumed.load_state_dict(watch.state_dict())
        resumed.check()
        assert told == []

    @pytest.mark.parametrize("value", [0, -1, 2.5, True])
    def test_check_every_is_a_positive_integer(self, value):
        with pytest.raises(ValueError, match="`check_every` must be an integer >= 1, got"):
            Watch(TrainingHistory(), value)


@pytest.mark.parametrize("values", [[], [2.0], [3.0, 1.0], [5.0, 1.0, 2.0], [-1e308, 1e308], [math.inf] * 2, [0.1] * 4])
def test_the_median_is_the_quantile_to_the_bit(values):
    assert str(median(values)) == str(quantiles(values, (0.5,))[0])
