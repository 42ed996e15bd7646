"""GuardSettings: the arguments of `wrap`, checked once, and compared when an optimizer is wrapped again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from .. import kernels
from ..clip import CheckedPolicy, GlobalNorm, as_policy
from ..errors import write_limit
from ..observers.weights import sampler_settings
from ..records import values
from ..records.model import OBJECTIVES
from ..recovery import as_recovery

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "objective": (None, *OBJECTIVES),
    "clip_through": ("scale", "grad_scale"),
    "on_guarded": ("reuse", "raise", "replace"),
    "ranks": ("first", "all"),
}
_OF_ALL_RANKS = ("skip_nonfinite", "max_consecutive_skips", "backend", "recovery")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def users_policy(clip: Any) -> Any:
    """The user's policy, without the one that checks its answers."""
    return clip.given if isinstance(clip, CheckedPolicy) else clip


def texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text that depends on no process."""
    return {name: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for name, value in settings.items()}


class AsGiven:
    """An argument that changes while it works, such as a clip policy, with the settings it showed when it was given.
    Two are equal if they hold the same object, or objects of one class with the same `repr` and public attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._shown = _shown(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AsGiven):
            return NotImplemented
        return users_policy(self.value) is users_policy(other.value) or self._shown == other._shown

    __hash__ = None  # type: ignore[assignment]


def _shown(value: Any, depth: int = 4) -> Any:
    value = users_policy(value)
    if isinstance(value, _PLAIN):
        return value
    if depth and isinstance(value, Mapping):
        return {key: _shown(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [_shown(item, depth - 1) for item in value]
    if not depth or isinstance(value, (torch.Tensor, torch.nn.Module)) or not hasattr(value, "__dict__"):
        return id(value)
    text = "" if getattr(type(value), "__repr__", None) is object.__repr__ else repr(value)
    public = {name: _shown(item, depth - 1) for name, item in vars(value).items() if not name.startswith("_")}
    return type(value), text, public if public or text else id(value)


@dataclass
class GuardSettings:
    """What one call of `wrap` or `wrap_backward` asks for; see there for each argument. Settings are equal if they ask
    for the same guard, except for `on_guarded`, which says what to do if they are not. `names` are keyed by the ids of
    parameters, to keep no parameter alive. Raises ValueError or TypeError for an argument that is not one of the known
    choices, or out of its range."""

    clip: Any = None
    skip_nonfinite: bool = True
    max_consecutive_skips: int = 25
    backend: str = "auto"
    clip_through: str = "scale"
    activations: Any = None
    weights: Any = None
    check_every: int | None = None
    objective: str | None = None
    recovery: Any = None
    names: Any = None
    ranks: str = "first"
    process_group: Any = None
    hooks: bool | None = None
    experiments: Any = None
    on_guarded: str = field(default="reuse", compare=False)

    def __post_init__(self) -> None:
        values.at_least(1, "max_consecutive_skips", self.max_consecutive_skips)
        if self.check_every is not None:
            values.at_least(0, "check_every", self.check_every)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                known = [choice for choice in choices if choice is not None]
                either = "None or " if None in choices else ""
                raise ValueError(f"`{name}` must be {either}one of {known}, got {value!r}")
        if self.backend not in ("auto", *kernels.registry.BACKENDS):
            kernels.resolve_backend(self.backend)  # raises
        self.clip, self.activations = AsGiven(self.clip), AsGiven(self.activations)
        self.weights, self.recovery = sampler_settings(self.weights), as_recovery(self.recovery)
        if isinstance(self.names, Mapping):
            self.names = {id(p): name for p, name in self.names.items()}
        elif self.names is not None:
            self.names = tuple(self.names)

    def of_all_ranks(self) -> dict[str, str]:
        """The settings that must be equal on all ranks that share a model, as text that depends on no process."""
        group = None if self.process_group is None else f"one of {self.process_group.size()} ranks"
        values = {"clip (max_norm)": users_policy(self.clip.value), "process_group": group}
        values |= {name: getattr(self, name) for name in _OF_ALL_RANKS}
        return texts(values)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> GuardSettings:
        """The settings among the arguments of `wrap` or `wrap_backward`."""
        max_norm, clip = arguments.get("max_norm"), arguments.get("clip")
        if max_norm is not None and clip is not None:
            raise ValueError("`max_norm` and `clip` must not both be given: max_norm=x is short for clip=GlobalNorm(x)")
        if max_norm is not None:
            if "clip=" in (remedy := write_limit(max_norm)):
                raise TypeError(f"`max_norm` must be a number > 0, got a clip policy. {remedy}")
            clip = GlobalNorm(max_norm)
        elif clip is not None:
            clip = as_policy(clip)
        given = {one.name: arguments[one.name] for one in fields(cls) if one.name in arguments}
        return cls(**{**given, "clip": clip})

    def differences(self, other: GuardSettings) -> list[str]:
        """Names of the settings in which the two ask for different guards."""
        compared = [one.name for one in fields(self) if one.compare]
        return [name for name in compared if getattr(self, name) != getattr(other, name)]
