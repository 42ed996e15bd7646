"""A few random lists, as `make fuzz` tries many."""

from __future__ import annotations

import pytest

pytest.importorskip("benchmarks.reliability", reason="the benchmarks are not beside the tests")

from benchmarks.reliability import kernels, threads
from fastguard.kernels import backends


def test_random_lists() -> None:
    found = kernels.run(40, seed=11)
    assert found["wrong"] == [] and found["num_refused"] > 1


@pytest.mark.slow
def test_many_random_lists() -> None:
    assert kernels.run(2000, seed=12)["wrong"] == []


@pytest.mark.skipif(backends()["cpu"].reason is not None, reason="there is no extension")
def test_threads_get_the_figures_of_one() -> None:
    assert threads.work(rounds=1) == 0
