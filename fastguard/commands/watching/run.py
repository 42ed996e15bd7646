"""A run, as far as its log tells of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...records import TrainingHistory
from ...records.loading import fill
from ...records.log import KEYS, LineReader
from .tail import LogTail

ASK_EVERY = 256  # steps: each stands in the rules' window at one time at least when they are asked
_NUM_KNOWN = 512  # newest steps by which lines that come twice are known
_NUM_TIMES = 64
NUM_LAYERS = 4


class LayerLine(NamedTuple):
    """A layer: norm of its gradient, share of zeros, update over weight."""

    name: str
    norm: float
    zero_share: float
    update_ratio: float | None
    is_named: bool  # by a finding


class _FollowedLog(LineReader):
    """Records of a log that grows. A file that is new, or was emptied, begins another run if steps come again and no
    run id says otherwise.

    Attributes:
        tail: the file.
        newest_step: -1 before there was a step.
        went_back_to: the step with which the run went on from an earlier one, in the same file; None if it never did.
        times: when the newest lines were written, in seconds since 1970.
    """

    def __init__(self, path: Path) -> None:
        self.tail = LogTail(path, self._restart)
        super().__init__(path, self.tail)
        self._is_restarted = False
        self._forget()

    def _forget(self) -> None:
        self.newest_step = -1
        self.went_back_to: int | None = None
        self.times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._known: deque[tuple[int, Any]] = deque(maxlen=_NUM_KNOWN)

    def _begin_run(self) -> None:
        super()._begin_run()
        self._forget()

    def _restart(self) -> None:
        self._is_restarted, self._news = True, {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for record in super().__iter__():
            if self._is_restarted and type(record.get("step")) is int:
                if (record["step"], record.get("time")) in self._known:
                    continue  # a sink repeats what was written last to a file that was deleted
                self._is_restarted = False
            self._take(record)
            yield record

    def _begins_run(self, record: dict[str, Any]) -> bool:
        if not self._is_restarted:
            return super()._begins_run(record)
        step = record["step"]
        return type(step) is int and step <= self.newest_step and (step, record.get("time")) not in self._known

    def _take(self, record: dict[str, Any]) -> None:
        step, written = record.get("step"), record.get("time")
        if type(step) is int and 0 <= step < 2**63:
            if step <= self.newest_step:
                self.went_back_to = step
            self.newest_step = step
            self._known.append((step, written))
            self.times.append(written if type(written) is float else time.time())


class _Records(list[dict[str, Any]]):
    """Some records, and what is known of the model since."""

    model: dict[str, Any]


class FollowedRun:
    """The run of a log, read as far as it is written. What cannot be read of it is counted, and left out.

    Args:
        path: the log; it need not be there yet.
        num_layers: how many layers to look at.

    Attributes:
        tail: the file.
        log: its records.
        history: the run.
        findings: a `LiveFindings`, what the rules said of it; None before they were asked.
        num_assessed: steps there were at the newest `assess`.
        layers: those that findings name, then those with the largest gradients; as of the newest `assess`.
        num_records: records so far, of all runs.
        num_misfits: lines that are JSON, and no record.
    """

    def __init__(self, path: Path, num_layers: int = NUM_LAYERS) -> None:
        self._num_layers = num_layers
        self.log = _FollowedLog(path)
        self.tail = self.log.tail
        self.num_misfits = self.num_records = 0
        self._num_runs = 1
        self._is_log = False
        self._begin()

    def _begin(self) -> None:
        self.history = TrainingHistory()
        self.findings: Any = None
        self.layers: list[LayerLine] = []
        self._noted: Any = None
        self._num_asked = self.num_assessed = 0

    @property
    def num_left_out(self) -> int:
        """Lines that are no record, or were cut off."""
        return self.num_misfits + self.log.num_skipped

    @property
    def has_news(self) -> bool:
        """Whether there are steps that the rules were not asked about."""
        return self.history.num_steps != self.num_assessed

    def read(self, seconds: float = float("inf")) -> bool:
        """Takes what has been written, for about so many seconds; whether there is more.

        Raises:
            ValueError: this is no log.
        """
        until = time.monotonic() + seconds
        self.tail.look()
        while True:
            self.tail.budget = ASK_EVERY
            records: list[dict[str, Any]] = []
            try:
                for record in self.log:
                    if self.log.num_runs != self._num_runs:
                        self._num_runs = self.log.num_runs
                        records = []
                        self._begin()
                    self.num_records += 1
                    records.append(record)
            except ValueError:
                if self.log.line == 1:
                    raise
                self.num_misfits += 1
            is_at_end = self.tail.budget == ASK_EVERY
            self._take(records)
            if self.history.num_steps - self._num_asked >= ASK_EVERY:
                self._num_asked = self.history.num_steps
                self._asked().ask()
            if is_at_end:
                return False
            if time.monotonic() > until:
                return self.tail.is_behind

    def _take(self, records: list[dict[str, Any]]) -> None:
        """Gives the history what it can take of them."""
        model = self.log.model if self.log.model is not self._noted else None
        self._noted = self.log.model
        while True:
            history, num_steps = self.history, self.history.num_steps
            lacks_norms = history.lacks_norms or not num_steps
            part = _Records(records)
            if model is not None:
                part.model = model
            try:
                fill(history, part, self.tail.path)
            except ValueError:
                if model is None and not (self._is_log or history.num_steps):
                    raise
                at = _place_behind(records, history.num_steps - num_steps)
                if model is None:  # else these may be to blame
                    self.num_misfits += 1
                    at = next((i + 1 for i in range(at, len(records)) if _is_read(records[i])), len(records))
                model, records = None, records[at:]
            else:
                records = []
            history.lacks_norms = history.lacks_norms and lacks_norms
            self._is_log = self._is_log or history.num_steps > 0
            if not records:
                return

    def _asked(self) -> Any:
        if self.findings is None:
            from .findings import LiveFindings  # takes 0.1 s, and the first picture needs none of it

            self.findings = LiveFindings(self.history)
        return self.findings

    def assess(self) -> None:
        """Asks the rules, and looks which layers to show. Cost: 2 ms, and 1 us a tensor."""
        self._num_asked = self.num_assessed = self.history.num_steps
        named: list[str] = []
        if self.history.num_steps:
            self._asked().assess()
            named = self.findings.layers
        tracks = dict(self.history.tensors.items())
        by_norm = sorted(tracks, key=lambda name: tracks[name].norm, reverse=True)
        chosen = [name for name in dict.fromkeys((*named, *by_norm)) if name in tracks][: self._num_layers]
        weights = {name: sampled.last.value for name, sampled in self.history.weights.items() if name in chosen}
        ratios = [weights[name].update_ratio if name in weights else None for name in chosen]
        self.layers = [
            LayerLine(name, tracks[name].norm, tracks[name].zero_share, ratio, name in named)
            for name, ratio in zip(chosen, ratios)
        ]


def _place_behind(records: list[dict[str, Any]], num_steps: int) -> int:
    """Where the records go on behind the first so many steps."""
    places = [i + 1 for i, record in enumerate(records) if "step" in record]
    return places[num_steps - 1] if num_steps else 0


def _is_read(record: dict[str, Any]) -> bool:
    """Whether a history looks at it: it is a step, or claims to know something of one."""
    return bool(record.keys() & KEYS - {"time"})
