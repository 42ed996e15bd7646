"""Loss, norm and fate of a step, and their mean over all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ..ranks import Ranks, has_other_ranks
from ..ranks.exchange import all_reduced
from ..records.codec import reader_of


class StepSeen(NamedTuple):
    """A step: `skipped` for any reason, `vetoed` by recovery."""

    loss: float | None
    norm: float
    skipped: bool
    vetoed: bool
    lr: float | None


Groups: TypeAlias = Sequence[dist.ProcessGroup]  # together they reach all processes


def groups_of(ranks: Ranks | None) -> Groups:
    """Groups of the processes that decide together: those that share the model, otherwise all; empty for one alone."""
    if ranks is not None:
        return ranks.groups
    return [dist.group.WORLD] if has_other_ranks() else []  # type: ignore[list-item]


def averaged(arrived: Sequence[StepSeen], flags: Sequence[bool], groups: Groups) -> tuple[list[StepSeen], list[bool]]:
    """The mean of the steps of all processes, if there are any, and which flags any process has set.

    Cost: one `all_reduce` a group, of a dozen numbers.
    """
    losses = [one.loss for one in arrived if one.loss is not None]
    sums = [sum(losses), len(losses), sum(one.norm for one in arrived), len(arrived)]
    sums += [sum(one.skipped for one in arrived), sum(one.vetoed for one in arrived), *flags]
    loss, num_losses, norm, count, skipped, vetoed, *raised = _reduced(sums, groups, dist.ReduceOp.SUM)
    mean, lr = loss / num_losses if num_losses else None, arrived[-1].lr if arrived else None
    steps = [StepSeen(mean, norm / count, skipped > 0, vetoed > 0, lr)] if count else []
    return steps, [number > 0 for number in raised]


def is_common(number: int, groups: Groups) -> bool:
    """Whether all processes have the same number. Cost: one `all_reduce` a group."""
    largest, least = _reduced([number, -number], groups, dist.ReduceOp.MAX)
    return largest == -least


def _reduced(numbers: Sequence[float], groups: Groups, how: Any) -> list[float]:
    words = torch.tensor([float(x) for x in numbers], dtype=torch.float64, device="cpu")
    return list(all_reduced(words, groups, how).tolist())


seen_of = reader_of(StepSeen)  # from a list of its fields; a MisfitError for anything else
