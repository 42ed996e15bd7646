"""The limits of one step, what they do to its gradients, and a policy whose answers are checked. csrc/clip.cpp applies
limits in the same way, to the bit."""

from __future__ import annotations

import inspect
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..errors import write_limit
from ..records import ClippedGroup, values
from ..records.columns import COLUMNS, INDEX
from ..records.failures import Failures
from .policy import ClipPolicy, Place

TORCH_FORMULA = -1.0  # as a trigger: scale by min(1, target / (norm + 1e-6)), whatever the norm is
_NO_GRADIENT = -1.0
SHRINKS = ("element", "unit")  # scopes of policies that write to the gradients themselves


def factor_of(norm: float, trigger: float, target: float) -> float:
    if not norm > trigger:
        return 1.0
    return min(1.0, target / (norm + (1e-6 if trigger < 0.0 else 0.0)))


def factors_of(norms: torch.Tensor, triggers: Any, targets: Any) -> torch.Tensor:
    """`factor_of` for tensors on a device. Does not synchronise."""
    is_torch_formula = triggers < 0.0
    eps = 1e-6 * (is_torch_formula.to(norms.dtype) if isinstance(is_torch_formula, torch.Tensor) else is_torch_formula)
    return (targets / (norms + eps)).clamp(max=1.0).masked_fill(~(norms > triggers), 1.0)


def row_norms(table: bytearray) -> list[float]:
    """The norm of each row of a table, without its NaN and Inf elements."""
    words: Any = memoryview(table).cast("d")
    return list(words[INDEX["finite_norm"] :: len(COLUMNS)])


class Ruling(NamedTuple):
    """What happens to the gradients of one step."""

    coefficient: float = 1.0  # the factor for all gradients; with `factors`, that of the total norm
    is_dropped: bool = False  # the step is skipped
    factors: list[float] | None = None  # one for each gradient, where they differ
    over: tuple[int, ...] = ()  # indices of the groups above their triggers


class Limits(NamedTuple):
    """The limits of one step. csrc/clip.cpp reads these fields by position."""

    trigger: float = math.inf  # gradients whose total norm is above it are scaled to `target`; to 0: skip the step
    target: float = math.inf
    groups: array[int] | None = None  # index of each parameter's group, -1 for none. None: each parameter is a group
    triggers: array[float] | None = None  # the same for each group. None: groups are measured, not clipped
    targets: array[float] | None = None
    norms: array[float] | None = None  # of each group, -1 without a gradient; written by `apply`. None: no groups

    def apply(self, norm: float, rows: Sequence[float], positions: Sequence[int] | None) -> Ruling:
        """The ruling on a step whose `norm` is finite, by the norms of the gradients. Writes `norms`."""
        is_dropped = norm > self.trigger and self.target == 0.0
        common = 1.0 if is_dropped else factor_of(norm, self.trigger, self.target)
        if self.norms is None:
            return Ruling(common, is_dropped)
        groups, triggers, targets, norms = self.groups, self.triggers, self.targets, self.norms
        places = range(len(rows)) if positions is None else positions
        group_of = list(places) if groups is None else [groups[place] for place in places]
        norms[:] = array("d", [_NO_GRADIENT]) * len(norms)
        for group, size in zip(group_of, rows, strict=True):
            if group >= 0:
                share = size / norm if norm > 0.0 else 0.0  # its square does not overflow
                norms[group] = size if groups is None else max(norms[group], 0.0) + share * share
        if groups is not None:
            norms[:] = array("d", [norm * math.sqrt(x) if x >= 0.0 else _NO_GRADIENT for x in norms])
        if is_dropped or triggers is None or targets is None or norm == 0.0:
            return Ruling(common, is_dropped)
        factors = [factor_of(*limits) for limits in zip(norms, triggers, targets, strict=True)]
        over = tuple(group for group, factor in enumerate(factors) if factor != 1.0)
        if any(targets[group] == 0.0 for group in over):
            return Ruling(1.0, True, None, over)
        if not over:
            return Ruling(common)
        each = [1.0 if group < 0 else factors[group] for group in group_of]
        share = 0.0
        for size, factor in zip(rows, each, strict=True):
            kept = size / norm * factor
            share += kept * kept
        return Ruling(common * min(1.0, math.sqrt(share)), False, [common * factor for factor in each], over)


