"""A history as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..stats import strict_json
from .entries import Entry, Validation, decode_events, encode_events
from .model import ModelNotes

if TYPE_CHECKING:
    from .core import TrainingHistory

VERSION = 2
COUNTERS = (
    "num_steps",
    "num_clean",
    "num_skipped",
    "num_clipped",
    "num_nonfinite",
    "num_nonfinite_applied",
    "num_scaled",
    "skip_run",
    "longest_skip_run",
    "longest_skip_run_end",
    "equal_run",
    "num_timed",
    "num_bad_losses",
    "first_bad_loss_step",
    "last_bad_loss_step",
)
_NUMBERS = ("norm_min", "norm_max", "overhead_total_s", "_equal_low", "_equal_high")
_RUNNING = ("log_norm", "losses", "val_losses", "lrs")
_TRENDS = ("loss_trend", "norm_trend", "overview", "tensors", "updates")
_SAMPLED = ("activations", "weights")


def check(state: Mapping[str, Any]) -> None:
    """Raises ValueError unless `state` is of this version."""
    if state.get("version") != VERSION:
        raise ValueError(
            f"`state` must be of version {VERSION}, got {state.get('version')!r} - at `state['version']`. "
            "It was not made by this version's `TrainingHistory.state_dict`; start a new history."
        )


def dump(history: TrainingHistory) -> dict[str, Any]:
    """Everything but `last`, as plain types that strict JSON can hold."""
    return {
        "version": VERSION,
        "counters": {name: getattr(history, name) for name in COUNTERS},
        "numbers": {name: strict_json.encode_float(getattr(history, name)) for name in _NUMBERS},
        "running": {name: strict_json.encode(getattr(history, name).state()) for name in _RUNNING},
        "recent": strict_json.encode(list(history.recent)),
        "clean": strict_json.encode(list(history.clean)),
        "first_events": encode_events(history.first_events),
        "last_events": encode_events(history.last_events),
        "first_nonfinite": dict(history.first_nonfinite),
        "validations": strict_json.encode([list(validation) for validation in history.validations]),
        "model": history.model.state(),
        **{name: strict_json.encode(getattr(history, name).state()) for name in _TRENDS},
        **{name: getattr(history, name).state() for name in _SAMPLED},
    }


def copy(history: TrainingHistory, twin: TrainingHistory) -> None:
    """Puts into the empty `twin` what is in `history`; what never changes is shared."""
    for name in (*COUNTERS, *_NUMBERS):
        setattr(twin, name, getattr(history, name))
    for name in _RUNNING:
        getattr(twin, name).load(getattr(history, name).state())
    for name in ("recent", "clean", "first_events", "last_events", "validations"):
        getattr(twin, name).extend(getattr(history, name))
    twin.first_nonfinite.update(history.first_nonfinite)
    twin.model = ModelNotes.of(history.model.state())
    for name in (*_TRENDS, *_SAMPLED):
        getattr(twin, name).take_over(getattr(history, name))


def load(history: TrainingHistory, state: Mapping[str, Any]) -> None:
    """Puts what `dump` gave into an empty history."""
    for name in COUNTERS:
        setattr(history, name, int(state["counters"][name]))
    for name in _NUMBERS:
        setattr(history, name, strict_json.decode_float(state["numbers"][name]))
    for name in _RUNNING:
        getattr(history, name).load(strict_json.decode(state["running"][name]))
    history.recent.extend(Entry._make(strict_json.decode(values)) for values in state["recent"])
    history.clean.extend(Entry._make(strict_json.decode(values)) for values in state["clean"])
    history.first_events.extend(decode_events(state["first_events"]))
    history.last_events.extend(decode_events(state["last_events"]))
    history.first_nonfinite.update(state["first_nonfinite"])
    history.validations.extend(Validation._make(strict_json.decode(values)) for values in state["validations"])
    history.model = ModelNotes.of(state["model"])
    for name in _TRENDS:
        getattr(history, name).load(strict_json.decode(state[name]))
    for name in _SAMPLED:
        getattr(history, name).load(state[name])
