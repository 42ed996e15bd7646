"""Around a clip policy: asks it, checks what it says, and stays upright where it fails."""

from __future__ import annotations

import inspect
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from ...stats import ClippedGroup, values
from ...stats.failures import Failures
from .policy import NO_LIMITS, ClipPolicy, Place, factor_of

TORCHS_FORMULA = -1.0  # a trigger that stands for it


class GivenPolicy(ClipPolicy):
    """A policy around which the guard stays upright: what it says is checked, what it raises is counted.

    It need not derive from `ClipPolicy`; what it lacks is as there.

    Attributes:
        given: the policy.
        failures: where it is counted.
        norms: of the groups or tensors of the step just measured, which whoever decides writes here; else None.
        loss: the newest finite one.
        asks: whether it has limits, rather than a coefficient or a way of its own to shrink gradients.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self.failures = Failures()
        self.scope: str = getattr(given, "scope", "model")
        self.norms: array[float] | None = None
        self.loss: float | None = None
        self.asks = self.scope in ("model", "group", "tensor") and _has_limits(given)
        self._is_sound = "is_sound" in type(given).__dict__
        self._places: tuple[Place, ...] | None = None
        self._apart: frozenset[int] = frozenset()
        self._assigned: array[int] | None = None
        self._shown: tuple[Any, ...] | None = None  # limits of the step told last

    @property
    def limit(self) -> float | None:  # type: ignore[override]
        """That of a `ClipPolicy`; Inf where it says none that could be one. Cost: 0.2 us."""
        return None if self._apart and self.scope == "model" else self._limit()

    def _limit(self) -> float | None:
        try:
            limit = self.given.limit if isinstance(self.given, ClipPolicy) else None
            return None if limit is None else values.positive("limit", limit, "")
        except Exception as error:
            self._note(error)
            return math.inf

    def coefficient(self, norm: float) -> float:
        limit = self.limit
        if limit is not None:
            return min(1.0, limit / (norm + 1e-6))  # as where it is asked nothing
        try:
            given = self.given.coefficient(norm)
            result = values.real(given)
            if not 0.0 <= result < math.inf or not result * norm < math.inf:
                raise ValueError(f"`coefficient` must give a finite number >= 0, gave {given!r} for a norm of {norm:g}")
        except Exception as error:
            self._note(error)
            return 1.0
        return result

    def count_in(self, failures: Failures) -> None:
        """Has what fails counted there, of policies within the policy too."""
        self.failures = failures
        if isinstance(getattr(self.given, "policies", None), dict):
            for policy in self.given.policies.values():
                if isinstance(policy, GivenPolicy):
                    policy.count_in(failures)

    def place(self, places: Sequence[Place], apart: frozenset[int]) -> None:
        """Learns which parameters there are.

        Args:
            places: of each parameter.
            apart: indices of optimizers whose gradients are no part of a norm of the whole model.

        Raises:
            ValueError: of the policy, on what its groups would be.
        """
        if self._places == (places := tuple(places)) and self._apart == apart:
            return
        self._places, self._apart, self._shown, self.norms = places, apart, None, None
        if self.scope == "group":
            group_of = self.given.group_of if hasattr(self.given, "group_of") else super().group_of
            groups: list[str | None] = [group_of(place) for place in places]
        elif self.scope == "tensor":
            groups = [place.name for place in places]
        elif apart:
            groups = [None if place.optimizer in apart else "all scaled" for place in places]
        else:
            return
        names = tuple(place.name for place in places) if self.scope == "tensor" else tuple(dict.fromkeys(groups))
        self.names = tuple(name for name in names if name is not None)
        if self.scope != "tensor":
            index = {name: i for i, name in enumerate(self.names)}
            self._assigned = array("i", [-1 if name is None else index[name] for name in groups])
        else:
            self._assigned = None
        self.norms = array("d", [-1.0]) * len(self.names)
        if self.scope != "model" and hasattr(self.given, "begin"):
            self.given.begin(self.names)
            self.count_in(self.failures)

    def place_again(self, places: Sequence[Place]) -> None:
        """The same in the midst of a run, where what is raised is counted."""
        try:
            self.place(places, self._apart)
        except Exception as error:
            self._note(error)

    def ask(self) -> tuple[Any, ...] | None:
        """The limits of the step to come: (trigger, target) of all gradients together, and where groups or tensors
        have norms of their own (group of each parameter or None, triggers, targets, norms to be written); None where
        the policy is to be asked for a coefficient. Cost: 0.5 us beside the policy's own.
        """
        if not self.asks:
            return None
        self._shown = asked = self._ask()
        return asked

    def _ask(self) -> tuple[Any, ...]:
        try:
            if self.norms is None:
                trigger, target = self.given.limits()
                return _checked(trigger, target)
            limit = self._limit() if self.scope == "model" else None
            trigger, target = self.given.limits() if limit is None else (TORCHS_FORMULA, limit)
            if limit is None and isinstance(trigger, (int, float)):
                trigger, target = _checked(trigger, target)
            if self.scope == "model":
                triggers, targets = array("d", [trigger]), array("d", [target])
            elif isinstance(trigger, float):
                return trigger, target, (self._assigned, None, None, self.norms)
            elif self._is_sound:
                triggers, targets = trigger, target
            else:
                triggers, targets = self._checked_arrays(trigger, target)
            return (*NO_LIMITS, (self._assigned, triggers, targets, self.norms))
        except Exception as error:
            self._note(error)
            return NO_LIMITS if self.norms is None else (*NO_LIMITS, (self._assigned, None, None, self.norms))

    def pass_over(self) -> None:
        """The newest step has no finite norm, of which to tell."""
        self._shown = None

    def tell(self, norm: float, loss: float | None, asked: tuple[Any, ...] | None = None) -> None:
        """Has the policy observe a step; `norms` has those of groups or tensors. Cost: 0.2 us beside its own.

        Args:
            asked: the limits of that step, where others have been asked for since.
        """
        if asked is not None:
            self._shown = asked
        if loss is not None and math.isfinite(loss):
            self.loss = loss
        if not self.asks or not hasattr(self.given, "observe"):
            return
        norms: Any = norm
        if self.norms is not None:
            norms = self.norms[0] if self.scope == "model" else self.norms
        if self.norms is not None and self.scope == "model" and norms < 0.0:
            return
        try:
            self.given.observe(norms, self.loss)
        except Exception as error:
            self._note(error)

    def told(self, over: Sequence[int] | None) -> dict[str, Any]:
        """The fields of a record that are about groups or tensors, of the step told last; `over` has their numbers."""
        fields: dict[str, Any] = {}
        if over and self.scope != "model":
            names = self.names if self.asks else [place.name for place in self._places or ()]
            fields["over"] = tuple(names[i] for i in over)
        if self.scope != "group" or self._shown is None or len(self._shown) < 3:
            return fields
        _, triggers, targets, norms = self._shown[2]
        groups = []
        limits = [(math.inf, math.inf)] * len(norms) if triggers is None else list(zip(triggers, targets))
        is_dropped = any(targets[i] == 0.0 for i in over or ())
        for name, norm, (trigger, target) in zip(self.names, norms, limits, strict=True):
            if norm >= 0.0:
                left = norm if is_dropped else norm * factor_of(norm, trigger, target)
                groups.append(ClippedGroup(name, norm, left, trigger))
        return {**fields, "groups": tuple(groups)}

    def _checked_arrays(self, triggers: Any, targets: Any) -> tuple[array[float], array[float]]:
        triggers, targets = array("d", triggers), array("d", targets)
        if not len(triggers) == len(targets) == len(self.names):
            given = f"{len(triggers)} and {len(targets)}"
            raise ValueError(f"`limits` must give {len(self.names)} triggers and targets, gave {given}")
        for pair in zip(triggers, targets):
            _checked(*pair)
        return triggers, targets

    def _note(self, error: Exception) -> None:
        self.failures.note(f"clip policy {type(self.given).__name__}", error, "The step was taken without clipping.")

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.given.state_dict() if hasattr(self.given, "state_dict") else {}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self.given, "load_state_dict"):
            self.given.load_state_dict(state)

    def __repr__(self) -> str:
        return repr(self.given)


def _checked(trigger: Any, target: Any) -> tuple[float, float]:
    if not (type(trigger) is float and type(target) is float):
        trigger, target = values.real(trigger), values.real(target)
    if not (trigger >= 0.0 and target >= 0.0) or (target == math.inf and trigger < math.inf):
        raise ValueError(f"`limits` must give (trigger, target), finite numbers >= 0, gave ({trigger}, {target})")
    return trigger, target


def _has_limits(given: Any) -> bool:
    """Whether `given` is asked for limits: of a class that has both, or of the nearest that has either."""
    if not isinstance(given, ClipPolicy):
        return callable(getattr(given, "limits", None))
    nearest: Mapping[str, Any] = next(
        c.__dict__ for c in inspect.getmro(type(given)) if "limits" in c.__dict__ or "coefficient" in c.__dict__
    )
    return "limits" in nearest and nearest["limits"] is not ClipPolicy.limits


def as_policy(clip: Any) -> ClipPolicy:
    """`clip` as a `ClipPolicy` that cannot fail.

    Raises:
        TypeError: it has neither `limits` nor `coefficient`.
    """
    is_sound = isinstance(clip, ClipPolicy) and "is_sound" in type(clip).__dict__
    if isinstance(clip, GivenPolicy) or (is_sound and clip.limit is not None):
        return clip
    has_either = any(callable(getattr(clip, name, None)) for name in ("limits", "coefficient"))
    if isinstance(clip, type) or not has_either:
        raise TypeError(f"`clip` must be a clip policy such as GlobalNorm(1.0), got {clip!r}")
    return GivenPolicy(clip)
