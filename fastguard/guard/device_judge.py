"""The judge that never waits for a device: it queues the measuring, the decision and what follows from it.

A step's record is in a slot on the device when the step is over. It is sent to the host when the next step begins, and
delivered by the step that finds it there. What must not wait stays on the device: the skip flag and the factor.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import kernels
from ..kernels.reference_workspace import Question
from ..kernels.slot import Slot, read
from ..stats import StepStats, TensorStats
from ..tools.clipping import ClipPolicy, GlobalNorm
from .courier import Courier, is_capturing
from .engines import Engine
from .fused import Both, HandedOver, Momentum, Straightened, takes_flags
from .lanes import Lane, Lanes
from .ledger import Ledger
from .recorder import check_scalar
from .ring import Entry, Ring
from .scaler import Handed
from .undo import SetAside, Undo

if TYPE_CHECKING:
    from .guard import Guard
    from .hooks import Attachment

_log = logging.getLogger("fastguard")
_NUM_CHECKED = 16  # lists of gradients of which it is remembered how they lie


class _Decision:
    """What was queued for one step; shared by all optimizers under one guard until each has taken its step.

    Attributes:
        is_scaled: whether the gradients carried a loss scale.
        may_skip: whether there is a flag to look at.
        factor: what to multiply by, where the host decided; else it is in the slot.
        plans: of all gradients, one a lane.
        gradients: themselves, where no other optimizer has any.
        straightened: what was done to gradients of fused optimizers, by the id of their attachment.
    """

    def __init__(self, entry: Entry, handed: Handed, may_skip: bool) -> None:
        self.slot = entry.slot
        self.is_scaled = handed.grad_scale is not None
        self.may_skip = may_skip
        self.factor: float | None = None
        self.plans: list[tuple[Lane, Any, Slot]] = []
        self.gradients: list[torch.Tensor] | None = None
        self.straightened: dict[int, Straightened] = {}
        self.taken: set[int] = set()
        self._skips: bool | None = None

    def skips(self) -> bool:
        """Whether the step is skipped. Synchronises, once."""
        if self._skips is None:
            self._skips = bool(self.slot.skip_flag)
        return self._skips


class DeviceJudge:
    """Judges steps whose gradients are on one device or several.

    Cost a step: on the device two launches and one to scale where something may have to be scaled; on the host about
    what it takes to queue them. No sync, no allocation, for fused optimizers. Others wait for one number before a step
    that may be skipped, and all do for a clip policy that is not `GlobalNorm`.

    Args:
        engine_for: the engine for a device, None if there is none.
        courier_for, device_of, is_capturing: for tests.
    """

    def __init__(
        self,
        ledger: Ledger,
        engine_for: Callable[[torch.device], type[Engine] | None],
        when_behind: str,
        clip_through: str,
        courier_for: Callable[[torch.device], Courier] = Courier,
        device_of: Callable[[torch.Tensor], torch.device] | None = None,
        is_capturing: Callable[[torch.device], bool] = is_capturing,
    ) -> None:
        self._ledger = ledger
        self._clips_through_scale = clip_through == "scale"
        self._ring = Ring(self._deliver, when_behind)
        self._lanes = Lanes(engine_for, courier_for, device_of)
        self._is_capturing = is_capturing
        self._momentum = Momentum()
        self._decision: _Decision | None = None
        self._newest, self._delivered = -1, -1  # steps
        # Plans, and whether some gradient lies otherwise than a fused kernel expects.
        self._checked: OrderedDict[tuple[int, ...], tuple[Any, bool]] = OrderedDict()
        self._flags: list[torch.Tensor] = []  # of optimizers that follow another's decision
        self._told_policy = False

    @property
    def lag(self) -> int:
        """Steps taken since the newest record that was delivered."""
        return self._newest - self._delivered

    @property
    def num_dropped(self) -> int:
        """Records that were given up."""
        return self._ring.num_dropped

    def observe(self, loss: Any = None, val_loss: Any = None) -> None:
        """Adds a loss to the step just taken, on the device if it is there."""
        entry = self._ring.current
        if entry is None:  # it was delivered: to the record itself, or there is none
            self._ledger.recorder.observe(loss, val_loss)
            return
        given = {name: value for name, value in (("loss", loss), ("val_loss", val_loss)) if value is not None}
        for name, value in given.items():
            check_scalar(name, value)
        for name, value in given.items():
            entry.note(name, value)

    def add_overhead(self, seconds: float) -> None:
        """Adds time that guarding took to the step just taken."""
        if self._ring.current is not None:
            self._ring.current.overhead_s += seconds
        else:
            self._ledger.recorder.add_overhead(seconds)

    def catch_up(self) -> None:
        """Waits for all records; that of the step just taken can still be added to."""
        self._ring.catch_up()

    def flush(self) -> None:
        """Waits for all records and delivers them."""
        try:
            self._ring.catch_up()
        finally:
            self._ledger.recorder.flush()

    def judge(
        self, guard: Guard, caller: Attachment, optimizer: torch.optim.Optimizer, handed: Handed, first: bool, loss: Any
    ) -> Undo | None:
        """Queues judging the gradients of all optimizers when the first of them steps; the others follow it."""
        decision = self._decision
        follows = False
        if decision is None or not first or id(caller) in decision.taken:
            decision = self._decision = self._decide(guard, handed, first, loss)
        elif decision.is_scaled is not (handed.grad_scale is not None):
            raise RuntimeError(
                "optimizers under one guard must have their gradients scaled alike when they step: got "
                f"{'unscaled' if decision.is_scaled else 'scaled'} ones after "
                f"{'scaled' if decision.is_scaled else 'unscaled'} ones. "
                "Call scaler.unscale_ on all of them, or on none, before."
            )
        else:
            follows = True
        decision.taken.add(id(caller))
        if len(decision.taken) == len(guard._attachments):
            self._decision = None
        return self._act(guard, caller, optimizer, handed, decision, follows)

    def _decide(self, guard: Guard, handed: Handed, first: bool, loss: Any) -> _Decision:
        ledger, ring = self._ledger, self._ring
        optimizers = [a.optimizer for a in guard._attachments]
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        if any(self._is_capturing(params[0].device) for params in groups[:1] if params):
            raise RuntimeError(
                "a guarded step cannot be captured in a graph: its replays would tell the guard nothing. Capture the "
                "forward and backward pass, and call optimizer.step() after the replay; or detach the guard before."
            )
        if ring.current is None and first:
            ledger.recorder.flush()
        ring.settle(is_over=first)
        if ring.is_idle:
            self._delivered = ledger.step - 1
        ledger.raise_due()
        gradients, positions, fingerprint = kernels.collect_gradients(groups)
        key = (fingerprint, None if positions is None else tuple(positions))
        names = guard.names(fingerprint, optimizers, groups)
        parts = self._lanes.plan(gradients, key, groups)
        straightened = {}
        if self._need_straightening([plan for _, plan, _ in parts], optimizers):
            straightened = {id(a): Straightened(a.optimizer) for a in guard._attachments if takes_flags(a.optimizer)}
            gradients, positions, _ = kernels.collect_gradients(groups)
            parts = self._lanes.plan(gradients, key, groups)
        if self._lanes.need_slots(sum(map(len, groups))):
            ring.rebuild(*self._lanes.make_slots(ring.num_slots))
        entry = ring.take()
        try:
            decision = self._fill(guard, entry, handed, first, gradients, parts)
            lr = optimizers[0].param_groups[0].get("lr") if optimizers[0].param_groups else None
            entry.note("lr", lr)
            if isinstance(loss, (int, float)) or (isinstance(loss, torch.Tensor) and loss.numel() == 1):
                entry.note("loss", loss)
        except BaseException:
            ring.give_back(entry)
            raise
        entry.names, entry.positions = names, positions
        decision.straightened = straightened
        ring.current = entry
        ledger.step = entry.step + 1
        self._newest = entry.step
        return decision

    def _fill(
        self,
        guard: Guard,
        entry: Entry,
        handed: Handed,
        first: bool,
        gradients: list[torch.Tensor],
        parts: list[tuple[Lane, Any, Any]],
    ) -> _Decision:
        """Queues what fills the slots of `entry`."""
        ledger = self._ledger
        entry.start(ledger.step if first else ledger.step - 1, first)
        entry.places = [()] * len(entry.parcels)
        for lane, _, places in parts:
            entry.places[lane.index] = places
        entry.from_scaler, entry.scaled = handed.from_scaler, handed.grad_scale is not None
        decision = _Decision(entry, handed, guard.skip_nonfinite or handed.found_inf is not None)
        decision.plans = [(lane, plan, entry.parcels[lane.index].slot) for lane, plan, _ in parts]
        if len(guard._attachments) == 1:
            decision.gradients = gradients
        self._measure(guard, entry, handed, decision)
        return decision

    def _measure(self, guard: Guard, entry: Entry, handed: Handed, decision: _Decision) -> None:
        max_norm = _max_norm(guard.clip)
        questions = []
        for lane, _, slot in decision.plans:
            question = Question(
                entry.step,
                lane.bring(handed.grad_scale, slot.scale),
                lane.bring(handed.found_inf, slot.found_inf),
                math.inf if max_norm is None else max_norm,
                guard.skip_nonfinite,
                handed.fused,
            )
            questions.append(question)
            lane.engine.measure(decision.plans[len(questions) - 1][1], slot, question, decide=len(decision.plans) == 1)
        entry.keep = (handed.grad_scale, handed.found_inf)
        home, _, home_slot = decision.plans[0]
        decision.slot = entry.slot = home_slot
        if len(decision.plans) > 1:
            totals = self._lanes.gather([slot.total for _, _, slot in decision.plans], home)
            home.engine.decide(totals, home_slot, questions[0])
            for _, _, slot in decision.plans[1:]:
                slot.decided.copy_(home_slot.decided, non_blocking=True)
        if max_norm is None and guard.clip is not None:
            self._ask_policy(guard.clip, entry, decision)

    def _ask_policy(self, policy: ClipPolicy, entry: Entry, decision: _Decision) -> None:
        """A clip policy that wants the norm as a number gets it. Synchronises."""
        if not self._told_policy:
            self._told_policy = True
            _log.warning(
                "clip policy %r decides on the host: one sync a step. GlobalNorm decides on the device.", policy
            )
        _, norm, _, factor = decision.slot.words[:4].tolist()
        coefficient = policy.coefficient(norm) if math.isfinite(norm) else 1.0
        entry.clip_coef = 1.0 if decision.may_skip and decision.skips() else coefficient
        decision.factor = factor * entry.clip_coef  # the slot's factor is the unscaling alone

    def _act(
        self,
        guard: Guard,
        caller: Attachment,
        optimizer: torch.optim.Optimizer,
        handed: Handed,
        decision: _Decision,
        follows: bool,
    ) -> Undo | None:
        """Queues what the decision means for one optimizer."""
        repairs: Undo | None = decision.straightened.get(id(caller))
        may_skip = decision.may_skip or handed.found_inf is not None
        fused = takes_flags(optimizer) and decision.slot.words.device.type != "mps"  # whose kernels take no flags
        attributes: dict[str, Any] = {}
        if may_skip:
            own_flag = handed.found_inf if follows else None
            if fused and self._momentum.is_safe(optimizer, self._lanes.key):
                attributes["found_inf"] = self._flag(caller, guard, decision, own_flag)
            elif decision.skips() or (own_flag is not None and bool(own_flag)):
                aside = SetAside(optimizer)
                return aside if repairs is None else Both(repairs, aside)
        unscales = decision.is_scaled and not handed.fused
        if decision.factor is not None:
            if decision.factor != 1.0:
                kernels.run_scale(_gradients(optimizer), decision.factor, guard.backend)
        elif unscales or _max_norm(guard.clip) != math.inf:
            # An optimizer that divides by the loss scale anyway clips for nothing.
            if fused and (not self._clips_through_scale or (decision.is_scaled and handed.fused)):
                attributes["grad_scale"] = decision.slot.divisor
            else:
                self._scale(optimizer, decision)
        if attributes:
            return HandedOver(optimizer, attributes, repairs)
        return repairs

    def _flag(self, caller: Attachment, guard: Guard, decision: _Decision, own_flag: Any) -> torch.Tensor:
        """The skip flag for an optimizer: of the decision, or where it follows it, of its own scaler too."""
        if own_flag is None:
            return decision.slot.skip_flag
        index = next(i for i, a in enumerate(guard._attachments) if a is caller)
        device = decision.slot.words.device
        while len(self._flags) <= index or self._flags[index].device != device:
            self._flags[index:] = [torch.zeros((), dtype=torch.float32, device=device)]
        flag = self._flags[index]
        own = own_flag if isinstance(own_flag, torch.Tensor) else torch.full((), float(own_flag))
        torch.logical_or(decision.slot.skip_flag, own.to(device, non_blocking=True), out=flag)
        return flag

    def _scale(self, optimizer: torch.optim.Optimizer, decision: _Decision) -> None:
        parts, gradients = decision.plans, decision.gradients
        is_whole = gradients is not None
        if gradients is None:
            gradients = _gradients(optimizer)
        if not gradients:
            return
        if not is_whole or not all(plan.is_plain for _, plan, _ in parts):
            slots = {lane.index: slot for lane, _, slot in parts}
            planned = self._lanes.plan_writable(gradients)
            parts = [(lane, plan, slots[lane.index]) for lane, plan in planned]
        for lane, plan, slot in parts:
            lane.engine.scale(plan, slot)
        kernels.tell_autograd(gradients)

    def _need_straightening(self, plans: list[Any], optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        fused = [optimizer for optimizer in optimizers if takes_flags(optimizer)]
        if not fused:
            return False
        key = tuple(map(id, plans))
        known = self._checked.get(key)
        if known is not None:
            return known[1]
        needed = any(map(Straightened.is_needed, fused))
        if self._lanes.remember_plans and all(plan.is_plain for plan in plans):
            self._checked[key] = (plans, needed)  # which keeps the ids from being those of other plans
            if len(self._checked) > _NUM_CHECKED:
                self._checked.popitem(last=False)
        return needed

    def _deliver(self, entry: Entry) -> None:
        """Enters the record of a step that has arrived."""
        contents = [read(parcel.copy, len(places)) for parcel, places in zip(entry.parcels, entry.places)]
        header, table, notes = next(c for c, p in zip(contents, entry.parcels) if p.slot is entry.slot)
        if len(contents) > 1:
            table = self._lanes.in_order([c.rows for c in contents], entry.places)
        names, positions = entry.names, entry.positions
        known: dict[str, Any] = {**entry.known, **{name: notes[name] for name in entry.noted}}
        record = StepStats(
            step=entry.step,
            tensors=TensorStats(
                table,
                names if positions is None else lambda: [names[i] for i in positions],
                kernels.fold_rows(table),
            ),
            clip_coef=header.clip_coef if entry.clip_coef is None else entry.clip_coef,
            skipped=header.skipped,
            loss_scale=header.loss_scale if entry.scaled else None,
            **known,
        )
        entry.keep = ()
        self._delivered = entry.step
        ledger = self._ledger
        ledger.enter(record, record.is_finite, entry.first, entry.from_scaler)
        ledger.recorder.add_overhead(entry.overhead_s)
        if entry.is_over:
            ledger.recorder.flush()


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return kernels.collect_gradients([group["params"] for group in optimizer.param_groups])[0]


def _max_norm(policy: ClipPolicy | None) -> float | None:
    """What the device clips to by itself; None for a policy that has to be asked."""
    if policy is None:
        return math.inf
    if isinstance(policy, GlobalNorm) and type(policy).coefficient is GlobalNorm.coefficient:
        return policy.max_norm
    return None
