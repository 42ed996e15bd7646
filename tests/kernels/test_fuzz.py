"""A few random lists, as `make fuzz` tries many; and that what is wrong would be seen."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarks.reliability", reason="the benchmarks are not beside the tests")

from benchmarks.reliability import kernels, threads
from fastguard.kernels import backends, dispatch
from fastguard.records import COLUMNS
from fastguard.records.columns import ROW_BYTES

needs_extension = pytest.mark.skipif(backends()["cpu"].reason is not None, reason="there is no extension")


def test_random_lists() -> None:
    found = kernels.run(40, seed=11)
    assert found["wrong"] == [] and found["num_refused"] > 1


@pytest.mark.slow
def test_many_random_lists() -> None:
    assert kernels.run(2000, seed=12)["wrong"] == []


@needs_extension
@pytest.mark.parametrize("column", COLUMNS[:3])
def test_a_wrong_column_is_seen(monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    def spoilt(tensors: Any, unscale: float = 1.0) -> Any:
        found = honest(tensors, unscale)
        if found is None:
            return None
        row = list(struct.unpack_from(f"{len(COLUMNS)}d", found[0]))
        row[COLUMNS.index(column)] += 1.0
        return bytearray(struct.pack(f"{len(COLUMNS)}d", *row)) + found[0][ROW_BYTES:], found[1], found[2]

    honest = dispatch.cpu.plain_stats
    monkeypatch.setattr(dispatch.cpu, "plain_stats", spoilt)
    with pytest.raises(kernels.WrongError):
        kernels.stats_case(random.Random(0), *_three())


def _three() -> tuple[list[torch.Tensor], list[kernels.Truth]]:
    given = [torch.tensor([1.0, 2.0, 4.0])]
    return given, [kernels.Truth(kernels.plain_values(t)) for t in given]


@needs_extension
def test_threads_get_the_figures_of_one() -> None:
    assert threads.work(rounds=1) == 0
