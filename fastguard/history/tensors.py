"""What a history knows of each tensor's gradient: a few numbers, brought up to date every now and then."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..stats import TensorStats

MAX_TENSORS = 4096
NUM_FIRST = 3
_RATE = 0.25
_FIRST_SAMPLES = (0, 1, 2, 5, 10)  # clean steps; from then on the interval decides
_MIN_INTERVAL = 20
_TENSORS_PER_STEP = 5


class TensorTrack:
    """One tensor's gradient over the sampled steps; all norms unscaled and before clipping.

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

    __slots__ = (
        "_last_sums",
        "_num_logs",
        "first_log_rms",
        "first_step",
        "last_step",
        "log_rms",
        "min_nonzero",
        "num_samples",
        "num_zero",
        "numel",
        "same_run",
        "zero_share",
        "zero_since",
    )

    def __init__(self) -> None:
        self.numel = self.num_samples = self.num_zero = self.same_run = self._num_logs = 0
        self.first_step = self.last_step = -1
        self.first_log_rms = self.log_rms = math.nan
        self.zero_share = self.min_nonzero = 0.0
        self.zero_since: int | None = None
        self._last_sums = [math.nan, math.nan]

    def add(self, step: int, row: Sequence[float]) -> None:
        """Takes one sample: a row in the order of `COLUMNS`. Cost: 0.7 us."""
        numel, sum_sq, total, _, low, zeros, _, _ = row
        if not self.num_samples:
            self.first_step = step
            self.zero_share = zeros / numel if numel else 0.0
        self.num_samples += 1
        self.last_step = step
        self.numel = int(numel)
        self.min_nonzero = low
        sums = self._last_sums
        self.same_run = self.same_run + 1 if sums[0] == sum_sq and sums[1] == total else 1
        self._last_sums = [sum_sq, total]
        if not numel:
            return
        self.zero_share += _RATE * (zeros / numel - self.zero_share)
        if zeros == numel:
            self.num_zero += 1
            if self.zero_since is None:
                self.zero_since = step
            return
        self.zero_since = None
        if sum_sq <= 0.0:
            return
        log_rms = 0.5 * math.log(sum_sq / numel)
        self._num_logs = count = self._num_logs + 1
        if count == 1:
            self.first_log_rms = self.log_rms = log_rms
            return
        if count <= NUM_FIRST:
            self.first_log_rms += (log_rms - self.first_log_rms) / count
        self.log_rms += max(_RATE, 1.0 / count) * (log_rms - self.log_rms)

    @property
    def norm(self) -> float:
        """The usual 2-norm, lately; 0.0 if it was never anything but zeros."""
        return math.exp(self.log_rms) * math.sqrt(self.numel) if self._num_logs else 0.0

    def state(self) -> list[Any]:
        """Everything, in the order of the slots."""
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def of(cls, state: Sequence[Any]) -> TensorTrack:
        """The track that gave `state`."""
        track = cls()
        for name, value in zip(cls.__slots__, state, strict=True):
            setattr(track, name, list(value) if name == "_last_sums" else value)
        return track

    def __repr__(self) -> str:
        return f"TensorTrack({self.state()})"


class TensorTracks:
    """The tracks of all tensors, by name in the order in which they were first met.

    A step is looked at only now and then: the first, second, third, sixth and eleventh clean step, then one in twenty,
    or in a fifth of the number of tensors if that is more, so that it costs about 3 us a step however many they are.

    Attributes:
        num_samples, last_step: how many steps were looked at, and the newest of them.
    """

    __slots__ = ("_next", "_num_seen", "_tracks", "last_step", "num_samples", "num_untracked")

    def __init__(self) -> None:
        self._tracks: dict[str, TensorTrack] = {}
        self._num_seen = self._next = 0
        self.num_samples = self.num_untracked = 0
        self.last_step = -1

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
        tracks = self._tracks
        self.num_untracked = 0
        rows: Any = tensors.table.tolist()
        for name, row in zip(tensors.names, rows):
            track = tracks.get(name)
            if track is None:
                if len(tracks) >= MAX_TENSORS:
                    self.num_untracked += 1
                    continue
                track = tracks[name] = TensorTrack()
            track.add(step, row)

    def __getitem__(self, name: str) -> TensorTrack:
        return self._tracks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tracks)

    def __len__(self) -> int:
        return len(self._tracks)

    def __contains__(self, name: object) -> bool:
        return name in self._tracks

    def items(self) -> Iterator[tuple[str, TensorTrack]]:
        """Names and tracks, in the order in which they were first met."""
        return iter(self._tracks.items())

    def state(self) -> list[Any]:
        """Everything, as numbers, strings and lists."""
        tracks = {name: track.state() for name, track in self._tracks.items()}
        return [self._num_seen, self._next, self.num_samples, self.num_untracked, self.last_step, tracks]

    def load(self, state: Sequence[Any]) -> None:
        """Takes back what `state` gave."""
        self._num_seen, self._next, self.num_samples, self.num_untracked, self.last_step, tracks = state
        self._tracks = {name: TensorTrack.of(values) for name, values in tracks.items()}

    def take_over(self, other: TensorTracks) -> None:
        """Becomes what `other` is."""
        self._num_seen, self._next, self.last_step = other._num_seen, other._next, other.last_step
        self.num_samples, self.num_untracked = other.num_samples, other.num_untracked
        self._tracks = {name: copy.copy(track) for name, track in other._tracks.items()}

    def __repr__(self) -> str:
        return f"TensorTracks({self.state()})"
