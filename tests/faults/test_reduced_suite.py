"""A part of the fault suite, trained here and now: each fault is found with its cause, healthy runs are left alone."""

import functools

import pytest

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults", reason="the fault suite is not beside these tests", exc_type=ImportError)

from benchmarks.faults import alarms, runs
from benchmarks.faults.cases import CASES, FAULTY, REPORT_SEEDS, SOUND, TUNE_SEEDS

SEED = TUNE_SEEDS[0]

QUIET = ("digits-mlp", "digits-mlp-sgd", "digits-autoencoder", "noisy-batch-of-4", "warm-restarts-sgd", "sparse-relu")


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "CACHE", tmp_path_factory.mktemp("runs"))
        yield


@functools.cache
def trained(name):
    return runs.train(CASES[name], SEED)


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


def test_there_are_at_least_as_many_healthy_cases_as_faulty_ones_have_faults():
    assert len(SOUND) >= 30
    assert len({case.fault.name for case in FAULTY}) == 43
    assert not set(TUNE_SEEDS) & set(REPORT_SEEDS)
