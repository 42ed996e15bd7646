"""Root causes: what explains what, how surely, how they argue, and what is left to "unknown"."""

import math

import pytest

from fastguard.diagnosis import CAUSES, RULES, Finding, cause, diagnose, find_causes, fitted
from fastguard.diagnosis.causes import UNKNOWN, evidence_for, shares
from fastguard.diagnosis.registry import SIGNS
from fastguard.records import TrainingHistory
from fastguard.records.failures import Failures

from faulty_runs import BAD
from made_runs import (
    batch,
    batches_run,
    bend,
    falling_losses,
    flat_losses,
    layered,
    noisy_norms,
    run,
    settings,
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


def dead_at(step):
    losses = [*falling_losses(step), *flat_losses(150 - step, level=1.1)]
    return layered(150, lambda s, place: 0.0 if place < 3 and s >= step else 1.0, losses)


def jumped(factor=10):
    losses = [*falling_losses(120), *flat_losses(80, level=6.0, noise=0.5)]
    return run(losses, lrs=[1e-3 * (factor if s >= 120 else 1) for s in range(200)])


def with_a_derivative_of_infinity(loss=0.5):
    """Gradients that were NaN now and then while the loss was a number: of a root of 0, say."""
    history = run(falling_losses(100))
    for step in range(100, 130):
        if step % 6:
            history.add(make_record(step, 1.0 + step % 3 / 10, loss=0.5, lr=1e-3))
        else:
            history.add(make_bad_record(step, ["b", "c"], loss=loss, lr=1e-3))
    return history


RIGHT = {
    "bad-batch": one_bad_batch(),
    "corrupted-weights": BAD["non-finite-weights"],
    "half-precision-overflow": BAD["non-finite-activations"],
    "half-precision-underflow": BAD["half-precision-underflow"],
    "learning-rate-too-high": jumped(),
    "learning-rate-too-low": BAD["update-ratio-low"],
    "scheduler-not-stepped": BAD["scheduler-not-stepping"],
    "exploding-gradients": run([None] * 260, bend(noisy_norms(260), (100, 150, 200), lambda norm: 60.0 * norm)),
    "unscaled-accumulation": BAD["unscaled-accumulation"],
    "vanishing-gradients": BAD["vanishing-layers"],
    "poor-initialisation": BAD["poor-initialisation"],
    "dead-units": dead_at(60),
    "saturated-units": BAD["saturated-units"],
    "parameters-missing-from-optimizer": BAD["parameters-not-in-optimizer"],
    "frozen-parameters": BAD["frozen-parameters"],
    "parameters-cut-off": BAD["missing-gradients"],
    "weight-decay-too-high": BAD["shrinking-weights"],
    "dropout-too-high": BAD["dropout-high"],
    "overfitting": BAD["overfitting"],
    "wrong-targets": BAD["loss-at-chance"],
    "gradients-too-large-to-clip": run(flat_losses(80), change=lambda s: {"clip_coef": 0.05}),
    "missing-zero-grad": BAD["gradients-not-cleared"],
    "no-gradient-arrives": BAD["no-gradient"],
    "trained-elsewhere": BAD["unseen-updates"],
    "wrong-output-layer": BAD["output-against-loss"],
    "unnormalised-inputs": BAD["input-scale"],
    "unnormalised-targets": BAD["target-scale"],
    "wrong-optimizer-settings": BAD["odd-optimizer-settings"],
    "clipped-away": run(
        flat_losses(150), change=lambda s: {"clip_coef": 0.005}, optimizer_settings=settings("SGD")
    ),
    "wrong-schedule": BAD["learning-rate-gone"],
    "weights-overwritten": BAD["weights-overwritten"],
    "train-mode-in-validation": BAD["validation-in-training-mode"],
    "wrong-loss": BAD["broadcast-targets"],
    "imbalanced-targets": BAD["uneven-targets"],
    "trivial-targets": BAD["one-target"],
    "repeated-data": BAD["same-inputs"],
    "outliers": batches_run(
        bend(falling_losses(200), [150], lambda v: 20.0),
        lambda s: batch(input_abs_max=9999.0 if s == 150 else 2.5)(s),
    ),
    "preprocessing-differs": BAD["validation-inputs-differ"],
    "collapsed-representation": batches_run(
        falling_losses(200), lambda s: batch(output_spread=0.5 if s < 30 else 0.0)(s)
    ),
    "model-cannot-fit": BAD["layers-without-activation"],
    "stopped-too-early": BAD["loss-still-falling"],
    "unshuffled-data": BAD["sorted-targets"],
    "normalisation-statistics": BAD["running-statistics-apart"],
    "eval-mode-in-training": BAD["training-in-eval-mode"],
    "adversary-wins": BAD["one-side-wins"],
    "hardware-fault": BAD["lone-element"],
    "singular-operation": with_a_derivative_of_infinity(),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CAUSES))
