"""Brings the run of one guard back when it has gone wrong: between its steps, before they are judged."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...diagnosis import diagnose, needs
from ...errors import FastguardError, RecoveryFailedError
from ...history.recoveries import recoveries_of, sentence
from ...stats import values
from ..judge import Judge
from ..ledger import Ledger
from ..policies import GlobalNorm
from ..run import Run
from ..sampling import Sampling
from .keeper import WHAT, Keeper
from .ladder import Ladder
from .recompute import RandomStates, Recomputation, recomputed
from .seen import Groups, StepSeen, averaged, groups_of, is_common, seen_of
from .settings import Recovery
from .snapshots import Snapshot

_log = logging.getLogger("fastguard")
_GRACE = 24  # steps after a rollback whose losses rules look at together with those before it
_UNSET: Any = object()


class _Doubt(NamedTuple):
    """A snapshot that was put back to look at its losses: itself, what was there, and why."""

    tried: Snapshot
    aside: Snapshot
    reason: str


class Rescue:
    """Snapshots and rollbacks of one guard.

    Attributes:
        ladder: what was seen and done.
        events: what was done, as facts.
        lr_factor: of the step under way; 1.0 but after a rollback.
    """

    def __init__(
        self,
        settings: Recovery,
        run: Run,
        ledger: Ledger,
        judge: Judge,
        sampling: Sampling,
        model: torch.nn.Module | None,
        objective: str | None = None,
    ) -> None:
        self._settings, self._run, self._ledger, self._judge = settings, run, ledger, judge
        self.ladder = Ladder(settings)
        self._keeper = Keeper(settings, run, ledger, sampling, self.ladder)
        self.events: list[dict[str, Any]] = []
        self.lr_factor = 1.0
        self._begun = self._seen = self._newest_to = -1
        self._heard_from = 0  # the step from which on losses are of what was put back
        self._is_fresh = True  # what is there now is to be kept first of all
        self._vetoed: set[int] = set()
        self._arrived: list[StepSeen] = []
        self._cause = ""  # as this process alone has found it
        self._clip: Any = _UNSET  # the given policy, while another stands in for it
        self._is_to_fall, self._is_aimless = objective == "minimise", objective in ("game", "reward")
        self._num_unheard = 0
        self._groups: Groups = ()
        self._doubt: _Doubt | None = None
        self._random: RandomStates | None = RandomStates(model) if settings.recompute and model is not None else None
        ledger.skips.instead, ledger.seen = _while_alive(self._note_due), _while_alive(self.see)
        if self._random is not None:
            weakref.finalize(self, self._random.close).atexit = False

    @property
    def recomputes(self) -> bool:
        """Whether steps with a closure are computed once more where their gradients are not finite."""
        return self._settings.recompute

    def see(self) -> None:
        """The newest record may have arrived."""
        ring = self._run.ring
        if ring.newest < 0 or ring.step <= self._seen:
            return
        header = ring.header(ring.newest)
        self._seen = header.step
        if header.step >= self._heard_from:
            vetoed = header.step in self._vetoed
            self._arrived.append(StepSeen(header.loss, header.norm, header.skipped, vetoed, header.lr))
        self._vetoed.discard(header.step)

    def begin_step(self, step: int, has_closure: bool) -> bool:
        """Ahead of a step of the first optimizer: goes back, if that is due. Whether the step has to be attended to.

        Raises:
            RecoveryFailedError: too many attempts have not helped.

        Cost: 10 us; a rollback copies everything back, and waits for the device.
        """
        if step <= self._begun:
            return self._is_active
        run, ladder = self._run, self.ladder
        self._end_veto()  # of a step that raised
        self._begun = step
        self.see()
        arrived, self._arrived = self._arrived, []
        self._look_for_causes(step)
        self._groups = groups_of(run.ranks)
        if self._groups:
            arrived = self._exchanged(arrived)
        ladder.cause, self._cause = self._cause, ""
        ladder.has_aim, ladder.has_grown = not self._is_aimless, self._keeper.has_grown
        was_odd = ladder.rise.is_odd
        for one in arrived:
            ladder.see(one.loss, one.norm, skipped=one.skipped, vetoed=one.vetoed, lr=one.lr)
        if not ladder.rise.is_odd:
            self._keeper.has_grown = False
        elif not was_odd:
            self._keeper.look_for_growth(step)
        if self._is_fresh:
            self._is_fresh = False
            self._keeper.take(step, is_proved=True)
        self._keeper.snapshots.prove(step, is_healthy=ladder.is_healthy, is_blow=ladder.is_blow)
        can_veto = all(member.can_skip for member in run.members)
        heard = any(one.loss is not None for one in arrived)
        if self._doubt is not None:
            self._go_on_trying(step, self._doubt, heard=heard, has_closure=has_closure)
        elif ladder.is_waiting and not ladder.cause:
            self._sit_out(step, heard=heard, can_veto=can_veto)
        elif reason := ladder.reason():
            self._roll_back(step, reason, has_closure, can_veto)
        elif ladder.is_lawful:
            self._accept(step, 0)
        elif (doubt := ladder.doubt()) and can_veto:
            self._try(step, doubt, has_closure)
        self.lr_factor = ladder.lr_factor(step)
        limit = ladder.norm_limit
        if limit < math.inf and not run.is_vetoed:
            given = None if run.clip is None else run.clip.limit
            self._clip = run.clip, run.ring.tell_of_parts
            run.clip_by(GlobalNorm(limit if given is None else min(limit, given)))
        if run.is_vetoed:
            self._note(num_left_out=self._ledger.history.model.num_left_out + 1)
        return self._is_active

    @property
    def _is_active(self) -> bool:
        return self._run.is_vetoed or self.lr_factor != 1.0

    def end_step(self) -> None:
        """All optimizers have taken the step, or left it out: a snapshot, if one is due."""
        run = self._run
        was_vetoed = run.is_vetoed
        self._end_veto()
        if self._random is not None:
            self._random.is_over = True
        if run.step < self._keeper.due or was_vetoed or not self.ladder.is_healthy:
            return
        if not (self._judge.waits and run.ring.newest >= 0 and run.ring.is_skipped):
            self._keeper.take(run.step)

    def _end_veto(self) -> None:
        run = self._run
        if run.is_vetoed:
            self._vetoed.add(self._begun)
            run.is_vetoed = False
        if self._clip is not _UNSET:
            if run.ring.newest >= 0:
                run.ring.latest()  # while what it says of the policy is so
            (run.clip, run.ring.tell_of_parts), self._clip = self._clip, _UNSET

    def _look_for_causes(self, step: int) -> None:
        """What this process alone can tell."""
        self._cause = self._keeper.cause(step) or self._cause
        checkup = self._ledger.checkup
        found = [] if checkup is None else checkup.take_new()
        critical = [f for f in found if f.severity == "critical" and f.rule in self._settings.rules]
        back = max((event["step"] for event in self.events if event["kind"] == "rollback"), default=None)
        if back is not None:  # what is found in the losses of the model that was given up is known
            critical = [f for f in critical if f.last_step is None or f.last_step > back + _GRACE]
        if critical and not self.ladder.is_waiting and self._doubt is None:
            self._cause = f"of {critical[0].rule}: {critical[0].summary.rstrip('.')}"
        count = self.ladder.num_bad
        is_looked_at = count >= 2 and count & (count - 1) == 0  # the second, the fourth, the eighth in a row
        if is_looked_at and not self._keeper.are_finite():
            self._cause = "parameters are not finite"
        if not (self._is_to_fall or self._is_aimless) and (self.ladder.rise.is_suspect or self.ladder.num_high):
            self._is_aimless = needs.descent(self._ledger.history) is False

    def _exchanged(self, arrived: list[StepSeen]) -> list[StepSeen]:
        """What all processes have seen, on average: on this every one decides alike."""
        flags = bool(self._cause), self._keeper.has_grown, self._is_aimless
        arrived, (has_cause, self._keeper.has_grown, self._is_aimless) = averaged(arrived, flags, self._groups)
        if has_cause and not self._cause:
            self._cause = "another process says so"
        return arrived

    def _note_due(self, error: FastguardError) -> None:
        """Too many steps in a row were skipped: in place of the error that would be raised."""
        if not self.ladder.is_waiting and not self._run.is_vetoed and self._doubt is None:
            self._cause = f"{self._ledger.skips.limit} steps in a row were skipped"

    def _sit_out(self, step: int, *, heard: bool, can_veto: bool) -> None:
        """The run went back: whether the data that come now are such that it can go on."""
        ladder, event = self.ladder, self.events[-1]
        knows_losses = ladder.limit < math.inf
        if not can_veto or not knows_losses or (not heard and ladder.num_sat_out >= self._settings.patience):
            ladder.is_waiting = False
            return
        if not heard:
            ladder.num_sat_out += 1
            is_out: bool | None = True
        else:
            is_out = ladder.sit_out()
        if is_out is None:
            self._tell({"kind": "new-level", "step": step, "reason": "", "num_batches": ladder.num_sat_out})
        if is_out:
            self._run.is_vetoed = True
            event["num_batches"] += 1
        else:
            self._note()

    def _try(self, step: int, reason: str, has_closure: bool) -> None:
        """Puts a snapshot back beside what is there, to see whether the loss of steps that are left out is lower."""
        run, ladder, is_kept = self._run, self.ladder, False
        earlier, most = ladder.attempts_before(step), self._settings.attempts
        is_harm = self._is_to_fall or self._keeper.has_grown  # no training grows its weights like that
        if earlier >= (most if is_harm else max(1, most - 1)):
            if is_harm:
                self._fail(step, reason)
            self._accept(step, 0)  # it has come again, from an older snapshot and at a lower learning rate
            return
        self._judge.arrive_all()
        snapshot = self._choose(step, earlier)
        if snapshot is None:
            ladder.accept()
            return
        aside = self._keeper.snapshots.spare(snapshot)
        with run.failures.kept(WHAT, "A loss that has risen is taken for lawful."):
            self._keeper.fill(aside)
            is_kept = True
        if not is_kept:
            ladder.accept()
            return
        self._keeper.restore(snapshot)
        ladder.try_back()
        self._doubt = _Doubt(snapshot, aside, reason)
        self._leave_out(step, has_closure, can_veto=True)

    def _go_on_trying(self, step: int, doubt: _Doubt, *, heard: bool, has_closure: bool) -> None:
        """The losses of what was put back tell whose doing it is that they had risen."""
        ladder, trial = self.ladder, self.ladder.trial
        self._num_unheard = 0 if heard else self._num_unheard + 1
        is_lower = False if trial is None or self._num_unheard >= self._settings.patience else trial.is_lower
        if is_lower is None:
            self._run.is_vetoed = True
            return
        self._doubt, num_asked = None, 0 if trial is None else trial.num_asked
        if is_lower:
            self._went_back(step, doubt.tried, doubt.reason, step - doubt.tried.step)
            ladder.is_waiting = False
        else:
            self._keeper.restore(doubt.aside)
            self._accept(step, num_asked + (0 if has_closure else 2))
            self._leave_out(step, has_closure, can_veto=not has_closure)
        self._keeper.snapshots.take_back(doubt.aside)

    def _accept(self, step: int, num_batches: int) -> None:
        self.ladder.accept()
        self._keeper.has_grown = False
        self._tell({"kind": "new-level", "step": step, "reason": "", "num_batches": num_batches})

    def _choose(self, step: int, earlier: int) -> Snapshot | None:
        newest = self._keeper.snapshots.proved
        chosen = self._keeper.snapshots.choose(
            older=earlier > 0 and newest is not None and newest.step == self._newest_to
        )
        if not self._is_common(chosen):
            self._fail(step, "a process has no snapshot of the step that others go back to")
        return chosen

    def _is_common(self, chosen: Snapshot | None) -> bool:
        """Whether all processes have chosen one of the same step; copies of different steps make no model."""
        return not self._groups or is_common(-1 if chosen is None else chosen.step, self._groups)

    def _leave_out(self, step: int, has_closure: bool, can_veto: bool) -> None:
        """The step at hand, whose gradients and loss, without a closure, are of what is there no longer."""
        self._run.is_vetoed = can_veto
        self._heard_from = step if has_closure else step + 1

    def _roll_back(self, step: int, reason: str, has_closure: bool, can_veto: bool) -> None:
        self._judge.arrive_all()
        earlier = self.ladder.attempts_before(step)
        if earlier >= self._settings.attempts:
            self._fail(step, reason)
        snapshot = self._choose(step, earlier)
        if snapshot is None:
            self._fail(step, f"{reason}, and there was no snapshot that counts")
            return
        self._keeper.restore(snapshot)
        num_batches = step - snapshot.step + (1 if can_veto or not has_closure else 0)
        self._went_back(step, snapshot, reason, num_batches)
        self._leave_out(step, has_closure, can_veto)

    def _went_back(self, step: int, snapshot: Snapshot, reason: str, num_batches: int) -> None:
        self._newest_to = snapshot.step
        factor = self.ladder.went_back(step, snapshot.baseline["ladder"])
        until = step + (self._settings.ramp if factor != 1.0 else 0)
        event = {"kind": "rollback", "step": step, "to": snapshot.step, "reason": reason, "num_batches": num_batches}
        self._tell({**event, "lr_factor": factor, "until": until})
        self._ledger.skips.clear()
        self._keeper.due = step + self._settings.every

    def _fail(self, step: int, reason: str) -> None:
        best = self._keeper.snapshots.best()
        if not self._is_common(best):
            best = None
        if best is not None:
            self._keeper.restore(best)
            self.ladder.load_baseline(best.baseline["ladder"])
        put_back = {} if best is None else {"to": best.step}
        self._tell({"kind": "failed", "step": step, "reason": reason, **put_back})
        self._ledger.deliver()
        findings = diagnose(self._ledger.history, failures=self._run.failures)
        done = [sentence(event) for event in self.events if event["kind"] == "rollback"]
        raise RecoveryFailedError(done, reason, None if best is None else best.step, [f.summary for f in findings])

    def _tell(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        _log.warning("%s", sentence(event))
        self._note()

    def _note(self, **facts: Any) -> None:
        with self._run.failures.kept("model facts", "The report does not tell what recovery did."):
            self._ledger.history.note_model(recoveries=self.events, **facts)

    def recompute(self, closure: Any, step: int) -> tuple[Recomputation, Any]:
        """The gradients of `step` once more; returns what came of it, and what `closure` returned."""
        run = self._run
        params = [p for one in run.optimizers() for group in one.param_groups for p in group["params"]]
        places = [] if run.buffers is None else run.buffers.places
        states = None if self._random is None else self._random.first
        if self._random is not None:
            self._random.is_paused = True
        try:
            found, loss = recomputed(closure, step, params, run.known_names, places, states)
        finally:
            if self._random is not None:
                self._random.is_paused = False
        self._tell({"kind": "recomputed", "step": step, "reason": "", "num_tensors": len(found.tensors)})
        return found, loss

    def close(self) -> None:
        """Takes the hook away; the optimizers are guarded no longer."""
        if self._random is not None:
            self._random.close()
        self._ledger.skips.instead = self._ledger.seen = None

    def state_dict(self) -> dict[str, Any]:
        """What was seen and done; snapshots are not in it: a resumed run keeps what it finds first."""
        self.see()
        events, arrived = [dict(event) for event in self.events], [list(one) for one in self._arrived]
        return {"ladder": self.ladder.state_dict(), "events": events, "arrived": arrived}

    def go_on(self, state: dict[str, Any] | None, step: int) -> None:
        """Goes on from what `state_dict` gave, if it did, at `step`. What the run finds there is kept first of all."""
        if state is not None:
            self.ladder.load_state_dict(state["ladder"])
            self.events = list(recoveries_of(state["events"]))
        self._arrived = [StepSeen(*one) for one in ([] if state is None else state["arrived"])]
        self._keeper.forget()
        self._is_fresh = True
        self._begun = self._seen = step - 1
        self._heard_from, self._newest_to = step, -1
        self._doubt = None
        self._vetoed.clear()


def _while_alive(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method that does not keep its object alive, and does nothing once that is gone."""
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = ref()
        if found is not None:
            found(*args)

    return call


def check_state(state: Any) -> Any:
    """Raises a MisfitError for what `Rescue.state_dict` did not give."""
    values.entry(state, "ladder", Ladder(Recovery()).load_state_dict)
    values.entry(state, "events", recoveries_of)
    values.entry(state, "arrived", lambda plain: values.each(seen_of, plain))
    return state
