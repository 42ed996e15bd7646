"""The limits of one step, and what they do to its gradients. csrc/clip.cpp computes the same, to the bit."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..records.columns import COLUMNS, INDEX

TORCH_FORMULA = -1.0  # as a trigger: scale by min(1, target / (norm + 1e-6)), whatever the norm is
_NO_GRADIENT = -1.0


def factor_of(norm: float, trigger: float, target: float) -> float:
    """The factor for gradients of that norm."""
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
    """What happens to the gradients of one step.

    Attributes:
        coefficient: the factor for all gradients. With `factors`, how much smaller the total norm becomes.
        is_dropped: whether the step is skipped.
        factors: one for each gradient, where they differ.
        over: indices of the groups above their triggers.
    """

    coefficient: float = 1.0
    is_dropped: bool = False
    factors: list[float] | None = None
    over: tuple[int, ...] = ()


class Limits(NamedTuple):
    """The limits of one step. csrc/clip.cpp reads these fields by position.

    Attributes:
        trigger, target: gradients whose total norm is above `trigger` are scaled to `target`. A target of 0 skips the
            step.
        groups: index of each parameter's group, -1 for none. None: each parameter is a group.
        triggers, targets: the same for each group. None: groups are measured, not clipped.
        norms: of each group, written when the limits are applied; -1 without a gradient. None: there are no groups.
    """

    trigger: float = math.inf
    target: float = math.inf
    groups: array[int] | None = None
    triggers: array[float] | None = None
    targets: array[float] | None = None
    norms: array[float] | None = None

    def apply(self, norm: float, rows: Sequence[float], positions: Sequence[int] | None) -> Ruling:
        """The ruling on a step whose norm is finite. Writes `norms`.

        Args:
            norm: of all gradients.
            rows: the norm of each gradient.
            positions: indices of their parameters; None if every parameter has a gradient.
        """
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
