"""A few random lists, as `make fuzz` tries many; and that what is wrong would be seen."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarks.reliability", reason="the benchmarks are not beside the tests")

from benchmarks.reliability import invented_tensors, kernels, threads
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
@pytest.mark.parametrize("column", COLUMNS)
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


@needs_extension
def test_a_wrong_product_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernels, "scale_", lambda tensors, factor: [t.mul_(factor).add_(1 + factor / 4) for t in tensors]
    )
    with pytest.raises(kernels.WrongError, match="scale_ by"):
        kernels.scale_case(random.Random(0), *_three())


def test_what_ought_to_be_refused_and_is_not_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernels, "tensors", lambda rng: [invented_tensors.Refused(torch.ones(3), invented_tensors.REASONS[0])]
    )
    assert "took what has no data" in kernels.run(1, seed=0)["wrong"][0]


def _three() -> tuple[list[torch.Tensor], list[kernels.Truth]]:
    given = [torch.tensor([1.0, 2.0, 4.0])]
    return given, [kernels.Truth(kernels.plain_values(t)) for t in given]


@needs_extension
def test_threads_get_the_figures_of_one() -> None:
    assert threads.work(rounds=1) == 0


def test_whose_report_it_is(tmp_path) -> None:
    report = "==================\nWARNING: ThreadSanitizer: data race\n  #0 {}\n==================\n"
    ours = report.format("fastguard::stats_of(…) /x/fastguard/_C.cpython-311-x86_64-linux-gnu.so")
    (tmp_path / "report.1").write_text(report.format("at::native::add libtorch_cpu.so") + ours)
    assert threads.reports(tmp_path) == (2, 1)
