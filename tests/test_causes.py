"""Root causes: what explains what, and how surely."""

from __future__ import annotations

import math
import time

import pytest

from fastguard.diagnosis import CAUSES, RULES, Cause, Finding, Watch, cause, diagnose, find_causes, unexplained
from fastguard.diagnosis.presets import PRESETS
from fastguard.history import TrainingHistory

from faulty_runs import (
    BAD,
    HEALTHY,
    activity,
    bend,
    falling_losses,
    flat_losses,
    layered,
    run,
    weights_run,
    with_activities,
)
from records import make_bad_record, make_record


def names(history):
    return [one.rule for one in find_causes(diagnose(history), history)]


def first(history):
    return find_causes(diagnose(history), history)[0]


def one_bad_batch():
    history = run(falling_losses(100))
    history.add(make_bad_record(100, ["b"], loss=math.nan, lr=1e-3))
    history.add(make_record(101, 1.0, loss=0.5, lr=1e-3))
    return history


def spoilt_for_good():
    history = run(falling_losses(100))
    for step in range(100, 110):
        history.add(make_bad_record(step, ["b", "c"], loss=math.nan, lr=1e-3))
    return history


def dead_at(step):
    losses = [*falling_losses(step), *flat_losses(150 - step)]
    return layered(150, lambda s, place: 0.0 if place < 3 and s >= step else 1.0, losses)


def jumped(factor=10):
    losses = [*falling_losses(120), *flat_losses(80, level=6.0, noise=0.5)]
    return run(losses, lrs=[1e-3 * (factor if s >= 120 else 1) for s in range(200)])


RIGHT = {
    "bad-batch": one_bad_batch(),
    "corrupted-weights": BAD["non-finite-weights"],
    "half-precision-overflow": BAD["non-finite-activations"],
    "half-precision-underflow": BAD["half-precision-underflow"],
    "recurring-bad-batch": BAD["periodic-loss-spikes"],
    "learning-rate-too-high": jumped(),
    "learning-rate-too-low": BAD["update-ratio-low"],
    "scheduler-not-stepped": BAD["scheduler-not-stepping"],
    "exploding-gradients": BAD["layer-norm-imbalance"],
    "unscaled-accumulation": BAD["unscaled-accumulation"],
    "vanishing-gradients": BAD["vanishing-layers"],
    "poor-initialisation": BAD["poor-initialisation"],
    "dead-units": dead_at(60),
    "saturated-units": BAD["saturated-units"],
    "parameters-missing-from-optimizer": BAD["parameters-not-in-optimizer"],
    "frozen-parameters": BAD["frozen-parameters"],
    "parameters-cut-off": run(falling_losses(50), names=["v", "w"]),
    "weight-decay-too-high": BAD["shrinking-weights"],
    "dropout-too-high": BAD["dropout-high"],
    "overfitting": BAD["overfitting"],
    "wrong-targets": BAD["loss-not-decreasing"],
    "gradients-too-large-to-clip": run(falling_losses(80), change=lambda s: {"clip_coef": 0.05}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CAUSES))
class TestEveryCause:
    def test_comes_first_where_it_is_right(self, name):
        assert first(RIGHT[name]).rule == name

    def test_names_known_rules_only(self, name):
        one = CAUSES[name]
        assert one.reasons.keys() | one.explains <= RULES.keys()
        assert one.summary.endswith(".") and one.remedy.endswith(".")

    def test_finding(self, name):
        found = first(RIGHT[name])
        assert found.link == f"docs/rules/causes.md#{name}"
        assert found.symptoms and 0.3 <= found.confidence < 1.0
        assert found.symptoms[0].rule in CAUSES[name].reasons  # the weightiest first
        assert found.recommendation == CAUSES[name].remedy


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_have_no_cause(name):
    assert names(HEALTHY[name]) == []