class TestEveryCause:
    def test_names_known_rules_only(self, name):
        one = CAUSES[name]
        assert one.reasons.keys() <= {*RULES, *SIGNS} and one.explains <= RULES.keys()
        assert one.summary.endswith(".") and one.remedy.endswith(".")
        assert one.unless <= {*RULES, *SIGNS}

    def test_finding(self, name):
        found = first(RIGHT[name])
        assert found.rule == name
        assert found.link == f"docs/rules/causes.md#{name}"
        assert found.symptoms and 0.35 <= found.evidence["share"] < 1.0
        assert found.symptoms[0].rule in {RULES[sign].whole for sign in CAUSES[name].reasons}  # the weightiest first
        assert found.recommendation == CAUSES[name].remedy


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
        assert "zero-gradients" in [symptom.rule for symptom in found[0].symptoms]

    def test_a_finding_is_a_symptom_of_one_cause_only(self):
        for history in BAD.values():
            told = [s.rule for one in find_causes(diagnose(history), history) for s in one.symptoms]
            assert len(told) == len(set(told))

    def test_remarks_alone_make_no_cause(self):
        remark = Finding("x.", severity="info", rule="non-finite-loss")
        assert find_causes([remark], TrainingHistory()) == []

    def test_a_cause_of_ones_own(self):
        try:
            cause("own", "Mine.", "Do it.", {"odd": 0.9}, "other")
            findings = [Finding("a.", 3, 4, rule="odd", layers=("w",)), Finding("b.", 1, 9, rule="other")]
            found = find_causes(findings, TrainingHistory())[0]
        finally:
            CAUSES.pop("own", None)
        assert (found.rule, found.first_step, found.last_step, found.layers) == ("own", 3, 9, ("w",))
        assert [symptom.rule for symptom in found.symptoms] == ["odd", "other"]


def noted(history, **facts):
    """A copy of the run, of whose model this is known besides."""
    twin = TrainingHistory()
    twin.load_state_dict(history.state_dict())
    twin.note_model(**facts)
    return twin


class TestFacts:
    """What is known of the model rules causes out, in runs that are the same otherwise."""

    @pytest.mark.parametrize(
        ("name", "allowed", "ruled_out"),
        [
            ("half-precision-overflow", {"dtypes": ["float32"], "autocast": "float16"}, {"dtypes": ["float32"]}),
            ("half-precision-underflow", {"dtypes": ["bfloat16"]}, {"dtypes": ["float32", "float64"]}),
            ("dead-units", {"module_kinds": {"ReLU": 2, "Tanh": 1}}, {"module_kinds": {"Linear": 3, "Tanh": 2}}),
            ("dead-units", {"module_kinds": {"Linear": 3}}, {"module_kinds": {"LSTM": 1}}),
            (
                "clipped-away",
                {"optimizer_settings": settings("SGD", momentum=0.9)},
                {"optimizer_settings": settings("AdamW")},
            ),
            ("unscaled-accumulation", {}, {"backward_per_step": 1}),
            ("scheduler-not-stepped", {}, {"has_scheduler": False}),
        ],
    )
    def test_needs(self, name, allowed, ruled_out):
        assert name in names(noted(RIGHT[name], **allowed))
        assert name not in names(noted(RIGHT[name], **ruled_out))

    def test_a_run_with_two_faults(self):
        history = noted(BAD["validation-in-training-mode"], num_left_gradients=20, num_watched_backwards=20)
        found = find_causes(diagnose(history), history)
        assert {one.rule for one in found} == {"missing-zero-grad", "train-mode-in-validation"}
        assert all(one.evidence["share"] > 0.9 for one in found)  # neither stands against the other, once both are told


def clipped_to(coef):
    return Finding("f.", rule="clip-rate-high", evidence={"median_coef": coef})


