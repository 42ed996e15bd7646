"""Which parameters had a gradient, from all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_NUM_LATELY = 100  # steps


class SeenParameters:
    """Which parameters ever had a gradient, and which had none for a while.

    Args:
        found: of the ring; its `place` holds the marks since the newest look, a byte a parameter, which C++ sets too.
            None while every step had all gradients.

    Cost: nothing while all are there; else a byte a parameter and step, in C++ 1 ns, elsewhere 30.
    """

    def __init__(self, found: list[Any], place: int) -> None:
        self._found, self._place = found, place
        self._names: Sequence[str] = ()
        self._ever: set[str] = set()
        self._candidates: set[str] | None = None  # of the run that is resumed: no others can be those never seen
        self._lately: tuple[str, ...] = ()
        self._since: int | None = None
        self._taken: Sequence[int] | None = None

    def take(self, positions: Sequence[int] | None, names: Sequence[str]) -> None:
        """Takes a step: `positions` among `names` had a gradient; None for all."""
        marks = self._found[self._place]
        if names is not self._names:
            self._fold()
            marks = self._found[self._place] = None
            self._names, self._taken = names, None
        elif marks is None and positions is not None:
            self._ever.update(names)  # at each step before
        if positions is None:
            if marks is not None:
                marks[:] = bytes([1]) * len(marks)
            return
        if marks is None:
            marks = self._found[self._place] = bytearray(len(names))
            self._since = self._taken = None
        if positions is not self._taken:
            for position in positions:
                marks[position] = 1
            self._taken = positions

    def _fold(self) -> None:
        marks = self._found[self._place]
        if marks is None:
            self._ever.update(self._names)
        elif len(self._ever) < len(self._names) or not self._ever.issuperset(self._names):
            self._ever.update(name for name, mark in zip(self._names, marks) if mark)

    @property
    def has_all(self) -> bool:
        """Whether every step since the newest look had all gradients, or no step was taken."""
        marks = self._found[self._place]
        return marks is None or 0 not in marks

    def never(self) -> list[int]:
        """Places of the parameters that never had one. Cost: 50 ns a parameter, where some are missing."""
        if self.has_all:
            return []
        self._fold()
        return [i for i, name in enumerate(self._names) if self._is_never(name)]

    def _is_never(self, name: str) -> bool:
        return name not in self._ever and (self._candidates is None or name in self._candidates)

    def look(self, step: int) -> tuple[list[str], list[str], int] | None:
        """Names that never had a gradient, names that had none in the newest hundred steps or more, and how many others
        there are; None before the first step."""
        names, marks = self._names, self._found[self._place]
        if not names:
            return None
        if marks is None:
            self._lately = ()
            return [], [], len(names)
        self._fold()
        if self._since is None or step - self._since >= _NUM_LATELY:
            if self._since is not None:
                self._lately = tuple(name for name, mark in zip(names, marks) if not mark)
            marks[:] = bytes(len(marks))
            self._since, self._taken = step, None
        never = [name for name in names if self._is_never(name)]
        return never, [name for name in self._lately if name in self._ever], len(names) - len(never)

    def go_on(self, never: Sequence[str]) -> None:
        """A run is resumed that knows only `never` to have had no gradient."""
        self._candidates = set(never)
