"""The vocabulary: what the figures mean at their edges, and that records are plain, frozen data."""

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

ROWS = st.lists(
    st.tuples(
        st.integers(1, 2**53),
        st.floats(0.0, 1e200),
        st.floats(-1e200, 1e200),
        st.floats(0.0, 1e200),
        st.floats(0.0, 1e200),
        st.integers(0, 2**40),
        st.integers(0, 2**40),
        st.integers(0, 2**40),
    ),
    max_size=6,
)


def is_nan(value):
    return value != value


class TestGradientStats:
    def test_no_elements_is_all_zeros_and_healthy(self):
        stats = TensorStats(b"").total()
        assert dataclasses.astuple(stats) == (0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0)
        assert stats.is_healthy() == (True, [])

    def test_all_nan_has_no_mean(self):
        stats = GradientStats.from_row((4, 0.0, 0.0, 0.0, 0.0, 0, 4, 0))
        assert is_nan(stats.norm) and is_nan(stats.mean) and is_nan(stats.std)
        assert stats.is_healthy() == (False, ["NaN gradients: 4 of 4 elements"])

    def test_inf_counts_and_leaves_the_finite_elements_their_figures(self):
        stats = GradientStats.from_row((3, 25.0, 7.0, 4.0, 3.0, 0, 0, 1))
        assert stats.norm == math.inf
        assert (stats.mean, stats.std, stats.max_val, stats.min_val) == (3.5, 0.5, 4.0, 3.0)
        assert stats.is_healthy() == (False, ["Inf gradients: 1 of 3 elements"])

    def test_nan_outranks_inf(self):
        stats = GradientStats.from_row((3, 1.0, 1.0, 1.0, 1.0, 0, 1, 1))
        assert is_nan(stats.norm)
        assert len(stats.is_healthy()[1]) == 2

    @pytest.mark.parametrize(
        ("norm", "message"),
        [
            (1000.5, "Exploding gradients: norm 1e+03 is above 1000"),
            (math.inf, "Exploding gradients: norm inf is above 1000"),
            (1e-9, "Vanishing gradients: norm 1e-09 is below 1e-8"),
            (0.0, "Vanishing gradients: norm 0 is below 1e-8"),
        ],
    )
    def test_unhealthy_norms(self, norm, message):
        assert GradientStats(norm, norm, norm, 0.0, 0.0, 0, 0, 0, 4).is_healthy() == (False, [message])

    @pytest.mark.parametrize("norm", [1000.0, 1e-8, 1.0])
    def test_healthy_norms(self, norm):
        assert GradientStats(norm, norm, norm, 0.0, 0.0, 0, 0, 0, 4).is_healthy() == (True, [])

    def test_overflowed_sum_has_no_finite_spread(self):
        stats = GradientStats.from_row((2, math.inf, 2e200, 1e200, 1e200, 0, 0, 0))
        assert (stats.norm, stats.std) == (math.inf, math.inf)

    def test_spread_beyond_the_range_of_squares(self):
        for size in (1e-250, 1e250):  # of size, -size and 0
            norm = math.sqrt(2) * size
            row = TensorRow(3, size * size, 0.0, size, size, 1, sum_sq_dev=size * size, finite_norm=norm)
            assert GradientStats.from_row(row).std == pytest.approx(size * math.sqrt(2 / 3), rel=1e-12)

    def test_rows_of_old_logs_have_the_spread_that_follows_from_them(self):
        assert GradientStats.from_row((2, 10.0, 4.0, 3.0, 1.0, 0, 0, 0)).std == 1.0
        assert GradientStats.from_row((2, 10.0, 4.0, 3.0, 1.0, 0, 0, 0)).norm == math.sqrt(10.0)

    def test_rounding_never_makes_a_variance_negative(self):
        assert GradientStats.from_row((3, 0.03, 0.3 * (1 + 1e-12), 0.1, 0.1, 0, 0, 0)).std == 0.0

    def test_is_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            TensorStats(b"").total().norm = 1.0


