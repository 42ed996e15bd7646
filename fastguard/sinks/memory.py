"""A sink that keeps the records."""

from __future__ import annotations

from collections import deque
from typing import Any

from .._text import listed, shown
from ..records import StepStats
from .sink import Sink, flatten

_PER_TENSOR = "grad/norm/"


class MemorySink(Sink):
    """Keeps the records in memory: all of them, or the newest `max_records`.

    Args:
        max_records: how many to keep; older ones are dropped. None keeps all.

    Raises:
        ValueError: `max_records` is below 1.

    Cost: 17 us a step to make the record; 80 bytes a tensor for each record that is kept.

    Attributes:
        records: a deque of `StepStats`, oldest first.
    """

    def __init__(self, max_records: int | None = None) -> None:
        if max_records is not None and max_records < 1:
            raise ValueError(f"`max_records` must be at least 1, or None for all, got {max_records}")
        self.records: deque[StepStats] = deque(maxlen=max_records)

    def write(self, record: StepStats) -> None:
        """Appends the record."""
        self.records.append(record)

    def has_taken(self, step: int) -> bool:
        """Whether the newest record is that of `step`."""
        return bool(self.records) and self.records[-1].step == step

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that any of the records has."""
        return tuple(dict.fromkeys(key for record in self.records for key in flatten(record)))

    def series(self, key: str) -> list[Any]:
        """The value of `key` in each record, oldest first; None where a record has none.

        Args:
            key: one of `keys`, or `grad/norm/<tensor>` for the norm of one tensor.

        Raises:
            KeyError: if no record has that key.
        """
        if key.startswith(_PER_TENSOR):
            tensor = key[len(_PER_TENSOR) :]
            values = [r.tensors[tensor].norm if tensor in r.tensors.names else None for r in self.records]
        else:
            values = [flatten(record).get(key) for record in self.records]
        if self.records and all(value is None for value in values):
            known = listed(self.keys, 32)
            raise KeyError(f"no record has the key '{shown(key)}'; the keys are: {known}, grad/norm/<tensor>")
        return values

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        return f"MemorySink({len(self.records)} records)"