class CheckedPolicy(ClipPolicy):
    """Wraps a policy: checks its limits, and counts what it raises instead of stopping the training."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.failures = Failures()  # counts what it raises
        self.scope: str = given.scope
        self.norms: array[float] | None = None  # of groups or tensors, written when limits are applied
        self.loss: float | None = None  # the newest finite one
        self.has_limits = self.scope not in SHRINKS  # others write to the gradients themselves
        self._is_sound = "is_sound" in type(given).__dict__
        self._places: tuple[Place, ...] | None = None
        self._apart: frozenset[int] = frozenset()
        self._groups: array[int] | None = None
        self._newest: Limits | None = None  # of the step observed last

    @property
    def limit(self) -> float | None:  # type: ignore[override]
        """As in `ClipPolicy`; Inf if the policy gives an invalid one. Cost: 0.2 us."""
        return None if self._apart and self.scope == "model" else self._limit()

    def _limit(self) -> float | None:
        try:
            limit = self.given.limit
            return None if limit is None else values.positive("limit", limit, "")
        except Exception as error:
            self._note(error)
            return math.inf

    def count_in(self, failures: Failures) -> None:
        """Counts failures there, also those of policies inside the policy."""
        self.failures = failures
        inner = getattr(self.given, "policies", None)
        for policy in inner.values() if isinstance(inner, dict) else ():
            if isinstance(policy, CheckedPolicy):
                policy.count_in(failures)

    def place(self, places: Sequence[Place], apart: frozenset[int]) -> None:
        """Groups the parameters as the policy wants them, and raises its ValueError about groups. Gradients of the
        optimizers `apart` do not count in a norm of the whole model."""
        if self._places == (places := tuple(places)) and self._apart == apart:
            return
        self._places, self._apart, self._newest, self._groups, self.norms = places, apart, None, None, None
        if self.scope == "group":
            self._group([self.given.group_of(place) for place in places])
        elif self.scope == "tensor":
            self.names = tuple(place.name for place in places)
        elif apart:
            self._group([None if place.optimizer in apart else "all scaled" for place in places])
        else:
            return
        self.norms = array("d", [-1.0]) * len(self.names)
        if self.scope != "model":
            self.given.begin(self.names)
            self.count_in(self.failures)

    def _group(self, groups: Sequence[str | None]) -> None:
        self.names = tuple(name for name in dict.fromkeys(groups) if name is not None)
        index = {name: i for i, name in enumerate(self.names)}
        self._groups = array("i", [-1 if name is None else index[name] for name in groups])

    def place_again(self, places: Sequence[Place]) -> None:
        """The same during a run: counts what the policy raises."""
        try:
            self.place(places, self._apart)
        except Exception as error:
            self._note(error)

    def next_limits(self) -> Limits | None:
        """The limits of the next step; None if the policy writes to the gradients itself. Cost: 1 us."""
        if not self.has_limits:
            return None
        trigger: Any
        target: Any
        try:
            limit = self._limit() if self.scope == "model" and self.norms is not None else None
            trigger, target = self.given.limits() if limit is None else (TORCH_FORMULA, limit)
            if limit is None and (self.norms is None or isinstance(trigger, (int, float))):
                trigger, target = _checked(trigger, target)
            if self.norms is None:
                self._newest = Limits(trigger, target)
            elif self.scope != "model" and isinstance(trigger, float):
                self._newest = Limits(trigger, target, self._groups, None, None, self.norms)
            else:
                if self.scope == "model":
                    trigger, target = array("d", [trigger]), array("d", [target])
                elif not self._is_sound:
                    trigger, target = array("d", trigger), array("d", target)
                    if not len(trigger) == len(target) == len(self.names):
                        given = f"{len(trigger)} and {len(target)}"
                        raise ValueError(f"`limits` must give {len(self.names)} triggers and targets, gave {given}")
                    for pair in zip(trigger, target):
                        _checked(*pair)
                self._newest = Limits(math.inf, math.inf, self._groups, trigger, target, self.norms)
        except Exception as error:
            self._note(error)
            self._newest = Limits(groups=self._groups, norms=self.norms)
        return self._newest

    def observe_step(self, norm: float, loss: float | None, limits: Limits | None = None) -> None:
        """Passes a step on to the policy unless its norm is not finite. `limits` are those of that step, if limits of
        later steps have been taken since. Cost: 0.2 us beside the policy's own."""
        if not math.isfinite(norm):
            self._newest = None
            return
        self._newest = self._newest if limits is None else limits
        if loss is not None and math.isfinite(loss):
            self.loss = loss
        if not self.has_limits:
            return
        norms: Any = norm if self.norms is None else self.norms
        if self.norms is not None and self.scope == "model":
            norms = self.norms[0]
            if norms < 0.0:
                return
        try:
            self.given.observe(norms, self.loss)
        except Exception as error:
            self._note(error)

    def record_fields(self, over: Sequence[int] | None) -> dict[str, Any]:
        """Fields of the newest record about groups or tensors; `over` has the indices of those above their triggers."""
        fields: dict[str, Any] = {}
        if over and self.scope != "model":
            names = self.names if self.has_limits else [place.name for place in self._places or ()]
            fields["over"] = tuple(names[i] for i in over)
        limits = self._newest
        if self.scope != "group" or limits is None or limits.norms is None:
            return fields
        no_limits = array("d", [math.inf]) * len(limits.norms)
        triggers, targets = limits.triggers or no_limits, limits.targets or no_limits
        is_dropped = any(targets[i] == 0.0 for i in over or ())
        groups = []
        for name, norm, trigger, target in zip(self.names, limits.norms, triggers, targets, strict=True):
            if norm >= 0.0:
                left = norm if is_dropped else norm * factor_of(norm, trigger, target)
                groups.append(ClippedGroup(name, norm, left, trigger))
        return {**fields, "groups": tuple(groups)}

    def _note(self, error: Exception) -> None:
        self.failures.note(f"clip policy {type(self.given).__name__}", error, "The step was taken without clipping.")

    def state_dict(self) -> dict[str, Any]:
        return self.given.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given.load_state_dict(state)

    def __repr__(self) -> str:
        return repr(self.given)


