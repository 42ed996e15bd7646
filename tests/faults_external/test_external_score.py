"""How verdicts on the external runs are passed and added up: on made-up answers, without training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="its data come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults.external", reason="the suite is not beside these tests", exc_type=ImportError)

from benchmarks import readme as write_tables
from benchmarks.faults.external import readme, score, table
from benchmarks.faults.external.case import Case, Proof, Truth
from benchmarks.faults.external.loop import Outcome
from benchmarks.faults.external.runs import Run
from benchmarks.faults.external.score import Heard

ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "benchmarks" / "results" / "faults-external.json"
TRUTH = Truth(("lr", "loss"), ("learning-rate-too-high",), ("4",))
FAULTY = Case("B/blob/lr/9", "B", "blob/lr", "", lambda seed: None, "", TRUTH, None, lambda case: Proof(True, {}))
SOUND = Case("sound/wine/adam", "sound", "wine", "", lambda seed: None, "")
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
        "confusion": score.confusion(verdicts, {FAULTY.name: FAULTY, SOUND.name: SOUND}),
        "false_alarms": score.false_alarms(verdicts),
        "misses": list(score.misses(verdicts)),
    }
    assert found["confusion"] == {"learning-rate-too-high": {"bad-batch": 1}}
    part = {
        "num_cases": 3,
        "kinds": ["B/blob/lr", "sound/wine"],
        "unproven": {"C/x": {"mean": 0.5}},
        "settings": {"default": found},
    }
    where = {"cpu": "a CPU", "torch": "2", "sklearn": "1", "python": "3", "fastguard": "0", "date": "today"}
    where["check_every"] = 10
    results = {
        "conditions": where,
        "halves": {"report": part},
        "causes_not_known": ["wrong-loss"],
        "seconds": 1.0,
        "training_s": 1.0,
    }
    text = table.text(results)
    assert "B/blob/lr/9: NOT FOUND, cause bad-batch, wrong layer; norm-spike" in text
    assert "C/x: mean 0.5" in text and "norm-spike: sound/wine/adam" in text and "wrong-loss" in text
    rows = table.markdown(results)
    assert rows[2].startswith("| sound | 0 |") and rows[3].startswith("| B | 1 | 0 | 0 | 1 | 0 |")
    assert rows[-1].startswith("The report half: 2 of 2 kinds; 1 of its 3 runs were not as meant, and are left out.")
    assert table.markdown_causes(results)[2] == "| `learning-rate-too-high` | 1 | 0 | bad-batch 1 |"
    places = "".join(f"<!-- {name}:begin --><!-- {name}:end -->".replace("--><", "-->\n<") for name in readme.TABLES)
    found["summary"] = dict(found["summary"])
    part["settings"]["all"] = found
    assert write_tables.render(places, results, readme.TABLES).count("| B | 1 |") == 2


def test_a_rival_is_given_what_its_words_may_stand_for(monkeypatch):
    from benchmarks.faults.external import rivals

    class Speaker(rivals.Watch):
        def __init__(self, alarms):
            self.alarms = lambda: alarms

    plan = dataclasses.make_dataclass("Plan", ["seed"])(0)
    monkeypatch.setattr(rivals, "carry_out", lambda plan, watch: None)
    case = dataclasses.replace(FAULTY, make=lambda seed: plan)
    said = [
        rivals._ask(case, Speaker(alarms)) for alarms in ({"a": ("units", "lr")}, {"a": ("units",)}, {"a": None}, {})
    ]
    assert [one[0] for one in said] == [True, False, True, False]
    sound = rivals._ask(dataclasses.replace(SOUND, make=lambda seed: plan), Speaker({"a": None, "b": ("lr",)}))
    assert sound == (None, ["a", "b"], None)
    found = rivals.summary([*said, sound])
    assert (found["found"], found["false_alarms"], found["num_failed"]) == (0.5, 2.0, 0)


def test_a_rival_that_raises_ends_the_run_and_is_told_of(monkeypatch):
    from benchmarks.faults.external import rivals

    class Broken(rivals.Watch):
        alarms = staticmethod(dict)

    def carry_out(plan, watch):
        raise ValueError("no such layer")

    monkeypatch.setattr(rivals, "carry_out", carry_out)
    case = dataclasses.replace(FAULTY, make=lambda seed: None)
    assert rivals._ask(case, Broken()) == (False, [], "ValueError: no such layer")


@pytest.mark.skipif(not SAVED.exists(), reason="the suite's results are not beside it")
def test_the_readme_has_what_the_results_say():
    document = ROOT / "benchmarks" / "faults" / "external" / "README.md"
    assert write_tables.main([str(SAVED), str(document), "--check"], tables=readme.TABLES) == 0
