"""Random histories, logs and saved states through all that reads them: some hundreds here, ten thousand by hand."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastguard.diagnosis import RULES, rule
from fastguard.records import TrainingHistory

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


def test_what_crashes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @rule("odd")
    def odd(history: TrainingHistory) -> None:
        raise KeyError("nothing here")

    monkeypatch.setattr(histories, "RESULTS", tmp_path / "results.json")
    try:
        assert histories.main(["--number", "1"]) == 1
    finally:
        del RULES["odd"]
    saved = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert saved["num_crashes"] == 1 and "rule 'odd': KeyError" in saved["failed"][0]


@pytest.mark.parametrize("plain", [{"a": float("nan")}, [float("inf")], {"a": object()}])
def test_what_is_not_strict_is_seen(plain: object) -> None:
    with pytest.raises(histories.NotStrictError):
        histories.strict(plain)


def test_a_case_is_the_same_again() -> None:
    def state(seed: str) -> str:
        return json.dumps(histories.invented.history(random.Random(seed)).state_dict())

    assert state("7") == state("7") != state("8")
