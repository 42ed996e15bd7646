"""What was decided for one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.slots import Slot
from .lanes import Lane
from .scaler import Handed
from .undo import Straightened


class Verdict(NamedTuple):
    """A decision that the host knows: a factor for all gradients, or one for each that there is."""

    clip_coef: float
    skipped: bool
    factors: list[float] | None = None


class Decision:
    """What was decided for one step; shared by all optimizers under one guard until each has taken its step.

    Attributes:
        verdict: the decision; None where it is on a device, and nobody has waited for it. The rest is about that case.
        is_scaled: whether the gradients carried a loss scale.
        may_skip: whether there is a flag to look at.
        slot: where the decision is.
        factor: what to multiply by, where the host decided; else it is in the slot.
        max_norm: what the device clips to; Inf where it does not.
        trigger: from which norm on; below 0: torch's formula.
        factors: of each gradient, on the device, beside that of all.
        plans: of all gradients, one a lane, with their slots.
        gradients: themselves, where no other optimizer has any.
        fused: of each member, whether it takes skip flag and divisor on the device.
        straightened: what was done to gradients of fused optimizers, by the index of their member.
        positions: flat ones of the parameters that had a gradient when this was decided; None for all.
        taken: indices of the members that have taken their step.
    """

    slot: Slot

    def __init__(self, verdict: Verdict | None, scale: Any, *, may_skip: bool = False) -> None:
        self.verdict = verdict
        self.is_scaled = scale is not None
        self.may_skip = may_skip
        self.factor: float | None = None
        self.max_norm = math.inf
        self.trigger = -1.0
        self.factors: torch.Tensor | None = None
        self.plans: list[tuple[Lane, Any, Slot]] = []
        self.gradients: list[torch.Tensor] | None = None
        self.fused: list[bool] = []
        self.straightened: dict[int, Straightened] = {}
        self.positions: Sequence[int] | None = None
        self.taken: set[int] = set()
        self._scale = scale
        self._skips: bool | None = None

    def skips(self) -> bool:
        """Whether the step is skipped. Synchronises, once."""
        if self._skips is None:
            self._skips = bool(self.slot.skip_flag)
        return self._skips

    def late(self, start: int, params: Sequence[torch.Tensor]) -> list[int]:
        """Places of those of `params`, the first of them at `start`, whose gradient came up after this was decided."""
        if self.positions is None:
            return []
        known = set(self.positions)
        return [i for i, p in enumerate(params) if p.grad is not None and start + i not in known]

    def check_scale(self, handed: Handed) -> None:
        """Raises RuntimeError if an optimizer that follows this decision has gradients that are scaled otherwise.

        Two scales that are both on a device are not compared: that would take a sync.
        """
        if self.verdict is not None:
            scale = handed.read().scale
            alike, before, now = scale == self._scale, f"scale {self._scale}", f"scale {scale}"
        else:
            alike = self.is_scaled is (handed.grad_scale is not None)
            before, now = ("scaled ones", "unscaled ones") if self.is_scaled else ("unscaled ones", "scaled ones")
        if not alike:
            raise RuntimeError(
                "optimizers under one guard must have their gradients scaled alike when they step: got "
                f"{now} after {before}. Call scaler.unscale_ on all of them, or on none, before."
            )