def _checked(trigger: Any, target: Any) -> tuple[float, float]:
    if not (type(trigger) is float and type(target) is float):
        trigger, target = values.real(trigger), values.real(target)
    if not (trigger >= 0.0 and target >= 0.0) or (target == math.inf and trigger < math.inf):
        raise ValueError(f"`limits` must give (trigger, target), finite numbers >= 0, gave ({trigger}, {target})")
    return trigger, target


def limits_of(clip: ClipPolicy | None) -> Limits | None:
    """The limits of the next step; None without a policy, or if it writes to the gradients itself."""
    limit = None if clip is None else clip.limit
    if limit is not None:
        return Limits(TORCH_FORMULA, limit)
    return clip.next_limits() if isinstance(clip, CheckedPolicy) else None


def trigger_of(clip: ClipPolicy | None, limits: Limits | None) -> float | None:
    """The total norm above which gradients are scaled, for the record; None if there is none."""
    trigger: float | None = None
    if limits is not None:
        trigger, target = limits.trigger, limits.target
        if clip is not None and clip.scope == "model" and limits.triggers is not None and limits.targets is not None:
            trigger, target = limits.triggers[0], limits.targets[0]
        trigger = target if trigger == TORCH_FORMULA else trigger
    elif isinstance(clip, CheckedPolicy):
        trigger = getattr(clip.given, "trigger", None)
    return None if trigger == math.inf else trigger


def as_policy(clip: Any) -> ClipPolicy:
    """`clip` as a `ClipPolicy` that cannot fail; raises TypeError if it is none, or has no `limits`."""
    says = isinstance(clip, ClipPolicy) and (
        type(clip).limits is not ClipPolicy.limits
        or clip.scope in SHRINKS
        or inspect.getattr_static(clip, "limit") is not None
    )
    if isinstance(clip, CheckedPolicy) or (says and "is_sound" in type(clip).__dict__ and clip.limit is not None):
        return clip
    if not says:
        problem = values.refused("a clip policy such as GlobalNorm(1.0)", clip).problem
        raise TypeError(f"`clip` {problem}. {write_limit(clip)}".strip())
    return CheckedPolicy(clip)
