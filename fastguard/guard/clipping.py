"""What the clip policy makes of one step: on the host, and on a device that nobody waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import kernels
from ..stats.columns import COLUMNS, INDEX
from ..stats.slot import CLIP_COEF
from .decision import Decision
from .engines import ElsewhereError
from .flight import Flight
from .policies import ClipPolicy, GivenPolicy
from .policies.ruling import Ruling, row_norms, rule
from .run import Member
from .scaler import Handed

SHRINKS = ("element", "unit")  # scopes of policies that see to the gradients themselves


class HostClipping:
    """Asks the policy about a step whose norm the host knows.

    Attributes:
        ruling: what it says.
        trigger: for the record; None without one.
        has_shrunk: it has seen to the gradients itself.
        has_groups: there is more to tell than a line of a log has.
    """

    def __init__(self, clip: ClipPolicy | None, norm: float, table: bytearray, positions: Sequence[int] | None) -> None:
        self._clip = clip if isinstance(clip, GivenPolicy) else None
        self._norm, self._table, self._positions = norm, table, positions
        self._asked: tuple[Any, ...] | None = None
        self.ruling, self.has_shrunk = Ruling(), False
        self.has_groups = self._clip is not None and self._clip.scope == "group"
        finite = math.isfinite(norm)
        limit = None if clip is None else clip.limit
        if clip is not None and limit is None and self._clip is not None:
            self._asked = self._clip.ask()
        self.trigger = trigger_of(clip, self._asked)
        if clip is None or not finite:
            return
        if self._asked is not None:
            self.ruling = rule(self._asked, norm, row_norms(table), positions)
        elif clip.scope not in SHRINKS:
            self.ruling = Ruling(clip.coefficient(norm))

    def tell(self, loss: float | None) -> None:
        """Has the policy observe the step."""
        if self._clip is not None and self._asked is not None:
            if math.isfinite(self._norm):
                self._clip.tell(self._norm, loss)
            else:
                self._clip.pass_over()

    def shrink(
        self, groups: list[list[torch.Tensor]], names: Sequence[str], inverse: float, backend: str
    ) -> Ruling | None:
        """Has a policy of elements or units see to the gradients of a step that is taken; None for any other."""
        clip, norm = self._clip, self._norm
        if clip is None or clip.scope not in SHRINKS or (clip.scope == "unit" and not math.isfinite(norm)):
            return None
        params, places = present(groups, self._positions)
        gradients = [p.grad for p in params]
        words = memoryview(self._table).cast("d")
        infinite = words[INDEX["num_infs"] :: len(COLUMNS)].tolist()
        highest = words[INDEX["abs_max"] :: len(COLUMNS)].tolist()
        rows = [(n, math.inf if i else h) for n, h, i in zip(row_norms(self._table), highest, infinite, strict=True)]
        its_names = [names[place] for place in places]
        over, norms = clip.given.shrink(its_names, params, gradients, rows, 1.0 / inverse, None)
        self.has_shrunk = True
        if not over or not math.isfinite(norm):
            return Ruling()
        kernels.tell_autograd([gradients[i] for i in over])
        left = math.sqrt(sum((size / norm) ** 2 for size in norms)) if norm else 1.0
        return Ruling(min(1.0, left), False, None, tuple(places[i] for i in over))


def trigger_of(clip: ClipPolicy | None, asked: tuple[Any, ...] | None) -> float | None:
    """The norm above which all gradients together are scaled, for the record; None without one."""
    if clip is None:
        return None
    given: Any = clip.given if isinstance(clip, GivenPolicy) else clip
    trigger: float | None
    if asked is not None:
        trigger = asked[0]
        if clip.scope == "model" and len(asked) > 2 and asked[2][1] is not None:
            trigger = asked[2][1][0] if asked[2][1][0] >= 0.0 else asked[2][2][0]
    else:
        trigger = clip.limit if clip.scope == "model" else given.trigger
    return trigger if trigger is not None and trigger < math.inf else None


def present(
    groups: list[list[torch.Tensor]], positions: Sequence[int] | None
) -> tuple[list[torch.Tensor], Sequence[int]]:
    """The parameters that had a gradient, and where they stand in the whole list."""
    params = [p for group in groups for p in group]
    places = range(len(params)) if positions is None else positions
    return [params[i] for i in places], places


class DeviceClipping:
    """The same where the numbers are on a device: limits go there, and nothing comes back before the record does.

    Attributes:
        shrinks: units or elements are clipped.
        must_be_asked: the policy wants the norm as a number.

    Raises:
        ElsewhereError: groups, tensors, units or elements are clipped, of gradients on several devices.

    Cost: limits of all gradients travel among the arguments of a launch. Those of groups or tensors are an upload and
    some twenty small launches, and a launch a tensor to scale, which writes all of them. No sync.
    """

    def __init__(self, clip: ClipPolicy | None, flight: Flight, decision: Decision) -> None:
        self._clip = clip if isinstance(clip, GivenPolicy) else None
        self._flight, self._decision = flight, decision
        limit = None if clip is None else clip.limit
        asked = flight.asked = self._clip.ask() if self._clip is not None and limit is None else None
        is_plain = clip is None or (limit is not None and clip.scope == "model")
        flight.trigger = (None if limit == math.inf else limit) if is_plain else trigger_of(clip, asked)
        self.shrinks = clip is not None and clip.scope in SHRINKS
        self.must_be_asked = clip is not None and limit is None and asked is None and not self.shrinks
        if (self.shrinks or (asked is not None and len(asked) > 2)) and len(decision.plans) > 1:
            raise ElsewhereError("groups, tensors, units and elements are clipped on one device at a time")
        if limit is not None:
            decision.max_norm = limit
        elif asked is not None and asked[0] < math.inf:
            decision.trigger, decision.max_norm = asked[:2]
            decision.may_skip = decision.may_skip or decision.max_norm == 0.0

    def follow(self, groups: list[list[torch.Tensor]], handed: Handed) -> None:
        """Queues what is to follow when the step is measured."""
        asked = self._flight.asked
        with torch.no_grad():
            if self.shrinks:
                self._shrink(groups, handed)
            elif asked is not None and len(asked) > 2 and asked[2][1] is not None:
                self._rule(asked[2])

    def _rule(self, parts: tuple[Any, ...]) -> None:
        decision, flight, slot = self._decision, self._flight, self._decision.slot
        assigned, triggers, targets, norms = parts
        count, size = len(flight.places[0]), len(norms)
        device, dtype = slot.words.device, slot.words.dtype
        places = range(count) if flight.positions is None else flight.positions
        own = list(places) if assigned is None else [assigned[place] for place in places]
        is_pinned = device.type == "cuda"
        limits = torch.tensor([triggers.tolist(), targets.tolist()], dtype=dtype, device="cpu", pin_memory=is_pinned)
        trigger, target = limits.to(device, non_blocking=True)
        index = torch.tensor(own, device="cpu", pin_memory=is_pinned).to(device, non_blocking=True)
        each = slot.rows[:count, INDEX["finite_norm"]]
        norm = slot.decided[0]
        shares = (each / torch.where(norm == 0.0, 1.0, norm)).nan_to_num(0.0)
        if assigned is None:
            found = torch.zeros(size, dtype=dtype, device=device).index_copy_(0, index, each)
        else:  # a product with ones and zeros adds in a fixed order, as index_add_ does not
            member = (index == torch.arange(size, device=device).unsqueeze(1)).to(dtype)
            found = norm * (member @ shares.square()).sqrt()
        is_skipped = slot.skip_flag != 0.0
        over = (found > trigger) & norm.isfinite() & ~is_skipped
        beside = (trigger < 0.0).to(dtype) * 1e-6
        factor = torch.where(over, (target / (found + beside)).clamp(max=1.0), 1.0)
        dropped = (over & (target == 0.0)).any()
        is_skipped = is_skipped | dropped
        slot.skip_flag.copy_(is_skipped)
        factor = torch.where(is_skipped, 1.0, factor)
        factors = torch.cat([factor, torch.ones(1, dtype=dtype, device=device)])[index]
        left = (shares * factors).square().sum().sqrt().clamp(max=1.0)
        slot.words[CLIP_COEF].copy_(torch.where((factors != 1.0).any(), left, 1.0))
        decision.factors = factors
        decision.may_skip = decision.may_skip or 0.0 in targets

    def _shrink(self, groups: list[list[torch.Tensor]], handed: Handed) -> None:
        clip, slot, flight = self._clip, self._decision.slot, self._flight
        assert clip is not None
        params, places = present(groups, flight.positions)
        if not params:
            return
        lane = self._decision.plans[0][0]
        brought = None if handed.grad_scale is None else lane.bring(handed.grad_scale, slot.scale)
        scale = torch.ones((), device=slot.words.device) if brought is None else brought
        names = [flight.names[place] for place in places]
        gradients = [p.grad for p in params]
        is_off = slot.skip_flag != 0.0
        if clip.scope == "unit":
            is_off = is_off | ~slot.decided[0].isfinite()
        _, norms = clip.given.shrink(names, params, gradients, None, scale, is_off)
        kernels.tell_autograd(gradients)
        norm = slot.decided[0]
        left = torch.linalg.vector_norm(torch.stack(norms).to(norm.dtype)) / torch.where(norm == 0.0, 1.0, norm)
        is_rounding = left > 1.0 - 1e-6
        untold = is_off | ~norm.isfinite() | (norm == 0.0) | is_rounding
        slot.words[CLIP_COEF].copy_(torch.where(untold, 1.0, left))


def scale_each_on_device(
    member: Member, optimizer: torch.optim.Optimizer, members: Sequence[Member], decision: Decision
) -> None:
    """Queues the scaling of each gradient of one optimizer by its factor."""
    assert decision.factors is not None
    start = sum(len(group["params"]) for one in members[: member.index] for group in one.optimizer.param_groups)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    factors = decision.factors.unbind()
    positions = range(len(factors)) if decision.positions is None else decision.positions
    known = dict(zip(positions, factors, strict=True))
    pairs = [(p.grad, known[start + i]) for i, p in enumerate(params) if p.grad is not None and start + i in known]
    if pairs:
        gradients = [gradient.detach() for gradient, _ in pairs]
        with torch.no_grad():
            torch._foreach_mul_(gradients, [factor for _, factor in pairs])
        kernels.tell_autograd([gradient for gradient, _ in pairs])
