"""What a clip policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .limits import factor_of

NO_LIMITS = (float("inf"), float("inf"))


class Place(NamedTuple):
    """Where a parameter stands: its name, the number of its param group over all optimizers, its optimizer's index."""

    name: str
    group: int
    optimizer: int


class ClipPolicy:
    """Says from which norm on gradients are scaled, and to what. A policy of your own derives from this.

    It has `limits`, which is asked before a step, and `observe`, which is told the norm afterwards. Both know the past
    only, so the limits of a step travel to the device before it, and nothing waits. A step whose norm is above the
    trigger has its gradients multiplied by target / norm; where the target is 0 it is skipped: parameters and state
    stay as they are.

    Attributes:
        scope: what has a norm: "model", all gradients together; "group", those of which `group_of` says the same; or
            "tensor", each gradient.
        names: of the groups or tensors, in the order of the limits; empty until `begin`, and with scope "model".
        limit: where `coefficient(norm)` is min(1, limit / (norm + 1e-6)), that limit; such a policy is asked nothing
            else. None for every other policy.
        is_sound: stands in a class that can neither raise nor give what is no limit; not for its subclasses.

    A policy that has `coefficient(norm)` instead of `limits` is asked for a factor between measuring and scaling, which
    on a GPU costs a sync a step.

    >>> class TwiceTheLast(ClipPolicy):
    ...     last = float("inf")
    ...     def limits(self):
    ...         return 2 * self.last, self.last
    ...     def observe(self, norms, loss=None):
    ...         self.last = norms
    >>> import torch, fastguard
    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = fastguard.wrap(torch.optim.SGD([p], lr=1.0), clip=TwiceTheLast())
    >>> for gradient in (1.0, 8.0):
    ...     p.grad = torch.full((1,), gradient)
    ...     optimizer.step()
    >>> p.item(), optimizer.guard.last.trigger, optimizer.guard.last.clip_coef
    (-2.0, 2.0, 0.125)
    """

    scope: str = "model"
    names: tuple[str, ...] = ()
    limit: float | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if ("coefficient" in cls.__dict__ or "limits" in cls.__dict__) and "limit" not in cls.__dict__:
            cls.limit = None  # of the parent's formula

    def limits(self) -> tuple[Any, Any]:
        """(trigger, target) for the step to come, from what is past: two floats >= 0; (inf, inf) does nothing.

        With scope "group" or "tensor" two sequences of floats, one entry for each of `names`; or two floats, which are
        then of all gradients together. Where it raises or gives anything else, the step is taken without clipping:
        that is logged once, and counted in the report.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` must have a method limits() -> (trigger, target), or coefficient(norm) -> float"
        )

    def observe(self, norms: Any, loss: float | None = None) -> None:
        """Takes the norm of a step, unscaled and before clipping, after it; not of a step with NaN or Inf.

        Args:
            norms: a float; with scope "group" or "tensor" a sequence of floats, one entry for each of `names`, -1.0
                where there was no gradient. It is written over at the next step: copy what is to be kept.
            loss: the newest finite loss known; on the CPU that of the step before.

        On a GPU it is called as records arrive, a step or two late.
        """

    def begin(self, names: Sequence[str]) -> None:
        """Takes the names of groups or tensors, before the first step and when the parameters have become others."""
        self.names = tuple(names)

    def group_of(self, place: Place) -> str | None:
        """The group of a parameter, with scope "group"; None if it is in none, and is not clipped."""
        return f"group{place.group}"

    def coefficient(self, norm: float) -> float:
        """The factor for all gradients of a step whose total norm is `norm`, which is finite; 1.0 leaves them alone."""
        trigger, target = self.limits()
        return factor_of(norm, trigger, target)

    def state_dict(self) -> dict[str, Any]:
        """What has to be kept to go on after a restart, as plain data; nothing for a policy without a memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, which came from `state_dict`."""
