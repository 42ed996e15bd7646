"""Steps that are measured and decided on a device: what is enqueued there, and what arrives on the host."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from .. import kernels
from .._device import Courier, is_capturing
from ..clip import CheckedPolicy, limits_of, trigger_of
from ..clip.limits import row_norms
from ..errors import UnsupportedTensorError
from ..kernels.slots import StepOptions, make_slots
from ..kernels.triton import Plan
from ..observers.observer import while_alive
from ..records.slot import HEADER_WORDS, NORM
from . import device as devices
from .clipping import Groups, clip_on_device, gradients_with_factors
from .device import NUM_PENDING, DeviceDecision, Engine, NoEngineError, PendingStep, PendingSteps, brought
from .ledger import Ledger
from .ring import OVER, TABLE
from .run import Member, Run
from .scalars import is_loss, rate_of
from .skip import ContiguousGrads, FusedFlags, Momentum, Skip, Undo, takes_flags, with_other_strides
from .wrappers import Handed


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The gradients of one optimizer, flat, without missing ones."""
    return kernels.collect_gradients([group["params"] for group in optimizer.param_groups])[0]


class DeviceJudge:
    """Judges steps without waiting for the device, where all gradients are on one. Cost: two launches, one more to
    scale; no sync and no allocation for fused optimizers. Others wait for the skip flag of a step that may be
    skipped."""

    def __init__(self, run: Run, ledger: Ledger, clip_through: str) -> None:
        self._run, self._ledger = run, ledger
        self._clips_through_scale = clip_through == "scale"
        self.pending = PendingSteps(while_alive(self._complete))
        self._courier_for = Courier
        self.engine: Engine | None = None  # of the device that gradients were on last
        self._device: torch.device | None = None
        self._num_rows = -1  # of the slots
        self._key: Any = None  # of the newest gradients: another where these belong to other parameters
        self._momentum = Momentum()
        self.newest = self.newest_complete = -1

    def decide(self, optimizer: Optimizer, handed: Handed, loss: Any) -> DeviceDecision:
        """Enqueues measuring and deciding. Waits for the oldest pending step if all slots are in use."""
        run = self._run
        optimizers = [optimizer] if len(run.members) == 1 else run.optimizers()
        groups = [group["params"] for one in optimizers for group in one.param_groups]
        params = groups[0] or next(filter(None, groups), None)
        if not params:
            raise NoEngineError("no parameters")
        device = params[0].device
        if is_capturing(device):
            raise RuntimeError(
                "a guarded step cannot be captured in a graph: its replays would tell the guard nothing. Capture the "
                "forward and backward pass, and call optimizer.step() after the replay; or detach the guard before."
            )
        if self.pending.current is None:  # it is complete, and was held for more to come
            run.ring.is_over = True
            self._ledger.open()
        if self.pending.begin_step():
            self.newest_complete = run.step - 1
        if self._ledger.skips.due is not None:
            self._ledger.raise_due()
        engine = self.engine
        if engine is None or device != self._device:
            kind = devices.engine_for(device, run.backend)
            if kind is None:
                raise NoEngineError(f"no engine for {device}")
            self.engine = engine = kind(device)
            self._device, self._num_rows = device, -1
        decision = self._enqueue(engine, optimizers, groups, handed)
        pending = decision.pending
        try:
            limits = pending.limits = limits_of(run.clip)
            pending.trigger = trigger_of(run.clip, limits)
            if limits is not None and limits.trigger < math.inf:
                decision.trigger, decision.max_norm = limits.trigger, limits.target
                decision.may_skip = decision.may_skip or decision.max_norm == 0.0
            slot, pending.keep = decision.slot, (handed.grad_scale, handed.found_inf)
            scale, found_inf = brought(handed.grad_scale, slot.scale), brought(handed.found_inf, slot.found_inf)
            decided = decision.max_norm, run.skip_nonfinite, handed.fused, decision.trigger
            engine.measure(decision.plan, slot, StepOptions(pending.step, scale, found_inf, *decided))
            clip_on_device(run.clip, decision, groups, handed)
            pending.note("lr", rate_of(optimizers[0]))
            if loss is not None and is_loss(loss):
                pending.note("loss", loss)
            if run.buffers is not None:
                run.follow_buffers(pending.step, slot.skip_flag if decision.may_skip else False)
        except BaseException:
            self.pending.free.append(pending)
            raise
        self.pending.current = pending
        run.step, self.newest = pending.step + 1, pending.step
        return decision

    def _enqueue(self, engine: Engine, optimizers: list[Optimizer], groups: Groups, handed: Handed) -> DeviceDecision:
        """A pending step, and a plan for the gradients of `groups`."""
        run = self._run
        gradients, positions, fingerprint = kernels.collect_gradients(groups)
        self._key = (fingerprint, None if positions is None else tuple(positions))
        names = run.known_names if fingerprint == run.fingerprint else run.names(fingerprint)
        try:
            plan = engine.plan(gradients)
        except UnsupportedTensorError as error:
            raise NoEngineError(str(error)) from error
        contiguous = {}
        fused = list(map(takes_flags, optimizers))
        needs_copies = plan.needs_copies if isinstance(plan, Plan) else None
        if True in fused and needs_copies is None:
            needs_copies = any(takes and next(with_other_strides(o), None) for o, takes in zip(optimizers, fused))
            if isinstance(plan, Plan):
                plan.needs_copies = needs_copies  # the same plan comes back with the same gradients
        if True in fused and needs_copies:
            contiguous = {i: ContiguousGrads(optimizers[i]) for i, takes in enumerate(fused) if takes}
            gradients, positions, _ = kernels.collect_gradients(groups)
            plan = engine.plan(gradients)
        num_rows = sum(map(len, groups))
        if num_rows > self._num_rows:
            self._num_rows = num_rows
            slots = make_slots(engine.device, num_rows, NUM_PENDING, engine.dtype)
            courier = self._courier_for(engine.device)
            self.pending.complete_all()
            self.pending.free = [PendingStep(slot, courier) for slot in slots]
        pending = self.pending.take()
        is_scaled = handed.grad_scale is not None
        pending.start(run.step, from_scaler=handed.from_scaler, is_scaled=is_scaled)
        pending.names, pending.positions = names, positions
        pending.num_rows = len(gradients)
        own = gradients if len(run.members) == 1 else None
        may_skip = run.skip_nonfinite or handed.found_inf is not None
        return DeviceDecision(pending, pending.slot, positions, plan, own, is_scaled, may_skip, fused, contiguous)

    def act(
        self, member: Member, optimizer: Optimizer, handed: Handed, decision: DeviceDecision, follows: bool
    ) -> Undo | Skip | None:
        """Enqueues what a decision means for one optimizer, which `follows` if it was made when another one stepped."""
        repairs: Undo | None = decision.contiguous.get(member.index)
        slot = decision.slot
        fused = decision.fused[member.index] and slot.words.device.type != "mps"  # whose kernels take no flags
        attributes: dict[str, Any] = {}
        if decision.may_skip or handed.found_inf is not None:
            own_flag = handed.found_inf if follows else None
            if fused and (not isinstance(optimizer, torch.optim.SGD) or self._momentum.is_safe(optimizer, self._key)):
                flag = slot.skip_flag
                if own_flag is not None:
                    own = own_flag if isinstance(own_flag, torch.Tensor) else torch.tensor(own_flag, device="cpu")
                    flag = torch.logical_or(flag, own.to(flag.device, non_blocking=True)).to(flag.dtype)
                attributes["found_inf"] = flag
            elif decision.skips() or (own_flag is not None and bool(own_flag)):
                if repairs is not None:
                    repairs.give_back()
                return Skip()
        if (decision.scale and not handed.fused) or decision.max_norm != math.inf:
            # An optimizer that divides by the loss scale anyway clips for nothing.
            if fused and (not self._clips_through_scale or (decision.scale and handed.fused)):
                attributes["grad_scale"] = slot.divisor
            else:
                engine: Any = self.engine
                plan, gradients = decision.plan, decision.gradients
                if gradients is None or not plan.is_plain:
                    gradients = gradients_of(optimizer) if gradients is None else gradients
                    plan = engine.plan(gradients, writable=True)
                if gradients:
                    engine.scale(plan, slot)
                    kernels.tell_autograd(gradients)
        if decision.factors is not None:
            found = gradients_with_factors(self._run.start_of(member), optimizer, decision)
            pairs = [(gradient, factor) for gradient, factor in found if factor is not None]
            if pairs:
                torch._foreach_mul_([gradient.detach() for gradient, _ in pairs], [factor for _, factor in pairs])
                kernels.tell_autograd([gradient for gradient, _ in pairs])
        return FusedFlags(optimizer, attributes, repairs) if attributes else repairs

    def _complete(self, pending: PendingStep) -> None:
        """Puts a step that has arrived into the ring."""
        ring, ledger = self._run.ring, self._ledger
        if ring.is_over:
            ledger.open()
        else:
            ledger.deliver()
        finite, skipped = ring.arrive_as_left(pending)
        limits, clip = pending.limits, self._run.clip
        if limits is not None and isinstance(clip, CheckedPolicy):
            norm, over = ring.words[HEADER_WORDS * ring.newest + NORM], None
            if finite and limits.norms is not None and limits.norms is clip.norms:
                over = limits.apply(norm, row_norms(ring.found[TABLE]), pending.positions).over or None
                ring.found[OVER] = over
            clip.observe_step(norm, ring.loss, limits)
            if finite and ledger.sinks and (over or clip.scope == "group"):
                ledger.want_record()  # a line of a log does not have the groups
        pending.keep = ()
        self.newest_complete = pending.step
        ring.is_over = pending.is_over
        if ledger.fetch is not None:
            ledger.fetch()
        if ledger.seen is not None:
            ledger.seen()
        if skipped or not finite:
            ledger.enter(is_bad=not finite, from_scaler=pending.from_scaler)
        if pending.is_over and ring.num_open >= ring.limit:
            ledger.open()