class TestTensorStats:
    STATS = make_table([make_row(5.0, 2), make_row(0.0, 3, num_zeros=3), make_row(1.0, num_nans=2)], ["a", "b", "c"])

    def test_rows_by_position_and_by_name(self):
        assert self.STATS[1] == self.STATS["b"] == self.STATS[-2]
        assert self.STATS["a"].norm == 5.0
        assert type(self.STATS["a"].numel) is int

    @pytest.mark.parametrize("index", [3, -4])
    def test_position_out_of_range(self, index):
        with pytest.raises(IndexError):
            self.STATS[index]

    def test_unknown_name_lists_the_known_ones(self):
        with pytest.raises(KeyError, match="no tensor is named 'd'; the names are: a, b, c"):
            self.STATS["d"]

    def test_unknown_name_among_many_lists_some(self):
        with pytest.raises(KeyError, match=r"tensor6, tensor7 and 1 more"):
            make_table([make_row()] * 9)["x"]

    def test_iteration_gives_the_rows_in_order(self):
        assert list(self.STATS) == [self.STATS[0], self.STATS[1], self.STATS[2]]
        assert all(isinstance(row, TensorRow) for row in self.STATS)

    def test_columns(self):
        assert self.STATS.numel == (2, 3, 4)
        assert self.STATS.num_zeros == (0, 3, 0)
        assert self.STATS.num_nans == (0, 0, 2)
        assert self.STATS.num_infs == (0, 0, 0)
        assert self.STATS.sum_sq[:2] == (25.0, 0.0)
        assert self.STATS.norm[:2] == (5.0, 0.0) and is_nan(self.STATS.norm[2])
        assert self.STATS.nonfinite == [2]

    def test_table_is_readonly_float64_with_a_row_a_tensor(self):
        table = self.STATS.table
        assert (table.shape, table.format, table.readonly) == ((3, len(COLUMNS)), "d", True)
        assert table.tolist() == [list(map(float, row)) for row in self.STATS]

    def test_table_without_rows(self):
        table = TensorStats(b"").table
        assert (table.shape, table.format, table.readonly, table.tolist()) == ((0,), "d", True, [])
        assert list(TensorStats(b"")) == []
        assert TensorStats(b"").total_row() == (0,) * len(COLUMNS)

    def test_table_of_a_bytearray_is_readonly(self):
        with pytest.raises(TypeError):
            TensorStats(bytearray(ROW_BYTES)).table[0, 0] = 1.0

    def test_part_of_a_row_is_refused(self):
        with pytest.raises(ValueError, match=f"must be whole rows of {ROW_BYTES} bytes, got {ROW_BYTES + 1} bytes"):
            TensorStats(bytes(ROW_BYTES + 1))

    def test_names_are_made_when_first_asked_for(self):
        calls = []
        stats = TensorStats(bytes(ROW_BYTES), lambda: calls.append(1) or ["w"])
        assert (len(stats), stats.total().norm, calls) == (1, 0.0, [])
        assert (stats.names, stats.names, calls) == (("w",), ("w",), [1])

    def test_unnamed_tensors_are_numbered(self):
        assert TensorStats(bytes(2 * ROW_BYTES)).names == ("tensor0", "tensor1")

    @pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda stats: pickle.loads(pickle.dumps(stats))])
    def test_copies_are_equal(self, clone):
        stats = TensorStats(bytearray(self.STATS.table.tobytes()), lambda: ["a", "b", "c"], self.STATS.total_row())
        twin = clone(stats)
        assert twin == stats == self.STATS
        assert (twin.names, list(twin)[:2], twin.total_row()) == (stats.names, list(stats)[:2], stats.total_row())

    def test_other_numbers_or_names_are_not_equal(self):
        assert make_table([make_row(1.0)], ["a"]) != make_table([make_row(2.0)], ["a"])
        assert make_table([make_row(1.0)], ["a"]) != make_table([make_row(1.0)], ["b"])
        assert make_table([make_row(1.0)]) != "a table"

    def test_columns_cannot_be_set(self):
        with pytest.raises(AttributeError):
            self.STATS.numel = (1,)

    def test_to_dict(self):
        assert list(self.STATS.to_dict()) == ["a", "b", "c"]
        assert tuple(self.STATS.to_dict()["b"]) == COLUMNS

    def test_repr_is_short(self):
        assert repr(self.STATS) == "TensorStats(3 tensors, norm=nan)"


