"""What a clip policy is."""

from __future__ import annotations

import math
from typing import Any

from ...stats import values
from ...stats.failures import Failures


class ClipPolicy:
    """Says what to multiply the gradients by. A policy of your own derives from this and has a `coefficient`.

    Attributes:
        limit: where `coefficient(norm)` is min(1, limit / (norm + 1e-6)), that limit: such a policy is asked nothing,
            and decides on the device of the gradients without a sync. None for every other policy.
        is_sound: stands in a class that can neither raise nor give what is no factor; not for its subclasses.

    >>> class Halve(ClipPolicy):
    ...     def coefficient(self, norm):
    ...         return 0.5 if norm > 1.0 else 1.0
    >>> import torch, fastguard
    >>> p = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = fastguard.wrap(torch.optim.SGD([p], lr=1.0), clip=Halve())
    >>> p.grad = torch.full((1,), 8.0)
    >>> optimizer.step()
    >>> p.item(), optimizer.guard.last.clip_coef
    (-3.0, 0.5)
    """

    limit: float | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "coefficient" in cls.__dict__ and "limit" not in cls.__dict__:
            cls.limit = None  # of the parent's formula

    def coefficient(self, norm: float) -> float:
        """The factor for a step whose total norm is `norm`, which is finite; 1.0 leaves the gradients alone.

        Called once a step, and again for each further evaluation of a closure. On a GPU that costs a sync a step. Where
        it raises, or gives anything but a finite number >= 0, the step is taken without clipping: that is logged once,
        and counted in the report.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must have a method coefficient(norm) -> float")

    def state_dict(self) -> dict[str, Any]:
        """What has to be kept to go on after a restart, as plain data; nothing for a policy without a memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, which came from `state_dict`."""


class GivenPolicy(ClipPolicy):
    """A policy of a user's around which the guard stays upright: what it says is checked, what it raises is counted.

    It need not derive from `ClipPolicy`; what it lacks is as there.

    Attributes:
        given: the policy.
        failures: where it is counted.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self.failures = Failures()

    @property
    def limit(self) -> float | None:  # type: ignore[override]
        """That of a `ClipPolicy`; Inf where it says none that could be one. Cost: 0.2 us."""
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


def as_policy(clip: Any) -> ClipPolicy:
    """`clip` as a `ClipPolicy` that cannot fail.

    Raises:
        TypeError: it has no method `coefficient`.
    """
    if isinstance(clip, GivenPolicy) or (isinstance(clip, ClipPolicy) and "is_sound" in type(clip).__dict__):
        return clip
    if isinstance(clip, type) or not callable(getattr(clip, "coefficient", None)):
        raise TypeError(f"`clip` must be a clip policy such as GlobalNorm(1.0), got {clip!r}")
    return GivenPolicy(clip)
