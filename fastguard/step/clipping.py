"""What the clip policy does to one step: on the host, and on a device without a sync."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from .. import kernels
from ..clip import CheckedPolicy, ClipPolicy, Limits
from ..clip.limits import SHRINKS, Ruling, factors_of, row_norms
from ..records.columns import COLUMNS, INDEX
from ..records.slot import CLIP_COEF
from .device import DeviceDecision, brought
from .ring import JudgedStep
from .wrappers import Handed

Groups: TypeAlias = list[list[torch.Tensor]]


@dataclass
class HostDecision:
    """A decision that the host knows."""

    positions: Sequence[int] | None  # of the parameters that had a gradient when this was decided; None for all
    clip_coef: float  # the factor for all gradients, without the loss scale
    skipped: bool
    factors: list[float] | None  # one for each gradient instead
    scale: float | None  # the loss scale, which all optimizers' gradients must carry
    taken: set[int] = field(default_factory=set)  # indices of the members that have taken their step


def ruling_of(limits: Limits | None, judged: JudgedStep) -> Ruling:
    """What `limits` do to the gradients of a step; nothing if its norm is not finite."""
    if limits is None or not math.isfinite(judged.norm):
        return Ruling()
    return limits.apply(judged.norm, () if limits.norms is None else row_norms(judged.table), judged.positions)


def shrink(clip: ClipPolicy | None, groups: Groups, judged: JudgedStep, inverse: float) -> Ruling | None:
    """Has a policy of elements or units clip the gradients of a step that is taken; None for other policies."""
    norm = judged.norm
    if not isinstance(clip, CheckedPolicy) or clip.scope not in SHRINKS:
        return None
    if clip.scope == "unit" and not math.isfinite(norm):
        return None
    params, places = _with_gradients(groups, judged.positions)
    over, norms = shrink_each(clip, [judged.names[i] for i in places], params, judged.table, 1.0 / inverse)
    if not over or not math.isfinite(norm):
        return Ruling()
    left = math.sqrt(sum((size / norm) ** 2 for size in norms)) if norm else 1.0
    return Ruling(min(1.0, left), over=tuple(places[i] for i in over))


def shrink_each(
    clip: CheckedPolicy, names: Sequence[str], params: Sequence[torch.Tensor], table: bytearray, scale: float
) -> tuple[list[int], list[float]]:
    """Has the policy clip gradients whose rows are `table`: indices of those that it clipped, and the norms of all."""
    words = memoryview(table).cast("d")
    num_infs = words[INDEX["num_infs"] :: len(COLUMNS)].tolist()
    abs_max = words[INDEX["abs_max"] :: len(COLUMNS)].tolist()
    largest = [math.inf if count else highest for count, highest in zip(num_infs, abs_max)]
    rows = list(zip(row_norms(table), largest, strict=True))
    gradients = [p.grad for p in params]
    over, norms = clip.given.shrink(names, params, gradients, rows, scale, None)
    kernels.tell_autograd([gradients[i] for i in over])
    return over, norms


def _with_gradients(groups: Groups, positions: Sequence[int] | None) -> tuple[list[torch.Tensor], Sequence[int]]:
    params = [p for group in groups for p in group]
    places = range(len(params)) if positions is None else positions
    return [params[i] for i in places], places


def clip_on_device(clip: ClipPolicy | None, decision: DeviceDecision, groups: Groups, handed: Handed) -> None:
    """Enqueues what follows measuring; nothing comes back before the record. Cost: limits of all gradients are
    arguments of a launch. Those of groups or tensors are an upload and some twenty small launches, and a launch a
    tensor to scale, which writes all of them. No sync."""
    limits = decision.pending.limits
    if isinstance(clip, CheckedPolicy) and clip.scope in SHRINKS:
        _shrink_on_device(clip, decision, groups, handed)
    elif limits is not None and limits.triggers is not None:
        _apply_on_device(limits, decision)


def _apply_on_device(limits: Limits, decision: DeviceDecision) -> None:
    """`Limits.apply` on the device."""
    slot, triggers, targets = decision.slot, limits.triggers, limits.targets
    assert triggers is not None and targets is not None
    count, size = decision.pending.num_rows, len(triggers)
    device, dtype = slot.words.device, slot.words.dtype
    places = range(count) if decision.positions is None else decision.positions
    groups = list(places) if limits.groups is None else [limits.groups[place] for place in places]
    is_pinned = device.type == "cuda"
    both = torch.tensor([triggers.tolist(), targets.tolist()], dtype=dtype, device="cpu", pin_memory=is_pinned)
    trigger, target = both.to(device, non_blocking=True)
    index = torch.tensor(groups, device="cpu", pin_memory=is_pinned).to(device, non_blocking=True)
    rows = slot.rows[:count, INDEX["finite_norm"]]
    norm = slot.norm
    shares = (rows / torch.where(norm == 0.0, 1.0, norm)).nan_to_num(0.0)
    if limits.groups is None:
        norms = torch.zeros(size, dtype=dtype, device=device).index_copy_(0, index, rows)
    else:  # a product with ones and zeros adds in a fixed order, as index_add_ does not
        is_member = (index == torch.arange(size, device=device).unsqueeze(1)).to(dtype)
        norms = norm * (is_member @ shares.square()).sqrt()
    is_skipped = slot.skip_flag != 0.0
    over = (norms > trigger) & norm.isfinite() & ~is_skipped
    is_skipped = is_skipped | (over & (target == 0.0)).any()
    slot.skip_flag.copy_(is_skipped)
    factor = torch.where(over & ~is_skipped, factors_of(norms, trigger, target), 1.0)
    factors = torch.cat([factor, torch.ones(1, dtype=dtype, device=device)])[index]  # -1 is the last one
    left = (shares * factors).square().sum().sqrt().clamp(max=1.0)
    slot.words[CLIP_COEF].copy_(torch.where((factors != 1.0).any(), left, 1.0))
    decision.factors = factors
    decision.may_skip = decision.may_skip or 0.0 in targets


def _shrink_on_device(clip: CheckedPolicy, decision: DeviceDecision, groups: Groups, handed: Handed) -> None:
    """`shrink` on the device."""
    slot = decision.slot
    params, places = _with_gradients(groups, decision.positions)
    if not params:
        return
    scale = brought(handed.grad_scale, slot.scale)
    scale = torch.ones((), device=slot.words.device) if scale is None else scale
    gradients = [p.grad for p in params]
    norm = slot.norm
    is_off = slot.skip_flag != 0.0
    if clip.scope == "unit":
        is_off = is_off | ~norm.isfinite()
    names = [decision.pending.names[place] for place in places]
    _, norms = clip.given.shrink(names, params, gradients, None, scale, is_off)
    kernels.tell_autograd(gradients)
    left = torch.linalg.vector_norm(torch.stack(norms).to(norm.dtype)) / torch.where(norm == 0.0, 1.0, norm)
    is_unclipped = is_off | ~norm.isfinite() | (norm == 0.0) | (left > 1.0 - 1e-6)  # but for rounding
    slot.words[CLIP_COEF].copy_(torch.where(is_unclipped, 1.0, left))


def gradients_with_factors(
    start: int, optimizer: Optimizer, decision: HostDecision | DeviceDecision
) -> list[tuple[torch.Tensor, Any]]:
    """The gradients of one optimizer, whose first parameter has the index `start`, each with its factor; None if it
    came after the decision."""
    factors: Any = decision.factors
    known = dict(zip(range(len(factors)) if decision.positions is None else decision.positions, factors))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [(p.grad, known.get(i)) for i, p in enumerate(params, start) if p.grad is not None]
