"""Asking the rules: while a run goes on, those of other tools, and what it costs."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import Watch
from fastguard.diagnosis.signals import median, signals_of
from fastguard.records import TrainingHistory
from fastguard.records.running import quantiles

from faulty_runs import BAD
from made_runs import (
    bend,
    falling_losses,
    run,
)
from records import make_record


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

    def test_logs_by_default(self, caplog):
        history = run(bend(falling_losses(60), [59], lambda v: math.nan))
        with caplog.at_level("INFO", logger="fastguard"):
            Watch(history).check()
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        assert caplog.messages[0].startswith("non-finite-loss (step 59): The loss was NaN or Inf at 1 step of 60.")

    def test_remarks_are_told_only_when_asked_for(self):
        told = []
        Watch(BAD["already-clipped"], tell=told.append).check()
        assert told == []
        Watch(BAD["already-clipped"], tell=told.append, least="info").check()
        assert [finding.rule for finding in told] == ["already-clipped"]

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


@pytest.mark.parametrize("odd", [None, math.nan, math.inf, -1e200])
def test_losses_are_those_of_the_steps_that_have_a_finite_one(odd):
    usual, history = [2.0 - step / 100 for step in range(60)], TrainingHistory()
    for step, loss in enumerate([*usual[:30], odd, *usual[30:]]):
        history.add(make_record(step, 1.0, loss=loss))
    newest, s = signals_of(history).newest_loss_entries(40), signals_of(history)
    entries = [e for e in history.clean if e.loss is not None and math.isfinite(e.loss)]
    known = [max(e.loss, -1e150) for e in entries]
    assert s.losses == [e.loss for e in s.loss_entries] == known and newest == s.loss_entries[-40:]
