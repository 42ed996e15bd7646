"""Healthy runs of the fault suite, trained here and now, are left alone."""

import pytest

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults", reason="the fault suite is not beside these tests", exc_type=ImportError)

from benchmarks.faults import alarms, runs
from benchmarks.faults.cases import CASES, TUNE_SEEDS

QUIET = ("digits-mlp", "digits-mlp-sgd", "digits-autoencoder", "noisy-batch-of-4", "warm-restarts-sgd", "sparse-relu")


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "CACHE", tmp_path_factory.mktemp("runs"))
        yield


@pytest.mark.thinned(n=4)
@pytest.mark.parametrize("name", QUIET)
def test_a_healthy_run_is_left_alone(name):
    run = runs.train(CASES[name], TUNE_SEEDS[0])
    assert run.is_proven, "this run did not end well, so it is no healthy one"
    assert alarms.ask(run, check_every=5).alarms == ()
