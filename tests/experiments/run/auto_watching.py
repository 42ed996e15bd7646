"""An AutoGuard whose guards keep their records in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fastguard.experiments.auto import AutoGuard
from fastguard.sinks import MemorySink


class Watched(AutoGuard):
    """An AutoGuard with a MemorySink for each guard."""

    def __init__(self, **settings: Any) -> None:
        self.sinks: list[MemorySink] = []
        protects = settings.pop("protects", False)
        super().__init__(lambda index: {"sinks": [self._sink()], **settings}, protects=protects)

    def _sink(self) -> MemorySink:
        self.sinks.append(MemorySink())
        return self.sinks[-1]

    def records(self, index: int = 0) -> list[Any]:
        """The records of one guard."""
        return list(self.sinks[index].records)

    def seen(self, name: str, index: int = 0) -> list[Any]:
        """`loss` or `val_loss` of each record of one guard."""
        return [getattr(record, name) for record in self.records(index)]


@contextlib.contextmanager
def watching(**settings: Any) -> Iterator[Watched]:
    """Guards what is trained in the block."""
    auto = Watched(**settings)
    auto.start()
    try:
        yield auto
    finally:
        auto.finish(has_ended=True)
