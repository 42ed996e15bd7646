"""The external suite's cases: split, truths, tests of harm, and a few of its trainings."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="its data come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults.external", reason="the suite is not beside these tests", exc_type=ImportError)

from benchmarks.faults.external import harm, runs
from benchmarks.faults.external.bases import Recipe, maker
from benchmarks.faults.external.case import HALVES, SETS, Case, Truth, half_of
from benchmarks.faults.external.cases import CASES, GROUPS
from benchmarks.faults.external.loop import Guarded, Watch, carry_out
from benchmarks.faults.external.score import ask
from benchmarks.faults.external.wild.case import APART, GROUP
from fastguard.diagnosis import CAUSES, RULES, diagnose
from fastguard.guard import Guard

FAULTY = [case for case in CASES.values() if case.truth is not None]
SOUND = [case for case in CASES.values() if case.truth is None]
# What no rule or cause stands for yet; names of causes as they are agreed upon.
TO_COME = {
    "wrong-output-layer", "wrong-loss", "unnormalised-inputs", "unnormalised-targets", "stopped-too-early",
    "batch-size", "missing-zero-grad", "no-gradient-arrives", "wrong-optimizer-settings", "clipped-away",
    "wrong-schedule", "weights-overwritten", "trivial-targets", "imbalanced-targets", "unshuffled-data",
    "repeated-data", "outliers", "preprocessing-differs", "model-cannot-fit", "dead-experts",
    "collapsed-representation", "normalisation-statistics", "train-mode-in-validation", "adversary-wins",
    "singular-operation", "hardware-fault", "unknown",
}  # fmt: skip
BLOB = Recipe("blob", hidden=(8,), lr=3e-2, batch_size=64, num_epochs=4)
RIGHT = Truth(("lr",), ("learning-rate-too-low",))


_train = runs.train  # some tests put another in its place


@functools.cache
def trained(name: str) -> runs.Run:
    return _train(CASES[name])


def fault(recipe: Recipe, test) -> Case:
    return Case("B/x", "B", "x", "", maker(recipe), "", RIGHT, maker(BLOB), test)


def test_both_halves_have_every_set():
    for group in SETS:
        kinds = {case.kind: case.half for case in CASES.values() if case.set == group}
        assert set(kinds.values()) == set(HALVES), group


def test_there_are_enough_of_them():
    assert len(SOUND) >= 120 and len({case.kind for case in SOUND}) >= 25
    assert len(FAULTY) >= 120


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
        assert case.set in GROUPS or (case.truth is None) == (case.set == "sound")


def test_the_wild_group_is_apart_from_both_halves():
    wild = [case for case in CASES.values() if case.set == GROUP]
    kinds = {case.kind: case.half for case in wild if case.truth is None}
    assert len(kinds) >= 60 and set(kinds.values()) == {"tune", APART}
    assert min([*kinds.values()].count(half) for half in ("tune", APART)) >= 30
    for case in wild:  # a fault is where its task is
        assert case.half == kinds.get(case.kind.partition("/")[0], case.half), case.name
    assert len([case for case in wild if case.truth is not None]) >= 60
    assert {case.seed for case in wild if case.truth is None} == {0, 1}


def test_the_runs_written_afresh_are_in_two_halves_and_have_no_validation_where_the_loop_is_plain():
    afresh = [case for case in CASES.values() if case.set == "afresh"]
    for is_sound in (True, False):
        halves = [case.half for case in afresh if (case.truth is None) == is_sound]
        assert set(halves) == {"tune", APART} and min(halves.count(half) for half in set(halves)) >= 20
    case = CASES["afresh/grades/momentum"]
    run = trained(case.name)
    assert run.outcome.quality >= case.make(case.seed).least
    (part,) = run.parts
    assert len(part.records) == 12 * 33 and not part.history().validations


def test_the_faults_written_afresh_again_are_in_two_halves_with_their_tasks():
    afresh = [case for case in CASES.values() if case.set == "afresh2"]
    halves = [case.half for case in afresh]
    assert min(halves.count(half) for half in ("tune", APART)) >= 50 and {*halves} == {"tune", APART}
    assert all(case.truth is not None and case.harm is not None for case in afresh)
    assert len({case.kind for case in afresh}) == len(afresh)
    of_tasks = {(case.kind.partition("/")[0], case.half) for case in afresh}
    assert len({task for task, _ in of_tasks}) == len(of_tasks)
    run = trained("afresh2/two-questions/cleared-late")
    assert "no-gradient" in {rule for part in run.parts for rule in ask(part).alarms}


def test_sound_scripts_are_in_two_halves_and_say_how_good_they_became():
    scripts = [case for case in CASES.values() if case.set == "sound2"]
    halves = [case.half for case in scripts]
    assert set(halves) == {"tune", APART} and min(halves.count(half) for half in set(halves)) >= 40
    assert all(case.truth is None and case.title for case in scripts)
    case = CASES["sound2/hastie-in-float64"]
    run = trained(case.name)
    assert run.outcome.quality >= case.make(case.seed).least
    (part,) = run.parts
    assert part.records[-1].loss < part.records[0].loss and not part.history().validations


@pytest.mark.slow
@pytest.mark.parametrize("name", ["angles", "binary-weights", "matching-pennies", "scaled-float16", "moving-target"])
def test_sound_scripts_reach_their_quality(name):
    plan = CASES[f"sound2/{name}"].make(0)
    assert carry_out(plan, Watch()).quality >= plan.least


def test_the_third_fresh_set_has_a_sound_twin_for_each_fault_in_the_same_half():
    fresh = {case.name: case for case in CASES.values() if case.set == "fresh3"}
    sound = {case.kind: case for case in fresh.values() if case.truth is None}
    faulty = [case for case in fresh.values() if case.truth is not None]
    assert len(sound) >= 70 and len(faulty) >= 60 and len(sound) + len(faulty) == len(fresh)
    for cases in (sound.values(), faulty):
        halves = [case.half for case in cases]
        assert set(halves) == {"tune", APART} and min(halves.count(half) for half in set(halves)) >= 30
    for case in faulty:
        twin = sound[case.kind.partition("/")[0]]
        assert case.twin is twin.make and case.half == twin.half, case.name
    case = CASES["fresh3/thirty-steps"]
    run = trained(case.name)
    assert run.outcome.quality >= case.make(case.seed).least
    (part,) = run.parts
    assert len(part.records) == 30 and len(part.history().validations) == 3
    short = CASES["fresh3/customers/few-steps"]
    assert short.harm is not None and short.harm(short).holds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worth-of-places", "sources-unmixed", "only-rising", "codons", "all-rows-by-layers"])
def test_scripts_of_the_third_fresh_set_reach_their_quality(name):
    plan = CASES[f"fresh3/{name}"].make(0)
    assert carry_out(plan, Watch()).quality >= plan.least


def test_the_fourth_fresh_set_has_several_sound_ways_and_several_faults_of_a_task_in_the_same_half():
    fresh = [case for case in CASES.values() if case.set == "fresh4"]
    sound = [case for case in fresh if case.truth is None]
    faulty = [case for case in fresh if case.truth is not None]
    first = {case.kind: case for case in reversed(sound)}
    assert len(first) >= 30 and len(sound) >= 60 and len(faulty) >= 90
    for cases in (sound, faulty):
        halves = [case.half for case in cases]
        assert set(halves) == {"tune", APART} and min(halves.count(half) for half in set(halves)) >= 20
    for case in faulty:
        twin = first[case.kind.partition("/")[0]]
        assert case.twin is twin.make and case.half == twin.half, case.name
    case = CASES["fresh4/fifteen-steps"]
    run = trained(case.name)
    assert run.outcome.quality >= case.make(case.seed).least and len(run.parts[0].records) == 15
    short = CASES["fresh4/steel/one-epoch"]
    assert short.harm is not None and short.harm(short).holds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["patients/rmsprop", "spoken-words", "letters-for-visitors", "shares/lion-like"])
def test_ways_of_the_fourth_fresh_set_reach_their_quality(name):
    plan = CASES[f"fresh4/{name}"].make(0)
    assert carry_out(plan, Watch()).quality >= plan.least


def test_the_fifth_fresh_set_has_sound_ways_and_faults_of_a_task_in_the_same_half():
    fresh = [case for case in CASES.values() if case.set == "fresh5"]
    sound = [case for case in fresh if case.truth is None]
    faulty = [case for case in fresh if case.truth is not None]
    first = {case.kind: case for case in reversed(sound)}
    assert len(first) >= 36 and len(sound) >= 70 and len(faulty) >= 140
    for cases in (sound, faulty):
        halves = [case.half for case in cases]
        assert set(halves) == {"tune", APART} and min(halves.count(half) for half in set(halves)) >= 25
    for case in faulty:
        twin = first[case.kind.partition("/")[0]]
        assert case.twin is twin.make and case.half == twin.half, case.name
    case = CASES["fresh5/vineyards"]
    run = trained(case.name)
    assert run.outcome.quality >= case.make(case.seed).least and len(run.parts[0].records) == 40 * 8
    short = CASES["fresh5/vineyards/three-epochs-at-1e-4"]
    assert short.harm is not None and short.harm(short).holds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shops/adafactor", "roads/sgd", "two-sellers", "turned-digits"])
def test_ways_of_the_fifth_fresh_set_reach_their_quality(name):
    plan = CASES[f"fresh5/{name}"].make(0)
    assert carry_out(plan, Watch()).quality >= plan.least


def test_the_sixth_fresh_set_has_sound_ways_and_faults_of_a_task_in_the_same_half():
    fresh = [case for case in CASES.values() if case.set == "fresh6"]
    sound = [case for case in fresh if case.truth is None]
    faulty = [case for case in fresh if case.truth is not None]
    first = {case.kind: case for case in reversed(sound)}
    assert len(first) >= 50 and len(sound) >= 100 and len(faulty) >= 240
    for cases in (sound, faulty):
        halves = [case.half for case in cases]
        assert set(halves) == {"tune", APART} and min(halves.count(half) for half in set(halves)) >= 45
    for case in faulty:
        twin = first[case.kind.partition("/")[0]]
        assert case.twin is twin.make and case.half == twin.half, case.name
    case = CASES["fresh6/flowers"]
    run = trained(case.name)
    assert run.outcome.quality >= case.make(case.seed).least and len(run.parts[0].records) == 50 * 11
    short = CASES["fresh6/flowers/two-epochs"]
    assert short.harm is not None and short.harm(short).holds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["appliances/resilient", "parity-of-four", "drifting-sensor/adam", "upper-digits"])
def test_ways_of_the_sixth_fresh_set_reach_their_quality(name):
    plan = CASES[f"fresh6/{name}"].make(0)
    assert carry_out(plan, Watch()).quality >= plan.least


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arms-value/adam", "listwise/sgd", "half-scaled/clipped", "line-search/lbfgs"])
def test_wild_ones_reach_their_quality(name):
    name = f"{GROUP}/{name}"
    plan = CASES[name].make(CASES[name].seed)
    assert carry_out(plan, Watch()).quality >= plan.least


def test_truths_use_the_names_of_rules_and_causes():
    families = {rule.family for rule in RULES.values()} | {"data", "output", "setup"}
    for case in FAULTY:
        assert case.truth.families and case.truth.causes
        assert set(case.truth.families) <= families, case.name
        assert set(case.truth.causes) <= {*CAUSES, *TO_COME}, case.name


def test_a_fault_counts_only_where_it_hurts():
    slow = fault(BLOB.but(lr=1e-9), harm.worse(2))
    assert slow.harm(slow).holds
    for test in (harm.worse(2), harm.below_base(3), harm.killed(3)):
        harmless = fault(BLOB, test)
        assert not harmless.harm(harmless).holds


def test_the_tests_of_harm_are_those_of_their_sets():
    slow = fault(BLOB.but(lr=1e-9), harm.is_slow)
    assert slow.harm(slow).holds and harm.loses_accuracy(slow).holds
    assert not harm.oscillates(slow).holds
    killed = fault(BLOB.but(lr=1e-9), harm.killed(3))
    figures = killed.harm(killed).figures
    assert figures["p"] < 0.05 and figures["mean"] < figures["twin"] - harm.MARGIN
    assert harm.num_drops([0.5, 0.9, 0.8, 0.9, 0.89, 0.95]) == (1, pytest.approx(1.2))
    assert harm.num_drops([0.5, 0.7, 0.4, 0.7, 0.4])[0] == 2
    assert harm.num_drops([0.1, 0.2, 0.3])[0] == 0
    assert harm.welch([1.0, 1.0], [1.0, 1.0]) == 1.0 and harm.welch([1.0, 1.0], [2.0, 2.0]) == 0.0


@pytest.mark.slow
def test_training_is_the_same_with_and_without_a_guard():
    make = CASES["sound/wine-tanh/adamw"].make
    assert carry_out(make(3), Watch()) == carry_out(make(3), Guarded(runs.Notebook, {}))
    assert carry_out(make(3), Watch()) != carry_out(make(4), Watch())


def test_a_run_tells_again_what_its_guard_told():
    run = trained("sound/iris-softmax/adam")
    with runs.alone():
        plan, watch = CASES[run.case].make(0), Guarded(runs.Notebook, runs.SETTINGS["default"])
        carry_out(plan, watch)
        guard: Guard = watch.guards[0]
        guard.flush()
        told = guard.report()
    assert run.outcome.quality >= plan.least
    (part,) = run.parts
    history = part.history()
    assert history.num_steps == guard.history.num_steps == 7 * 60
    assert [f.rule for f in diagnose(history)] == [f.rule for f in told.findings]
    assert [v.step for v in history.validations] == [7 * epoch + 6 for epoch in range(60)]
    assert history.model.names == ("weight", "bias")


def test_a_run_comes_back_from_the_cache_until_its_source_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "CACHE", tmp_path)
    case = CASES["sound/iris-softmax/adam"]
    monkeypatch.setattr(runs, "train", lambda *_: trained(case.name))
    made = runs.load_or_train(case)
    assert runs.load_or_prove(case).holds
    monkeypatch.setattr(runs, "train", lambda *_: pytest.fail("trained again"))
    kept = runs.load_or_train(case)
    assert kept.outcome == made.outcome and kept.parts[0].records == made.parts[0].records
    assert runs.load_or_prove(case).figures["quality"] == made.outcome.quality
    assert len(list(tmp_path.rglob("*.z"))) == 1
    monkeypatch.setattr(runs, "train", lambda *_: dataclasses.replace(made, seconds=-1.0))
    monkeypatch.setattr(runs, "_hash", lambda *paths: "another")
    assert runs.load_or_train(case).seconds == -1.0
    assert len(list(tmp_path.rglob("*.z"))) == 1  # the old one is gone


@pytest.mark.slow
def test_recorded_gives_the_runs_that_count(tmp_path, monkeypatch):
    names = ("sound/iris-softmax/adam", "sound/wine-tanh/adamw")
    monkeypatch.setattr(runs, "CACHE", tmp_path)
    monkeypatch.setattr(runs, "CASES", {name: CASES[name] for name in names})
    monkeypatch.setattr(runs, "train", lambda case, settings="default": trained(case.name))
    found = {half: [run.case for run, history in runs.recorded(half) if history.num_steps] for half in HALVES}
    assert found == {half: [name for name in names if CASES[name].half == half] for half in HALVES}
    assert sum(map(len, found.values())) == 2


def test_where_the_suite_lies():
    assert runs.CACHE.parent.name == "build" and Path(runs.__file__).parents[3] == runs.ROOT
