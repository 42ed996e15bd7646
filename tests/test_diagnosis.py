"""Every rule fires on a run that has its fault and is silent on healthy ones."""

from __future__ import annotations

import json
import math
import random

import pytest

from fastguard.diagnosis import RULES, Finding, diagnose, rule
from fastguard.diagnosis.rules import explosion_ahead
from fastguard.diagnosis.signals import signals_of
from fastguard.records import Entry, StepStats, TensorRow, TrainingHistory

from faulty_runs import BAD, HEALTHY
from made_runs import (
    falling_losses,
    noisy_norms,
    run,
    scaler_run,
    settings,
    spiked,
    with_bad_steps,
)
from records import make_history, make_record, make_row, make_table


def bad_run(name):
    if name not in BAD:
        pytest.fail(
            f"the rule {name!r} has no run that it must fire on: add one as BAD[{name!r}] in tests/faulty_runs.py, "
            "from the functions there, such as run(losses, norms) and layered(...)",
            pytrace=False,
        )
    return BAD[name]


def only(finding_or_none):
    assert finding_or_none is not None
    return finding_or_none


@pytest.mark.parametrize("name", sorted(sign.name for rule in RULES.values() for sign in rule.signs))
class TestEverySign:
    def test_fires_on_its_bad_run_and_does_not_change_it(self, name):
        before = json.dumps(bad_run(name).state_dict())
        finding = RULES[name](bad_run(name))
        assert finding is not None, f"does not fire on BAD[{name!r}] in tests/faulty_runs.py"
        assert finding.rule == RULES[name].whole
        assert finding.summary.endswith(".") and finding.recommendation
        assert 0 <= finding.first_step <= finding.last_step < bad_run(name).num_steps
        assert json.dumps(finding.to_dict(), allow_nan=False)
        assert json.dumps(bad_run(name).state_dict()) == before

    def test_is_silent_on_healthy_runs_and_no_more_severe_than_declared(self, name):
        hit = [run for run, history in HEALTHY.items() if RULES[name](history) is not None]
        assert not hit, f"fires on runs of HEALTHY in tests/faulty_runs.py: {hit}. Tighten the rule, not the runs."
        order = ["info", "warning", "critical"]
        severities = [f.severity for history in BAD.values() if (f := RULES[name](history)) is not None]
        assert all(order.index(severity) <= order.index(RULES[name].severity) for severity in severities)

    def test_is_documented(self, name):
        r = RULES[name]
        assert r.remedy and r.check.__doc__ and (r.of or (r.source and r.reads))
        assert all(f"`{threshold}`" in r.check.__doc__ for threshold in r.thresholds)


class TestNonFinite:
    def check(self, history):
        return only(RULES["non-finite-gradients"](history))

    def test_one_skipped_step_is_a_warning_that_names_the_origin(self):
        finding = self.check(with_bad_steps(100, {40: ["a", "b"]}))
        assert (finding.severity, finding.first_step, finding.last_step, finding.layers) == ("warning", 40, 40, ("b",))
        assert finding.summary == "NaN or Inf in the gradients of 1 step of 100 (all skipped); first in b."
        assert finding.evidence["last_num_tensors"] == 2

    def test_a_step_that_was_not_skipped_is_critical(self):
        finding = self.check(with_bad_steps(100, {40: ["a"]}, skipped=False))
        assert finding.severity == "critical" and "skip_nonfinite=True" in finding.recommendation

    def test_lbfgs_is_not_advised_to_skip(self):
        history = with_bad_steps(100, {40: ["a"]}, skipped=False)
        history.note_model(optimizer_settings=settings("LBFGS"))
        advice = self.check(history).recommendation
        assert "skip_nonfinite" not in advice and "strong_wolfe" in advice

    def test_most_frequent_origin_comes_first(self):
        finding = self.check(with_bad_steps(100, {10: ["b"], 20: ["c"], 30: ["c"], 40: ["a"]}))
        assert finding.layers == ("c", "b", "a")

    def test_among_equals_the_first_event_leads(self):
        assert self.check(with_bad_steps(100, {10: ["b"], 20: ["c"]})).layers == ("b", "c")

    def test_overflow_of_the_norm_alone_blames_no_tensor(self):
        history = make_history(noisy_norms(50))
        row = TensorRow(1, math.inf, 1.5e308, 1.5e308, 1.5e308, finite_norm=1.5e308)
        history.add(StepStats(50, make_table([row, row]), skipped=True))
        assert "no single tensor" in self.check(history).summary

    @pytest.mark.parametrize(
        ("num_steps", "skipped", "severity"),
        [
            (20, range(6), "info"),  # the scale is being found
            (2000, [1900], "info"),
            (600, range(100, 600, 10), "warning"),
            (100, range(80, 91), "critical"),
        ],
    )
    def test_a_loss_scaler_skips_now_and_then(self, num_steps, skipped, severity):
        finding = self.check(scaler_run(num_steps, skipped))
        assert finding.severity == severity
        assert ("GradScaler finds its scale" in finding.recommendation) == (severity == "info")


