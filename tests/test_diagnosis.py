"""Every rule fires on a run that has its fault, is silent on healthy ones, and keeps to the table of limits."""

import json
import math

import limits_data
import limits_gradients
import limits_loss
import limits_model
import pytest

from fastguard.diagnosis import RULES, Finding, diagnose, rule
from fastguard.records import TrainingHistory

from faulty_runs import BAD, HEALTHY
from made_runs import noisy_norms, severity, spiked, with_bad_steps


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
        assert r.remedy and r.check.__doc__
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


class TestNormSpike:
    def test_thresholds_can_be_given(self):
        history = spiked(noisy_norms(300), 200, 50.0)
        assert RULES["norm-spike"](history, ratio=1000.0) is None
        assert diagnose(history, thresholds={"norm-spike": {"z": 1e6}}) == []


class TestDiagnose:
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


TABLES = {"loss": limits_loss, "gradients": limits_gradients, "data": limits_data, "model": limits_model}
CASES = [
    (name, sign, i) for name, table in TABLES.items() for sign, rows in table.LIMITS.items() for i in range(len(rows))
]


@pytest.mark.parametrize(("table", "sign", "place"), CASES)
def test_limits(table, sign, place):
    """`expected` is a severity, None for silence, or True for any severity."""
    history, expected = TABLES[table].LIMITS[sign][place]
    said = severity(sign, history)
    assert said is not None if expected is True else said == expected
