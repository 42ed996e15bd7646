"""The external suite: its truths, a few of its trainings, and its saved figures in the documents."""

import functools
import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="its data come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults.external", reason="the suite is not beside these tests", exc_type=ImportError)

from benchmarks import readme as write_tables
from benchmarks.faults import readme
from benchmarks.faults.external import runs
from benchmarks.faults.external.cases import CASES
from benchmarks.faults.external.loop import Guarded, Watch, carry_out
from fastguard.diagnosis import CAUSES, RULES, diagnose

SOUND = "tasks/flowers/four-units"
SOUND_ONES = """
    B/blob C/cancer tasks/glass/adam-smoothed tasks/parity-of-four tasks/coded-digits
    tasks/sorting tasks/cells tasks/first-kept/rmsprop tasks/spiral-from-noise/averaged tasks/pumps
"""


_train = runs.train  # some tests put another in its place


@functools.cache
def trained(name):
    return _train(CASES[name])


def test_truths_use_the_names_of_rules_and_causes():
    families = {rule.family for rule in RULES.values()} | {"data", "output", "setup"}
    for case in CASES.values():
        if case.truth is not None:
            assert case.truth.families and set(case.truth.families) <= families, case.name
            assert case.truth.causes and set(case.truth.causes) <= {*CAUSES, "unknown"}, case.name


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND_ONES.split())
def test_sound_runs_reach_their_quality(name):
    plan = CASES[name].make(CASES[name].seed)
    assert carry_out(plan, Watch()).quality >= plan.least


@pytest.mark.slow
def test_a_run_tells_again_what_its_guard_told():
    run = trained(SOUND)
    with runs.alone():
        plan, watch = CASES[run.case].make(0), Guarded(runs.Notebook, runs.SETTINGS["default"])
        bare = carry_out(CASES[run.case].make(0), Watch())
        assert carry_out(plan, watch) == bare, "training is the same with and without a guard"
        guard = watch.guards[0]
        guard.flush()
        told = guard.report()
    assert run.outcome.quality == bare.quality >= plan.least
    (part,) = run.parts
    history = part.history()
    assert history.num_steps == guard.history.num_steps == len(part.records)
    of_the_machine = "starved-of-cores"  # depends on what else runs here
    assert [f.rule for f in diagnose(history)] == [f.rule for f in told.findings if f.rule != of_the_machine]


ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "benchmarks" / "results" / "faults-asked-once.json"


@pytest.mark.skipif(not SAVED.exists(), reason="the saved figures are not beside it")
def test_the_documents_have_what_the_rules_said_first():
    documents = [str(ROOT / "README.md"), str(ROOT / "benchmarks" / "README.md")]
    assert write_tables.main([str(SAVED), *documents, "--check"], tables=readme.TABLES) == 0
    weighted = readme.together(json.loads(SAVED.read_text(encoding="utf-8"))["sets"])
    assert (weighted["num_faulty"], weighted["num_sound"]) == (1289, 795)
    assert weighted["found"] == pytest.approx(0.717, abs=5e-3)
