"""The decision on one step, shared by all optimizers under one guard until each has taken its step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .device import DevicePlan, PendingStep
from .fused import ContiguousGrads
from .scaler import Handed


class Decision:
    """The part that host and device share.

    Attributes:
        positions: indices of the parameters that had a gradient when this was decided; None for all.
        taken: indices of the members that have taken their step.
    """

    positions: Sequence[int] | None
    taken: set[int]

    def late(self, start: int, params: Sequence[torch.Tensor]) -> list[int]:
        """Indices of those of `params` that got their gradient after this was decided; `start` is the first one's."""
        if self.positions is None:
            return []
        known = set(self.positions)
        return [i for i, p in enumerate(params) if p.grad is not None and start + i not in known]


class HostDecision(Decision):
    """A decision that the host knows.

    Attributes:
        clip_coef: the factor for all gradients, without the loss scale.
        factors: one for each gradient instead.
    """

    def __init__(
        self, positions: Sequence[int] | None, clip_coef: float, skipped: bool, factors: list[float] | None, scale: Any
    ) -> None:
        self.taken, self.positions = set(), positions
        self.clip_coef, self.skipped, self.factors, self._scale = clip_coef, skipped, factors, scale

    def check_scale(self, handed: Handed) -> None:
        """Raises RuntimeError if another optimizer's gradients have another scale than those decided on."""
        scale = handed.read().grad_scale
        if scale != self._scale:
            raise _other_scale(f"scale {self._scale}", f"scale {scale}")


class DeviceDecision(Decision):
    """A decision on a device. The host has not waited for it.

    Attributes:
        pending: the step; `slot` has the decision.
        is_scaled: whether the gradients carried a loss scale.
        may_skip: whether the skip flag has to be looked at.
        factor: the factor, if the host decided; else it is in the slot.
        max_norm, trigger: as in `StepOptions`.
        factors: one for each gradient on top, on the device.
        plans: of all gradients, one a device; `gradients`: these, unless other optimizers have some of them.
        fused: for each member, whether it takes skip flag and divisor on the device.
        contiguous: copies of gradients for fused optimizers, by the index of their member.
    """

    def __init__(self, pending: PendingStep, plans: list[DevicePlan], grad_scale: Any, *, may_skip: bool) -> None:
        self.taken, self.positions = set(), pending.positions
        self.pending, self.plans, self.slot = pending, plans, pending.slot
        self.is_scaled = grad_scale is not None
        self.may_skip = may_skip
        self.factor: float | None = None
        self.max_norm, self.trigger = math.inf, -1.0
        self.factors: torch.Tensor | None = None
        self.gradients: list[torch.Tensor] | None = None
        self.fused: list[bool] = []
        self.contiguous: dict[int, ContiguousGrads] = {}
        self._skips: bool | None = None

    def skips(self) -> bool:
        """Whether the step is skipped. Synchronises, once."""
        if self._skips is None:
            self._skips = bool(self.slot.skip_flag)
        return self._skips

    def check_scale(self, handed: Handed) -> None:
        """Raises RuntimeError if only one of two optimizers has scaled gradients. The scales are not compared: that
        would take a sync."""
        if self.is_scaled is (handed.grad_scale is None):
            kinds = "unscaled ones", "scaled ones"
            raise _other_scale(kinds[self.is_scaled], kinds[not self.is_scaled])


def _other_scale(before: str, now: str) -> RuntimeError:
    return RuntimeError(
        "optimizers under one guard must have their gradients scaled alike when they step: got "
        f"{now} after {before}. Call scaler.unscale_ on all of them, or on none, before."
    )
