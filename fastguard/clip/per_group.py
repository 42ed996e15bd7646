"""A policy for each group of parameters."""

from __future__ import annotations

import copy
import fnmatch
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from .._text import listed
from ..records import values
from .global_norm import GlobalNorm
from .limits import CheckedPolicy, as_policy
from .policy import ClipPolicy, Place

_BY = ("param_group", "optimizer", "tensor")


class PerGroup(ClipPolicy):
    """Clips groups of parameters, each by its own norm and its own policy.

    Args:
        policies: a dict from shell-style patterns of tensor names (`"embed*"`) to policies of the whole model or
            numbers, which are short for `GlobalNorm`. A parameter belongs to the first pattern that matches its name;
            without a match it is not clipped. Or one policy or number, of which each group gets a copy.
        by: with one policy, the groups: "param_group" of the optimizers, "optimizer", or each "tensor".

    Raises:
        ValueError: a pattern is the first match of no parameter, from `wrap`; an unknown `by`; an empty dict.
        TypeError: not a policy of the whole model with limits.

    If the policy of one group skips (`SkipSpikes`), the whole step is skipped.

    Cost: no read beyond the step's own; it writes the gradients of groups above their limits. 1 us a step and the cost
    of the policies on the host, for each group or tensor; no sync.

    >>> PerGroup({"embed*": 0.1, "*": GlobalNorm(2.0)})
    PerGroup({'embed*': GlobalNorm(0.1), '*': GlobalNorm(2)})
    """

    is_sound = True
    scope = "group"

    def __init__(self, policies: Mapping[str, Any] | Any, *, by: str = "param_group") -> None:
        if by not in _BY:
            raise ValueError(f"`by` must be one of {list(_BY)}, got {by!r}")
        self.by = by
        self._by_pattern = isinstance(policies, Mapping)
        self._model = None if self._by_pattern else _policy_of(policies)
        self.policies: dict[str, ClipPolicy] = {}
        self._seen: list[str] = []  # names of the parameters that are being grouped
        if isinstance(policies, Mapping):
            if not policies:
                raise ValueError('`policies` must have a pattern, got an empty dict. {"*": 1.0} is all tensors.')
            self.policies = {str(pattern): _policy_of(policy) for pattern, policy in policies.items()}

    def group_of(self, place: Place) -> str | None:
        if not self._by_pattern:
            if self.by == "tensor":
                return place.name
            return f"group{place.group}" if self.by == "param_group" else f"optimizer{place.optimizer}"
        self._seen.append(place.name)
        return next((pattern for pattern in self.policies if fnmatch.fnmatchcase(place.name, pattern)), None)

    def begin(self, names: Sequence[str]) -> None:
        if self._by_pattern:
            for pattern in self.policies.keys() - set(names):
                raise ValueError(
                    f"`policies` must have patterns that a parameter matches first, got {pattern!r}, which is not the "
                    f"first match of any. Parameters: {listed(self._seen, 8)}."
                )
        self._seen.clear()
        super().begin(names)
        for name in self.names:
            if name not in self.policies:
                self.policies[name] = copy.deepcopy(self._model)  # type: ignore[assignment]

    def limits(self) -> tuple[Any, Any]:
        triggers, targets = array("d"), array("d")
        for name in self.names:
            policy = self.policies[name]
            limit = policy.limit
            limits = (limit, limit) if limit is not None else policy.next_limits()  # type: ignore[attr-defined]
            triggers.append(limits[0])
            targets.append(limits[1])
        return triggers, targets

    def observe(self, norms: Any, loss: float | None = None) -> None:
        for name, norm in zip(self.names, norms):
            policy = self.policies[name]
            if norm >= 0.0 and isinstance(policy, CheckedPolicy):
                policy.observe_step(norm, loss)

    def state_dict(self) -> dict[str, Any]:
        return {"policies": {name: policy.state_dict() for name, policy in self.policies.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states = values.entry(state, "policies", values.mapping)
        for name, its in states.items():
            if name not in self.policies and not self._by_pattern:
                self.policies[name] = copy.deepcopy(self._model)  # type: ignore[assignment]
            if name in self.policies:
                self.policies[name].load_state_dict(its)

    def __repr__(self) -> str:
        if self._by_pattern:
            return f"PerGroup({self.policies!r})"
        return f"PerGroup({self._model!r}, by={self.by!r})"


def _policy_of(given: Any) -> ClipPolicy:
    """A policy of the whole model with limits; a number is short for `GlobalNorm`."""
    limit = math.nan if isinstance(given, ClipPolicy) else values.real_or_nan(given)
    policy = as_policy(given) if math.isnan(limit) else GlobalNorm(limit)
    if policy.scope != "model":
        raise TypeError(f"`policies` must be of the whole model, got {given!r}")
    return policy
