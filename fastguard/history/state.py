"""A history as plain data, and back: what is saved of it, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..stats import part
from ..stats.part import PART, PLAIN, Kind, numbers, rows
from .entries import Entry, NonFiniteEvent, Validation
from .model import ModelNotes
from .series import COUNTERS, Series

VERSION = 2
_SECTIONS: dict[str, dict[str, Kind]] = {
    "counters": dict.fromkeys(COUNTERS, PLAIN),
    "numbers": dict.fromkeys(("norm_min", "norm_max", "overhead_total_s", "_equal_low", "_equal_high"), PLAIN),
    "running": dict.fromkeys(("log_norm", "losses", "val_losses", "lrs"), PART),
}
_PARTS = ("loss_trend", "norm_trend", "overview", "tensors", "updates", "activations", "weights")
_FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("recent", "clean"), rows(numbers(Entry))),
    **dict.fromkeys(("first_events", "last_events"), rows(NonFiniteEvent.of)),
    "first_nonfinite": PLAIN,
    "validations": rows(numbers(Validation)),
    "model": Kind(ModelNotes.state, lambda plain, now: ModelNotes.of(plain)),
    **dict.fromkeys(_PARTS, PART),
}


def check(state: Mapping[str, Any]) -> None:
    """Raises ValueError unless `state` is of this version."""
    if state.get("version") != VERSION:
        raise ValueError(
            f"`state` must be of version {VERSION}, got {state.get('version')!r} - at `state['version']`. "
            "It was not made by this version's `TrainingHistory.state_dict`; start a new history."
        )


def dump(history: Series) -> dict[str, Any]:
    """Everything but `last`, as plain types that strict JSON can hold."""
    sections = {name: part.dump(history, fields) for name, fields in _SECTIONS.items()}
    return {"version": VERSION, **sections, **part.dump(history, _FIELDS)}


def load(history: Series, state: Mapping[str, Any]) -> None:
    """Puts what `dump` gave into an empty history."""
    for name, fields in _SECTIONS.items():
        part.load(history, fields, state[name])
    part.load(history, _FIELDS, state)


def copy(history: Series, twin: Series) -> None:
    """Gives `twin` what is in `history`; what never changes is shared."""
    for fields in (*_SECTIONS.values(), _FIELDS):
        part.copy_fields(history, fields, twin)
