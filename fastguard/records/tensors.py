"""What a history knows about the gradient of each tensor: a few numbers, updated at a few steps."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat
from typing import Annotated, Any, NamedTuple

from . import columns, values
from .codec import Count, Part, reader_of
from .slot import batch_end
from .table import TensorStats

MAX_TENSORS = 4096
NUM_FIRST = 3
_RATE = 0.25
_FIRST_GAPS = (1, 1, 3, 5)  # steps between the first samples; later ones are at the end of a batch of steps
_TENSORS_PER_STEP = 5
_SLACK = 16  # steps by which a sample may come early, to be at the end of a batch

# A track is 11 float64 in a row: 88 bytes, where an object with Python numbers would take six hundred.
_NUMEL, _NUM_SAMPLES, _NUM_ZERO, _NUM_LOGS, _FIRST_STEP, _LAST_STEP = range(6)
_FIRST_LOG_RMS, _LOG_RMS, _ZERO_SHARE, _MIN_NONZERO, _ZERO_SINCE = range(6, 11)
_WIDTH = 11
_EMPTY = (0.0, 0.0, 0.0, 0.0, -1.0, -1.0, math.nan, math.nan, 0.0, 0.0, -1.0)
_needed = columns.picker("numel", "abs_min_nonzero", "num_zeros", "finite_norm")


def _add(data: array[float], at: int, step: int, row: Sequence[float]) -> None:
    """Takes one sample into the track at `at`: a row in the order of `COLUMNS`. Cost: 1 us."""
    numel, low, zeros, norm = _needed(row)
    if not data[at + _NUM_SAMPLES]:
        data[at + _FIRST_STEP] = step
        data[at + _ZERO_SHARE] = zeros / numel if numel else 0.0
    data[at + _NUM_SAMPLES] += 1.0
    data[at + _LAST_STEP] = step
    data[at + _NUMEL] = numel
    data[at + _MIN_NONZERO] = low
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


class TensorTrack(NamedTuple):
    """One tensor's gradient over the sampled steps; norms are unscaled and before clipping."""

    numel: int  # number of elements
    # num_samples, first_step, last_step: the samples that contained the tensor
    num_samples: int
    num_zero: int  # samples in which it was all zeros; `zero_since` is the step since when all were, or None
    num_logs: int
    first_step: int
    last_step: int
    # Mean of ln(norm / sqrt(numel)) over the first three samples that were not all zeros; NaN if none
    first_log_rms: float
    log_rms: float  # exponential average of the same over about four samples; NaN if none
    zero_share: float  # exponential average of the share of zeros
    min_nonzero: float  # the smallest non-zero |g| of the newest sample
    zero_since: int | None

    @property
    def norm(self) -> float:
        """The usual 2-norm of recent samples; 0.0 if all samples were zeros."""
        return math.exp(self.log_rms) * math.sqrt(self.numel) if self.num_logs else 0.0


@dataclass(repr=False)
class TensorTracks(Part, Mapping[str, TensorTrack]):
    """The tracks of all tensors by name, in the order of first appearance. Only a few steps are sampled: the first,
    second, third, sixth and eleventh, then some that end a batch of steps (`batch_end`). With n tensors, at least n / 5
    steps are between two samples, so that the mean cost is about 3 us a step for any n. If a step is skipped, the next
    clean one takes its place."""

    _next: int = 0
    num_samples: Count = 0
    last_step: int = -1
    _names: list[str] = field(default_factory=list)
    _data: Annotated[Any, reader_of(list[float])] = field(default_factory=partial(array, "d"))

    def __post_init__(self) -> None:
        self._placed: dict[str, int] = {}  # by name; made on demand

    def load(self, state: Any) -> None:
        super().load(state)
        self._data = array("d", self._data)
        if len(self._data) != _WIDTH * len(self._names):
            raise values.MisfitError(f"must be {_WIDTH} numbers for each of {len(self._names)} names", ("_data",))
        counts = (_NUMEL, _NUM_SAMPLES, _NUM_ZERO, _NUM_LOGS)
        least = {**dict.fromkeys(counts, 0.0), **dict.fromkeys((_FIRST_STEP, _LAST_STEP, _ZERO_SINCE), -1.0)}
        for place, number in enumerate(self._data):
            low = least.get(place % _WIDTH)
            if low is not None and not low <= number < math.inf:
                raise values.MisfitError(f"must be finite and >= {low:g}, got {number}", ("_data", place))

    def is_due(self, step: int) -> bool:
        """Whether the table of this step is needed, if the step is clean."""
        return step >= self._next or step < self.last_step  # step numbers may start again

    def due_at(self, step: int) -> int:
        """The first step from `step` on whose table is needed."""
        return step if self.is_due(step) else self._next

    def see(self, step: int, tensors: TensorStats) -> bool:
        """Takes the table of a clean step if it is due. Cost: 0.1 us; 0.7 us a tensor if it is due."""
        if not self.is_due(step) or not len(tensors):
            return False
        if self.num_samples < len(_FIRST_GAPS):
            self._next = step + _FIRST_GAPS[self.num_samples]
        else:
            self._next = batch_end(max(step + 1, step + len(tensors) // _TENSORS_PER_STEP - _SLACK))
        self.num_samples += 1
        self.last_step = step
        names, data, num_known = tensors.names, self._data, len(self._names)
        order: Iterable[int | None]
        if [*names[:num_known]] == self._names:
            self._append(names[num_known:MAX_TENSORS])
            order = range(0, len(data), _WIDTH)
        else:
            unknown = (name for name in names if name not in self._places)
            self._append(list(islice(unknown, MAX_TENSORS - num_known)))
            order = map(self._places.get, names)
        for at, row in zip(order, columns.ROW.iter_unpack(tensors.table.cast("B"))):
            if at is not None:
                _add(data, at, step, row)
        return True

    def _append(self, names: Sequence[str]) -> None:
        self._names.extend(names)
        self._data.extend(chain.from_iterable(repeat(_EMPTY, len(names))))

    @property
    def _places(self) -> dict[str, int]:
        """Where each track begins. Made on demand: 50 bytes a tensor."""
        if len(self._placed) != len(self._names):
            self._placed = {name: _WIDTH * i for i, name in enumerate(self._names)}
        return self._placed

    def column(self, field: str) -> array[float]:
        """One field of all tracks, in their order; `zero_since` is -1 for never. Cost: 10 us at 1000 tensors."""
        return self._data[TensorTrack._fields.index(field) :: _WIDTH]

    def all_are(self, field: str, value: float) -> bool:
        """Whether a field, as in `column`, is `value` in all tracks. Cost: 2 us at 1000 tensors."""
        return self.column(field).tobytes() == struct.pack("d", value) * len(self)

    def hold(self, names: Sequence[str]) -> bool:
        """Whether all names have a track. Cost: 5 us at 1000 names in the order of the tracks, else 20 us."""
        return self._names == [*names] or all(map(self._places.__contains__, names))

    def __getitem__(self, name: str) -> TensorTrack:
        at = self._places[name]
        *numbers, since = self._data[at : at + _WIDTH].tolist()
        counts, rest = map(int, numbers[:_FIRST_LOG_RMS]), numbers[_FIRST_LOG_RMS:]
        return TensorTrack._make([*counts, *rest, None if since < 0.0 else int(since)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
