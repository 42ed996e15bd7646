"""What a history knows of each tensor's gradient: a few numbers, brought up to date every now and then."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ..stats import TensorStats, columns, strict_json, values
from ..stats.part import COUNT, WHOLE, Kind, Part

MAX_TENSORS = 4096
NUM_FIRST = 3
_RATE = 0.25
_FIRST_SAMPLES = (0, 1, 2, 5, 10)  # clean steps; from then on the interval decides
_MIN_INTERVAL = 20
_TENSORS_PER_STEP = 5

# A track is so many float64 in a row: 112 bytes, where an object of Python numbers would take six hundred.
_NUMEL, _NUM_SAMPLES, _NUM_ZERO, _SAME_RUN, _NUM_LOGS, _FIRST_STEP, _LAST_STEP = range(7)
_FIRST_LOG_RMS, _LOG_RMS, _ZERO_SHARE, _MIN_NONZERO, _ZERO_SINCE, _LAST_SUM_SQ, _LAST_SUM = range(7, 14)
_WIDTH = 14
_FIELDS = {
    "num_samples": _NUM_SAMPLES,
    "last_step": _LAST_STEP,
    "first_log_rms": _FIRST_LOG_RMS,
    "log_rms": _LOG_RMS,
    "min_nonzero": _MIN_NONZERO,
    "zero_since": _ZERO_SINCE,
}
_EMPTY = (0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -1.0, math.nan, math.nan, 0.0, 0.0, -1.0, math.nan, math.nan)
_needed = columns.picker("numel", "sum_sq", "sum", "abs_min_nonzero", "num_zeros", "finite_norm")


def _add(data: array[float], at: int, step: int, row: Sequence[float]) -> None:
    """Takes one sample into the track at `at`: a row in the order of `COLUMNS`. Cost: 1 us."""
    numel, sum_sq, total, low, zeros, norm = _needed(row)
    if not data[at + _NUM_SAMPLES]:
        data[at + _FIRST_STEP] = step
        data[at + _ZERO_SHARE] = zeros / numel if numel else 0.0
    data[at + _NUM_SAMPLES] += 1.0
    data[at + _LAST_STEP] = step
    data[at + _NUMEL] = numel
    data[at + _MIN_NONZERO] = low
    is_same = data[at + _LAST_SUM_SQ] == sum_sq and data[at + _LAST_SUM] == total
    data[at + _SAME_RUN] = data[at + _SAME_RUN] + 1.0 if is_same else 1.0
    data[at + _LAST_SUM_SQ] = sum_sq
    data[at + _LAST_SUM] = total
    if not numel:
        return
    data[at + _ZERO_SHARE] += _RATE * (zeros / numel - data[at + _ZERO_SHARE])
    if zeros == numel:
        data[at + _NUM_ZERO] += 1.0
        if data[at + _ZERO_SINCE] < 0.0:
            data[at + _ZERO_SINCE] = step
        return
    data[at + _ZERO_SINCE] = -1.0
    if norm <= 0.0:
        return
    log_rms = math.log(norm) - 0.5 * math.log(numel)
    count = data[at + _NUM_LOGS] + 1.0
    data[at + _NUM_LOGS] = count
    if count == 1.0:
        data[at + _FIRST_LOG_RMS] = data[at + _LOG_RMS] = log_rms
        return
    if count <= NUM_FIRST:
        data[at + _FIRST_LOG_RMS] += (log_rms - data[at + _FIRST_LOG_RMS]) / count
    data[at + _LOG_RMS] += max(_RATE, 1.0 / count) * (log_rms - data[at + _LOG_RMS])


class TensorTrack:
    """One tensor's gradient over the sampled steps; all norms unscaled and before clipping. A view: it follows.

    Attributes:
        numel: its elements.
        num_samples, first_step, last_step: the samples that held it.
        first_log_rms: mean of ln(norm / sqrt(numel)) over its first three samples that were not all zeros; NaN if none.
        log_rms: exponential average of the same over about four samples; NaN if none.
        num_zero: samples in which it was all zeros; `zero_since` the step since when it always was, or None.
        zero_share: exponential average of the share of zeros.
        same_run: samples in a row whose gradient had bit for bit the same norm and sum, the newest among them.
        min_nonzero: the smallest non-zero |g| of the newest sample.
    """

    __slots__ = ("_at", "_data")

    def __init__(self, data: array[float], at: int) -> None:
        self._data, self._at = data, at

    numel = property(lambda self: int(self._data[self._at + _NUMEL]))
    num_samples = property(lambda self: int(self._data[self._at + _NUM_SAMPLES]))
    first_step = property(lambda self: int(self._data[self._at + _FIRST_STEP]))
    last_step = property(lambda self: int(self._data[self._at + _LAST_STEP]))
    first_log_rms = property(lambda self: self._data[self._at + _FIRST_LOG_RMS])
    log_rms = property(lambda self: self._data[self._at + _LOG_RMS])
    num_zero = property(lambda self: int(self._data[self._at + _NUM_ZERO]))
    zero_share = property(lambda self: self._data[self._at + _ZERO_SHARE])
    same_run = property(lambda self: int(self._data[self._at + _SAME_RUN]))
    min_nonzero = property(lambda self: self._data[self._at + _MIN_NONZERO])

    @property
    def zero_since(self) -> int | None:
        since = self._data[self._at + _ZERO_SINCE]
        return None if since < 0.0 else int(since)

    @property
    def norm(self) -> float:
        """The usual 2-norm, lately; 0.0 if it was never anything but zeros."""
        data, at = self._data, self._at
        return math.exp(data[at + _LOG_RMS]) * math.sqrt(data[at + _NUMEL]) if data[at + _NUM_LOGS] else 0.0

    def __repr__(self) -> str:
        return f"TensorTrack({self._data[self._at : self._at + _WIDTH].tolist()})"


class TensorTracks(Part):
    """The tracks of all tensors, by name in the order in which they were first met.

    A step is looked at only now and then: the first, second, third, sixth and eleventh clean step, then one in twenty,
    or in a fifth of the number of tensors if that is more, so that it costs about 3 us a step however many they are.

    Attributes:
        num_samples, last_step: how many steps were looked at, and the newest of them.
    """

    __slots__ = ("_data", "_next", "_num_seen", "_places", "last_step", "num_samples", "num_untracked")
    _fields: ClassVar = {
        **dict.fromkeys(("_num_seen", "_next", "num_samples", "num_untracked"), COUNT),
        "last_step": WHOLE,
        "_places": Kind(
            list, lambda names, now: {name: _WIDTH * i for i, name in enumerate(values.each(values.text, names))}
        ),
        "_data": Kind(
            lambda data: strict_json.encode(data.tolist()),
            lambda plain, now: array("d", values.each(values.number, plain)),
        ),
    }

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._data = array("d")
        self._num_seen = self._next = 0
        self.num_samples = self.num_untracked = 0
        self.last_step = -1

    def load(self, state: Any) -> None:
        """Takes back what `state` gave; a MisfitError for anything else."""
        super().load(state)
        if len(self._data) != _WIDTH * len(self._places):
            raise values.MisfitError(f"must be {_WIDTH} numbers for each of {len(self._places)} names", ("_data",))
        counts = (_NUMEL, _NUM_SAMPLES, _NUM_ZERO, _SAME_RUN, _NUM_LOGS)
        least = {**dict.fromkeys(counts, 0.0), **dict.fromkeys((_FIRST_STEP, _LAST_STEP, _ZERO_SINCE), -1.0)}
        for place, number in enumerate(self._data):
            low = least.get(place % _WIDTH)
            if low is not None and not low <= number < math.inf:
                raise values.MisfitError(f"must be finite and >= {low:g}, got {number}", ("_data", place))

    @property
    def due_in(self) -> int:
        """How many clean steps may pass before one whose table is wanted."""
        return max(0, self._next - self._num_seen)

    def let_pass(self, num: int = 1) -> None:
        """Takes note of clean steps whose tables were not kept; only where `due_in` allows it."""
        self._num_seen += num

    def see(self, step: int, tensors: TensorStats) -> None:
        """Takes a clean step's table, or lets it pass. Cost: 0.1 us; 0.7 us a tensor when it is looked at."""
        seen = self._num_seen
        self._num_seen = seen + 1
        if seen < self._next or not len(tensors):
            return
        interval = max(_MIN_INTERVAL, len(tensors) // _TENSORS_PER_STEP)
        self._next = next((early for early in _FIRST_SAMPLES if early > seen), seen + interval)
        self.num_samples += 1
        self.last_step = step
        places, data = self._places, self._data
        self.num_untracked = 0
        for name, row in zip(tensors.names, columns.ROW.iter_unpack(tensors.table.cast("B"))):
            at = places.get(name)
            if at is None:
                if len(places) >= MAX_TENSORS:
                    self.num_untracked += 1
                    continue
                at = places[name] = len(data)
                data.extend(_EMPTY)
            _add(data, at, step, row)

    def column(self, field: str) -> list[float]:
        """One field of all tracks, in their order: "num_samples", "last_step", "first_log_rms", "log_rms",
        "min_nonzero", or "zero_since", which is -1 for never. Cost: 10 us at 1000 tensors, of which each track takes 1.
        """
        return self._data[_FIELDS[field] :: _WIDTH].tolist()

    def all_are(self, field: str, value: float) -> bool:
        """Whether that field, as in `column`, is `value` in all tracks. Cost: 2 us at 1000 tensors."""
        return self._data[_FIELDS[field] :: _WIDTH].tobytes() == struct.pack("d", value) * len(self._places)

    def hold(self, names: Sequence[str]) -> bool:
        """Whether all of these have a track. Cost: 5 us at 1000 names where they are in this order, else 20 us."""
        return [*self._places] == [*names] or all(map(self._places.__contains__, names))

    def __getitem__(self, name: str) -> TensorTrack:
        return TensorTrack(self._data, self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def items(self) -> Iterator[tuple[str, TensorTrack]]:
        """Names and tracks, in the order in which they were first met."""
        data = self._data
        return ((name, TensorTrack(data, at)) for name, at in self._places.items())
