"""The judge: measures the gradients of a step, decides on it, and does for each optimizer what follows. Where the host
may wait for the gradients, on the CPU above all, it knows the decision at once. Elsewhere `DeviceJudge` enqueues
everything, and the record arrives with one of the next steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .. import kernels
from .._device import is_capturing
from ..clip import CheckedPolicy, limits_of, trigger_of
from ..clip.limits import Ruling
from ..errors import UnsupportedTensorError
from ..ranks.shards import locals_of
from ..records.columns import norm_of, norm_parts
from . import device
from .clipping import HostDecision, gradients_with_factors, ruling_of, shrink
from .device import DeviceDecision, NoEngineError
from .device_judge import DeviceJudge, gradients_of
from .ledger import Ledger
from .ring import JudgedStep
from .run import Member, Run
from .scalars import is_loss, learning_rate, scalar
from .skip import FusedFlags, Skip, Undo, takes_flags
from .wrappers import Handed

_log = logging.getLogger("fastguard")


class Judge:
    """Judges the steps of all optimizers under one guard when the first of them steps; the others follow. Cost on the
    CPU: one read of the gradients, and one more read and write if they are clipped."""

    def __init__(self, run: Run, ledger: Ledger, clip_through: str) -> None:
        self._run = run
        self._ledger = ledger
        self.clip_through = clip_through
        self.on_device = DeviceJudge(run, ledger, clip_through)
        self._decision: HostDecision | DeviceDecision | None = None
        self._was_on_cpu: bool | None = None  # the first parameter, when `waits` was chosen
        self._is_forced = False
        self._has_warned = False

    # Whether the record of the step just taken may still be added to; whether all have followed the last decision.
    is_held = property(lambda self: self.on_device.pending.current is not None or self._run.ring.is_held)
    is_between_steps = property(lambda self: self._decision is None)

    @property
    def has_step(self) -> bool:
        """Whether a step was taken, by this process."""
        pending = self.on_device.pending
        return self._run.ring.newest >= 0 or pending.current is not None or bool(pending.submitted)

    def record_loss(self, loss: Any = None, val_loss: Any = None) -> None:
        """Puts losses, numbers or tensors of one element, into the slot of the step just taken: in the ring, or on the
        device while it is there. C++ puts plain ones into the ring itself (`put_loss`)."""
        pending, ring = self.on_device.pending.current, self._run.ring
        if pending is None and not ring.is_held:
            raise RuntimeError(
                "`observe` must follow a step that has not been handed to the sinks yet. Call it after "
                "optimizer.step(), before flush() and before the next step."
            )
        for name, value in (("loss", loss), ("val_loss", val_loss)):
            if value is not None and pending is not None:
                pending.note(name, value)
            elif value is not None:
                ring.note(name, scalar(name, value))

    def add_overhead(self, seconds: float) -> None:
        pending = self.on_device.pending.current
        if pending is not None:
            pending.overhead_s += seconds
        else:
            self._run.ring.add_overhead(seconds)

    def arrive_all(self) -> None:
        """Waits for all steps to arrive; the one just taken can still be added to. Not while a graph is captured."""
        engine = self.on_device.engine
        if engine is None or not is_capturing(engine.device):
            self.on_device.pending.complete_all()

    def flush(self) -> None:
        """Waits for all steps to arrive, and delivers them."""
        try:
            self.arrive_all()
        finally:
            self._ledger.deliver()

    def judge(self, member: Member, optimizer: Optimizer, handed: Handed, first: bool, loss: Any) -> Undo | Skip | None:
        """Judges the step that `member` is about to take and clips it. Returns what has to be done for the step and
        undone after it. `first` is for the first evaluation of the step; `loss` is what its closure returned."""
        run, groups = self._run, optimizer.param_groups
        params = groups[0]["params"] if groups else None
        if params and params[0].is_cpu is not self._was_on_cpu:
            self.choose()
        if not first and not run.waits:  # the host decides on a step that evaluates its closure several times
            self.arrive_all()
            run.waits = run.may_wait = True
        if self._decision is None and run.is_vetoed is not self._is_forced:
            self._is_forced = run.is_vetoed
            self.choose(waits=self._is_forced)  # the host decides on a vetoed step
        try:
            decision, follows = self._decision_for(member, optimizer, handed, first, loss)
        except UnsupportedTensorError as error:
            raise self._named(error, run.members) from None
        decision.taken.add(member.index)
        if len(decision.taken) == len(run.members):
            self._decision = None
        if follows and decision.positions is not None and self._must_not_follow(member, optimizer, decision):
            return Skip()
        if not isinstance(decision, HostDecision):
            return self.on_device.act(member, optimizer, handed, decision, follows)
        scaling = handed.read()
        if (decision.skipped and member.can_skip) or scaling.found_inf:
            return Skip()
        inverse = 1.0 if scaling.fused else scaling.inverse
        if decision.factors is not None:
            by_factor: dict[float, list[torch.Tensor]] = {}
            for gradient, known in gradients_with_factors(run.start_of(member), optimizer, decision):
                factor = inverse if known is None else known * inverse
                if factor != 1.0:
                    by_factor.setdefault(factor, []).append(gradient)
            for factor, gradients in by_factor.items():
                kernels.run_scale(self._local(gradients), factor, run.backend)
            return None
        factor = decision.clip_coef * inverse
        return None if factor == 1.0 else self.scale(optimizer, factor, from_scaler=handed.from_scaler)

    def abandon(self, member: Member) -> None:
        """Drops the decision for `member` after `judge` raised. A step number that has a record is used up."""
        run, decision = self._run, self._decision
        if decision is not None and member.index not in decision.taken:
            self._decision = None
        if run.ring.num_open:
            run.step = max(run.step, run.ring.step + 1)

    def choose(self, *, waits: bool = False) -> None:
        """Chooses between host and devices for the parameters as they are now, or, if it `waits`, the host, which reads
        tensors wherever they are. Pending steps arrive on a change."""
        run = self._run
        params = run.params()
        self._was_on_cpu = params[0].is_cpu if params else None
        # A step that evaluates its closure several times and cannot be skipped waits for its losses anyway.
        waits = waits or run.ranks is not None or not params or not all(member.can_skip for member in run.members)
        devices = {p.device for p in params}
        waits = waits or len(devices) > 1 or any(device.engine_for(one, run.backend) is None for one in devices)
        if waits is not run.waits:
            self.flush()
            run.waits = waits
        run.may_wait = waits

    def _decision_for(
        self, member: Member, optimizer: Optimizer, handed: Handed, first: bool, loss: Any
    ) -> tuple[HostDecision | DeviceDecision, bool]:
        """The decision on a step, and whether it was made when another optimizer stepped."""
        decision = self._decision
        if decision is None or not first or member.index in decision.taken:
            decision = None
            if not self._run.waits:
                try:
                    decision = self.on_device.decide(optimizer, handed, loss)
                except NoEngineError:
                    self.choose(waits=True)  # the host reads tensors wherever they are
            self._decision = decision = decision or self._decide(member, optimizer, handed, first, loss)
            return decision, False
        is_scaled = handed.grad_scale is not None
        if decision.scale != (handed.read().grad_scale if isinstance(decision, HostDecision) else is_scaled):
            raise RuntimeError(
                "optimizers under one guard must have their gradients scaled alike when they step. Call "
                "scaler.unscale_ on all of them, or on none, before."
            )
        return decision, True

    def _decide(self, member: Member, optimizer: Optimizer, handed: Handed, first: bool, loss: Any) -> HostDecision:
        """Measures and decides here. Synchronises with the gradients' devices."""
        run, ring = self._run, self._run.ring
        optimizers = [optimizer] if len(run.members) == 1 else run.optimizers()
        groups = [group["params"] for one in optimizers for group in one.param_groups]
        judged, scaling = self._measure(groups, handed.read(), first)
        judged.lr, judged.loss = learning_rate(optimizers[0]), scalar("loss", loss) if is_loss(loss) else None
        clip, limits = run.clip, limits_of(run.clip)
        if not run.is_vetoed:  # the policy has no part in a vetoed step
            judged.trigger = trigger_of(clip, limits)
        ruling, shrunk = ruling_of(limits, judged), None
        if first and not run.is_vetoed and isinstance(clip, CheckedPolicy):
            clip.observe_step(judged.norm, judged.loss if judged.loss is not None else ring.loss)
        is_bad = run.skip_nonfinite and not math.isfinite(judged.norm)
        if member.can_skip and (run.is_vetoed or is_bad or scaling.found_inf):
            judged.skipped, ruling = True, Ruling()
        elif member.can_skip and ruling.is_dropped:
            judged.skipped, ruling = True, Ruling(over=ruling.over)
        else:
            shrunk = shrink(clip, groups, judged, scaling.inverse)
            ruling = shrunk or ruling
        judged.clip_coef, judged.over = ruling.coefficient, ruling.over
        self.enter(judged, again=not first and ring.is_held)
        self._ledger.raise_due()
        coefficient = ruling.coefficient if shrunk is None else 1.0
        positions = judged.positions if judged.total is None or ruling.factors is not None else judged.present
        return HostDecision(positions, coefficient, judged.skipped, ruling.factors, scaling.grad_scale)

    def enter(self, judged: JudgedStep, *, again: bool = False) -> None:
        """Puts a step into the ring, or another evaluation of the newest one: of several it keeps the first bad one."""
        run, ring, step = self._run, self._run.ring, judged.step
        finite = math.isfinite(judged.norm)
        is_news = not again or (not finite and ring.is_finite)
        if is_news:
            ring.arrive(judged, again=again)
            run.step = step + 1  # at once: after an interrupt the next step must not have the same number
            ring.note("lr", judged.lr)
            ring.note("loss", judged.loss)
            ring.closure_step = -1 if judged.loss is None else step
        else:
            ring.mark_skipped(judged.skipped)
        run.follow_buffers(step, judged.skipped)
        if judged.total is not None or judged.over or (run.clip is not None and run.clip.scope == "group"):
            self._ledger.want_record()  # no line has the groups, and its norm is that of the table
        self._ledger.enter(is_bad=is_news and not finite, from_scaler=judged.from_scaler)

    def _measure(self, groups: list[list[torch.Tensor]], scaling: Handed, first: bool) -> tuple[JudgedStep, Handed]:
        run, ring, ranks, total, present = self._run, self._run.ring, self._run.ranks, None, None
        step = run.step if first else run.step - 1
        if ranks is not None:
            ranks.wants_tables = isinstance(run.clip, CheckedPolicy) and run.clip.norms is not None
            loss = (math.nan if ring.loss is None else ring.loss) if first and ring.has_loss else None
            shared = ranks.measure(groups, run.backend, scaling.inverse, step, loss=loss, found_inf=scaling.found_inf)
            if shared.loss is not None and ring.newest >= 0:
                ring.note("loss", shared.loss)  # the mean of those that the ranks observed for the step before
            bad = shared.bad_loss if first else None
            if bad is not None and ranks.note_bad_loss(step - 1, bad, self._ledger.history):
                _log.log(self._ledger.level, "step %d: rank %d alone had a loss that is not finite", step - 1, bad)
            scaling = scaling._replace(found_inf=shared.found_inf)
        if first:
            self._ledger.open()  # before there is a new table, so that no more than two are in memory
        if ranks is not None:
            table, total, positions, present, fingerprint = shared[:5]
            fold: Any = total
        else:
            table, fold, positions, fingerprint = kernels.gradient_stats(groups, run.backend, scaling.inverse)
        names = run.names(fingerprint)
        norm = norm_of(*norm_parts(kernels.fold_rows(table) if fold is None else fold))
        if ranks is not None and not math.isfinite(norm):
            ranks.find_trouble(step, shared, names, self._ledger.history if first else None)
        judged = JudgedStep(step, table, positions, names, norm, total=total, present=present)
        judged.loss_scale, judged.from_scaler = scaling.grad_scale, scaling.from_scaler
        return judged, scaling

    def _must_not_follow(self, member: Member, optimizer: Optimizer, decision: HostDecision | DeviceDecision) -> bool:
        """Whether gradients of `member` that came after the decision are not finite. Warns about any that came late."""
        run, ring = self._run, self._run.ring
        params = [p for group in optimizer.param_groups for p in group["params"]]
        known, start = set(decision.positions or ()), run.start_of(member)
        late = [i for i, p in enumerate(params) if p.grad is not None and start + i not in known]
        if not late:
            return False
        if not self._has_warned:
            self._has_warned = True
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
        first = run.known_names[start + late[0]]
        _log.warning("step %d: late gradients are not finite (first %r); skipped", ring.step, first)
        ring.mark_skipped(True)
        run.follow_buffers(ring.step, True)
        self._ledger.enter(is_bad=False, from_scaler=False)
        self._ledger.raise_due()
        return True

    def scale(self, optimizer: Optimizer, factor: float, *, from_scaler: bool = False) -> Undo | None:
        """Multiplies the gradients of one optimizer, or returns how it will do so in its own pass."""
        if self._run.ranks is None and not from_scaler and self.divides(optimizer):
            divisor = torch.tensor(1.0 / factor if factor else math.inf, dtype=torch.float32, device="cpu")
            return FusedFlags(optimizer, {"grad_scale": divisor})
        try:
            kernels.run_scale(self._local(gradients_of(optimizer)), factor, self._run.backend)
        except UnsupportedTensorError as error:
            raise self._named(error, [m for m in self._run.members if m.optimizer is optimizer]) from None
        return None

    def _named(self, error: UnsupportedTensorError, members: Sequence[Member]) -> UnsupportedTensorError:
        """`error`, about a gradient of `members`, with the parameter's name."""
        of_all = [(m, p) for m in self._run.members for group in m.optimizer.param_groups for p in group["params"]]
        named = zip(self._run.names_now(), of_all)
        names = [name for name, (member, p) in named if member in members and p.grad is not None]
        return UnsupportedTensorError(error.index, error.problem, f"{names[error.index]}.grad", "optimizer.step()")

    def _local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The part of `gradients` that this rank writes to."""
        return gradients if self._run.ranks is None else locals_of(gradients)

    def divides(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` multiplies its own gradients, all of them on the CPU, when they are clipped."""
        if self.clip_through == "scale" or not takes_flags(optimizer):
            return False
        return all(p.is_cpu for group in optimizer.param_groups for p in group["params"])
