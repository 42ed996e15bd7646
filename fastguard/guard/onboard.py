"""Steps that are measured and decided on a device: what is queued there, and what arrives."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import kernels
from .._device import Courier
from ..kernels.slots import Slot, read_slot
from ..stats.slot import HEADER_WORDS, NORM
from .decision import Decision
from .engines import Engine, Question
from .flight import Flight, Flights
from .lanes import Lane, Lanes
from .ledger import Ledger
from .policies import GivenPolicy
from .policies.ruling import row_norms, rule
from .ring import OVER, TABLE
from .run import Member, Run, held_weakly
from .scaler import Handed
from .undo import Momentum, Straightened, takes_flags

_NUM_CHECKED = 16  # lists of gradients of which it is remembered how they lie


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of one optimizer that are there, flat."""
    return kernels.collect_gradients([group["params"] for group in optimizer.param_groups])[0]


class Onboard:
    """The devices' side of a judge.

    Attributes:
        flights: steps on their way.
        lanes: the devices.
        momentum: sees to buffers of fused SGD.
    """

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        when_behind: str,
        engine_for: Callable[[torch.device], type[Engine] | None],
        courier_for: Callable[[torch.device], Courier],
        device_of: Callable[[torch.Tensor], torch.device] | None,
    ) -> None:
        self._run = run
        self._ledger = ledger
        self.flights = Flights(held_weakly(self._arrive), when_behind)
        self.lanes = Lanes(engine_for, courier_for, device_of)
        self.momentum = Momentum()
        self._newest, self._arrived = -1, -1  # steps
        # Plans, and whether some gradient lies otherwise than a fused kernel expects.
        self._checked: OrderedDict[tuple[int, ...], tuple[Any, bool]] = OrderedDict()
        self._flags: list[torch.Tensor] = []  # of optimizers that follow another's decision

    @property
    def lag(self) -> int:
        """Steps taken since the newest that has arrived."""
        return self._newest - self._arrived

    def begin_step(self, first: bool) -> None:
        """Another evaluation begins, of another step if it is the `first`: what is there arrives."""
        if first and self.flights.current is None:  # it has arrived, and was held for more to come
            self._run.ring.is_over = True
            self._ledger.open()
        self.flights.begin_step(is_over=first)
        if self.flights.is_idle:
            self._arrived = self._run.step - 1

    def board(
        self, optimizers: Sequence[torch.optim.Optimizer], groups: list[list[torch.Tensor]], handed: Handed, first: bool
    ) -> tuple[Flight, Decision]:
        """A flight and plans for the gradients of `groups`. Waits if all slots are in flight."""
        run, lanes, flights = self._run, self.lanes, self.flights
        gradients, positions, fingerprint = kernels.collect_gradients(groups)
        key = (fingerprint, None if positions is None else tuple(positions))
        names = run.known_names if fingerprint == run.fingerprint else run.names(fingerprint)
        parts = lanes.plan(gradients, key, groups)
        straightened = {}
        fused = list(map(takes_flags, optimizers))
        if True in fused and self._need_straightening(parts, optimizers, fused):
            straightened = {i: Straightened(optimizers[i]) for i, takes in enumerate(fused) if takes}
            gradients, positions, _ = kernels.collect_gradients(groups)
            parts = lanes.plan(gradients, key, groups)
        if lanes.need_slots(sum(map(len, groups))):
            flights.rebuild(*lanes.make_slots(flights.num_slots))
        flight = flights.take()
        flight.start(run.step if first else run.step - 1, first, handed.from_scaler, handed.grad_scale is not None)
        flight.names, flight.positions = names, positions
        decision = Decision(None, handed.grad_scale, may_skip=run.skip_nonfinite or handed.found_inf is not None)
        for lane, plan, places in parts:
            flight.places[lane.index] = places
            decision.plans.append((lane, plan, flight.slots[lane.index]))
        decision.straightened, decision.fused, decision.positions = straightened, fused, positions
        if len(run.members) == 1:
            decision.gradients = gradients
        return flight, decision

    def measure(self, flight: Flight, decision: Decision, handed: Handed, skip_nonfinite: bool) -> None:
        """Queues what fills the slots of `flight`."""
        questions = []
        is_one = len(decision.plans) == 1
        for lane, plan, slot in decision.plans:
            question = Question(
                flight.step,
                None if handed.grad_scale is None else lane.bring(handed.grad_scale, slot.scale),
                None if handed.found_inf is None else lane.bring(handed.found_inf, slot.found_inf),
                decision.max_norm,
                skip_nonfinite,
                handed.fused,
                decision.trigger,
            )
            questions.append(question)
            lane.engine.measure(plan, slot, question, decide=is_one)
        flight.keep = (handed.grad_scale, handed.found_inf)
        home, _, home_slot = decision.plans[0]
        decision.slot = flight.slot = home_slot
        if not is_one:
            totals = self.lanes.gather([slot.total for _, _, slot in decision.plans], home)
            home.engine.decide(totals, home_slot, questions[0])
            for _, _, slot in decision.plans[1:]:
                slot.decided.copy_(home_slot.decided, non_blocking=True)

    def take_off(self, flight: Flight) -> None:
        """The step of `flight` is the one just taken."""
        self.flights.current = flight
        self._run.step = flight.step + 1
        self._newest = flight.step

    def flag(self, member: Member, slot: Slot, own_flag: Any) -> torch.Tensor:
        """The skip flag for an optimizer that follows a decision and has one of its own, of its scaler."""
        index, device = member.index, slot.words.device
        while len(self._flags) <= index or self._flags[index].device != device:
            self._flags[index:] = [torch.zeros((), dtype=torch.float32, device=device)]
        flag = self._flags[index]
        own = own_flag if isinstance(own_flag, torch.Tensor) else torch.full((), float(own_flag), device="cpu")
        torch.logical_or(slot.skip_flag, own.to(device, non_blocking=True), out=flag)
        return flag

    def scale(self, optimizer: torch.optim.Optimizer, decision: Decision) -> None:
        """Queues the scaling of the gradients of one optimizer."""
        parts, gradients = decision.plans, decision.gradients
        is_whole = gradients is not None
        if gradients is None:
            gradients = gradients_of(optimizer)
        if not gradients:
            return
        is_plain = parts[0][1].is_plain if len(parts) == 1 else False not in [plan.is_plain for _, plan, _ in parts]
        if not is_whole or not is_plain:
            slots = {lane.index: slot for lane, _, slot in parts}
            planned = self.lanes.plan_writable(gradients)
            parts = [(lane, plan, slots[lane.index]) for lane, plan in planned]
        for lane, plan, slot in parts:
            lane.engine.scale(plan, slot)
        kernels.tell_autograd(gradients)

    def _need_straightening(
        self, parts: list[tuple[Lane, Any, Any]], optimizers: Sequence[torch.optim.Optimizer], fused: Sequence[bool]
    ) -> bool:
        key = tuple([id(plan) for _, plan, _ in parts])
        known = self._checked.get(key)
        if known is not None:
            return known[1]
        needed = any(Straightened.is_needed(o) for o, takes in zip(optimizers, fused) if takes)
        plans = [plan for _, plan, _ in parts]
        if self.lanes.remember_plans and all(plan.is_plain for plan in plans):
            self._checked[key] = (plans, needed)  # which keeps the ids from being those of other plans
            if len(self._checked) > _NUM_CHECKED:
                self._checked.popitem(last=False)
        return needed

    def _arrive(self, flight: Flight) -> None:
        """Puts a step that has arrived on the host into the ring."""
        ring, ledger = self._run.ring, self._ledger
        if not flight.first and ring.is_held and ring.step == flight.step:
            self._arrive_again(flight)
            return
        if ring.num_open >= ring.limit or not flight.first or not ring.is_over:
            ledger.deliver()
        home = 0 if len(flight.slots) == 1 else flight.slots.index(flight.slot)
        finite, skipped = ring.arrive_as_left(
            flight.parcels[home].copy,
            len(flight.places[home]),
            flight.positions,
            flight.names,
            flight.known,
            flight.noted,
            flight.overhead_s,
            scaled=flight.scaled,
            clip_coef=flight.clip_coef,
            trigger=flight.trigger,
        )
        if len(flight.slots) > 1:
            ring.found[TABLE] = self._rows_in_order(flight)
        if flight.asked is not None:
            self._tell(flight, finite)
        flight.keep = ()
        self._arrived = flight.step
        ring.is_over = flight.is_over
        if ledger.fetch is not None:
            ledger.fetch()
        if ledger.seen is not None:
            ledger.seen()
        if skipped or not finite:
            ledger.enter(is_bad=not finite, from_scaler=flight.from_scaler)
        if flight.is_over and ring.num_open >= ring.limit:
            ledger.deliver()

    def _arrive_again(self, flight: Flight) -> None:
        """Of several evaluations of a step the first bad gradients are what to keep, and the last one decides."""
        ring = self._run.ring
        home = flight.slots.index(flight.slot)
        found = read_slot(flight.parcels[home].copy, len(flight.places[home]))
        is_bad = not math.isfinite(found.norm) and ring.is_finite
        if is_bad:
            rows = found.rows if len(flight.slots) == 1 else self._rows_in_order(flight)
            coefficient = found.clip_coef if flight.clip_coef is None else flight.clip_coef
            scale = found.loss_scale if flight.scaled else None
            state = flight.positions, flight.names
            ring.arrive(flight.step, found.norm, coefficient, found.skipped, scale, rows, *state, again=True)
            for name in flight.known.keys() | flight.noted:
                ring.note(name, found.notes[name] if name in flight.noted else flight.known[name])
        else:
            ring.mark_skipped(found.skipped)
        flight.keep = ()
        self._arrived = flight.step
        ring.is_over = flight.is_over
        ring.add_overhead(flight.overhead_s)
        self._ledger.enter(is_bad=is_bad, from_scaler=flight.from_scaler)

    def _tell(self, flight: Flight, finite: bool) -> None:
        """Has the clip policy observe a step that has arrived, and keeps who was over."""
        run, ring, asked = self._run, self._run.ring, flight.asked
        clip = run.clip
        if not isinstance(clip, GivenPolicy) or asked is None:
            return
        if not finite:
            clip.pass_over()
            return
        norm, own = ring.words[HEADER_WORDS * ring.newest + NORM], None
        if len(asked) > 2 and asked[2][3] is clip.norms:
            own = rule(asked, norm, row_norms(ring.found[TABLE]), flight.positions)
            ring.found[OVER] = own.over or None
        clip.tell(norm, ring.loss, asked)
        if self._ledger.sinks and ((own is not None and own.over) or clip.scope == "group"):
            ring.limit = min(ring.limit, ring.num_open)

    def _rows_in_order(self, flight: Flight) -> bytearray:
        """The rows of all devices, in the order of the gradients."""
        tables = [read_slot(p.copy, len(places)).rows for p, places in zip(flight.parcels, flight.places)]
        return self.lanes.in_order(tables, flight.places)
