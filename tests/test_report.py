"""The report: what it says first, that it fits a page, and that a machine can read it; all of it without torch."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import textwrap
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

    def test_the_worst_finding_decides_and_comes_first(self):
        history = healthy_history()
        history.add(make_bad_record(200, ["b"]))
        report = build_report(history, sinks_lost={"JsonlSink('run.jsonl')": 2})
        assert report.status == "critical"
        assert [finding.rule for finding in report.findings] == ["non-finite-gradients", "lost-records"]
        assert lines_of(report)[0] == "CRITICAL after 201 steps: 1 critical problem, 1 warning"

    def test_a_bad_loss_without_gradients_is_critical(self):
        history = TrainingHistory()
        for step in range(5):
            history.record(step, loss=float("nan"), grad_norm=0.0, lr=1e-3)
        assert build_report(history).status == "critical"

    def test_what_was_not_observed_is_listed_if_nothing_was_found(self):
        history = healthy_history()
        assert lines_of(build_report(history))[1] == "    not observed: validation loss, activations, weights"
        history.add(make_record(200, loss=1.0, val_loss=1.0))
        assert lines_of(build_report(history))[1] == "    not observed: activations, weights"
        found = build_report(history, findings=[Finding("Odd.", rule="odd", severity="warning")])
        assert "not observed" not in str(found)


class TestText:
    def test_findings(self):
        history = healthy_history()
        history.add(make_bad_record(200, ["b", "a"]))
        history.add(make_record(201))
        long = Finding("x.", 3, 9, layers=tuple("abcde"), rule="odd")
        text = str(build_report(history, findings=[long]))
        assert "[warning] non-finite-gradients, step 200, in b\n" in text
        assert "\n    NaN or Inf in the gradients of 1 step of 202 (all skipped); first in b." in text
        assert "\n    evidence: num_nonfinite 1," in text
        assert "\n    what to do: Look at the data of these steps" in text
        assert "[warning] odd, steps 3 to 9, in a, b, c and 2 more" in text.splitlines()

    def test_numbers(self):
        history = healthy_history()
        history.add(make_bad_record(200, ["b"], loss=1.5, lr=1e-4), overhead_s=41e-6)
        text = " ".join(str(build_report(history, sinks_lost={"log": 3, "other": 0})).split())
        for needed in (
            "steps 201, the last is step 200",
            "gradient norm last nan, largest ",
            "over the last 200 good steps 0.",
            "clipped 10 % (20 of 200 good steps)",
            "skipped 0.498 % (1 of 201 steps)",
            "loss last 1.5, lowest 1.005",
            "learning rate last 0.0001",
            "cost of guarding median 41 us, mean 41 us a step",
            "records lost 3 by the sinks",
            "3 records could not be written: 3 by log.",
        ):
            assert needed in text
        unknown = str(build_report(make_history([1.0, 2.0])))
        assert not any(word in unknown for word in ("learning rate", "cost", "lost", "validation loss  "))
        assert "loss              not observed" in unknown
        bad = build_report(make_history([math.nan] * 3))
        assert bad.status == "critical" and "clipped" not in str(bad) and "gradient norm     last nan" in str(bad)
        assert "after 1234567 steps:" in str(Report("healthy", (), [], {"num_steps": 1_234_567}))

    @pytest.mark.parametrize(("confidence", "said"), [(0.49, "Possible"), (0.5, "Likely")])
    def test_confidence_of_causes(self, confidence, said):
        cause = Finding("So it is.", rule="one", confidence=confidence)
        report = Report("warning", (), [], {"num_steps": 1}, (cause,))
        assert f"{said} cause: one (confidence {confidence:.2f})" in str(report)
        text = str(build_report(make_history([1.0] * 3), findings=[Finding("Odd.", severity="critical", rule="odd")]))
        assert "Likely cause: unknown" in text and "confidence" not in text

    def test_fits_a_page_in_plain_ascii(self):
        history = healthy_history()
        history.add(make_bad_record(200, ["blocks.3." * 30 + "weight"], names=["blocks.3." * 30 + "weight"]))
        finding = Finding("word " * 100, 1, 2, layers=("x" * 200,), evidence={"k" * 60: 1.0}, rule="long")
        text = str(build_report(history, sinks_lost={"s" * 150: 1}, findings=[finding]))
        assert max(map(len, text.splitlines())) <= 100 and text.isascii()


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

    def test_other_thresholds_and_rules(self):
        history = make_turning_history([1.0] * 20)
        assert build_report(history).findings != ()
        assert build_report(history, thresholds={"already-clipped": {"run": 30}}).findings == ()
        assert build_report(history, rules=[]).findings == ()


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

    def test_causes_come_first_and_each_finding_once(self):
        report = build_report(troubled_history())
        assert [one.rule for one in report.causes] == ["learning-rate-too-high"]
        assert report.recommendations[0] == report.causes[0].recommendation
        text = str(report)
        assert all(text.count(f"] {finding.rule}, ") == 1 for finding in report.findings)

    def test_for_machines(self):
        plain = json.loads(json.dumps(build_report(troubled_history()).to_dict(), allow_nan=False))
        assert plain["causes"][0]["symptoms"][0] == "learning-rate-jump"
        assert plain["modules"][1]["num_dead_units"] == 64
        assert plain["weights"][0]["update_ratio"] == pytest.approx(0.081)
        of_several = [finding["rule"] for finding in plain["findings"] if "symptoms" in finding]
        assert of_several == ["loss-divergence"]
        assert plain["findings"][0]["link"].startswith("docs/rules/")

    def test_tables_show_the_worst_of_many(self):
        modules = tuple(activity(f"m{i}", dead=i / 40, order=i) for i in range(40))
        weights = tuple(WeightStats(f"w{i}" * 20, 64, 1.0, 0.5, 2.0, 1.0, 10.0**-i) for i in range(40))
        history = run([1.0], change=lambda step: {"activations": modules, "weights": weights})
        lines = str(build_report(history)).splitlines()
        assert "and 28 more modules" in lines and "and 28 more parameters" in lines
        assert [line.split()[0] for line in lines if line.startswith("m")] == [f"m{i}" for i in range(28, 40)]
        assert max(map(len, lines)) <= 100 and any("..." in line and line.startswith("w12") for line in lines)


def test_from_record_to_report_without_torch_or_numpy(tmp_path):
    code = """
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None  # importing either now fails
        from records import make_bad_record, make_record
        from fastguard.records import TrainingHistory
        from fastguard.report import build_report
        from fastguard.sinks import JsonlSink, read_jsonl
        history = TrainingHistory()
        with JsonlSink("run.jsonl") as sink:
            for step in range(20):
                record = make_bad_record(step, ["b"]) if step == 19 else make_record(step)
                sink.write(record)
                history.add(record)
        for line in read_jsonl("run.jsonl"):
            print(line["step"], line.get("nonfinite"))
        print(build_report(history))
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=env,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "19 ['b']" in done.stdout
    assert "CRITICAL after 20 steps: 1 critical problem" in done.stdout