class TestYielding:
    """Reasons that say less where another finding explains them."""

    @pytest.mark.parametrize(
        ("name", "reason", "other", "weights"),
        [
            ("learning-rate-too-low", "steps-too-small", clipped_to(0.04), (0.85, 0.25)),
            ("learning-rate-too-low", "steps-too-small", clipped_to(0.06), (0.85, 0.85)),
            ("learning-rate-too-low", "update-ratio-low", clipped_to(0.04), (0.85, 0.25)),
            ("wrong-targets", "unrelated-targets", Finding("f.", rule="loss-at-chance"), (0.9, 0.9)),
            ("wrong-targets", "unrelated-targets", Finding("f.", rule="no-warm-up", severity="info"), (0.9, 0.9)),
        ],
    )
    def test_to_another_finding(self, name, reason, other, weights):
        history = TrainingHistory()
        alone, beside = (evidence_for(found, history)[name] for found in (say(reason), [*say(reason), other]))
        assert (alone[reason], beside[reason]) == weights


class TestContradictions:
    """What is seen besides, and cannot be where the cause is at work."""

    @pytest.mark.parametrize(
        ("name", "rule"),
        [
            ("dead-units", "no-gradient"),
            ("learning-rate-too-high", "learning-rate-still-rising"),
            ("singular-operation", "batch-not-finite"),
        ],
    )
    def test_another_finding(self, name, rule):
        findings = diagnose(RIGHT[name])
        assert name in evidence_for(findings, RIGHT[name])
        assert name not in evidence_for([*findings, *say(rule)], RIGHT[name])

    @pytest.mark.parametrize(("dtypes", "can_be"), [(["float32"], True), (["float16"], False), ([], True)])
    def test_half_precision_overflows_by_itself(self, dtypes, can_be):
        history = RIGHT["singular-operation"]
        known = noted(history, dtypes=dtypes) if dtypes else history
        assert ("singular-operation" in evidence_for(diagnose(history), known)) == can_be


def say(*rules, **fields):
    """Warnings of these names."""
    return [Finding("f.", rule=rule, **fields) for rule in rules]


@pytest.fixture
def own():
    """Only causes that the test makes, with the usual weights."""
    registries = (CAUSES, fitted.WEIGHTS, fitted.OFFSETS)
    before = [dict(registry) for registry in registries]
    for registry in registries:
        registry.clear()
    yield lambda name, reasons, explains="", **more: cause(name, f"{name}.", "Do it.", reasons, explains, **more)
    for registry, items in zip(registries, before):
        registry.clear()
        registry.update(items)


def told(findings, history=None, **options):
    return find_causes(findings, TrainingHistory() if history is None else history, **options)


