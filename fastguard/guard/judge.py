"""The judge: measures the gradients of a step, decides, and does what follows for each optimizer.

Where the host may wait for the gradients, on the CPU above all, the decision is known when they are measured. On a
device it is not waited for: the step is over when everything is queued, what must not wait (the skip flag, the factor)
stays there, and the record arrives with one of the next steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import kernels
from .._device import Courier, is_capturing
from ..errors import UnsupportedTensorError
from ..history.bad_ranks import with_step
from ..stats.columns import norm_of, norm_parts
from . import engines
from .clipping import DeviceClipping, HostClipping, scale_each_on_device
from .decision import Decision, Verdict
from .engines import ElsewhereError, Engine
from .flight import Flight
from .ledger import Ledger
from .onboard import Onboard, gradients_of
from .policies import ClipPolicy, GivenPolicy
from .policies.ruling import Ruling
from .ranks import Ranks, Shared, locals_of
from .run import Member, Run, held_weakly
from .scalars import check_scalar, is_loss, scalar
from .scaler import UNSCALED, Handed, Scaling
from .undo import HandedOver, Skip, Undo, takes_flags

_log = logging.getLogger("fastguard")


class Judge:
    """Judges the steps of all optimizers under one guard, when the first of them steps; the others follow.

    Cost of the long way: on the CPU one read of the gradients, and one more read and write if they are clipped. On a
    device two launches and one to scale where something may have to be scaled, and on the host what it takes to queue
    them: no sync and no allocation for fused optimizers. Others wait for one number before a step that may be skipped,
    and all do for a clip policy without limits.

    Args:
        engine_for, courier_for, device_of, is_capturing: for tests.
    """

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        when_behind: str,
        clip_through: str,
        *,
        engine_for: Callable[[torch.device, str], type[Engine] | None] | None = None,
        courier_for: Callable[[torch.device], Courier] = Courier,
        device_of: Callable[[torch.Tensor], torch.device] | None = None,
        is_capturing: Callable[[torch.device], bool] = is_capturing,
    ) -> None:
        self._run = run
        self._ledger = ledger
        self.settings = when_behind, clip_through
        self._clips_through_scale = clip_through == "scale"
        self._engine_for = engine_for or (lambda device, backend: engines.engine_for(device, backend))
        self._is_capturing = is_capturing
        self.onboard = Onboard(run, ledger, when_behind, held_weakly(self._engine_on), courier_for, device_of)
        self._decision: Decision | None = None
        self._was_on_cpu: bool | None = None  # the first parameter, when it was chosen who measures
        self.waits = True
        self._is_forced = False
        self._told_policy = self._told_late = False

    @property
    def lag(self) -> int:
        """Steps taken since the newest that has arrived."""
        return 0 if self.waits else self.onboard.lag

    @property
    def has_step(self) -> bool:
        """Whether a step was taken, by this process."""
        return self._run.ring.newest >= 0 or not self.onboard.flights.is_idle

    @property
    def is_held(self) -> bool:
        """Whether the record of the step just taken may still be added to."""
        return self.onboard.flights.current is not None or self._run.ring.is_held

    @property
    def num_dropped(self) -> int:
        """Records that were given up."""
        return self.onboard.flights.num_dropped

    @property
    def is_between_steps(self) -> bool:
        """Whether all optimizers have followed the last decision."""
        return self._decision is None

    def step_of(self, member: Member) -> int:
        """Number of the step that `member` is about to take."""
        decision = self._decision
        return self._run.step - (decision is not None and member.index not in decision.taken)

    def observe(self, loss: Any = None, val_loss: Any = None) -> None:
        """Adds a loss to the step just taken, on the device if it is there."""
        flight = self.onboard.flights.current
        if flight is None:
            self._ledger.observe(loss, val_loss)
            return
        given = [(name, value) for name, value in (("loss", loss), ("val_loss", val_loss)) if value is not None]
        for name, value in given:
            check_scalar(name, value)
        for name, value in given:
            flight.note(name, value if isinstance(value, torch.Tensor) else scalar(name, value))

    def add_overhead(self, seconds: float) -> None:
        """Adds time that guarding took to the step just taken."""
        flight = self.onboard.flights.current
        if flight is not None:
            flight.overhead_s += seconds
        else:
            self._run.ring.add_overhead(seconds)

    def arrive_all(self) -> None:
        """Waits for all steps to arrive; the one just taken can still be added to."""
        self.onboard.flights.arrive_all()

    def flush(self) -> None:
        """Waits for all steps to arrive, and delivers them."""
        try:
            self.onboard.flights.arrive_all()
        finally:
            self._ledger.deliver()

    def judge(
        self, member: Member, optimizer: torch.optim.Optimizer, handed: Handed, first: bool, loss: Any
    ) -> Undo | Skip | None:
        """Judges the step that `member` is about to take, clips, and says what has to be done for it and undone after.

        Args:
            handed: what a GradScaler handed over.
            first: whether this is the first evaluation of the step; a closure may ask for more.
            loss: what the closure returned.
        """
        groups = optimizer.param_groups
        params = groups[0]["params"] if groups else None
        if params and params[0].is_cpu is not self._was_on_cpu:
            self.choose()
        if self._decision is None and self._run.is_vetoed is not self._is_forced:
            self._is_forced = self._run.is_vetoed
            self.choose(waits=self._is_forced)  # the host decides on a step that is left out
        try:
            decision, follows = self._decision_for(member, optimizer, handed, first, loss)
        except ElsewhereError:  # a gradient where no engine can reach: to the host, which reaches everywhere
            self.choose(waits=True)
            decision, follows = self._decision_for(member, optimizer, handed, first, loss)
        except UnsupportedTensorError as error:
            raise self._named(error, self._run.members) from None
        decision.taken.add(member.index)
        if len(decision.taken) == len(self._run.members):
            self._decision = None
        if follows and decision.positions is not None and self._must_not_follow(member, optimizer, decision):
            return Skip()
        if decision.verdict is not None:
            return self._act(member, optimizer, handed, decision, decision.verdict)
        return self._act_on_device(member, optimizer, handed, decision, follows)

    def abandon(self, member: Member) -> None:
        """`judge` raised: what it had decided for `member` is not for its next step, and a number with a record is
        used up."""
        run, decision = self._run, self._decision
        if decision is not None and member.index not in decision.taken:
            self._decision = None
        if run.ring.num_open:
            run.step = max(run.step, run.ring.step + 1)

    def choose(self, *, waits: bool = False) -> None:
        """Chooses who measures, for the parameters as they are now; what is on its way arrives.

        Args:
            waits: the host, which reads tensors wherever they are.
        """
        run = self._run
        params = [p for o in run.optimizers() for group in o.param_groups for p in group["params"]]
        self._was_on_cpu = params[0].is_cpu if params else None
        # A step that evaluates its closure several times and cannot be skipped waits for its losses anyway.
        waits = waits or run.ranks is not None or not params or not all(member.can_skip for member in run.members)
        waits = waits or any(self._engine_on(d) is None for d in {p.device for p in params})
        if waits is not self.waits:
            self.flush()
            self.waits = waits
        run.may_wait = waits

    def _engine_on(self, device: torch.device) -> type[Engine] | None:
        return self._engine_for(device, self._run.backend)

    def _decision_for(
        self, member: Member, optimizer: torch.optim.Optimizer, handed: Handed, first: bool, loss: Any
    ) -> tuple[Decision, bool]:
        """The decision for a step, and whether it was made when another optimizer stepped."""
        decision = self._decision
        if decision is None or not first or member.index in decision.taken:
            decide = self._decide if self.waits else self._decide_on_device
            self._decision = decide(member, optimizer, handed, first, loss)
            return self._decision, False
        decision.check_scale(handed)
        return decision, True

    def _decide(
        self, member: Member, optimizer: torch.optim.Optimizer, handed: Handed, first: bool, loss: Any
    ) -> Decision:
        """Measures and decides here. Synchronises with whatever device the gradients are on."""
        run, ledger, ring = self._run, self._ledger, self._run.ring
        scaling = handed.read() if handed.from_scaler else UNSCALED
        optimizers = [optimizer] if len(run.members) == 1 else run.optimizers()
        groups = [group["params"] for one in optimizers for group in one.param_groups]
        shared: Shared | None = None
        if run.ranks is not None:
            shared = self._measure_over_ranks(run.ranks, groups, scaling, first)
            scaling = scaling._replace(found_inf=shared.found_inf)
        if first:
            ledger.deliver()  # before the new table is there: two of them at a time are enough
        if shared is None:
            table, total, positions, fingerprint = kernels.gradient_stats(groups, run.backend, scaling.inverse)
        else:
            table, total, positions, _, fingerprint = shared[:5]
        names = run.names(fingerprint)
        norm = norm_of(*norm_parts(kernels.fold_rows(table) if total is None else total))
        finite = math.isfinite(norm)
        if shared is not None and run.ranks is not None and not finite:
            self._find_trouble(run.ranks, shared, names, first)
        lr = learning_rate(optimizers[0])
        closure_loss = scalar("loss", loss) if is_loss(loss) else None
        skipped = (run.is_vetoed or (run.skip_nonfinite and not finite) or scaling.found_inf) and member.can_skip
        clipping = HostClipping(run.clip, norm, table, positions)
        if first and not run.is_vetoed:
            clipping.tell(closure_loss if closure_loss is not None else ring.loss)
        ruling = clipping.ruling
        dropped = ruling.is_dropped and member.can_skip and not skipped
        skipped = skipped or dropped
        if skipped:
            ruling = Ruling(over=ruling.over if dropped else ())
        else:
            ruling = clipping.shrink(groups, names, scaling.inverse, self._run.backend) or ruling
        again = not first and ring.is_held
        step = run.step if first else run.step - 1
        is_news = not again or (not finite and ring.is_finite)  # of several evaluations the first bad one is kept
        if is_news:
            trigger = None if run.is_vetoed else clipping.trigger  # what is left out is not the policy's doing
            told: dict[str, Any] = {"again": again, "trigger": trigger, "over": ruling.over or None}
            if shared is not None:
                told["total"], told["present"] = total, shared.present
            ring.arrive(step, norm, ruling.coefficient, skipped, scaling.scale, table, positions, names, **told)
            if ledger.sinks and (ruling.over or clipping.has_groups):
                ring.limit = min(ring.limit, ring.num_open)  # who was over is in no line
            run.step = step + 1  # at once: an interrupt must not have the next step take the same number
            ring.note("lr", lr)
            ring.note("loss", closure_loss)
            ring.closure_step = step if closure_loss is not None else -1
        else:
            ring.mark_skipped(skipped)
        run.step = step + 1
        run.follow_buffers(step, skipped)
        ledger.enter(is_bad=is_news and not finite, from_scaler=scaling.from_scaler)
        ledger.raise_due()
        coefficient = 1.0 if clipping.has_shrunk else ruling.coefficient
        decision = Decision(Verdict(coefficient, skipped, ruling.factors), scaling.scale)
        decision.positions = positions if shared is None or ruling.factors is not None else shared.present
        return decision

    def _measure_over_ranks(
        self, ranks: Ranks, groups: list[list[torch.Tensor]], scaling: Scaling, first: bool
    ) -> Shared:
        """Measures over all ranks; the step before takes the mean of the losses that they observed."""
        run, ring = self._run, self._run.ring
        ranks.wants_tables = isinstance(run.clip, GivenPolicy) and run.clip.norms is not None
        loss = ring.loss if first else None
        step = run.step if first else run.step - 1
        shared = ranks.measure(groups, run.backend, scaling.inverse, step, loss=loss, found_inf=scaling.found_inf)
        if shared.loss is not None and ring.newest >= 0:
            ring.note("loss", shared.loss)
        return shared

    def _find_trouble(self, ranks: Ranks, shared: Shared, names: Sequence[str], first: bool) -> None:
        """Asks which ranks hold what is not finite, and notes it among what is known of the run."""
        step = self._run.step if first else self._run.step - 1
        is_noted = ranks.find_trouble(step, shared.own, names, shared.present)
        if first and not is_noted and not ranks.is_alone:
            history = self._ledger.history
            bad = with_step(history.model.bad_ranks, self._run.step, ranks.num_ranks, ranks.trouble)
            history.note_model(bad_ranks=bad)

    def _must_not_follow(self, member: Member, optimizer: torch.optim.Optimizer, decision: Decision) -> bool:
        """Whether gradients of `member` that nobody had when the step was decided on are not finite. Tells of any."""
        run, ring = self._run, self._run.ring
        params = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p for one in run.members[: member.index] for g in one.optimizer.param_groups for p in g["params"]]
        late = decision.late(len(before), params)
        if not late:
            return False
        if not self._told_late:
            self._told_late = True
            _log.warning(
                "%s stepped with gradients that were not there when the first optimizer under its guard did, as where "
                "optimizers step within the backward pass: they are in no norm and no record. Have all of them step "
                "after the backward pass, or give each a guard of its own.",
                type(optimizer).__name__,
            )
        rows = kernels.gradient_stats([[params[i] for i in late]], run.backend, 1.0)[0]
        if not (run.skip_nonfinite and member.can_skip) or math.isfinite(norm_of(*norm_parts(kernels.fold_rows(rows)))):
            return False
        self.arrive_all()
        names = run.names_of(member)
        _log.warning("step %d: late gradients are not finite (first %r); skipped", ring.step, names[late[0]])
        ring.mark_skipped(True)
        run.follow_buffers(ring.step, True)
        self._ledger.enter(is_bad=False, from_scaler=False)
        self._ledger.raise_due()
        return True

    def _act(
        self, member: Member, optimizer: torch.optim.Optimizer, handed: Handed, decision: Decision, verdict: Verdict
    ) -> Undo | Skip | None:
        """Does what a decision that is known means for one optimizer."""
        scaling = handed.read() if handed.from_scaler else UNSCALED
        if (verdict.skipped and member.can_skip) or scaling.found_inf:
            return Skip()
        inverse = 1.0 if scaling.fused else scaling.inverse
        if verdict.factors is not None:
            self._scale_each(member, optimizer, decision, verdict.factors, inverse)
            return None
        factor = verdict.clip_coef * inverse
        return None if factor == 1.0 else self.scale(optimizer, factor, from_scaler=handed.from_scaler)

    def _scale_each(
        self,
        member: Member,
        optimizer: torch.optim.Optimizer,
        decision: Decision,
        factors: Sequence[float],
        inverse: float,
    ) -> None:
        """Multiplies each gradient of one optimizer by its factor; what is multiplied by 1 is not touched."""
        known = dict(zip(range(len(factors)) if decision.positions is None else decision.positions, factors))
        before = [o.optimizer.param_groups for o in self._run.members[: member.index]]
        place = sum(len(group["params"]) for groups in before for group in groups)
        alike: dict[float, list[torch.Tensor]] = {}
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            factor = known.get(place, 1.0) * inverse
            place += 1
            if p.grad is not None and factor != 1.0:
                alike.setdefault(factor, []).append(p.grad)
        for factor, gradients in alike.items():
            kernels.run_scale(self._here(gradients), factor, self._run.backend)

    def scale(self, optimizer: torch.optim.Optimizer, factor: float, *, from_scaler: bool = False) -> Undo | None:
        """Multiplies the gradients of one optimizer, or says how it will do so in its own pass."""
        if self._run.ranks is None and not from_scaler and self.divides(optimizer):
            divisor = torch.tensor(1.0 / factor if factor else math.inf, dtype=torch.float32, device="cpu")
            return HandedOver(optimizer, {"grad_scale": divisor}, None)
        gradients = gradients_of(optimizer)
        if gradients:
            try:
                kernels.run_scale(self._here(gradients), factor, self._run.backend)
            except UnsupportedTensorError as error:
                raise self._named(error, [m for m in self._run.members if m.optimizer is optimizer]) from None
        return None

    def _named(self, error: UnsupportedTensorError, members: Sequence[Member]) -> UnsupportedTensorError:
        """The same, of a gradient of `members`, with its parameter's name."""
        of_all = [(m, p) for m in self._run.members for group in m.optimizer.param_groups for p in group["params"]]
        named = zip(self._run.names_now(), of_all)
        names = [name for name, (member, p) in named if member in members and p.grad is not None]
        return UnsupportedTensorError(error.index, error.problem, f"{names[error.index]}.grad", "optimizer.step()")

    def _here(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """What of `gradients` is to be written to by this rank."""
        return gradients if self._run.ranks is None else locals_of(gradients)

    def divides(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` itself is to multiply its gradients, all of them on the CPU, where they are clipped."""
        if self._clips_through_scale or not takes_flags(optimizer):
            return False
        return all(p.is_cpu for group in optimizer.param_groups for p in group["params"])

    def _decide_on_device(
        self, member: Member, optimizer: torch.optim.Optimizer, handed: Handed, first: bool, loss: Any
    ) -> Decision:
        """Queues measuring and deciding."""
        run, onboard = self._run, self.onboard
        optimizers = [optimizer] if len(run.members) == 1 else run.optimizers()
        groups = [group["params"] for one in optimizers for group in one.param_groups]
        if groups and groups[0] and self._is_capturing(groups[0][0].device):
            raise RuntimeError(
                "a guarded step cannot be captured in a graph: its replays would tell the guard nothing. Capture the "
                "forward and backward pass, and call optimizer.step() after the replay; or detach the guard before."
            )
        onboard.begin_step(first)
        if self._ledger.skips.due is not None:
            self._ledger.raise_due()
        flight, decision = onboard.board(optimizers, groups, handed, first)
        try:
            clipping = DeviceClipping(run.clip, flight, decision)
            onboard.measure(flight, decision, handed, run.skip_nonfinite)
            if flight.asked is not None or clipping.shrinks:
                clipping.follow(groups, handed)
            if clipping.must_be_asked and run.clip is not None:
                self._ask_policy(run.clip, flight, decision)
            flight.note("lr", _rate(optimizers[0]))
            if loss is not None and is_loss(loss):
                flight.note("loss", loss)
            if run.buffers is not None:
                run.follow_buffers(flight.step, decision.slot.skip_flag if decision.may_skip else False)
        except BaseException:
            onboard.flights.give_back(flight)
            raise
        onboard.take_off(flight)
        return decision

    def _ask_policy(self, policy: ClipPolicy, flight: Flight, decision: Decision) -> None:
        """A clip policy that wants the norm as a number gets it. Synchronises."""
        if not self._told_policy:
            self._told_policy = True
            _log.warning(
                "clip policy %r decides on the host: one sync a step. One with `limits` decides on the device.", policy
            )
        _, norm, _, factor = decision.slot.words[:4].tolist()
        coefficient = policy.coefficient(norm) if math.isfinite(norm) else 1.0
        flight.clip_coef = 1.0 if decision.may_skip and decision.skips() else coefficient
        decision.factor = factor * flight.clip_coef  # the slot's factor is the unscaling alone

    def _act_on_device(
        self, member: Member, optimizer: torch.optim.Optimizer, handed: Handed, decision: Decision, follows: bool
    ) -> Undo | Skip | None:
        """Queues what a decision means for one optimizer."""
        repairs: Undo | None = decision.straightened.get(member.index)
        slot = decision.slot
        fused = decision.fused[member.index] and slot.words.device.type != "mps"  # whose kernels take no flags
        attributes: dict[str, Any] = {}
        if decision.may_skip or handed.found_inf is not None:
            own_flag = handed.found_inf if follows else None
            if fused and self.onboard.momentum.is_safe(optimizer, self.onboard.lanes.key):
                flag = slot.skip_flag if own_flag is None else self.onboard.flag(member, slot, own_flag)
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
                self.onboard.scale(optimizer, decision)
        if decision.factors is not None:
            scale_each_on_device(member, optimizer, self._run.members, decision)
        return HandedOver(optimizer, attributes, repairs) if attributes else repairs


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """That of the first group, None where it is no number; synchronises if it is a tensor on an accelerator."""
    lr = _rate(optimizer)
    return None if lr is None else scalar("lr", lr)


def _rate(optimizer: torch.optim.Optimizer) -> Any:
    """The learning rate as it stands in the first group, if it is a number or a tensor of one."""
    lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return lr if type(lr) is float or (lr is not None and is_loss(lr)) else None
