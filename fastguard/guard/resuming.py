"""The state of a guard: checked whole before any of it is taken, and as one text."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from ..history import TrainingHistory
from ..stats import values
from .evidence import checked
from .policies import ClipPolicy
from .recovery import check_state

VERSION = 1
_MAX_STEPS = 2**53  # from there on a float does not tell one step from the next
_NEEDED = {"version", "step", "skipped_run", "skipped_tensors", "history", "clip"}


class Resumed(NamedTuple):
    """What stood in a state, each part checked; None for what it does not have."""

    step: int
    skipped_run: list[int]
    skipped_tensors: list[str]
    by_policy: list[int]
    history: TrainingHistory
    checkup: dict[str, Any] | None
    evidence: Any
    recovery: Any
    clip_loss: float | None


def read(
    state: Any, history: TrainingHistory, check_checkup: Callable[[Any], None], clip: ClipPolicy | None
) -> Resumed:
    """The parts of `state`; the clip policy has taken its own.

    Raises:
        ValueError: as `Guard.load_state_dict`; nothing has changed then.
    """
    missing = _NEEDED - values.mapping(state).keys()
    if missing or state["version"] != VERSION or isinstance(state["version"], bool):
        problem = f"without {sorted(missing)}" if missing else f"of version {state['version']!r}"
        raise ValueError(f"`state` must come from Guard.state_dict (version {VERSION}), got one {problem}")
    step = values.entry(state, "step", values.count)
    if step >= _MAX_STEPS:
        raise values.MisfitError(f"must be below 2**53, got {step}", ("step",))
    skipped_run = values.entry(state, "skipped_run", partial(values.each, values.whole))
    skipped_tensors = values.entry(state, "skipped_tensors", partial(values.each, values.text))
    by_policy = values.each(values.whole, state.get("skipped_by_policy", []))
    restored = values.entry(state, "history", history.restored)
    checkup, recovery = state.get("checkup"), state.get("recovery")
    if checkup is not None:
        values.entry(state, "checkup", check_checkup)
    evidence = None if state.get("evidence") is None else values.entry(state, "evidence", checked)
    if state["clip"] is not None and not isinstance(state["clip"], Mapping):
        raise values.MisfitError(f"must be a dict or None, got {type(state['clip']).__name__}", ("clip",))
    if recovery is not None:
        values.entry(state, "recovery", check_state)
    if clip is not None and state["clip"] is not None:
        _load_policy(clip, state["clip"])
    loss = values.entry(state, "clip_loss", values.number) if state.get("clip_loss") is not None else None
    return Resumed(step, skipped_run, skipped_tensors, by_policy, restored, checkup, evidence, recovery, loss)


def _load_policy(policy: ClipPolicy, state: Any) -> None:
    """Has a policy go on from its state, or from where it was, and raises a ValueError."""
    before = copy.deepcopy(policy.state_dict())
    try:
        policy.load_state_dict(state)
    except Exception as error:  # whatever a policy of a user's raises
        policy.load_state_dict(before)
        raise ValueError(f"`state` does not suit the clip policy {policy!r}: {error} - at `state['clip']`") from error


class _HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StatefulGuard:
    """A guard whose state is one entry; see `Guard.stateful`."""

    def __init__(self, guard: _HasState) -> None:
        self._guard = guard

    def state_dict(self) -> dict[str, str]:
        """The guard's state as JSON."""
        return {"state": json.dumps(self._guard.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from it.

        Raises:
            ValueError: it does not come from here; or as `Guard.load_state_dict`.
        """
        self._guard.load_state_dict(json.loads(values.entry(state, "state", values.text)))
