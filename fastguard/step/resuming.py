"""The state of a guard, which is checked completely before any of it is loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from ..records import TrainingHistory, values
from ..records.codec import read_fields
from ..recovery import check_state

VERSION = 1
_MAX_STEPS = 2**53  # the first integer whose successor is not a float
_NEEDED = {"version", "step", "skipped_run", "skipped_tensors", "history", "clip"}


def _step(value: Any) -> int:
    step = values.count(value)
    if step >= _MAX_STEPS:
        raise values.MisfitError(f"must be below 2**53, got {step}")
    return step


@dataclass(frozen=True)
class ResumedState:
    """What `Guard.state_dict` returned, checked; None for a part that it lacks."""

    step: Annotated[int, _step]
    skipped_run: list[int]
    skipped_tensors: list[str]
    history: Annotated[Any, values.mapping]
    clip: Annotated[Any, values.mapping] | None
    skipped_by_policy: list[int] = field(default_factory=list)
    checkup: Annotated[Any, values.mapping] | None = None
    recovery: Annotated[Any, check_state] | None = None
    clip_loss: float | None = None


class StatefulGuard:
    """A guard whose state is one string; see `Guard.stateful`."""

    def __init__(self, guard: Any) -> None:
        self._guard = guard

    def state_dict(self) -> dict[str, str]:
        return {"state": json.dumps(self._guard.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._guard.load_state_dict(json.loads(values.entry(state, "state", values.text)))


def checked(state: dict[str, Any], history: TrainingHistory, watch: Any, clip: Any) -> ResumedState:
    """The parts of `state`, which suit the history, the checkup's `watch` and the clip policy, which takes its own."""
    missing = _NEEDED - values.mapping(state).keys()
    if missing or state["version"] != VERSION or isinstance(state["version"], bool):
        problem = f"one without {sorted(missing)}" if missing else f"one of version {state['version']!r}"
        if "param_groups" in state:
            problem = "that of an optimizer. Save guard.state_dict() beside optimizer.state_dict()."
        raise ValueError(f"`state` must come from Guard.state_dict (version {VERSION}), got {problem}")
    checkup = state.get("checkup")
    if checkup is not None:
        values.entry(state, "checkup", watch.check_state)
    restored = values.entry(state, "history", history.restored)
    given = ResumedState(**read_fields(ResumedState, state, history=restored, checkup=checkup))
    if clip is not None and given.clip is not None:
        before = copy.deepcopy(clip.state_dict())
        try:
            clip.load_state_dict(given.clip)
        except Exception as error:  # a user's policy may raise anything
            clip.load_state_dict(before)
            problem = f"`state` does not suit the clip policy {clip!r}: {error} - at `state['clip']`"
            raise ValueError(problem) from error
    return given
