"""What a step has shown, and what all processes have seen of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...stats import values


class StepSeen(NamedTuple):
    """A step that was taken, or left out: `skipped` by whatever, `vetoed` by recovery."""

    loss: float | None
    norm: float
    skipped: bool
    vetoed: bool
    lr: float | None


def averaged(
    arrived: Sequence[StepSeen], flags: Sequence[bool], device: Callable[[], torch.device]
) -> tuple[list[StepSeen], list[bool]]:
    """The average of all processes' steps, as one, if there is any, and which flags anybody has raised.

    Cost: one `all_reduce`, of a tensor on `device()` where the processes talk by NCCL.
    """
    losses = [one.loss for one in arrived if one.loss is not None]
    sums = [sum(losses), len(losses), sum(one.norm for one in arrived), len(arrived)]
    sums += [sum(one.skipped for one in arrived), sum(one.vetoed for one in arrived), *flags]
    where = device() if dist.get_backend() == "nccl" else torch.device("cpu")
    told = torch.tensor([float(x) for x in sums], dtype=torch.float64, device=where)
    dist.all_reduce(told)
    loss, num_losses, norm, count, skipped, vetoed, *raised = told.tolist()
    mean, lr = loss / num_losses if num_losses else None, arrived[-1].lr if arrived else None
    steps = [StepSeen(mean, norm / count, skipped > 0, vetoed > 0, lr)] if count else []
    return steps, [number > 0 for number in raised]


def seen_of(plain: Any) -> StepSeen:
    """From a list of its fields; a MisfitError for anything else."""
    number = values.maybe(values.number)
    reads = (number, values.number, values.truth, values.truth, number)
    if len(values.row(plain)) != len(reads):
        raise values.MisfitError(f"must have {len(reads)} entries, got {len(plain)}")
    return StepSeen(*(read(value) for read, value in zip(reads, plain)))
