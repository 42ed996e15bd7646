"""Histograms of magnitudes by power of two, and how other formats would represent them. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Every binary exponent that a float64 can have, subnormals included.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -1074, 1023
# The counts of a kernel: zeros, NaNs, Infs, then one count for each exponent from the lowest to the highest.
NUM_COUNTS = 3 + HIGHEST_EXPONENT - LOWEST_EXPONENT + 1


class FloatFormat(NamedTuple):
    """Binary exponents of a format's smallest subnormal, smallest normal and largest finite number."""

    smallest: int
    normal: int
    largest: int


FORMATS: Mapping[str, FloatFormat] = {
    "float64": FloatFormat(-1074, -1022, 1023),
    "float32": FloatFormat(-149, -126, 127),
    "bfloat16": FloatFormat(-133, -126, 127),
    "float16": FloatFormat(-24, -14, 15),
    "float8_e5m2": FloatFormat(-16, -14, 15),
    "float8_e4m3fn": FloatFormat(-9, -6, 8),
}


@dataclass(frozen=True)
class MagnitudeHistogram:
    """Counts of floor(log2 |x|).

    Attributes:
        counts: the number of finite non-zero elements with 2^e <= |x| < 2^(e + 1), for each e that occurs, rising.
        num_zeros, num_nans, num_infs: elements without an exponent.

    Ratios are shares of the finite non-zero elements, or 0.0 without any. Their resolution is a power of two.
    """

    counts: Mapping[int, int]
    num_zeros: int = 0
    num_nans: int = 0
    num_infs: int = 0

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> MagnitudeHistogram:
        """From the counts of a kernel: zeros, NaNs, Infs, then each exponent from the lowest to the highest."""
        if len(counts) != NUM_COUNTS:
            raise ValueError(f"`counts` must have {NUM_COUNTS} numbers, got {len(counts)}")
        exponents = {e: n for e, n in enumerate(counts[3:], LOWEST_EXPONENT) if n}
        return cls(exponents, counts[0], counts[1], counts[2])

    @property
    def num_nonzero(self) -> int:
        """Finite elements other than zero."""
        return sum(self.counts.values())

    @property
    def total_elements(self) -> int:
        """All elements."""
        return self.num_nonzero + self.num_zeros + self.num_nans + self.num_infs

    def _ratio(self, low: float, high: float) -> float:
        total = self.num_nonzero
        return sum(n for e, n in self.counts.items() if low <= e < high) / total if total else 0.0

    def underflow_ratio(self, dtype: str) -> float:
        """Share that becomes zero in `dtype`: |x| below half of its smallest subnormal.

        Exactly half also rounds to zero, but belongs to the next power of two and is not counted.

        Args:
            dtype: "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32" or "float64".

        >>> MagnitudeHistogram({-30: 1, 0: 3}).underflow_ratio("float16")
        0.25
        """
        return self._ratio(-math.inf, _format(dtype).smallest - 1)

    def subnormal_ratio(self, dtype: str) -> float:
        """Share that loses bits in `dtype` without becoming zero: |x| below its smallest normal number."""
        found = _format(dtype)
        return self._ratio(found.smallest - 1, found.normal)

    def overflow_ratio(self, dtype: str) -> float:
        """Share that is certainly too large for `dtype`: |x| at least the power of two above its largest number.

        Values between that number and the power of two are not counted: 65520 to 65536 for float16, 464 to 512 for
        float8_e4m3fn.

        >>> MagnitudeHistogram({16: 1, 15: 1}).overflow_ratio("float16")
        0.5
        """
        return self._ratio(_format(dtype).largest + 1, math.inf)


def _format(dtype: str) -> FloatFormat:
    name = str(dtype).removeprefix("torch.")
    if name not in FORMATS:
        raise ValueError(f"`dtype` must be one of [{', '.join(FORMATS)}], got {name!r}")
    return FORMATS[name]
