"""The table of columns stands in Python, in C++ and in Triton, which cannot read each other: all say the same."""

from __future__ import annotations

import math

import pytest
import torch

from fastguard import kernels
from fastguard.records import COLUMNS, TensorRow, columns


def test_cpp_has_the_same_columns():
    if kernels.backends()["cpu"].reason is not None:
        pytest.skip("there is no extension")
    from fastguard import _C

    assert _C.columns == columns.TABLE


def test_triton_has_the_same_columns():
    pytest.importorskip("triton", reason="Triton is not installed")
    from fastguard.kernels.triton.lang import stats

    numbers = {name: getattr(stats, name.upper()).value for name in COLUMNS}
    assert numbers == columns.INDEX
    assert stats.COLUMNS.value == len(COLUMNS)


def test_rows_fold_to_the_row_of_all(backend: str):
    parts = [torch.tensor([1.5, -2.0, math.nan]), torch.zeros(3), torch.tensor([0.25, math.inf]), torch.zeros(0)]
    stats = kernels.tensor_stats(parts, backend=backend)
    whole = kernels.tensor_stats([torch.cat(parts)], backend=backend)[0]
    assert columns.fold_rows(stats) == stats.total_row()
    for column, folded in zip(columns.TABLE, stats.total_row(), strict=True):
        assert folded == pytest.approx(getattr(whole, column.name), rel=0 if column.power == 0 else 1e-15), column
    assert columns.fold_rows([]) == columns.EMPTY_ROW


def test_a_row_of_plain_numbers():
    row = columns.as_row((2.0, 9.0, 3.0))
    assert row == TensorRow(numel=2, sum_sq=9.0, sum=3.0, sum_sq_dev=4.5, finite_norm=3.0)
    assert type(row.numel) is type(row.num_nans) is int
