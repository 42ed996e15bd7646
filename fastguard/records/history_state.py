"""A history as plain data, and back."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, TypeVar

from . import codec, values
from .codec import kinds_of
from .entries import Total
from .series import Aggregates, Contents, Counters, LaterContents, Numbers, Series
from .table import StepStats

_HistoryT = TypeVar("_HistoryT", bound="SavedHistory")
VERSION = 2
_SECTIONS = {"counters": kinds_of(Counters), "numbers": kinds_of(Numbers), "running": kinds_of(Aggregates)}
_CONTENTS, _LATER = kinds_of(Contents), kinds_of(LaterContents)
# Pairs of which both are empty, or neither is: a counter and what it counts.
_TOGETHER = (
    ("num_steps", "recent"),
    ("num_clean", "clean"),
    ("num_nonfinite", "first_events"),
    ("num_nonfinite", "last_events"),
)


class SavedHistory(Series):
    """Saves, restores and copies a `TrainingHistory`."""

    last: StepStats | None
    revision: int
    lacks_norms: bool
    _totals: deque[Total]

    def _another(self) -> Any:
        """An empty history with the same window."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Everything but `last`, as plain dicts, lists, strings and numbers that strict JSON can hold.

        Cost: 0.4 KB a step of the window, and what the samples hold.
        """
        sections = {name: codec.dump_fields(self, kinds) for name, kinds in _SECTIONS.items()}
        return {"version": VERSION, **sections, **codec.dump_fields(self, {**_CONTENTS, **_LATER})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; with a smaller window, the newest steps of it. `last` becomes None.

        Raises:
            ValueError: for a state of another version, or one that lacks an entry or has a wrong one, which it names.
                Nothing is changed then.
        """
        self.become(self.restored(state_dict))

    def restored(self: _HistoryT, state_dict: dict[str, Any]) -> _HistoryT:
        """Another history with this one's window and the past of `state_dict`; raises as `load_state_dict` does."""
        version = values.mapping(state_dict).get("version")
        if version != VERSION or isinstance(version, bool):
            raise values.MisfitError(
                f"must be of version {VERSION}, got {version!r}",
                ("version",),
                remedy="It was not made by this version's `TrainingHistory.state_dict`; start a new history.",
            )
        twin: _HistoryT = self._another()
        for name, kinds in _SECTIONS.items():
            values.entry(state_dict, name, partial(codec.load_fields, twin, kinds))
        later = {name: kind for name, kind in _LATER.items() if name in state_dict}
        codec.load_fields(twin, {**_CONTENTS, **later}, state_dict)
        for counter, items in _TOGETHER:
            number, held = getattr(twin, counter), len(getattr(twin, items))
            if number < held or bool(number) is not bool(held):
                raise values.MisfitError(
                    f"must be the number of what `{items}` has {held} of, got {number}", (counter,)
                )
        if not twin.equal_run <= twin.num_clean:
            raise values.MisfitError(f"must be at most {twin.num_clean}, got {twin.equal_run}", ("equal_run",))
        return twin

    def become(self, other: SavedHistory) -> None:
        """Takes over the past of `other`, which is of no use any more. Cannot fail."""
        revision = self.revision
        self.__dict__.update(other.__dict__)
        self.revision = revision + 1

    def copy(self: _HistoryT) -> _HistoryT:
        """Another history with the same past; `last` is shared.

        Cost: 20 us at a window of 512, and 1 us a tensor, sampled module and sampled weight.
        """
        twin: _HistoryT = self._another()
        for kinds in (*_SECTIONS.values(), _CONTENTS, _LATER):
            codec.copy_fields(self, kinds, twin)
        twin.last, twin._totals, twin.lacks_norms = self.last, self._totals.copy(), self.lacks_norms
        twin.revision += 1
        return twin
