"""Random histories, logs and saved states through all that reads them: some hundreds here, ten thousand by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("benchmarks.reliability", reason="the benchmarks are not beside these tests")
from benchmarks.reliability import histories


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    log = logging.getLogger("fastguard")
    level = log.level
    yield
    log.setLevel(level)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_crashes_and_all_json_is_strict(seed: int) -> None:
    found = histories.run(20, seed)
    assert not found["failed"], found["failed"]
    assert sum(found["outcomes"].values()) == found["num_cases"] == 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 102))
def test_nothing_crashes_in_many_cases(seed: int) -> None:
    found = histories.run(240, seed)
    assert not found["failed"], found["failed"]
    assert {outcome.partition(":")[0] for outcome in found["outcomes"]} == histories.CASES.keys()
