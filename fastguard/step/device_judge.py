"""Steps that are measured and decided on a device: what is enqueued there, and what arrives on the host."""

from __future__ import annotations

import logging
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import kernels
from .._device import Courier
from ..clip import CheckedPolicy, ClipPolicy
from ..clip.limits import row_norms
from ..kernels.slots import StepOptions, read_slot
from ..observers.observer import held_weakly
from ..records.slot import HEADER_WORDS, NORM
from .clipping import DeviceClipping, scale_each_on_device
from .decision import DeviceDecision
from .device import DevicePlan, Devices, PendingStep, PendingSteps, merge_rows
from .engines import Engine
from .fused import ContiguousGrads, FusedFlags, Momentum, takes_flags
from .ledger import Ledger
from .ring import OVER, TABLE, JudgedStep
from .run import Member, Run
from .scalars import is_loss, rate_of
from .scaler import Handed
from .skip import Skip, Undo, UndoPair

_NUM_CHECKED = 16  # lists of gradients whose strides are known

_log = logging.getLogger("fastguard")
_plan_of = operator.itemgetter(1)  # of a DevicePlan


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of one optimizer, flat, without missing ones."""
    return kernels.collect_gradients([group["params"] for group in optimizer.param_groups])[0]


class DeviceJudge:
    """Judges steps without waiting for the device.

    Cost: two launches, one more to scale; no sync and no allocation for fused optimizers. Others wait for the skip flag
    of a step that may be skipped, and all wait for a clip policy without limits.

    Attributes:
        pending: steps on their way.
        devices: those that gradients have been on.
    """

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        when_behind: str,
        clip_through: str,
        engine_for: Callable[[torch.device], type[Engine] | None],
        courier_for: Callable[[torch.device], Courier],
        device_of: Callable[[torch.Tensor], torch.device] | None,
        is_capturing: Callable[[torch.device], bool],
    ) -> None:
        self._run, self._ledger = run, ledger
        self._clips_through_scale = clip_through == "scale"
        self.is_capturing = is_capturing
        self.pending = PendingSteps(held_weakly(self._complete), when_behind)
        self.devices = Devices(engine_for, courier_for, device_of)
        self._momentum = Momentum()
        self._newest = self._newest_complete = -1
        self._checked: OrderedDict[tuple[int, ...], tuple[Any, bool]] = OrderedDict()
        self._flags: list[torch.Tensor] = []  # of optimizers that follow another's decision
        self._has_warned = False

    @property
    def lag(self) -> int:
        """Steps taken since the newest complete one."""
        return self._newest - self._newest_complete

    def decide(
        self, member: Member, optimizer: torch.optim.Optimizer, handed: Handed, first: bool, loss: Any
    ) -> DeviceDecision:
        """Enqueues measuring and deciding. Waits for the oldest pending step if all slots are in use."""
        run = self._run
        optimizers = [optimizer] if len(run.members) == 1 else run.optimizers()
        groups = [group["params"] for one in optimizers for group in one.param_groups]
        if groups and groups[0] and self.is_capturing(groups[0][0].device):
            raise RuntimeError(
                "a guarded step cannot be captured in a graph: its replays would tell the guard nothing. Capture the "
                "forward and backward pass, and call optimizer.step() after the replay; or detach the guard before."
            )
        self._begin_step(first)
        if self._ledger.skips.due is not None:
            self._ledger.raise_due()
        decision = self._enqueue(optimizers, groups, handed, first)
        pending = decision.pending
        try:
            clipping = DeviceClipping(run.clip, decision)
            self.measure(decision, handed)
            clipping.follow(groups, handed)
            if clipping.needs_norm and run.clip is not None:
                self._ask_policy(run.clip, decision)
            pending.note("lr", rate_of(optimizers[0]))
            if loss is not None and is_loss(loss):
                pending.note("loss", loss)
            if run.buffers is not None:
                run.follow_buffers(pending.step, decision.slot.skip_flag if decision.may_skip else False)
        except BaseException:
            self.pending.give_back(pending)
            raise
        self.pending.current = pending
        run.step, self._newest = pending.step + 1, pending.step
        return decision

    def _begin_step(self, first: bool) -> None:
        if first and self.pending.current is None:  # it is complete, and was held for more to come
            self._run.ring.is_over = True
            self._ledger.open()
        if self.pending.begin_step(is_over=first):
            self._newest_complete = self._run.step - 1

    def _enqueue(
        self, optimizers: Sequence[torch.optim.Optimizer], groups: list[list[torch.Tensor]], handed: Handed, first: bool
    ) -> DeviceDecision:
        """A pending step, and plans for the gradients of `groups`."""
        run, devices = self._run, self.devices
        gradients, positions, fingerprint = kernels.collect_gradients(groups)
        key = (fingerprint, None if positions is None else tuple(positions))
        names = run.known_names if fingerprint == run.fingerprint else run.names(fingerprint)
        plans = devices.plan(gradients, key, groups)
        contiguous = {}
        fused = list(map(takes_flags, optimizers))
        if True in fused and self._needs_contiguous(plans, optimizers, fused):
            contiguous = {i: ContiguousGrads(optimizers[i]) for i, takes in enumerate(fused) if takes}
            gradients, positions, _ = kernels.collect_gradients(groups)
            plans = devices.plan(gradients, key, groups)
        if devices.need_slots(sum(map(len, groups))):
            self.pending.rebuild(*devices.make_slots())
        pending = self.pending.take()
        step, is_scaled = run.step if first else run.step - 1, handed.grad_scale is not None
        pending.start(step, first=first, from_scaler=handed.from_scaler, is_scaled=is_scaled)
        pending.names, pending.positions = names, positions
        pending.slot = pending.slots[plans[0].context.index]
        for context, _, places in plans:
            pending.places[context.index] = places
        may_skip = run.skip_nonfinite or handed.found_inf is not None
        decision = DeviceDecision(pending, plans, handed.grad_scale, may_skip=may_skip)
        decision.contiguous, decision.fused = contiguous, fused
        if len(run.members) == 1:
            decision.gradients = gradients
        return decision

    def measure(self, decision: DeviceDecision, handed: Handed) -> None:
        """Enqueues what fills the slots."""
        pending, plans = decision.pending, decision.plans
        slots, options = [], []
        for context, plan, _ in plans:
            slot = pending.slots[context.index]
            own = StepOptions(
                pending.step,
                None if handed.grad_scale is None else context.bring(handed.grad_scale, slot.scale),
                None if handed.found_inf is None else context.bring(handed.found_inf, slot.found_inf),
                decision.max_norm,
                self._run.skip_nonfinite,
                handed.fused,
                decision.trigger,
            )
            slots.append(slot)
            options.append(own)
            context.engine.measure(plan, slot, own, decide=len(plans) == 1)
        pending.keep = (handed.grad_scale, handed.found_inf)
        if len(plans) > 1:
            home = plans[0].context
            home.engine.decide(self.devices.gather([slot.total for slot in slots], home), slots[0], options[0])
            for slot in slots[1:]:
                slot.decided.copy_(slots[0].decided, non_blocking=True)

    def _needs_contiguous(
        self, plans: list[DevicePlan], optimizers: Sequence[torch.optim.Optimizer], fused: Sequence[bool]
    ) -> bool:
        key = tuple(map(id, map(_plan_of, plans)))
        known = self._checked.get(key)
        if known is not None:
            return known[1]
        needed = any(ContiguousGrads.is_needed(o) for o, takes in zip(optimizers, fused) if takes)
        engines_plans = [plan for _, plan, _ in plans]
        if self.devices.remembers_plans and all(plan.is_plain for plan in engines_plans):
            self._checked[key] = (engines_plans, needed)  # held, so that no other plans get these ids
            if len(self._checked) > _NUM_CHECKED:
                self._checked.popitem(last=False)
        return needed

    def _ask_policy(self, policy: ClipPolicy, decision: DeviceDecision) -> None:
        """Gives the norm to a clip policy without limits. Synchronises."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "clip policy %r decides on the host: one sync a step. One with `limits` decides on the device.", policy
            )
        _, norm, _, factor = decision.slot.words[:4].tolist()
        coefficient = policy.coefficient(norm) if math.isfinite(norm) else 1.0
        coefficient = 1.0 if decision.may_skip and decision.skips() else coefficient
        decision.pending.clip_coef, decision.factor = coefficient, factor * coefficient  # the slot's only unscales

    def act(
        self, member: Member, optimizer: torch.optim.Optimizer, handed: Handed, decision: DeviceDecision, follows: bool
    ) -> Undo | Skip | None:
        """Enqueues what a decision means for one optimizer.

        Args:
            follows: the decision was made when another optimizer stepped.
        """
        repairs: Undo | None = decision.contiguous.get(member.index)
        slot = decision.slot
        fused = decision.fused[member.index] and slot.words.device.type != "mps"  # whose kernels take no flags
        attributes: dict[str, Any] = {}
        if decision.may_skip or handed.found_inf is not None:
            own_flag = handed.found_inf if follows else None
            if fused and (
                not isinstance(optimizer, torch.optim.SGD) or self._momentum.is_safe(optimizer, self.devices.key)
            ):
                flag = slot.skip_flag if own_flag is None else self._merged_flag(member, slot.skip_flag, own_flag)
                attributes["found_inf"] = flag
            elif decision.skips() or (own_flag is not None and bool(own_flag)):
                return Skip(repairs)
        if decision.factor is not None:
            if decision.factor != 1.0:
                kernels.run_scale(gradients_of(optimizer), decision.factor, self._run.backend)
        elif (decision.is_scaled and not handed.fused) or decision.max_norm != math.inf:
            # An optimizer that divides by the loss scale anyway clips for nothing.
            if fused and (not self._clips_through_scale or (decision.is_scaled and handed.fused)):
                attributes["grad_scale"] = slot.divisor
            else:
                self._scale(optimizer, decision)
        if decision.factors is not None:
            scale_each_on_device(self._run.start_of(member), optimizer, decision)
        if not attributes:
            return repairs
        flags = FusedFlags(optimizer, attributes)
        return flags if repairs is None else UndoPair(repairs, flags)

    def _merged_flag(self, member: Member, skip_flag: torch.Tensor, own_flag: Any) -> torch.Tensor:
        """The skip flag of an optimizer that follows a decision and has a flag of its scaler."""
        index, device = member.index, skip_flag.device
        while len(self._flags) <= index or self._flags[index].device != device:
            self._flags[index:] = [torch.zeros((), dtype=torch.float32, device=device)]
        own = own_flag if isinstance(own_flag, torch.Tensor) else torch.full((), float(own_flag), device="cpu")
        return torch.logical_or(skip_flag, own.to(device, non_blocking=True), out=self._flags[index])

    def _scale(self, optimizer: torch.optim.Optimizer, decision: DeviceDecision) -> None:
        """Enqueues the scaling of the gradients of one optimizer by the factor in the slot."""
        plans, gradients = decision.plans, decision.gradients
        is_plain = plans[0].plan.is_plain if len(plans) == 1 else all(plan.is_plain for _, plan, _ in plans)
        if gradients is None or not is_plain:
            gradients = gradients_of(optimizer) if gradients is None else gradients
            plans = self.devices.plan_writable(gradients) if gradients else []
        if gradients:
            for context, plan, _ in plans:
                context.engine.scale(plan, decision.pending.slots[context.index])
            kernels.tell_autograd(gradients)

    def _complete(self, pending: PendingStep) -> None:
        """Puts a step that has arrived into the ring."""
        ring, ledger = self._run.ring, self._ledger
        if not pending.first and ring.is_held and ring.step == pending.step:
            self._complete_again(pending)
            return
        if pending.first and ring.is_over:
            if ring.num_open >= ring.limit:
                ledger.open()
        else:
            ledger.deliver()
        finite, skipped = ring.arrive_as_left(pending)
        if len(pending.slots) > 1:
            ring.found[TABLE] = _rows(pending)
        if pending.limits is not None:
            self._inform_policy(pending, finite)
        pending.keep = ()
        self._newest_complete = pending.step
        ring.is_over = pending.is_over
        if ledger.fetch is not None:
            ledger.fetch()
        if ledger.seen is not None:
            ledger.seen()
        if skipped or not finite:
            ledger.enter(is_bad=not finite, from_scaler=pending.from_scaler)
        if pending.is_over and ring.num_open >= ring.limit:
            ledger.open()

    def _complete_again(self, pending: PendingStep) -> None:
        """Keeps the first bad gradients of several evaluations, and the decision of the last one."""
        ring = self._run.ring
        home = pending.slots.index(pending.slot)
        found = read_slot(pending.parcels[home].copy, len(pending.places[home]))
        is_bad = not math.isfinite(found.norm) and ring.is_finite
        if is_bad:
            coefficient = found.clip_coef if pending.clip_coef is None else pending.clip_coef
            scale = found.loss_scale if pending.is_scaled else None
            judged = JudgedStep(pending.step, _rows(pending), pending.positions, pending.names, found.norm)
            judged.clip_coef, judged.skipped, judged.loss_scale = coefficient, found.skipped, scale
            ring.arrive(judged, again=True)
            for name in pending.known.keys() | pending.noted:
                ring.note(name, found.notes[name] if name in pending.noted else pending.known[name])
        else:
            ring.mark_skipped(found.skipped)
        pending.keep = ()
        self._newest_complete = pending.step
        ring.is_over = pending.is_over
        ring.add_overhead(pending.overhead_s)
        self._ledger.enter(is_bad=is_bad, from_scaler=pending.from_scaler)

    def _inform_policy(self, pending: PendingStep, finite: bool) -> None:
        """Has the clip policy observe a step, and keeps which groups were above their triggers."""
        ring, limits, clip = self._run.ring, pending.limits, self._run.clip
        if not isinstance(clip, CheckedPolicy) or limits is None:
            return
        norm, over = ring.words[HEADER_WORDS * ring.newest + NORM], None
        if finite and limits.norms is not None and limits.norms is clip.norms:
            over = limits.apply(norm, row_norms(ring.found[TABLE]), pending.positions).over or None
            ring.found[OVER] = over
        clip.observe_step(norm, ring.loss, limits)
        if finite and self._ledger.sinks and (over or clip.scope == "group"):
            ring.limit = min(ring.limit, ring.num_open)  # a line of a log does not have the groups


def _rows(pending: PendingStep) -> bytearray:
    tables = [read_slot(p.copy, len(places)).rows for p, places in zip(pending.parcels, pending.places)]
    return tables[0] if len(tables) == 1 else merge_rows(tables, pending.places)