class TestSkipRun:
    def test_over_is_a_warning(self):
        finding = only(RULES["skip-run"](BAD["skip-run"]))
        assert (finding.severity, finding.first_step, finding.last_step) == ("warning", 50, 53)

    def test_going_on_is_critical(self):
        finding = only(RULES["skip-run"](with_bad_steps(54, {step: ["a"] for step in range(50, 54)})))
        assert finding.severity == "critical" and "goes on" in finding.summary

    def test_a_loss_scaler_may_skip_ten(self):
        assert RULES["skip-run"](scaler_run(100, range(10))) is None
        assert only(RULES["skip-run"](scaler_run(100, range(11)))).evidence["longest_run"] == 11


class TestNormSpike:
    def test_names_the_step_and_the_size(self):
        finding = only(RULES["norm-spike"](BAD["norm-spike"]))
        assert (finding.first_step, finding.last_step, finding.evidence["num_spikes"]) == (200, 200, 1)
        assert 25 < finding.evidence["ratio"] < 100

    @pytest.mark.parametrize(("coef", "is_advised"), [(1.0, True), (0.02, False)])
    def test_clipping_is_not_advised_for_a_step_that_was_clipped(self, coef, is_advised):
        norms = noisy_norms(300)
        norms[200] *= 50.0
        history = run(falling_losses(300), norms, change=lambda step: {"clip_coef": coef} if step == 200 else {})
        finding = only(RULES["norm-spike"](history))
        assert ("Clip at" in (finding.recommendation or RULES["norm-spike"].remedy)) == is_advised

    def test_thresholds_can_be_given(self):
        history = spiked(noisy_norms(300), 200, 50.0)
        assert RULES["norm-spike"](history, ratio=1000.0) is None
        assert diagnose(history, thresholds={"norm-spike": {"z": 1e6}}) == []

    def test_nan_does_not_blind_it(self):
        norms = noisy_norms(300)
        norms[50] = norms[100] = math.nan
        assert only(RULES["norm-spike"](spiked(norms, 200, 50.0))).first_step == 200

    def test_a_new_level_is_no_spike_for_ever(self):
        norms = [*noisy_norms(200), *noisy_norms(300, level=30.0)]
        finding = only(RULES["norm-spike"](make_history(norms), z=0.0))
        assert 250 < finding.last_step < 200 + 128 / 2 + 10  # then half of its baseline is of the new level


class TestZeroGradients:
    def test_empty_tensors_and_histories_without_records_are_silent(self):
        history = make_history([1.0])
        history.add(StepStats(1, make_table([make_row(), [0] * 8])))
        assert RULES["zero-gradients"](history) is None
        history.last = None
        assert RULES["zero-gradients"](history) is None


class TestAlreadyClipped:
    def test_names_the_steps(self):
        finding = only(RULES["already-clipped"](BAD["already-clipped"]))
        assert (finding.first_step, finding.last_step, finding.severity) == (50, 59, "info")
        assert finding.evidence["norm"] == pytest.approx(1.0, rel=1e-3)


