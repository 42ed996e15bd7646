"""The external suite's cases: split, truths, tests of harm, and a few of its trainings."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest

pytest.importorskip("sklearn", reason="its data come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults.external", reason="the suite is not beside these tests", exc_type=ImportError)

from benchmarks.faults.external import harm, runs
from benchmarks.faults.external.bases import Recipe, maker
from benchmarks.faults.external.case import HALVES, SETS, Case, Truth, half_of
from benchmarks.faults.external.cases import CASES, GROUPS
from benchmarks.faults.external.loop import Guarded, Watch, carry_out
from benchmarks.faults.external.wild.case import APART, GROUP
from fastguard.diagnosis import CAUSES, RULES, diagnose
from fastguard.step import Guard

FAULTY = [case for case in CASES.values() if case.truth is not None]
SOUND = [case for case in CASES.values() if case.truth is None]
BLOB = Recipe("blob", hidden=(8,), lr=3e-2, batch_size=64, num_epochs=4)
RIGHT = Truth(("lr",), ("learning-rate-too-low",))

SOUND_ONES = """
    sound2/angles sound2/binary-weights sound2/matching-pennies sound2/scaled-float16 sound2/moving-target
    fresh3/worth-of-places fresh3/sources-unmixed fresh3/only-rising fresh3/codons fresh3/all-rows-by-layers
    fresh4/patients/rmsprop fresh4/spoken-words fresh4/letters-for-visitors fresh4/shares/lion-like
    fresh5/shops/adafactor fresh5/roads/sgd fresh5/two-sellers fresh5/turned-digits fresh6/appliances/resilient
    fresh6/parity-of-four fresh6/drifting-sensor/adam fresh6/upper-digits wild/arms-value/adam wild/listwise/sgd
    wild/half-scaled/clipped wild/line-search/lbfgs
"""


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


@pytest.mark.parametrize(
    ("name", "num_tasks", "num_sound", "num_faulty", "in_each_half", "sound_one", "num_steps", "short_one"),
    [
        ("fresh3", 70, 70, 60, 30, "thirty-steps", 30, "customers/few-steps"),
        ("fresh4", 30, 60, 90, 20, "fifteen-steps", 15, "steel/one-epoch"),
        ("fresh5", 36, 70, 140, 25, "vineyards", 40 * 8, "vineyards/three-epochs-at-1e-4"),
        ("fresh6", 50, 100, 240, 45, "flowers", 50 * 11, "flowers/two-epochs"),
    ],
)
def test_a_fresh_set_has_several_sound_ways_and_several_faults_of_a_task_in_the_same_half(
    name, num_tasks, num_sound, num_faulty, in_each_half, sound_one, num_steps, short_one
):
    fresh = [case for case in CASES.values() if case.set == name]
    sound = [case for case in fresh if case.truth is None]
    faulty = [case for case in fresh if case.truth is not None]
    first = {case.kind: case for case in reversed(sound)}
    assert len(first) >= num_tasks and len(sound) >= num_sound and len(faulty) >= num_faulty
    for cases in (sound, faulty):
        halves = [case.half for case in cases]
        assert set(halves) == {"tune", APART} and min(halves.count(half) for half in set(halves)) >= in_each_half
    for case in faulty:
        twin = first[case.kind.partition("/")[0]]
        assert case.twin is twin.make and case.half == twin.half, case.name
    case = CASES[f"{name}/{sound_one}"]
    run = trained(case.name)
    assert run.outcome.quality >= case.make(case.seed).least and len(run.parts[0].records) == num_steps
    short = CASES[f"{name}/{short_one}"]
    assert short.harm is not None and short.harm(short).holds


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND_ONES.split())
def test_sound_runs_reach_their_quality(name):
    plan = CASES[name].make(CASES[name].seed)
    assert carry_out(plan, Watch()).quality >= plan.least


def test_truths_use_the_names_of_rules_and_causes():
    families = {rule.family for rule in RULES.values()} | {"data", "output", "setup"}
    for case in FAULTY:
        assert case.truth.families and case.truth.causes
        assert set(case.truth.families) <= families, case.name
        assert set(case.truth.causes) <= {*CAUSES, "unknown"}, case.name


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
