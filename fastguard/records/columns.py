"""The one table of columns of a row, and everything that depends on it. C++ has the same table in csrc/stats.h, and
Triton the numbers of columns in kernels/triton/lang/stats.py, since neither can read this one;
tests/kernels/test_tensor_stats.py compares them."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

Fold = Literal["add", "max", "least_nonzero", "deviations", "norm"]


class TensorRow(NamedTuple):
    """One row of a `TensorStats`: the statistics of one tensor.

    A complex tensor counts as its real and imaginary parts: `numel` is then twice `Tensor.numel()`.
    NaN and Inf are counted, and excluded from every other column.

    Each field is a column. Its annotation is its type (an int is a count), the power of f by which it grows if the
    elements are multiplied by f, and how the rows of two tensors are merged. Without elements, every column is 0.

    `sum_sq_dev` is the sum of squared deviations from the tensor's own mean. `finite_norm` is the root of `sum_sq`, but
    correct even if squares of float64 overflow or underflow, so that `sum_sq` is Inf or inaccurate.
    """

    numel: Annotated[int, 0, "add"] = 0
    sum_sq: Annotated[float, 2, "add"] = 0.0
    sum: Annotated[float, 1, "add"] = 0.0
    abs_max: Annotated[float, 1, "max"] = 0.0
    abs_min_nonzero: Annotated[float, 1, "least_nonzero"] = 0.0
    num_zeros: Annotated[int, 0, "add"] = 0
    num_nans: Annotated[int, 0, "add"] = 0
    num_infs: Annotated[int, 0, "add"] = 0
    sum_sq_dev: Annotated[float, 2, "deviations"] = 0.0
    finite_norm: Annotated[float, 1, "norm"] = 0.0

    @property
    def norm(self) -> float:
        """The 2-norm as torch has it: NaN if any element is NaN, else Inf if any is infinite."""
        return norm_of(self.finite_norm, self.num_nans, self.num_infs)

    @property
    def mean(self) -> float:
        """Mean of the finite elements; NaN if there are elements but none is finite."""
        return self.mean_and_std()[0]

    @property
    def std(self) -> float:
        """Standard deviation (of the population) of the finite elements."""
        return self.mean_and_std()[1]

    @property
    def is_finite(self) -> bool:
        """Whether every element is finite and so is the norm."""
        return not (self.num_nans or self.num_infs) and math.isfinite(self.finite_norm)

    def mean_and_std(self) -> tuple[float, float]:
        """`mean` and `std` at once."""
        count = self.numel - self.num_nans - self.num_infs
        if count <= 0:
            nothing = math.nan if self.numel else 0.0
            return nothing, nothing
        mean = self.sum / count
        if in_range(self.sum_sq) or (self.sum_sq == math.inf and self.sum_sq_dev < math.inf):
            return mean, math.sqrt(max(0.0, self.sum_sq_dev / count))
        rms = self.finite_norm / math.sqrt(count)  # the squares of deviations are out of range too
        if not rms:
            return mean, 0.0
        share = mean / rms
        rest = 1.0 - share * share
        return mean, math.inf if math.isnan(rest) else rms * math.sqrt(max(0.0, rest))


class Column(NamedTuple):
    """A column; see `TensorRow`."""

    name: str
    power: int
    fold: Fold
    is_count: bool

    @property
    def is_exact(self) -> bool:
        """Whether every backend gives the same bits, as for every column but sums of rounded numbers."""
        return self.is_count or self.fold in ("max", "least_nonzero")


_HINTS = get_type_hints(TensorRow, include_extras=True)
TABLE = tuple(Column._make((name, *hint.__metadata__, hint.__origin__ is int)) for name, hint in _HINTS.items())
COLUMNS = tuple(column.name for column in TABLE)
INDEX = {name: i for i, name in enumerate(COLUMNS)}
POWERS = tuple(column.power for column in TABLE)
_COUNTS = tuple(i for i, column in enumerate(TABLE) if column.is_count)
ROW = struct.Struct(f"{len(TABLE)}d")
ROW_BYTES = ROW.size
EMPTY_ROW = TensorRow()


def norm_of(finite_norm: float, num_nans: float, num_infs: float) -> float:
    """The 2-norm as torch has it: NaN if any element is NaN, else Inf if any is infinite."""
    if num_nans:
        return math.nan
    if num_infs:
        return math.inf
    return finite_norm


def in_range(sum_sq: float) -> bool:
    """Whether a sum of squares is accurate in float64: it neither overflowed nor lost bits to underflow."""
    return 2.0**-960 <= sum_sq < math.inf


def picker(*names: str) -> Callable[[Sequence[float]], tuple[float, ...]]:
    """A function that returns these columns, two or more, of a row."""
    return operator.itemgetter(*(INDEX[name] for name in names))


norm_parts = picker("finite_norm", "num_nans", "num_infs")  # the arguments of `norm_of`
_moments = picker("numel", "num_nans", "num_infs", "sum", "sum_sq", "sum_sq_dev", "finite_norm")


def as_row(values: Sequence[float]) -> TensorRow:
    """A `TensorRow` of float64 values in the order of `COLUMNS`, `completed`; counts become ints."""
    row = list(completed(values))
    for i in _COUNTS:
        row[i] = int(row[i])
    return TensorRow._make(row)


def completed(values: Sequence[float]) -> Sequence[float]:
    """`values` in the order of `COLUMNS`. Rows of old logs lack columns: these follow from the others, or are 0."""
    known = len(values)
    if known >= len(TABLE):
        return values
    row = TensorRow._make([*values, *EMPTY_ROW[known:]])
    count = row.numel - row.num_nans - row.num_infs
    if known <= INDEX["sum_sq_dev"] and count > 0:
        deviations = row.sum_sq - row.sum * (row.sum / count) if row.sum_sq < math.inf else math.inf
        row = row._replace(sum_sq_dev=max(0.0, deviations))
    return row._replace(finite_norm=math.sqrt(row.sum_sq) if row.sum_sq >= 0 else row.sum_sq)


# Not `sum` and the like: `sum` rounds in another way from Python 3.12 on, and every backend adds from first to last.
_FOLDS: dict[Fold, Callable[[Any, Any], Any]] = {
    **{"add": operator.add, "max": max},
    "least_nonzero": lambda a, b: b if b and (not a or b < a) else a,
}


def _merged_norm(sum_sq: float, a: float, b: float) -> float:
    """The norm of two groups together: the root of their squares, unless these are out of the range of float64."""
    if in_range(sum_sq):
        return math.sqrt(sum_sq)
    large = a if a > b else b
    if not large or large == math.inf:
        return large
    ratio = (b if a > b else a) / large
    return large * math.sqrt(1.0 + ratio * ratio)


def _fold_moments(rows: Iterable[Sequence[float]]) -> dict[Fold, float]:
    """The columns whose fold needs other columns. Squared deviations of two groups together are those from each group's
    own mean plus those between the means (Chan, Golub and LeVeque, 1979)."""
    count = total = sum_sq = deviations = norm = 0.0
    for numel, nans, infs, row_total, row_sq, row_deviations, row_norm in map(_moments, rows):
        n = float(numel - nans - infs)
        between = 0.0
        if count > 0 and n > 0:  # a log may claim more NaNs than elements
            away = row_total * count - total * n
            between = away / (count * n * (count + n)) * away
            if between != between:
                between = math.inf
        deviations = deviations + row_deviations + between
        count += n
        total += row_total
        sum_sq += row_sq
        norm = _merged_norm(sum_sq, norm, row_norm)
    return {"deviations": deviations, "norm": norm}


def fold_rows(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Rows merged into one, first to last: the same order, and so the same bits, as every backend's own total."""
    rows = list(rows)
    each = list(zip(*rows)) or [()] * len(TABLE)
    moments = _fold_moments(rows)
    return tuple(
        functools.reduce(_FOLDS[column.fold], values, nothing) if column.fold in _FOLDS else moments[column.fold]
        for column, values, nothing in zip(TABLE, each, EMPTY_ROW, strict=True)
    )
