"""How verdicts on the external runs are passed and added up: on made-up answers, without training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="its data come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults.external", reason="the suite is not beside these tests", exc_type=ImportError)

from benchmarks import readme as write_tables
from benchmarks.faults import readme
from benchmarks.faults.external import by_rule, score, table
from benchmarks.faults.external.case import Case, Proof, Truth
from benchmarks.faults.external.loop import Outcome
from benchmarks.faults.external.runs import Run
from benchmarks.faults.external.score import Heard

ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "benchmarks" / "results" / "faults-asked-once.json"
TRUTH = Truth(("lr", "loss"), ("learning-rate-too-high",), ("4",))
FAULTY = Case("B/blob/lr/9", "B", "blob/lr", "", lambda seed: None, "", TRUTH, None, lambda case: Proof(True, {}))
SOUND = Case("B/wine", "B", "wine", "", lambda seed: None, "")
RUN = Run("", "default", Outcome(0.5), (), 0.1)
RIGHT = Heard({"loss-explosion": ("loss", 10)}, (("learning-rate-too-high", 0.9), ("bad-batch", 0.85)), ("4.weight",))
WRONG = Heard({"norm-spike": ("explosion", 20)}, (("bad-batch", 0.8),), ("40.weight",))
UNKNOWN = Heard({"loss-explosion": ("loss", 10)}, (("unknown", 0.4),), ())
SILENT = Heard({}, (), ())


def test_a_right_answer():
    verdict = score.judge(FAULTY, RUN, [RIGHT])
    assert (verdict.found, verdict.cause_right, verdict.layer_right) == (True, True, True)
    assert verdict.told == ((0.9, True), (0.85, False)), "each cause that is told is held against the truth"


def test_a_wrong_answer():
    verdict = score.judge(FAULTY, RUN, [WRONG])
    assert (verdict.found, verdict.cause_right, verdict.layer_right) == (False, False, False)


def test_not_knowing_is_neither_right_nor_wrong():
    found = score.summary([score.judge(FAULTY, RUN, [heard]) for heard in (RIGHT, WRONG, UNKNOWN, SILENT)])
    assert (found["found"], found["cause_right"], found["wrong_cause"]) == (0.5, 0.25, 0.5)
    assert (found["names_a_cause"], found["layer_right"]) == (0.5, 0.25)
    assert (found["sure_right"], found["num_sure"], found["num_told"]) == (pytest.approx(1 / 3), 3, 3)


def test_a_refused_optimizer_is_found_and_has_no_report():
    run = dataclasses.replace(RUN, outcome=Outcome(-1.0, refused="`model` has none of the optimizer's parameters"))
    verdict = score.judge(FAULTY, run, [])
    assert (verdict.found, verdict.cause_right, verdict.layer_right) == (True, None, None)
    assert score.summary([verdict])["cause_right"] is None


def test_anything_said_of_a_sound_run_is_a_false_alarm():
    verdicts = [score.judge(SOUND, RUN, [SILENT]), score.judge(SOUND, RUN, [WRONG, RIGHT])]
    found = score.summary(verdicts)
    assert (found["num_sound"], found["false_alarms"], found["sound_alarmed"]) == (2, 1.0, 0.5)
    assert found["num_told"] == 3 and found["sure_right"] == 0.0
    assert score.false_alarms(verdicts) == {"norm-spike": [SOUND.name], "loss-explosion": [SOUND.name]}


def test_calibration():
    assert score.calibration_error([]) is None
    assert score.calibration_error([(0.75, True)] * 3 + [(0.75, False)]) == pytest.approx(0.0)
    assert score.calibration_error([(0.9, False), (0.9, False)]) == pytest.approx(0.9)
    assert score.calibration_error([(1.0, True), (0.25, True)]) == pytest.approx(0.375)


def test_tables_show_every_set():
    verdicts = [score.judge(FAULTY, RUN, [WRONG]), score.judge(SOUND, RUN, [WRONG])]
    found = {
        "summary": score.summary(verdicts),
        "sets": score.by_set(verdicts),
        "false_alarms": score.false_alarms(verdicts),
        "misses": list(score.misses(verdicts)),
    }
    part = {
        "num_cases": 3,
        "kinds": ["B/blob/lr", "B/wine"],
        "unproven": {"C/x": {"mean": 0.5}},
        "settings": {"default": found},
    }
    where = {"cpu": "a CPU", "torch": "2", "sklearn": "1", "python": "3", "fastguard": "0", "date": "today"}
    where["check_every"] = 10
    results = {
        "conditions": where,
        "halves": {"report": part},
        "seconds": 1.0,
        "training_s": 1.0,
    }
    text = table.text(results)
    assert "B/blob/lr/9: NOT FOUND, cause bad-batch, wrong layer; norm-spike" in text
    assert "C/x: mean 0.5" in text and "norm-spike: B/wine" in text


def test_a_table_by_rule_counts_what_it_alone_finds():
    said = {"loss-explosion": (10, 0.5)}
    faulty = {"run": "a", "sound": False, "refused": False, "alarms": said, "right": ["loss-explosion"]}
    sound = {"run": "b", "sound": True, "refused": False, "alarms": said, "right": []}
    (line,) = by_rule.table([faulty, faulty, sound])[1:]
    assert line.split() == ["loss-explosion", "1", "2", "2", "2", "0.67", "10", "0.5"]


@pytest.mark.skipif(not SAVED.exists(), reason="the saved figures are not beside it")
def test_the_documents_have_what_the_rules_said_first():
    documents = [str(ROOT / "README.md"), str(ROOT / "benchmarks" / "README.md")]
    assert write_tables.main([str(SAVED), *documents, "--check"], tables=readme.TABLES) == 0
    weighted = readme.together(json.loads(SAVED.read_text(encoding="utf-8"))["sets"])
    assert (weighted["num_faulty"], weighted["num_sound"]) == (897, 597)
    assert weighted["found"] == pytest.approx(0.724, abs=5e-3)
