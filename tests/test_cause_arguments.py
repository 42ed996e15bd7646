"""How causes argue: needs, reasons, contradictions, shares of one, and what is left to "unknown"."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import CAUSES, Finding, cause, find_causes, fitted
from fastguard.diagnosis.causes import UNKNOWN, shares
from fastguard.records import TrainingHistory
from fastguard.records.failures import Failures


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
