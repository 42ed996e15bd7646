"""What limits mean for the norms of one step. The CPU's short way has the same in csrc/clip.cpp, to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...stats.columns import COLUMNS, INDEX
from .policy import factor_of


class Ruling(NamedTuple):
    """What becomes of the gradients of one step.

    Attributes:
        coefficient: of all of them; or, where each has its factor, how much smaller the norm of all becomes.
        is_dropped: the step is skipped.
        factors: of each gradient, where they are not one.
        over: numbers of the groups or tensors above their triggers.
    """

    coefficient: float = 1.0
    is_dropped: bool = False
    factors: list[float] | None = None
    over: tuple[int, ...] = ()


def row_norms(table: bytearray) -> list[float]:
    """The norm of each row of a table, NaN and Inf aside."""
    norms: Any = memoryview(table).cast("d")[INDEX["finite_norm"] :: len(COLUMNS)].tolist()
    return list(norms)


def rule(asked: tuple[Any, ...], norm: float, rows: Sequence[float], positions: Sequence[int] | None) -> Ruling:
    """The ruling on a step whose norm is finite; writes the norms of groups or tensors.

    Args:
        asked: what `GivenPolicy.ask` gave.
        norm: of all gradients.
        rows: the norm of each.
        positions: of their parameters in the whole list; None if all have one.
    """
    trigger, target = asked[:2]
    if norm > trigger and target == 0.0:
        common, is_dropped = 1.0, True
    else:
        common, is_dropped = factor_of(norm, trigger, target), False
    if len(asked) == 2:
        return Ruling(common, is_dropped)
    groups, triggers, targets, norms = asked[2]
    places = range(len(rows)) if positions is None else positions
    parts = list(places) if groups is None else [groups[place] for place in places]
    for part in range(len(norms)):
        norms[part] = -1.0
    for part, size in zip(parts, rows, strict=True):
        if part >= 0:
            share = size / norm if norm > 0.0 else 0.0  # whose square stays within the floats
            norms[part] = size if groups is None else max(norms[part], 0.0) + share * share
    if groups is not None:
        for part, sum_sq in enumerate(norms):
            norms[part] = norm * math.sqrt(sum_sq) if sum_sq >= 0.0 else -1.0
    if is_dropped or triggers is None or norm == 0.0:
        return Ruling(common, is_dropped)
    factors = [factor_of(*limits) for limits in zip(norms, triggers, targets, strict=True)]
    over = tuple(part for part, factor in enumerate(factors) if factor != 1.0)
    if any(targets[part] == 0.0 for part in over):
        return Ruling(1.0, True, None, over)
    if not over:
        return Ruling(common)
    each = [1.0 if part < 0 else factors[part] for part in parts]
    share = 0.0
    for size, factor in zip(rows, each, strict=True):
        kept = size / norm * factor
        share += kept * kept
    return Ruling(common * min(1.0, math.sqrt(share)), False, [common * factor for factor in each], over)
