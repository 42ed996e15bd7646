"""Warm-up and cosine decay, of torch's own schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from ..records import values
from ..step.wrappers import innermost


def warmup_cosine(
    optimizer: Any, warmup: float, total: int, *, start: float = 0.01, min_lr: float = 0.0
) -> LRScheduler:
    """A scheduler that warms each group's learning rate up linearly, then lowers it along half a cosine.

    Equivalent to: `SequentialLR(optimizer, [LinearLR(optimizer, start, 1.0, warmup), CosineAnnealingLR(optimizer,
    total - warmup, min_lr)], [warmup])`. Call `step()` after each step of the optimizer, `total` times.

    Args:
        optimizer: guarded or not, also inside a wrapper such as accelerate's.
        warmup: number of steps until the full rate, or a float below 1: their share of `total`. 5 to 10 % is usual; 0
            for no warm-up.
        total: number of all steps, including the warm-up.
        start: share of the full rate at the first step, in (0, 1].
        min_lr: the rate at the end, the same for all groups.

    Raises:
        ValueError: not 0 <= warmup < total; `start` or `min_lr` out of range; `min_lr` above a group's rate.

    Cost: a few microseconds a step and group.

    >>> import torch, fastguard
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    >>> scheduler = fastguard.tools.warmup_cosine(optimizer, warmup=2, total=6, start=0.5)
    >>> lrs = []
    >>> for _ in range(6):
    ...     lrs.append(round(scheduler.get_last_lr()[0], 3))
    ...     optimizer.step()
    ...     scheduler.step()
    >>> lrs
    [0.5, 0.75, 1.0, 0.854, 0.5, 0.146]
    """
    inner = innermost(optimizer)
    if not 0.0 < start <= 1.0:
        raise ValueError(f"`start` must be in (0, 1], got {start!r}")
    lowest = min((float(group.get("initial_lr", group["lr"])) for group in inner.param_groups), default=min_lr)
    if not 0.0 <= min_lr <= lowest:
        raise ValueError(f"`min_lr` must be from 0 to the lowest group's learning rate, {lowest:g}, got {min_lr!r}")
    return warmed_up(inner, warmup, total, lambda steps: CosineAnnealingLR(inner, steps, min_lr), start)


def warmed_up(
    inner: Optimizer, warmup: float, total: int, after: Callable[[int], LRScheduler], start: float = 0.01
) -> LRScheduler:
    """A linear warm-up of so many steps, or of a share below 1 of `total`, then `after(steps)` for the rest."""
    values.at_least(1, "total", total)
    number = round(warmup * total) if 0.0 < warmup < 1.0 else warmup
    if isinstance(warmup, bool) or number != int(number) or not 0 <= number < total:
        limits = f"a number of steps below `total` = {total}, or a share in (0, 1)"
        raise ValueError(f"`warmup` must be {limits}, got {warmup!r}")
    if not number:
        return after(total)
    rise = LinearLR(inner, start, 1.0, int(number))
    return SequentialLR(inner, [rise, after(total - int(number))], [int(number)])