class TestRanking:
    def test_dead_units_after_a_jump_of_the_learning_rate_are_its_symptom(self):
        history = dead_at(60)
        alone = names(history)
        lrs = [1e-3 if s < 60 else 1e-1 for s in range(150)]
        twin = TrainingHistory()
        for step, entry in enumerate(history.recent):
            record = make_record(step, entry.norm, loss=entry.loss, lr=lrs[step])
            twin.add(record)
        twin.tensors = history.tensors
        found = find_causes(diagnose(twin), twin)
        assert alone[0] == "dead-units" and found[0].rule == "learning-rate-too-high"
        assert "zero-gradient-tensors" in [symptom.rule for symptom in found[0].symptoms]

    def test_weights_that_are_bad_for_good_are_told_from_one_bad_batch(self):
        assert names(spoilt_for_good())[0] == "corrupted-weights"
        assert names(one_bad_batch())[0] == "bad-batch"

    def test_large_updates_of_shrinking_weights_are_decay(self):
        history = weights_run(
            lambda step, name: 0.1, flat_losses(140), norm=lambda step: 10 * 0.97**step, decay_per_step=0.1
        )
        assert names(history)[0] == "weight-decay-too-high"

    def test_a_finding_is_a_symptom_of_one_cause_only(self):
        for history in BAD.values():
            told = [s.rule for one in find_causes(diagnose(history), history) for s in one.symptoms]
            assert len(told) == len(set(told))

    def test_what_no_cause_explains_is_left(self):
        findings = [*diagnose(RIGHT["bad-batch"]), Finding("odd.", rule="odd")]
        causes = find_causes(findings, RIGHT["bad-batch"])
        assert [finding.rule for finding in unexplained(findings, causes)] == ["odd"]

    def test_remarks_alone_make_no_cause(self):
        remark = Finding("x.", severity="info", rule="non-finite-loss")
        assert find_causes([remark], TrainingHistory()) == []

    def test_independent_reasons_add_up(self):
        one = Cause("x", "s.", "r.", {"a": 0.5, "b": 0.5, "c": lambda finding, history, found: 0.0})
        findings = {name: Finding("f.", rule=name) for name in "abc"}
        confidence, reasons = one.weigh(findings, TrainingHistory())
        assert confidence == 0.75 and [finding.rule for _, finding in reasons] == ["a", "b"]
        assert one.weigh({"a": findings["a"]}, TrainingHistory())[0] == 0.5

    def test_a_cause_of_ones_own(self):
        try:
            cause("own", "Mine.", "Do it.", {"odd": 0.9}, "other")
            findings = [Finding("a.", 3, 4, rule="odd", layers=("w",)), Finding("b.", 1, 9, rule="other")]
            found = find_causes(findings, TrainingHistory())[0]
        finally:
            CAUSES.pop("own", None)
        assert (found.rule, found.first_step, found.last_step, found.layers) == ("own", 3, 9, ("w",))
        assert [symptom.rule for symptom in found.symptoms] == ["odd", "other"]


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

    def test_asks_at_every_so_many_steps_only(self):
        asked = []

        class History(TrainingHistory):
            def settle(self):
                asked.append(True)
                super().settle()

        watch = Watch(History(), check_every=7)
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


def losses_of(values):
    return run(values, [1.0 + s % 5 for s in range(len(values))])


PRESET_RUNS = {
    "lightning/spike": (losses_of([1.0] * 20 + [3.5]), losses_of([1.0] * 20 + [2.9])),
    "kill-loss-spike/kill-loss-spike": (losses_of([1.0] * 100 + [2.5] * 5), losses_of([1.0] * 100 + [2.5] * 4)),
    "skip-step/skip-step": (losses_of([*[1.0, 2.0] * 40, 9.0]), losses_of([1.0, 2.0] * 40)),
    "megatron/large": (run([1.0] * 120, [1.0] * 119 + [10.0]), run([1.0] * 120, [1.0] * 119 + [9.0])),
    "sagemaker/vanishing": (layered(5, lambda s, p: 1e-9), layered(5, lambda s, p: 1e-3)),
    "sagemaker/exploding": (BAD["non-finite-gradients"], HEALTHY["noisy"]),
    "sagemaker/loss-not-decreasing": (losses_of([1.0] * 20), losses_of([1.0 - s / 100 for s in range(50)])),
    "sagemaker/overfit": (run([1.0] * 30, val_losses={29: 1.2}), run([1.0] * 30, val_losses={29: 1.05})),
    "sagemaker/update-ratio": (weights_run(lambda s, n: 20.0), weights_run(lambda s, n: 0.5)),
    "sagemaker/dead-relu": (BAD["dead-relu-units"], HEALTHY["a naturally sparse ReLU"]),
    "sagemaker/saturated": (
        with_activities(activity(family="tanh", stuck=0.9)),
        with_activities(activity(family="tanh", stuck=0.4)),
    ),
    "torchmortem/layer-ratio": (layered(5, lambda s, p: 1000.0 if p else 1.0), layered(5, lambda s, p: p + 1.0)),
    "torchmortem/update-ratio": (weights_run(lambda s, n: 0.2), weights_run(lambda s, n: 0.05)),
    "torchmortem/large-norm": (run([1.0] * 3, [1.0, 1001.0, 1.0]), run([1.0] * 3, [1.0, 999.0, 1.0])),
    "toolkit/loss-explosion": (losses_of([1.0] * 9 + [math.nan]), losses_of([math.nan] + [1.0] * 9)),
    "toolkit/plateau": (losses_of([1.0] * 100), losses_of([1.0] * 99)),
    "toolkit/overfitting": (
        run(falling_losses(400), val_losses={s: 1.0 + s / 400 for s in range(9, 400, 19)}),
        run(falling_losses(400), val_losses={s: 2.0 - s / 400 for s in range(9, 400, 19)}),
    ),
    "toolkit/large-norm": (run([1.0] * 3, [1.0, 1001.0, 1.0]), HEALTHY["noisy"]),
    "toolkit/small-norm": (run([1.0] * 3, [1.0, 1e-9, 1.0]), HEALTHY["noisy"]),
}  # fmt: skip


def test_every_preset_has_its_runs():
    known = [rule.name for name, rules in PRESETS.items() if name != "fastguard" for rule in rules]
    assert known == list(PRESET_RUNS)
    assert PRESETS["fastguard"] == tuple(RULES.values())
    assert not set(known) & RULES.keys()  # they are not asked unless one asks for them


@pytest.mark.parametrize("name", PRESET_RUNS)
def test_presets_keep_to_their_definition(name):
    rule = next(rule for rules in PRESETS.values() for rule in rules if rule.name == name)
    bad, good = PRESET_RUNS[name]
    finding = rule(bad)
    assert finding is not None and finding.rule == name
    assert rule(good) is None
    assert rule.source and rule.family == "own"


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
