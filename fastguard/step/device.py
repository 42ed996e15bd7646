"""What measures on a device, the steps that are on their way from there to the host, and the decisions on them. The
engine is Triton's kernels, or plain torch operations. The CPU's own way is `kernels`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim import Optimizer

from .. import kernels
from .._device import Courier, is_capturing
from ..clip import CheckedPolicy, ClipPolicy, Limits, limits_of, trigger_of
from ..clip.limits import SHRINKS, factors_of, row_norms
from ..errors import UnsupportedTensorError
from ..kernels import triton
from ..kernels.reference import scale_by_, tensor_columns, wide_dtype
from ..kernels.slots import Slot, StepOptions, make_slots
from ..kernels.tensors import plain
from ..observers.observer import while_alive
from ..records.columns import INDEX, POWERS
from ..records.slot import CLIP_COEF, HEADER_WORDS, NARROW, NORM
from .ledger import Ledger
from .ring import OVER, TABLE
from .run import Member, Run
from .scalars import is_loss, rate_of
from .skip import ContiguousGrads, FusedFlags, Momentum, Skip, Undo, takes_flags, with_other_strides
from .wrappers import Handed

_GPUS = ("cuda", "xpu", "mps")
NUM_PENDING = 16


def brought(value: Any, word: torch.Tensor) -> torch.Tensor | None:
    """`value` as a float32 on the device of `word`: itself, or a copy in `word`. Does not synchronise."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or (value.is_cpu and not word.is_cpu):
        return word.fill_(float(value))
    if value.dtype is torch.float32 and value.device == word.device:
        return value
    return word.copy_(value.detach().reshape(()), non_blocking=True)


class PendingStep:
    """A slot on the device, and what the host knows about the step in it."""

    def __init__(self, slot: Slot, courier: Courier) -> None:
        self.slot, self.courier = slot, courier
        self.parcel = courier.parcel(slot.words)  # carries the slot to the host
        self.start(0, from_scaler=False, is_scaled=False)

    def start(self, step: int, *, from_scaler: bool, is_scaled: bool) -> None:
        """Forgets the step before. `is_scaled`: the gradients carry a loss scale; a scaler may have removed it."""
        self.step, self.from_scaler, self.is_scaled = step, from_scaler, is_scaled
        self.is_over = False  # neither another evaluation nor a loss comes to this step
        self.names: tuple[str, ...] = ()  # of all parameters
        self.positions: list[int] | None = None  # which of them had a gradient, None for all
        self.num_rows = 0
        self.limits: Limits | None = None  # of the clip policy, if it has any
        self.trigger: float | None = None  # that of all gradients, for the record
        self.known: dict[str, float | None] = {}  # losses and learning rate, as far as the host has them
        self.noted: set[str] = set()  # names of those in the slot
        self.overhead_s = 0.0
        self.keep: tuple[Any, ...] = ()  # what must live until the device is done
        if self.courier.has_streams:
            self.parcel.stream = self.courier.current_stream()

    def note(self, name: str, value: Any) -> None:
        """Adds a number. Copies a tensor on a device there, without a sync."""
        if isinstance(value, torch.Tensor) and (self.slot.words.is_cpu or not value.is_cpu):
            self.slot.notes[name].copy_(value.detach().reshape(()), non_blocking=True)
            self.noted.add(name)
        else:
            self.known[name] = None if value is None else float(value)
            self.noted.discard(name)


class PendingSteps:
    """Hands out pending steps, submits them when their step is over, and completes them in order."""

    def __init__(self, complete: Callable[[PendingStep], None]) -> None:
        self._complete = complete
        self.free: list[PendingStep] = []
        self.submitted: deque[PendingStep] = deque()
        self.current: PendingStep | None = None  # the step just taken, which may still be added to

    def begin_step(self) -> bool:
        """Submits the current step as another begins, and completes those that have arrived; whether all have."""
        if self.current is not None:
            self.current.is_over = True
        self._submit()
        while self.submitted and self.submitted[0].courier.has_arrived(self.submitted[0].parcel):
            self._pop()
        return not self.submitted

    def take(self) -> PendingStep:
        """A pending step to fill. Waits for the oldest one if all are in use."""
        while not self.free:
            self._wait_for_oldest()
        return self.free.pop()

    def complete_all(self) -> None:
        """Completes every step, the current one too. Waits."""
        self._submit()
        while self.submitted:
            self._wait_for_oldest()

    def _submit(self) -> None:
        pending, self.current = self.current, None
        if pending is not None:
            pending.courier.send(pending.parcel)
            self.submitted.append(pending)

    def _wait_for_oldest(self) -> None:
        self.submitted[0].courier.wait(self.submitted[0].parcel)
        self._pop()

    def _pop(self) -> None:
        pending = self.submitted.popleft()
        self._complete(pending)
        self.free.append(pending)


@dataclass
class DeviceDecision:
    """A decision on a device, in `slot`. The host has not waited for it."""

    pending: PendingStep
    slot: Slot
    positions: Sequence[int] | None  # as in `judge.HostDecision`, and `taken`
    plan: Any  # the engine's, of all gradients
    gradients: list[torch.Tensor] | None  # these, unless other optimizers have some of them
    scale: bool  # the gradients carried a loss scale; to compare the scales would take a sync
    may_skip: bool  # the skip flag has to be looked at
    fused: list[bool]  # for each member, whether it takes skip flag and divisor on the device
    contiguous: dict[int, ContiguousGrads]  # copies of gradients for fused optimizers, by the index of their member
    max_norm: float = math.inf  # as in `StepOptions`, and `trigger`
    trigger: float = -1.0
    factors: torch.Tensor | None = None  # one for each gradient on top, on the device
    taken: set[int] = field(default_factory=set)
    _skips: bool | None = None

    def skips(self) -> bool:
        """Whether the step is skipped. Synchronises, once."""
        if self._skips is None:
            self._skips = bool(self.slot.skip_flag)
        return self._skips


