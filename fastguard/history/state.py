"""A history as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..stats import part
from .series import FIELDS, SECTIONS, Series

VERSION = 2


def check(state: Mapping[str, Any]) -> None:
    """Raises ValueError unless `state` is of this version."""
    if state.get("version") != VERSION:
        raise ValueError(
            f"`state` must be of version {VERSION}, got {state.get('version')!r} - at `state['version']`. "
            "It was not made by this version's `TrainingHistory.state_dict`; start a new history."
        )


def dump(history: Series) -> dict[str, Any]:
    """Everything but `last`, as plain types that strict JSON can hold."""
    sections = {name: part.dump(history, fields) for name, fields in SECTIONS.items()}
    return {"version": VERSION, **sections, **part.dump(history, FIELDS)}


def load(history: Series, state: Mapping[str, Any]) -> None:
    """Puts what `dump` gave into an empty history."""
    for name, fields in SECTIONS.items():
        part.load(history, fields, state[name])
    part.load(history, FIELDS, state)


def copy(history: Series, twin: Series) -> None:
    """Gives `twin` what is in `history`; what never changes is shared."""
    for fields in (*SECTIONS.values(), FIELDS):
        part.copy_fields(history, fields, twin)