class TestDiagnose:
    def test_names_are_shown_not_obeyed(self):
        history = with_bad_steps(100, {})
        history.note_model(dropout={"d\x1b[2J": 0.9})
        assert "d\\x1b[2J" in only(RULES["dropout-high"](history)).summary

    @pytest.mark.parametrize("num_losses", [1, 60, 300])
    def test_losses_that_stop_coming_break_no_rule(self, num_losses):
        history = TrainingHistory(window=64)
        for step in range(700):
            history.add(make_record(step, loss=2.0 if step < num_losses else None, lr=1e-3))
        assert history.loss == [] and isinstance(diagnose(history), list)

    def test_sorted_by_severity_then_confidence(self):
        def says(severity, confidence):
            return lambda history: Finding("x.", severity=severity, confidence=confidence)

        given = [("info", 1.0), ("warning", 0.5), ("critical", 0.1), ("warning", 0.9)]
        rules = []
        try:
            for i, (severity, confidence) in enumerate(given):
                says_it = says(severity, confidence)
                says_it.__qualname__ = f"rule{i}"
                rules.append(rule(f"test-{i}", severity="critical")(says_it))
            found = diagnose(TrainingHistory(), rules=rules)
        finally:
            for i in range(len(given)):
                RULES.pop(f"test-{i}", None)
        assert [f.rule for f in found] == ["test-2", "test-3", "test-1", "test-0"]

    @pytest.mark.parametrize("run", HEALTHY)
    def test_healthy_runs_have_no_findings(self, run):
        assert diagnose(HEALTHY[run]) == []

    def test_unknown_thresholds_list_the_known_ones(self):
        with pytest.raises(ValueError, match=r"`thresholds` must name rules, got 'spike'; the rules are: .*norm-spike"):
            diagnose(TrainingHistory(), thresholds={"spike": {}})
        with pytest.raises(TypeError, match="`x` must be a threshold of the rule 'norm-spike'; it has: z, ratio"):
            RULES["norm-spike"](TrainingHistory(), x=1.0)

    def test_the_same_after_save_and_load(self):
        # The last record and the end of the run are not saved.
        for name in set(BAD) - {"zero-gradients", "loss-still-falling"}:
            twin = TrainingHistory()
            twin.load_state_dict(BAD[name].state_dict())
            assert RULES[name](twin) == RULES[name](BAD[name])


class TestRegistry:
    def test_a_name_that_is_taken(self):
        with pytest.raises(ValueError, match="`name` must be new, got 'norm-spike', which is a rule already"):
            rule("norm-spike")(lambda history: None)

    def test_the_same_function_defined_again_replaces_the_rule(self):
        def define(answer):
            @rule("again")
            def again(history):
                return Finding(answer)

        try:
            define("one.")
            define("two.")
            assert RULES["again"](TrainingHistory()).summary == "two."
        finally:
            del RULES["again"]

    def test_thresholds_need_defaults(self):
        def check(history, *, limit):
            return None

        with pytest.raises(ValueError, match="`limit` must have a default - at rule 'limited'"):
            rule("limited")(check)

    def test_unknown_severity(self):
        with pytest.raises(
            ValueError, match=r"`severity` must be one of \['info', 'warning', 'critical'\], got 'fatal'"
        ):
            rule("x", severity="fatal")(len)
        with pytest.raises(ValueError, match=r"`severity` must be one of .* got 'fatal' - at `Finding`"):
            Finding("x.", severity="fatal")

    @pytest.mark.parametrize("confidence", [-0.1, 1.1, math.nan])
    def test_confidence_is_a_share(self, confidence):
        with pytest.raises(ValueError, match="`confidence` must be from 0 to 1"):
            Finding("x.", confidence=confidence)


def test_a_loss_that_comes_down_is_let_go_without_a_look_at_the_window(monkeypatch):
    """What the rule says early is what it would say, and it says it of the newest 40 losses, however many there are."""
    ahead = RULES["divergence-ahead"]
    found, num_early = [], 0
    for seed in range(40):
        rng = random.Random(seed)
        rise = 1.0 + 0.0006 * rng.randint(-6, 9)
        losses = [3.0 * 0.985 ** min(i, 90) * rise ** max(0, i - 90) * rng.uniform(0.9, 1.1) for i in range(240)]
        history = TrainingHistory()
        for step, loss in enumerate(losses):
            history.record(step, loss, 0.0 if rng.random() < 0.01 * (seed % 3) else loss * loss, 1e-3)
        with monkeypatch.context() as patch:
            patch.setattr(explosion_ahead, "_comes_down", lambda near: False)
            at_length = ahead(history)
        assert ahead(history) == at_length
        found.append(at_length is not None)
        num_early += explosion_ahead._comes_down(signals_of(history).newest_loss_entries(40))
    assert any(found) and not all(found) and num_early > 5


@pytest.mark.parametrize("losses", [[1.0, None, math.nan, 2.0] * 9, [1.0, 1e160] * 20])
def test_the_newest_losses_are_the_end_of_all(losses):
    history = TrainingHistory()
    for step, loss in enumerate(losses):
        history.extend([Entry(step, 1.0, 1.0, False, loss, None, None, None, None)])
    signals = signals_of(history)
    newest = [signals.newest_loss_entries(num) for num in (5, 100)]  # before all are there
    assert newest == [signals.loss_entries[-5:], signals.loss_entries]
    assert len(newest[0]) == 5 and signals.newest_loss_entries(5) == newest[0]