class TestFold:
    @given(ROWS)
    def test_is_the_left_to_right_merge(self, rows):
        numel, sum_sq, total, high, low, zeros, nans, infs, *_ = fold_rows(make_table(rows))
        columns = list(zip(*rows)) or [()] * 8
        assert (numel, zeros, nans, infs) == (sum(columns[0]), sum(columns[5]), sum(columns[6]), sum(columns[7]))
        for folded, column in ((sum_sq, columns[1]), (total, columns[2])):
            assert folded == (list(itertools.accumulate(column, initial=0.0))[-1])  # the same order: the same bits
        assert high == max(columns[3], default=0.0)
        assert low == min((value for value in columns[4] if value), default=0.0)

    def test_counts_that_cannot_be_break_nothing(self):
        """As a damaged log may have them: more NaNs than elements."""
        broken, sound = TensorRow(1, 4.0, 2.0, 2.0, 2.0, num_nans=3), TensorRow(2, 8.0, 4.0, 2.0, 2.0)
        for rows in ([broken, sound], [sound, broken], [broken, broken]):
            assert fold_rows(rows)[0] == sum(row.numel for row in rows)

    def test_order_shows_in_the_last_bits(self):
        large, small = [1, 2.0**53, *[0] * 6], [1, 1.0, *[0] * 6]
        assert fold_rows(make_table([large, small, small]))[1] == 2.0**53
        assert fold_rows(make_table([small, small, large]))[1] == 2.0**53 + 2

    def test_given_total_is_taken_as_it_is(self):
        assert TensorStats(bytes(ROW_BYTES), None, range(len(COLUMNS))).total_row() == tuple(range(len(COLUMNS)))


class TestStepStats:
    def test_defaults(self):
        record = make_record(3, 5.0)
        assert (record.step, record.norm, record.clip_coef) == (3, 5.0, 1.0)
        assert not record.clipped and not record.skipped
        assert record.loss is record.val_loss is record.lr is record.loss_scale is None
        assert record.gradients.norm == 5.0
        assert record.nonfinite == [] and record.is_finite

    def test_nonfinite_is_in_backward_order(self):
        record = make_bad_record(0, bad=("a", "c"))
        assert record.nonfinite == ["c", "a"]
        assert is_nan(record.norm) and not record.is_finite

    def test_norm_can_overflow_though_no_tensor_is_to_blame(self):
        row = TensorRow(1, math.inf, 1.5e308, 1.5e308, 1.5e308, finite_norm=1.5e308)
        record = StepStats(0, make_table([row, row]))
        assert (record.norm, record.is_finite, record.nonfinite) == (math.inf, False, [])

    def test_norm_does_not_overflow_where_its_square_does(self):
        record = StepStats(0, make_table([TensorRow(1, 1e308, 1e154, 1e154, 1e154, finite_norm=1e154)] * 2))
        assert record.norm == pytest.approx(math.sqrt(2) * 1e154) and record.is_finite

    def test_a_tensor_whose_norm_overflowed_is_to_blame(self):
        row = [1, math.inf, 1e200, 1e200, 1e200, 0, 0, 0]
        assert StepStats(0, make_table([row, make_row()], ["big", "small"])).nonfinite == ["big"]

    def test_is_frozen_and_survives_pickle(self):
        record = make_record(1, math.inf, loss=math.inf, lr=0.1, clip_coef=0.5)
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.step = 2
        twin = pickle.loads(pickle.dumps(record))
        assert twin == record and twin.clipped
