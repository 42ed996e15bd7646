"""Tables of statistics: what the figures mean at their edges, and that records are plain, frozen data."""

import dataclasses
import math
import pickle

import pytest

from fastguard.records import COLUMNS, GradientStats, TensorRow, TensorStats
from fastguard.records.columns import ROW_BYTES

from records import make_record, make_row, make_table


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


class TestStepStats:
    def test_is_frozen_and_survives_pickle(self):
        record = make_record(1, math.inf, loss=math.inf, lr=0.1, clip_coef=0.5)
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.step = 2
        twin = pickle.loads(pickle.dumps(record))
        assert twin == record and twin.clipped
