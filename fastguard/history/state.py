"""A history as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..stats import part, values
from .series import FIELDS, LATER_FIELDS, SECTIONS, Series

VERSION = 2
# Pairs of which both are empty, or neither is: a counter and what it counts.
_TOGETHER = (
    ("num_steps", "recent"),
    ("num_clean", "clean"),
    ("num_nonfinite", "first_events"),
    ("num_nonfinite", "last_events"),
)


def check(state: Mapping[str, Any]) -> None:
    """Raises MisfitError, a ValueError, unless `state` is of this version."""
    version = values.mapping(state).get("version")
    if version != VERSION or isinstance(version, bool):
        raise values.MisfitError(
            f"must be of version {VERSION}, got {version!r}",
            ("version",),
            remedy="It was not made by this version's `TrainingHistory.state_dict`; start a new history.",
        )


def dump(history: Series) -> dict[str, Any]:
    """Everything but `last`, as plain types that strict JSON can hold."""
    sections = {name: part.dump(history, fields) for name, fields in SECTIONS.items()}
    return {"version": VERSION, **sections, **part.dump(history, {**FIELDS, **LATER_FIELDS})}


def load(history: Series, state: Mapping[str, Any]) -> None:
    """Puts what `dump` gave into an empty history; a MisfitError leaves it half full."""
    for name, fields in SECTIONS.items():
        values.entry(state, name, partial(part.load, history, fields))
    part.load(history, {**FIELDS, **{name: kind for name, kind in LATER_FIELDS.items() if name in state}}, state)
    for counter, items in _TOGETHER:
        number, held = getattr(history, counter), len(getattr(history, items))
        if number < held or bool(number) is not bool(held):
            raise values.MisfitError(f"must be the number of what `{items}` has {held} of, got {number}", (counter,))
    if not history.equal_run <= history.num_clean:
        raise values.MisfitError(f"must be at most {history.num_clean}, got {history.equal_run}", ("equal_run",))


def copy(history: Series, twin: Series) -> None:
    """Gives `twin` what is in `history`; what never changes is shared."""
    for fields in (*SECTIONS.values(), FIELDS, LATER_FIELDS):
        part.copy_fields(history, fields, twin)
