"""Asking the rules: while a run goes on, those of other tools, and what it costs."""

from __future__ import annotations

import math
import time

import pytest

from fastguard.diagnosis import RULES, Watch, diagnose, find_causes, needs
from fastguard.diagnosis.signals import median, signals_of
from fastguard.records import TrainingHistory
from fastguard.records.running import quantiles

from faulty_runs import BAD
from made_runs import (
    activity,
    bend,
    falling_losses,
    layered,
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

    def test_asks_at_every_so_many_steps_only(self, monkeypatch):
        asked = []
        monkeypatch.setattr("fastguard.diagnosis.watch.diagnose", lambda *args, **settings: asked.append(True) or [])
        watch = Watch(TrainingHistory(), check_every=7)
        assert [bool(asked) for _ in range(6) if watch.step() == []] == [False] * 6
        watch.step()
        assert asked == [True]

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

    def test_unknown_severity(self):
        with pytest.raises(ValueError, match="`least` must be one of"):
            Watch(TrainingHistory(), least="fatal")


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


def test_what_many_rules_need_is_worked_out_once(monkeypatch):
    asked = []
    monkeypatch.setattr(needs, "descent", lambda history: asked.append(history))
    assert sum(rule.needs_descent for rule in RULES.values()) > 10
    diagnose(TrainingHistory(), rules=[rule for rule in RULES.values() if rule.needs_descent])
    assert len(asked) <= 2  # rules that need targets of data besides are asked for both


def test_all_rules_are_asked_within_a_millisecond_or_so():
    names = [f"layers.{i}.weight" for i in range(150)]
    history = layered(600, lambda step, place: 1.0 + place / 100, falling_losses(600), names=names)
    modules = tuple(activity(f"layers.{i}.act") for i in range(50))
    for step in range(600, 1000):
        history.add(make_record(step, 1.0 + step % 5, loss=0.3, lr=1e-3, activations=modules if step % 50 == 0 else ()))
    durations = []
    for _ in range(7):
        history.note_model()  # a change, so that nothing is remembered from the last time
        started = time.process_time()  # not that of whoever else runs
        find_causes(diagnose(history), history)
        durations.append(time.process_time() - started)
    assert min(durations) < 10e-3  # 0.6 ms where nothing else runs
