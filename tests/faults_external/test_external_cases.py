"""The external suite's cases: halves, truths, tests of harm, and a few of its trainings."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest

pytest.importorskip("sklearn", reason="its data come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults.external", reason="the suite is not beside these tests", exc_type=ImportError)

from benchmarks.faults.external import harm, runs
from benchmarks.faults.external.bases import Recipe, maker
from benchmarks.faults.external.case import HALVES, SETS, TASKS, Case, Truth, half_of
from benchmarks.faults.external.cases import CASES
from benchmarks.faults.external.loop import Guarded, Watch, carry_out
from fastguard.diagnosis import CAUSES, RULES, diagnose
from fastguard.step import Guard

BLOB = Recipe("blob", hidden=(8,), lr=3e-2, batch_size=64, num_epochs=4)
RIGHT = Truth(("lr",), ("learning-rate-too-low",))
SOUND = "tasks/flowers/four-units"
SOUND_ONES = """
    B/blob C/cancer tasks/glass/adam-smoothed tasks/parity-of-four tasks/drifting-sensor/adam tasks/thawed/cosine
    tasks/two-sensors tasks/boundary-layer tasks/coded-digits tasks/lift
"""


_train = runs.train  # some tests put another in its place


@functools.cache
def trained(name: str) -> runs.Run:
    return _train(CASES[name])


def fault(recipe: Recipe, test) -> Case:
    return Case("B/x", "B", "x", "", maker(recipe), "", RIGHT, maker(BLOB), test)


def test_both_halves_have_sound_and_faulty_runs_of_many_kinds():
    for group in SETS:
        assert {case.half for case in CASES.values() if case.set == group} == set(HALVES), group
    for half in HALVES:
        cases = [case for case in CASES.values() if case.half == half]
        assert len([case for case in cases if case.truth is None]) >= 30
        assert len({case.truth.causes for case in cases if case.truth is not None}) >= 30


def test_a_kind_is_in_one_half_and_stays_there():
    assert (half_of("sound", "moons-tanh"), half_of("sound", "cancer-mlp")) == ("report", "tune")
    assert half_of("B", "blob/lr", 0) != half_of("B", "circle/lr", 1)
    shares = [half_of("sound", str(number)) == "tune" for number in range(400)]
    assert 160 < sum(shares) < 240


def test_names_say_set_and_kind():
    for name, case in CASES.items():
        assert name == case.name and f"{name}/".startswith(f"{case.set}/{case.kind}/"), name
        assert re.fullmatch(r"[A-Za-z0-9/.+-]+", name), name
        assert (case.truth is None) == (case.harm is None) == (case.twin is None)


def test_a_task_has_its_faults_in_its_own_half_and_is_their_twin():
    tasks = [case for case in CASES.values() if case.set == TASKS]
    first = {case.kind: case for case in reversed(tasks) if case.truth is None}
    assert 25 <= len(first) <= 60, "at most sixty scripts"
    for case in tasks:
        twin = first[case.kind.partition("/")[0]]
        assert case.half == twin.half and case.twin in (None, twin.make), case.name


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


def test_a_fault_counts_only_where_it_hurts():
    slow, harmless = fault(BLOB.but(lr=1e-9), harm.worse(2)), fault(BLOB, harm.worse(2))
    assert slow.harm(slow).holds and not harmless.harm(harmless).holds
    figures = slow.harm(slow).figures
    assert figures["mean"] < figures["twin"] - harm.MARGIN
    short = CASES["tasks/flowers/two-epochs"]
    assert short.harm(short).holds


def test_a_run_tells_again_what_its_guard_told():
    run = trained(SOUND)
    with runs.alone():
        plan, watch = CASES[run.case].make(0), Guarded(runs.Notebook, runs.SETTINGS["default"])
        bare = carry_out(CASES[run.case].make(0), Watch())
        assert carry_out(plan, watch) == bare, "training is the same with and without a guard"
        guard: Guard = watch.guards[0]
        guard.flush()
        told = guard.report()
    assert run.outcome.quality == bare.quality >= plan.least
    (part,) = run.parts
    history = part.history()
    assert history.num_steps == guard.history.num_steps == len(part.records)
    assert [f.rule for f in diagnose(history)] == [f.rule for f in told.findings]


def test_a_run_comes_back_from_the_cache_until_its_source_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "CACHE", tmp_path)
    case = CASES[SOUND]
    monkeypatch.setattr(runs, "train", lambda *_: trained(case.name))
    made = runs.load_or_train(case)
    assert runs.load_or_prove(case).holds
    monkeypatch.setattr(runs, "train", lambda *_: pytest.fail("trained again"))
    kept = runs.load_or_train(case)
    assert kept.outcome == made.outcome
    assert [one.loss for one in kept.parts[0].records] == [one.loss for one in made.parts[0].records]
    assert runs.load_or_prove(case).figures["quality"] == made.outcome.quality
    monkeypatch.setattr(runs, "CASES", {SOUND: case})
    assert [(run.case, history.num_steps) for run, history in runs.recorded(case.half)] == [
        (SOUND, len(made.parts[0].records))
    ]
    monkeypatch.setattr(runs, "_hash", lambda *paths: "another")
    assert runs.load_or_train(case, replay=True).outcome == made.outcome, "a replay takes what older code recorded"
    assert runs.load_or_prove(case, replay=True).holds
    monkeypatch.setattr(runs, "train", lambda *_: dataclasses.replace(made, seconds=-1.0))
    assert runs.load_or_train(case).seconds == -1.0
    assert len(list(tmp_path.rglob("*.z"))) == 1, "the old one is gone"
