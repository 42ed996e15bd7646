"""Tables of statistics: what the figures mean at their edges, and that records are plain, frozen data."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastguard.records import COLUMNS, GradientStats, StepStats, TensorRow, TensorStats, fold_rows
from fastguard.records.columns import ROW_BYTES

from records import make_bad_record, make_record, make_row, make_table

SIZES, COUNTS = st.floats(0.0, 1e200), st.integers(0, 2**40)
ROWS = st.lists(
    st.tuples(st.integers(1, 2**53), SIZES, st.floats(-1e200, 1e200), SIZES, SIZES, COUNTS, COUNTS, COUNTS),
    max_size=6,
)


def equal(given, expected):
    """Whether numbers are equal, with NaN equal to itself."""
    return all(a == b or (a != a and b != b) for a, b in zip(given, expected, strict=True))


class TestGradientStats:
    @pytest.mark.parametrize(
        ("row", "norm", "mean", "std", "issues"),
        [
            ((4, 0.0, 0.0, 0.0, 0.0, 0, 4, 0), math.nan, math.nan, math.nan, ["NaN gradients: 4 of 4 elements"]),
            ((3, 25.0, 7.0, 4.0, 3.0, 0, 0, 1), math.inf, 3.5, 0.5, ["Inf gradients: 1 of 3 elements"]),
            ((3, 1.0, 1.0, 1.0, 1.0, 0, 1, 1), math.nan, 1.0, 0.0, ["NaN gradients: 1 of", "Inf gradients: 1 of"]),
            ((2, 10.0, 4.0, 3.0, 1.0, 0, 0, 0), math.sqrt(10.0), 2.0, 1.0, []),  # a row of an old log
            ((3, 0.03, 0.3 * (1 + 1e-12), 0.1, 0.1, 0, 0, 0), math.sqrt(0.03), 0.1, 0.0, []),  # rounded below zero
            ((2, math.inf, 2e200, 1e200, 1e200, 0, 0, 0), math.inf, 1e200, math.inf, ["Exploding gradients: norm inf"]),
        ],
    )
    def test_from_rows(self, row, norm, mean, std, issues):
        stats = GradientStats.from_row(row)
        assert equal((stats.norm, stats.std), (norm, std)) and (stats.mean == pytest.approx(mean, nan_ok=True))
        is_healthy, found = stats.is_healthy()
        assert is_healthy is not bool(issues) and len(found) == len(issues)
        assert all(one.startswith(start) for one, start in zip(found, issues))

    @pytest.mark.parametrize(
        ("norm", "issues"),
        [
            (1000.5, ["Exploding gradients: norm 1e+03 is above 1000"]),
            (1e-9, ["Vanishing gradients: norm 1e-09 is below 1e-8"]),
            *((norm, []) for norm in (1000.0, 1e-8, 1.0)),
        ],
    )
    def test_limits_of_healthy_norms(self, norm, issues):
        assert GradientStats(norm, norm, norm, 0.0, 0.0, 0, 0, 0, 4).is_healthy() == (not issues, issues)

    def test_spread_beyond_the_range_of_squares(self):
        for size in (1e-250, 1e250):  # of size, -size and 0
            norm = math.sqrt(2) * size
            row = TensorRow(3, size * size, 0.0, size, size, 1, sum_sq_dev=size * size, finite_norm=norm)
            assert GradientStats.from_row(row).std == pytest.approx(size * math.sqrt(2 / 3), rel=1e-12)

    def test_without_elements_all_is_zero_healthy_and_frozen(self):
        stats = TensorStats(b"").total()
        assert dataclasses.astuple(stats) == (0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0) and stats.is_healthy() == (True, [])
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats.norm = 1.0


class TestTensorStats:
    STATS = make_table([make_row(5.0, 2), make_row(0.0, 3, num_zeros=3), make_row(1.0, num_nans=2)], ["a", "b", "c"])

    def test_rows_and_columns(self):
        stats = self.STATS
        assert stats[1] == stats["b"] == stats[-2] and stats["a"].norm == 5.0 and type(stats["a"].numel) is int
        assert list(stats) == [stats[0], stats[1], stats[2]] and all(isinstance(row, TensorRow) for row in stats)
        assert (stats.numel, stats.num_zeros, stats.num_nans) == ((2, 3, 4), (0, 3, 0), (0, 0, 2))
        assert equal(stats.norm, (5.0, 0.0, math.nan)) and stats.nonfinite == [2]
        assert list(stats.to_dict()) == ["a", "b", "c"] and tuple(stats.to_dict()["b"]) == COLUMNS
        assert repr(stats) == "TensorStats(3 tensors, norm=nan)"

    def test_errors(self):
        with pytest.raises(KeyError, match="no tensor is named 'd'; the names are: a, b, c"):
            self.STATS["d"]
        with pytest.raises(KeyError, match=r"tensor6, tensor7 and 1 more"):
            make_table([make_row()] * 9)["x"]
        for index in (3, -4):
            with pytest.raises(IndexError):
                self.STATS[index]
        with pytest.raises(AttributeError):
            self.STATS.numel = (1,)
        with pytest.raises(ValueError, match=f"must be whole rows of {ROW_BYTES} bytes, got {ROW_BYTES + 1} bytes"):
            TensorStats(bytes(ROW_BYTES + 1))

    def test_the_table_is_readonly_float64(self):
        table, empty = self.STATS.table, TensorStats(b"")
        assert (table.shape, table.format, table.readonly) == ((3, len(COLUMNS)), "d", True)
        assert table.tolist() == [list(map(float, row)) for row in self.STATS]
        assert (empty.table.shape, empty.table.format, empty.table.tolist(), list(empty)) == ((0,), "d", [], [])
        assert empty.total_row() == (0,) * len(COLUMNS)
        with pytest.raises(TypeError):
            TensorStats(bytearray(ROW_BYTES)).table[0, 0] = 1.0

    def test_names_are_made_on_demand(self):
        calls = []
        stats = TensorStats(bytes(ROW_BYTES), lambda: calls.append(1) or ["w"])
        assert (len(stats), stats.total().norm, calls) == (1, 0.0, [])
        assert (stats.names, stats.names, calls) == (("w",), ("w",), [1])
        assert TensorStats(bytes(2 * ROW_BYTES)).names == ("tensor0", "tensor1")

    @pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda stats: pickle.loads(pickle.dumps(stats))])
    def test_copies_are_equal(self, clone):
        stats = TensorStats(bytearray(self.STATS.table.tobytes()), lambda: ["a", "b", "c"], self.STATS.total_row())
        twin = clone(stats)
        assert twin == stats == self.STATS
        assert (twin.names, list(twin)[:2], twin.total_row()) == (stats.names, list(stats)[:2], stats.total_row())
        assert make_table([make_row(1.0)], ["a"]) != make_table([make_row(2.0)], ["a"])
        assert make_table([make_row(1.0)], ["a"]) != make_table([make_row(1.0)], ["b"])


class TestFold:
    @given(ROWS)
    def test_merges_from_left_to_right(self, rows):
        numel, sum_sq, total, high, low, zeros, nans, infs, *_ = fold_rows(make_table(rows))
        columns = list(zip(*rows)) or [()] * 8
        assert (numel, zeros, nans, infs) == (sum(columns[0]), sum(columns[5]), sum(columns[6]), sum(columns[7]))
        for folded, column in ((sum_sq, columns[1]), (total, columns[2])):
            assert folded == (list(itertools.accumulate(column, initial=0.0))[-1])  # the same order: the same bits
        assert high == max(columns[3], default=0.0)
        assert low == min((value for value in columns[4] if value), default=0.0)

    def test_impossible_counts_of_a_damaged_log(self):
        broken, sound = TensorRow(1, 4.0, 2.0, 2.0, 2.0, num_nans=3), TensorRow(2, 8.0, 4.0, 2.0, 2.0)
        for rows in ([broken, sound], [sound, broken], [broken, broken]):
            assert fold_rows(rows)[0] == sum(row.numel for row in rows)


class TestStepStats:
    def test_nonfinite_is_in_backward_order(self):
        record, good = make_bad_record(0, bad=("a", "c")), make_record(3, 5.0)
        assert record.nonfinite == ["c", "a"] and math.isnan(record.norm) and not record.is_finite
        assert (good.nonfinite, good.is_finite, good.norm, good.gradients.norm) == ([], True, 5.0, 5.0)
        assert not good.clipped and good.loss is good.loss_scale is None

    @pytest.mark.parametrize(
        ("row", "norm", "bad"),
        [
            (TensorRow(1, math.inf, 1.5e308, 1.5e308, 1.5e308, finite_norm=1.5e308), math.inf, []),  # only the total
            (TensorRow(1, math.inf, 1e200, 1e200, 1e200, finite_norm=math.inf), math.inf, ["b", "a"]),
            (TensorRow(1, 1e308, 1e154, 1e154, 1e154, finite_norm=1e154), math.sqrt(2) * 1e154, []),
        ],
    )
    def test_norms_that_overflow(self, row, norm, bad):
        record = StepStats(0, make_table([row, row], ["a", "b"]))
        assert record.norm == pytest.approx(norm) and record.is_finite == math.isfinite(norm)
        assert record.nonfinite == bad

    def test_is_frozen_and_survives_pickle(self):
        record = make_record(1, math.inf, loss=math.inf, lr=0.1, clip_coef=0.5)
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.step = 2
        twin = pickle.loads(pickle.dumps(record))
        assert twin == record and twin.clipped
