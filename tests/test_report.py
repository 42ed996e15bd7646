"""The report: what it says first, that it fits a page, and that a machine can read it; all of it without torch."""

import json
import math
import random
from pathlib import Path

import pytest

from fastguard.diagnosis import Finding
from fastguard.records import TrainingHistory
from fastguard.records.samples import WeightStats
from fastguard.report import Report, build_report

from made_runs import activity, run
from records import make_bad_record, make_history, make_record, make_turning_history


def healthy_history(num_steps=200):
    rng = random.Random(0)
    history = TrainingHistory()
    for step in range(num_steps):
        coef = 0.5 if step % 10 == 0 else 1.0
        record = make_record(step, rng.lognormvariate(0, 0.3), clip_coef=coef, loss=2 - step / 200, lr=1e-3)
        history.add(record, overhead_s=41e-6)
    return history


def lines_of(report):
    return str(report).splitlines()


class TestStatus:
    @pytest.mark.parametrize(
        ("make", "status", "first_line", "rules"),
        [
            (healthy_history, "healthy", "HEALTHY after 200 steps: no problems found", []),
            (TrainingHistory, "no-evidence", "NOTHING TO REPORT: no step has been recorded yet", ["no-steps"]),
            (lambda: make_history([0.0] * 3), "no-evidence", "NO EVIDENCE after 3 steps: 1 remark", ["no-evidence"]),
            (lambda: make_history([0.0, 0.0, 1.0]), "healthy", "HEALTHY after 3 steps: no problems found", []),
            (lambda: make_history([1.0]), "healthy", "HEALTHY after 1 step: no problems found", []),
            (
                lambda: make_turning_history([1.0] * 20),
                "healthy",
                "HEALTHY after 20 steps: 1 remark",
                ["already-clipped"],
            ),
        ],
    )
    def test_of_runs_without_a_problem(self, make, status, first_line, rules):
        report = build_report(make())
        assert report.status == status == report.to_dict()["status"]
        assert lines_of(report)[0] == first_line and [finding.rule for finding in report.findings] == rules

    def test_what_was_not_observed_is_listed_if_nothing_was_found(self):
        history = healthy_history()
        assert lines_of(build_report(history))[1] == "    not observed: validation loss, activations, weights"
        history.add(make_record(200, loss=1.0, val_loss=1.0))
        assert lines_of(build_report(history))[1] == "    not observed: activations, weights"
        found = build_report(history, findings=[Finding("Odd.", rule="odd", severity="warning")])
        assert "not observed" not in str(found)


class TestText:
    @pytest.mark.parametrize(("confidence", "said"), [(0.49, "Possible"), (0.5, "Likely")])
    def test_confidence_of_causes(self, confidence, said):
        cause = Finding("So it is.", rule="one", confidence=confidence)
        report = Report("warning", (), [], {"num_steps": 1}, (cause,))
        assert f"{said} cause: one (confidence {confidence:.2f})" in str(report)
        text = str(build_report(make_history([1.0] * 3), findings=[Finding("Odd.", severity="critical", rule="odd")]))
        assert "Likely cause: unknown" in text and "confidence" not in text


class TestForMachines:
    def test_to_dict_is_strict_json(self):
        history = healthy_history()
        history.add(make_bad_record(200, ["b"], loss=math.inf))
        report = build_report(history)
        plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        tables = ["modules", "weights", "sinks"]
        assert list(plain) == ["status", "causes", "findings", "recommendations", "numbers", *tables]
        assert plain["numbers"]["norm_last"] == "NaN" and plain["numbers"]["loss_last"] == "Infinity"
        assert (plain["findings"][0]["rule"], plain["findings"][0]["layers"]) == ("non-finite-gradients", ["b"])
        numbers = report.numbers
        assert (numbers["num_steps"], numbers["num_clipped"], numbers["num_records_lost"]) == (201, 20, 0)
        assert numbers["norm_q05"] < numbers["norm_median"] < numbers["norm_q95"] < numbers["norm_max"]
        assert numbers["overhead_median_us"] == pytest.approx(41.0)

    def test_recommendations_are_in_order_and_each_once(self):
        given = [
            Finding("a.", severity="info", recommendation="last", rule="a"),
            Finding("b.", severity="critical", recommendation="first", rule="b"),
            Finding("c.", recommendation="first", rule="c"),
            Finding("d.", confidence=0.5, recommendation="middle", rule="d"),
        ]
        report = build_report(healthy_history(), findings=given)
        assert report.recommendations == ["first", "middle", "last"]
        assert [finding.rule for finding in report.findings] == ["b", "c", "d", "a"]


def troubled_history():
    """A learning rate that jumps at step 60, with what was sampled every 20 steps."""
    losses = [2.0 - step / 60 for step in range(60)] + [8.0] * 25
    norms = [1.0 + step % 3 / 10 for step in range(60)] + [30.0 + step for step in range(25)]

    def sampled(step):
        if step % 20:
            return {}
        updates = (("blocks.0.weight", 0.001 * (1 + step)), ("blocks.1.weight", 0.02))
        return {
            "activations": (activity("blocks.0.act", zero=0.5), activity("blocks.1.act", zero=1.0, dead=1.0, order=1)),
            "weights": tuple(WeightStats(name, 64, 4.0, 0.5, 2.0, 1.0, 4.0 * ratio) for name, ratio in updates),
        }

    lrs = [1e-3 if step < 60 else 5e-2 for step in range(85)]
    return run(losses, norms, lrs=lrs, change=sampled, val_losses={39: 1.5, 79: 9.0})


class TestSnapshot:
    def test_text(self):
        expected = (Path(__file__).parent / "report_snapshot.txt").read_text(encoding="utf-8")
        assert str(build_report(troubled_history())) + "\n" == expected

    def test_tables_show_the_worst_of_many(self):
        modules = tuple(activity(f"m{i}", dead=i / 40, order=i) for i in range(40))
        weights = tuple(WeightStats(f"w{i}" * 20, 64, 1.0, 0.5, 2.0, 1.0, 10.0**-i) for i in range(40))
        history = run([1.0], change=lambda step: {"activations": modules, "weights": weights})
        lines = str(build_report(history)).splitlines()
        assert "and 28 more modules" in lines and "and 28 more parameters" in lines
        assert [line.split()[0] for line in lines if line.startswith("m")] == [f"m{i}" for i in range(28, 40)]
        assert max(map(len, lines)) <= 100 and any("..." in line and line.startswith("w12") for line in lines)