Groups: TypeAlias = list[list[torch.Tensor]]


class NoEngineError(Exception):
    """No engine can read all of the gradients: some are on another device, say."""


def engine_for(device: torch.device, backend: str) -> type[Engine] | None:
    """What measures on `device` without waiting for it; None where the host may as well compute by itself. On the CPU
    only `backend` "triton" has an engine: interpreted."""
    if device.type == "cpu":
        return triton.Workspace if backend == "triton" else None
    if device.type not in _GPUS or backend == "cpu":
        return None
    chosen = kernels.registry.choose(device, backend)
    return triton.Workspace if chosen.name == "triton" and chosen.accepts(device) else TorchEngine


class TorchPlan(NamedTuple):
    """The tensors themselves: nothing is kept from step to step."""

    tensors: Sequence[torch.Tensor]
    is_plain: bool = True


class TorchEngine:
    """Measures, decides and scales on one device in plain torch operations: the definition of what `triton.Workspace`
    does. It serves devices that Triton does not: Apple's GPUs, old GPUs, and FASTGUARD_BACKEND=reference. Many small
    launches, temporary memory, but no sync."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = wide_dtype(device)
        # A list that became a tensor on the device at each step would be waited for.
        self._powers = torch.tensor(POWERS, dtype=self.dtype, device="cpu").to(device)

    def plan(self, tensors: Sequence[torch.Tensor], *, writable: bool = False) -> TorchPlan:
        """`tensors`, which must all be on this device."""
        for i, tensor in enumerate(tensors):
            if tensor.device != self.device:
                raise UnsupportedTensorError(i, f"must be on {self.device}, got {tensor.device}")
        return TorchPlan(tensors)

    def scale(self, plan: TorchPlan, slot: Slot) -> None:
        """x *= factor, with one rounding; reads and writes the tensors also where the factor is 1."""
        scale_by_(plan.tensors, slot.factor)

    def measure(self, plan: TorchPlan, slot: Slot, options: StepOptions) -> None:
        """Statistics, and a decision, into `slot`. Cost: about a dozen launches and passes a tensor, and a float64 copy
        of at most 2^20 elements at a time."""
        norm_sq = torch.zeros((), dtype=self.dtype, device=self.device)
        scale = inverse = torch.ones_like(norm_sq)
        if options.scale is not None:  # rounded as `GradScaler.unscale_` rounds it
            scale = options.scale.to(self.dtype)
            inverse = scale.reciprocal().float().to(self.dtype)
        if plan.tensors:
            rows = torch.stack([tensor_columns(plain(t, i)) for i, t in enumerate(plan.tensors)])
            rows = rows * inverse**self._powers
            slot.rows[: len(rows)].copy_(rows)
            sums = rows.sum(0)
            norm_sq = sums[INDEX["sum_sq"]].masked_fill(sums[INDEX["num_infs"]] > 0, math.inf)
            norm_sq = norm_sq.masked_fill(sums[INDEX["num_nans"]] > 0, math.nan)
        slot.step.fill_(options.step)
        slot.total.copy_(norm_sq)
        norm = norm_sq.sqrt()
        finite = norm.isfinite()
        coefficient = factors_of(norm, options.trigger, options.max_norm).masked_fill(~finite, 1.0)
        skip = ~finite if options.skip_nonfinite else torch.zeros_like(finite)
        if options.max_norm == 0.0:
            skip = skip | (finite & (norm > options.trigger))
        if options.found_inf is not None:
            skip = skip | (options.found_inf != 0)  # a NaN flag is a flag
        coefficient = coefficient.masked_fill(skip, 1.0)
        factor = coefficient
        if not options.unscales_itself:
            factor = torch.where(skip, coefficient, coefficient * inverse)
        slot.words[NORM:NARROW].copy_(torch.stack([norm, coefficient, factor, scale]))
        slot.skip_flag.copy_(skip)
        slot.divisor.copy_(scale / coefficient)


Engine: TypeAlias = TorchEngine | triton.Workspace


def with_gradients(groups: Groups, positions: Sequence[int] | None) -> tuple[list[torch.Tensor], Sequence[int]]:
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
    params, places = with_gradients(groups, decision.positions)
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


def gradients_with_factors(start: int, optimizer: Optimizer, decision: Any) -> list[tuple[torch.Tensor, Any]]:
    """The gradients of one optimizer, whose first parameter has the index `start`, each with its factor; None if it
    came after the decision."""
    factors: Any = decision.factors
    known = dict(zip(range(len(factors)) if decision.positions is None else decision.positions, factors))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [(p.grad, known.get(i)) for i, p in enumerate(params, start) if p.grad is not None]


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
            kind = engine_for(device, run.backend)
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
        needs_copies = plan.needs_copies if isinstance(plan, triton.Plan) else None
        if True in fused and needs_copies is None:
            needs_copies = any(takes and next(with_other_strides(o), None) for o, takes in zip(optimizers, fused))
            if isinstance(plan, triton.Plan):
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
