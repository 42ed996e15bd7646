"""A part of the fault suite, trained here and now: each fault is found with its cause, healthy runs are left alone."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults", reason="the fault suite is not beside these tests", exc_type=ImportError)

from benchmarks.faults import alarms, runs, score
from benchmarks.faults.cases import CASES, FAULTY, REPORT_SEEDS, SOUND, TUNE_SEEDS

SEED = TUNE_SEEDS[0]
FOUND = (
    "nan@digits-mlp",
    "inf-weights@digits-mlp",
    "lr-jump@digits-mlp",
    "dead-relu@digits-mlp",
    "tanh@digits-autoencoder",
    "frozen@digits-mlp",
    "missing@digits-autoencoder",
    "bad-batch@digits-autoencoder",
    "bad-epoch@digits-mlp",
)
QUIET = ("digits-mlp", "digits-mlp-sgd", "digits-autoencoder", "noisy-batch-of-4", "warm-restarts-sgd", "sparse-relu")


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "CACHE", tmp_path_factory.mktemp("runs"))
        yield


@functools.cache
def trained(name: str) -> runs.Run:
    return runs.train(CASES[name], SEED)


@pytest.mark.parametrize("name", [FOUND[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FOUND[1:])])
def test_a_fault_is_found_with_its_cause(name):
    run = trained(name)
    assert run.is_proven, "the planted fault did the training no harm"
    said = alarms.ask(run)
    verdict = score.judge(run, said)
    assert verdict.found, said
    assert verdict.cause_right, said
    assert verdict.layer_right in (True, None), said
    assert not verdict.false_alarms, said
    if verdict.kind == "non-finite":
        assert verdict.delay == 0


@pytest.mark.thinned(n=4)
@pytest.mark.parametrize("name", QUIET)
def test_a_healthy_run_is_left_alone(name):
    run = trained(name)
    assert run.is_proven, "this run did not end well, so it is no healthy one"
    assert alarms.ask(run, check_every=5).alarms == ()


@pytest.mark.slow
def test_a_run_is_the_same_each_time():
    name = "dead-relu@digits-mlp"  # no NaN among its losses, which would differ from itself
    again = runs.train(CASES[name], SEED)
    assert again.outcome == trained(name).outcome
    assert [r.tensors for r in again.records] == [r.tensors for r in trained(name).records]
    assert [r.weights for r in again.records] == [r.weights for r in trained(name).records]
    other = runs.train(CASES[name], SEED + 1)
    assert other.outcome.losses != again.outcome.losses


def test_a_run_comes_back_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "CACHE", tmp_path)
    made = runs.load_or_train("digits-mlp-sgd", SEED)
    monkeypatch.setattr(runs, "train", lambda *_: pytest.fail("trained again"))
    kept = runs.load_or_train("digits-mlp-sgd", SEED)
    assert kept.records == made.records and kept.outcome == made.outcome and kept.notes == made.notes
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".z"]


def test_there_are_at_least_as_many_healthy_cases_as_faulty_ones_have_faults():
    assert len(SOUND) >= 30
    assert len({case.fault.name for case in FAULTY}) == 44
    assert not set(TUNE_SEEDS) & set(REPORT_SEEDS)


def test_missing_digits_are_told_of(monkeypatch):
    import sys

    from benchmarks.faults import digits

    digits.digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(digits.MissingDataError, match="come with scikit-learn, which is not installed"):
        digits.digits()
    monkeypatch.undo()
    digits.digits()