class TestArgument:
    @pytest.mark.parametrize("scores", [{}, {"a": 0.0}, {"a": 700.0, "b": -700.0}, {"a": -3.0, "b": 2.5, "c": 2.5}])
    def test_shares_sum_to_one(self, scores):
        found = shares(scores)
        assert found.keys() == {*scores, UNKNOWN} and sum(found.values()) == pytest.approx(1.0)
        assert all(0.0 <= share <= 1.0 for share in found.values())

    def test_independent_reasons_add_up(self, own):
        one = own("x", {"a": 0.5, "b": 0.4, "c": lambda finding, history, found: 0.0})
        findings = {finding.rule: finding for finding in say("a", "b", "c")}
        signs = one.signs(findings, TrainingHistory())
        assert signs == {"a": 0.5, "b": 0.4}
        assert one.score(signs) == pytest.approx(5.2 * 0.9 - 2.2)
        [found] = told(findings.values())
        assert found.evidence["share"] == pytest.approx(1 / (1 + math.exp(2.2 - 5.2 * 0.9)))
        assert found.evidence["speaks_for_it"] == ["a", "b"]

    def test_fitted_weights_are_used(self, own, monkeypatch):
        own("x", {"a": 0.9})
        own("y", {"a": 0.3})
        assert told(say("a"))[0].rule == "x"
        monkeypatch.setitem(fitted.WEIGHTS, "x", {"a": 1.0})
        monkeypatch.setitem(fitted.OFFSETS, "y", 2.0)
        found = told(say("a"))[0]
        scores = {"x": 1.0 * 0.9 - 2.2, "y": 5.2 * 0.3 + 2.0}
        assert found.rule == "y" and found.evidence["share"] == pytest.approx(shares(scores)["y"])

    def test_a_share_is_trusted_as_far_as_such_shares_were_right(self, own, monkeypatch):
        own("x", {"loss-spike": 0.9}, explains="norm-spike")
        trust = {"offset": -0.5, "by_share": 0.5, "by_families": 1.0}
        monkeypatch.setattr(fitted, "TRUST", trust)
        monkeypatch.setattr(fitted, "OF_CAUSE", {})
        score = -0.5 + 0.5 * (5.2 * 0.9 - 2.2)
        assert told(say("loss-spike"))[0].confidence == pytest.approx(1 / (1 + math.exp(-score)))
        of_two = told(say("loss-spike", "norm-spike"))[0].confidence
        assert of_two == pytest.approx(1 / (1 + math.exp(-score - 1.0)))
        monkeypatch.setattr(fitted, "OF_CAUSE", {"x": -1.0})
        assert told(say("loss-spike"))[0].confidence == pytest.approx(1 / (1 + math.exp(1.0 - score)))

    def test_confidences_are_probabilities_that_rise_with_the_share(self):
        for name in ["never-told", *CAUSES]:
            told_with = [fitted.confidence(name, share / 100, n) for n in (1, 2) for share in range(101)]
            assert all(0.0 < one < 1.0 for one in told_with)
            assert told_with[:101] == sorted(told_with[:101]) and told_with[101:] == sorted(told_with[101:])
            assert all(one < two for one, two in zip(told_with[:101], told_with[101:]))

    @pytest.mark.parametrize(("answer", "expected"), [(True, "x"), (None, "x"), (False, UNKNOWN)])
    def test_a_need_that_is_false_rules_out(self, own, answer, expected):
        own("x", {"a": 0.9}, needs=[lambda history: True, lambda history: answer])
        assert told(say("a"))[0].rule == expected

    def test_no_cause_takes_what_is_more_severe_than_all_of_its_reasons(self, own):
        own("x", {"a": 0.9}, "b c")
        [minor, major] = say("b"), say("c", severity="critical")
        found = told([*say("a"), *minor, *major])
        assert [(one.rule, one.severity) for one in found] == [("x", "warning"), (UNKNOWN, "critical")]
        assert [[symptom.rule for symptom in one.symptoms] for one in found] == [["a", "b"], ["c"]]
        [alone] = told([*say("a", severity="critical"), *minor, *major])
        assert [symptom.rule for symptom in alone.symptoms] == ["a", "b", "c"]

    def test_two_faults_are_both_told_the_worse_first(self, own):
        own("x", {"a": 0.9}, "c")
        own("y", {"b": 0.7}, "c")
        own("z", {"c": 0.6})
        found = told([*say("a", "c"), *say("b", severity="critical")])
        assert [one.rule for one in found] == ["y", "x"]
        assert [[symptom.rule for symptom in one.symptoms] for one in found] == [["b"], ["a", "c"]]
        found = told(say("a", "b"))
        assert [one.rule for one in found] == ["x", "y"]

    @pytest.mark.parametrize(("weight", "expected"), [(0.48, ["y", "x"]), (0.56, ["x", "y"])])
    def test_a_doubtful_cause_comes_after_a_sure_one_however_severe(self, own, weight, expected):
        own("x", {"a": weight})
        own("y", {"b": 0.9})
        found = told([*say("a", severity="critical"), *say("b")])
        assert [one.rule for one in found] == expected
        doubtful = next(one for one in found if one.rule == "x")
        assert doubtful.severity == "critical" and (doubtful.evidence["share"] < 0.6) == (expected[0] == "y")

    @pytest.mark.parametrize("broken", ["weight", "need"])
    def test_a_cause_that_raises_is_caged(self, own, broken, caplog):
        def fail(*arguments):
            raise ZeroDivisionError("of its own")

        own("x", {"a": 0.5})
        own(
            "broken",
            {"a": fail if broken == "weight" else 0.9},
            needs=[fail] if broken == "need" else [],
        )
        failures = Failures()
        for _ in range(2):
            assert [one.rule for one in told(say("a"), failures=failures)] == ["x"]
        assert len(caplog.records) == 1 and "cause 'broken'" in caplog.text and "of its own" in caplog.text


class TestUnknown:
    def test_where_nothing_fits(self, own):
        own("x", {"a": 0.1})
        [found] = told([Finding("f.", 3, 7, layers=("w",), rule="a"), Finding("g.", 2, rule="b", severity="critical")])
        assert (found.rule, found.severity, found.confidence) == (UNKNOWN, "critical", 0.0)
        assert (found.first_step, found.last_step, found.layers) == (2, 7, ("w",))
        assert found.summary == "Something is wrong, and the evidence does not single out a cause: b, a."
        assert found.link == "docs/rules/causes.md#unknown" and [one.rule for one in found.symptoms] == ["b", "a"]

    def test_beside_a_cause_only_for_what_is_critical(self, own):
        own("x", {"a": 0.9})
        assert [one.rule for one in told(say("a", "b"))] == ["x"]
        found = told([*say("a", "c"), *say("b", severity="critical")])
        assert [one.rule for one in found] == ["x", UNKNOWN]  # the last, however severe
        assert found[1].summary.startswith("Something else is wrong,")
