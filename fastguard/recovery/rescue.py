"""Rolls training back when it has gone wrong, between two steps."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import torch
import torch.distributed as dist

from ..clip import GlobalNorm
from ..diagnosis import by_sign, diagnose, needs
from ..errors import FastguardError, RecoveryFailedError
from ..observers.observer import while_alive
from ..ranks.shards import has_other_ranks
from ..records.events import RecoveryEvent, describe_recovery
from .ladder import Groups, Ladder, StepSeen, exchanged, read_events, reduced
from .rise import Trial
from .settings import Recovery
from .snapshots import Snapshot, Snapshots, are_finite, have_not_grown, largest, parameters_of

_log = logging.getLogger("fastguard")
WHAT = "recovery"
_GRACE = 24  # steps after a rollback in which rules still see losses from before it
_UNSET: Any = object()


class Rescue:
    """Snapshots and rollbacks of one guard; `run`, `ledger`, `judge` and `observers` are the guard's."""

    def __init__(
        self, settings: Recovery, run: Any, ledger: Any, judge: Any, observers: Any, objective: str | None = None
    ) -> None:
        self._settings, self._run, self._ledger, self._judge = settings, run, ledger, judge
        self.ladder = Ladder(settings)  # decides what to do
        self._observers = observers
        self._snapshots = Snapshots(settings.keep, settings.quarantine or 0, settings.patience)
        self._due = 0  # the step after which to take the next
        self._flags: list[tuple[int, torch.Tensor, str]] = []  # step; whether all is well; the problem if not
        self.events: list[RecoveryEvent] = []  # what was done
        self.lr_factor = 1.0  # of the current step; 1.0 except after a rollback
        self._begun = self._seen = self._newest_to = -1
        self._heard_from = 0  # losses belong to the restored state from this step on
        self._is_fresh = True  # take a snapshot before anything else
        self._vetoed: set[int] = set()
        self._arrived: list[StepSeen] = []
        self._clip: Any = _UNSET  # the user's policy, while another replaces it
        self._is_to_fall, self.ladder.has_aim = objective == "minimise", objective not in ("game", "reward")
        self._num_unheard = 0
        self._groups: Groups = ()
        # a snapshot that was restored to try its losses, their trial, the state that it replaced, and the reason
        self._doubt: tuple[Snapshot, Trial, Snapshot, str] | None = None
        ledger.skips.instead, ledger.seen = while_alive(self._note_due), while_alive(self.see)

    def see(self) -> None:
        """Takes the newest record, if one has arrived."""
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
        """Rolls back, if that is due, ahead of a step of the first optimizer. Returns whether to change the step."""
        if step <= self._begun:
            return self._run.is_vetoed or self.lr_factor != 1.0
        run, ladder = self._run, self.ladder
        self._end_veto()  # of a step that raised
        self._begun = step
        self.see()
        arrived, self._arrived = self._arrived, []
        was_odd = ladder.rise.is_odd
        ladder.has_grown = ladder.has_grown and was_odd
        self._look_for_causes(step)
        world: Groups = [dist.group.WORLD] if has_other_ranks() else []  # type: ignore[list-item]
        self._groups = world if run.ranks is None else run.ranks.groups  # of those that share the model, or of all
        if self._groups:
            arrived = exchanged(self.ladder, arrived, self._groups)
        for one in arrived:
            ladder.see(one.loss, one.norm, skipped=one.skipped, vetoed=one.vetoed, lr=one.lr)
        if ladder.rise.is_odd and not was_odd and (before := self._snapshots.proved) is not None:
            flag = have_not_grown(largest(self._parameters()), before.largest)
            if flag is not None:
                self._flags.append((step, flag, ""))
        if self._is_fresh:
            self._is_fresh = False
            self._take(step, is_proved=True)
        self._snapshots.prove(step, is_healthy=ladder.is_healthy, is_blow=ladder.is_blow)
        can_veto = all(member.can_skip for member in run.members)
        heard = any(one.loss is not None for one in arrived)
        if self._doubt is not None:
            self._go_on_trying(step, *self._doubt, heard=heard, has_closure=has_closure)
        elif ladder.is_waiting and not ladder.cause:
            self._sit_out(step, heard=heard, can_veto=can_veto)
        elif reason := ladder.reason():
            self._roll_back(step, reason, has_closure, can_veto)
        elif ladder.is_lawful:
            self._accept(step, 0)
        elif (doubt := ladder.doubt()) and can_veto:
            self._try(step, doubt, has_closure)
        ladder.cause = ""
        self.lr_factor = ladder.lr_factor(step)
        limit = ladder.norm_limit
        if limit < math.inf and not run.is_vetoed:
            given = None if run.clip is None else run.clip.limit
            self._clip = run.clip, run.ring.tell_of_parts
            run.clip_by(GlobalNorm(limit if given is None else min(limit, given)))
        if run.is_vetoed:
            self._note(num_left_out=self._ledger.history.model.num_left_out + 1)
        return run.is_vetoed or self.lr_factor != 1.0

    def end_step(self) -> None:
        """Takes a snapshot, if one is due, once all optimizers have taken or skipped the step."""
        run = self._run
        was_vetoed = run.is_vetoed
        self._end_veto()
        if run.step < self._due or was_vetoed or not self.ladder.is_healthy:
            return
        if not (run.waits and run.ring.newest >= 0 and run.ring.is_skipped):
            self._take(run.step)

    def _end_veto(self) -> None:
        run = self._run
        if run.is_vetoed:
            self._vetoed.add(self._begun)
            run.is_vetoed = False
        if self._clip is not _UNSET:
            if run.ring.newest >= 0:
                run.ring.latest()  # made now, because it describes the present policy
            (run.clip, run.ring.tell_of_parts), self._clip = self._clip, _UNSET

    def _take(self, step: int, *, is_proved: bool = False) -> None:
        """Takes a snapshot ahead of `step`."""
        run = self._run
        self._due = step + self._settings.every
        with run.failures.kept(WHAT, "No snapshot was taken."):
            snapshot = self._snapshots.take(step, self._fill, is_proved=is_proved)
            places = [] if run.buffers is None else run.buffers.places
            written = [place.tensor for place in places if place.is_written and place.tensor is not None]
            sizes = snapshot.largest = largest(self._parameters())
            for what, found in (("parameters", sizes), ("buffers", largest(written))):
                if found is not None:
                    self._flags.append((step, found.isfinite().all(), f"{what} are not finite"))

    def _fill(self, snapshot: Snapshot) -> None:
        """Copies the present state."""
        run, settings = self._run, self._settings
        places = [] if run.buffers is None else run.buffers.places
        snapshot.take(run.optimizers(), places, settings.state)
        clip_state = None if run.clip is None else copy.deepcopy(run.clip.state_dict())
        snapshot.baseline = {"ladder": self.ladder.baseline(), "clip": clip_state}
        snapshot.loss = self.ladder.level.newest

    def _restore(self, snapshot: Snapshot) -> None:
        """Restores it, and drops everything pending from earlier steps."""
        run = self._run
        snapshot.restore()
        if run.clip is not None and snapshot.baseline["clip"] is not None:
            run.clip.load_state_dict(copy.deepcopy(snapshot.baseline["clip"]))
        if run.buffers is not None:
            run.buffers.refresh()
        self._observers.forget()
        self._ledger.skips.due = None
        self._flags.clear()
        self.ladder.has_grown = False

    def _flagged(self, step: int) -> str:
        """Why to roll back, as found in earlier snapshots; "" for no reason."""
        late, found = self._settings.quarantine or 0, ""
        for flag in [flag for flag in self._flags if flag[1].is_cpu or step >= flag[0] + late]:
            self._flags.remove(flag)
            if not flag[1] and flag[2]:
                found = flag[2]
            elif not flag[1]:
                self.ladder.has_grown = True
        return found

    def _parameters(self) -> list[torch.Tensor]:
        return parameters_of(self._run.optimizers())

    def _look_for_causes(self, step: int) -> None:
        """Looks for reasons to roll back that this process can see."""
        ladder = self.ladder
        ladder.cause = self._flagged(step) or ladder.cause
        checkup = self._ledger.checkup
        found = [] if checkup is None else checkup.take_new()
        critical = [f for f in found if f.severity == "critical" and {f.rule, *by_sign([f])} & {*self._settings.rules}]
        back = max((event["step"] for event in self.events if event["kind"] == "rollback"), default=None)
        if back is not None:  # findings about the state that was given up are old
            critical = [f for f in critical if f.last_step is None or f.last_step > back + _GRACE]
        if critical and not ladder.is_waiting and self._doubt is None:
            ladder.cause = f"of {critical[0].rule}: {critical[0].summary.rstrip('.')}"
        count = ladder.num_bad
        is_looked_at = count >= 2 and count & (count - 1) == 0  # the second, fourth, eighth in a row
        if is_looked_at and not are_finite(self._parameters()):
            ladder.cause = "parameters are not finite"
        if ladder.has_aim and not self._is_to_fall and (ladder.rise.is_suspect or ladder.num_high):
            ladder.has_aim = needs.descent(self._ledger.history) is not False

    def _note_due(self, error: FastguardError) -> None:
        """Rolls back instead of raising because too many steps in a row were skipped."""
        if not self.ladder.is_waiting and not self._run.is_vetoed and self._doubt is None:
            self.ladder.cause = f"{self._ledger.skips.limit} steps in a row were skipped"

    def _sit_out(self, step: int, *, heard: bool, can_veto: bool) -> None:
        """Skips steps after a rollback while the losses of the new data are too high."""
        ladder, event = self.ladder, self.events[-1]
        knows_losses = ladder.level.limit < math.inf
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
        """Restores a snapshot for some skipped steps, to see whether their losses are lower."""
        ladder = self.ladder
        earlier, most = ladder.attempts_before(step), self._settings.attempts
        is_harm = self._is_to_fall or ladder.has_grown  # weights never grow like that in training
        if earlier >= (most if is_harm else max(1, most - 1)):
            if is_harm:
                self._fail(step, reason)
            self._accept(step, 0)  # it came again with an older snapshot and a lower learning rate
            return
        self._judge.arrive_all()
        snapshot = self._choose(step, earlier)
        if snapshot is not None:
            aside, is_kept = self._snapshots.spare(snapshot), False
            with self._run.failures.kept(WHAT, "A loss that has risen is taken for lawful."):
                self._fill(aside)
                is_kept = True
            if is_kept:
                self._restore(snapshot)
                self._doubt = snapshot, ladder.try_back(), aside, reason
                self._leave_out(step, has_closure, can_veto=True)
                return
        ladder.accept()

    def _go_on_trying(
        self, step: int, tried: Snapshot, trial: Trial, aside: Snapshot, reason: str, *, heard: bool, has_closure: bool
    ) -> None:
        """Keeps the restored snapshot if its losses are lower, or restores the state that it replaced."""
        self._num_unheard = 0 if heard else self._num_unheard + 1
        is_lower = False if self._num_unheard >= self._settings.patience else trial.is_lower
        if is_lower is None:
            self._run.is_vetoed = True
            return
        self._doubt = None
        if is_lower:
            self._went_back(step, tried, reason, step - tried.step)
            self.ladder.is_waiting = False
        else:
            self._restore(aside)
            self._accept(step, trial.num_asked + (0 if has_closure else 2))
            self._leave_out(step, has_closure, can_veto=not has_closure)
        self._snapshots.free.append(aside)

    def _accept(self, step: int, num_batches: int) -> None:
        self.ladder.accept()
        self._tell({"kind": "new-level", "step": step, "reason": "", "num_batches": num_batches})

    def _choose(self, step: int, earlier: int) -> Snapshot | None:
        newest = self._snapshots.proved
        chosen = self._snapshots.choose(older=earlier > 0 and newest is not None and newest.step == self._newest_to)
        if not self._is_common(chosen):
            self._fail(step, "a process has no snapshot of the step that others go back to")
        return chosen

    def _is_common(self, chosen: Snapshot | None) -> bool:
        """Whether all processes have chosen a snapshot of the same step."""
        if not self._groups:
            return True
        step = -1 if chosen is None else chosen.step
        last, first = reduced([step, -step], self._groups, dist.ReduceOp.MAX)
        return last == -first

    def _leave_out(self, step: int, has_closure: bool, can_veto: bool) -> None:
        """Skips this step: without a closure, its gradients and loss belong to the state that was replaced."""
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
        self._restore(snapshot)
        num_batches = step - snapshot.step + (1 if can_veto or not has_closure else 0)
        self._went_back(step, snapshot, reason, num_batches)
        self._leave_out(step, has_closure, can_veto)

    def _went_back(self, step: int, snapshot: Snapshot, reason: str, num_batches: int) -> None:
        self._newest_to = snapshot.step
        factor = self.ladder.went_back(step, snapshot.baseline["ladder"])
        until = step + (self._settings.ramp if factor != 1.0 else 0)
        event = RecoveryEvent(kind="rollback", step=step, to=snapshot.step, reason=reason, num_batches=num_batches)
        self._tell({**event, "lr_factor": factor, "until": until})
        self._ledger.skips.clear()
        self._due = step + self._settings.every

    def _fail(self, step: int, reason: str) -> None:
        best = self._snapshots.best()
        if not self._is_common(best):
            best = None
        if best is not None:
            self._restore(best)
            self.ladder.load_baseline(best.baseline["ladder"])
        event = RecoveryEvent(kind="failed", step=step, reason=reason)
        if best is not None:
            event["to"] = best.step
        self._tell(event)
        self._ledger.deliver()
        findings = diagnose(self._ledger.history, failures=self._run.failures)
        done = [describe_recovery(event) for event in self.events if event["kind"] == "rollback"]
        raise RecoveryFailedError(done, reason, None if best is None else best.step, [f.summary for f in findings])

    def _tell(self, event: RecoveryEvent) -> None:
        self.events.append(event)
        _log.warning("%s", describe_recovery(event))
        self._note()

    def _note(self, **facts: Any) -> None:
        with self._run.failures.kept("model facts", "The report does not tell what recovery did."):
            self._ledger.history.note_model(recoveries=self.events, **facts)

    def close(self) -> None:
        """Removes the hooks, once the optimizers are no longer guarded."""
        self._ledger.skips.instead = self._ledger.seen = None

    def state_dict(self) -> dict[str, Any]:
        """Plain data. Snapshots are not included: a resumed run starts by taking one."""
        self.see()
        events, arrived = [dict(event) for event in self.events], [list(one) for one in self._arrived]
        return {"ladder": self.ladder.state(), "events": events, "arrived": arrived}

    def go_on(self, state: dict[str, Any] | None, step: int) -> None:
        """Resumes at `step` from what `state_dict` returned, or from None, and takes a snapshot first."""
        if state is not None:
            self.ladder.load(state["ladder"])
            self.events = read_events(state["events"])
        self._arrived = [StepSeen(*one) for one in ([] if state is None else state["arrived"])]
        self._snapshots.forget()
        self._flags.clear()
        self.ladder.has_grown = False
        self._is_fresh = True
        self._begun = self._seen = step - 1
        self._heard_from, self._newest_to = step, -1
        self._doubt = self.ladder.trial = None
        self._vetoed.clear()
