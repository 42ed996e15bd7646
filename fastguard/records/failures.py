"""Exceptions in the monitoring, which must not stop the training."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from typing import NamedTuple

_log = logging.getLogger("fastguard")


class Failure(NamedTuple):
    """The part that raised, how often, and its newest message."""

    what: str
    times: int
    error: str


class Failures:
    """Counts exceptions by the part that raised. Logs the first of each part to `fastguard`; training goes on.

    `KeyboardInterrupt` and `SystemExit` pass through.

    >>> failures = Failures()
    >>> with failures.kept("rule 'odd'", "It was not checked."):
    ...     1 / 0
    >>> [(failure.times, failure.error[:17]) for failure in failures]
    [(1, 'ZeroDivisionError')]
    """

    def __init__(self) -> None:
        self._known: dict[str, Failure] = {}

    def note(self, what: str, error: Exception | str, so: str) -> None:
        """Counts a failure of `what`. Logs the first, followed by its consequence `so`."""
        known = self._known.get(what)
        said = error if isinstance(error, str) else describe(error)
        self._known[what] = Failure(what, 1 if known is None else known.times + 1, said)
        if known is None:
            _log.warning("%s failed: %s. %s Training goes on; later failures are only counted.", what, said, so)

    @contextmanager
    def kept(self, what: str, so: str) -> Iterator[None]:
        """Catches and counts an exception. Cost: 1 us."""
        try:
            yield
        except Exception as error:
            self.note(what, error, so)

    def counts(self) -> dict[str, int]:
        return {failure.what: failure.times for failure in self}

    def since(self, before: Mapping[str, int]) -> list[Failure]:
        """The parts that have failed since `counts` returned `before`."""
        return [failure for failure in self if failure.times > before.get(failure.what, 0)]

    def __iter__(self) -> Iterator[Failure]:
        return iter(list(self._known.values()))

    def __len__(self) -> int:
        return len(self._known)


def describe(error: Exception) -> str:
    """Type, message and place of an exception: "ValueError: no such thing (rules.py:12)"."""
    try:
        said = " ".join(str(error).split())
    except Exception:  # its own `__str__` raises
        said = "its message cannot be shown"
    said = said if len(said) <= 200 else said[:197] + "..."
    where = ""
    for frame, line in walk_tb(error.__traceback__):
        where = f" ({os.path.basename(frame.f_code.co_filename)}:{line})"
    return f"{type(error).__name__}{': ' if said else ''}{said}{where}"
