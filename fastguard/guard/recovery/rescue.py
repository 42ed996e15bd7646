"""Brings the run of one guard back when it has gone wrong: between its steps, before they are judged."""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...diagnosis import diagnose
from ...errors import FastguardError, RecoveryFailedError
from ...history.recoveries import recoveries_of, sentence
from ...stats import values
from ..judge import Judge
from ..ledger import Ledger
from ..policies import GlobalNorm
from ..run import Run
from ..sampling import Sampling
from .ladder import Ladder
from .recompute import RandomStates, Recomputation, recomputed
from .settings import Recovery
from .snapshots import Snapshot, Snapshots

_log = logging.getLogger("fastguard")
_GRACE = 24  # steps after a rollback whose losses rules look at together with those before it
_WHAT = "recovery"
_UNSET: Any = object()


class _StepSeen(NamedTuple):
    """What a step has shown."""

    loss: float | None
    norm: float
    skipped: bool
    vetoed: bool


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
    ) -> None:
        self._settings, self._run, self._ledger, self._judge, self._sampling = settings, run, ledger, judge, sampling
        self.ladder = Ladder(settings)
        self._snapshots = Snapshots(settings.keep, settings.quarantine or 0)
        self.events: list[dict[str, Any]] = []
        self.lr_factor = 1.0
        self._begun = self._seen = self._newest_to = -1
        self._due = self._heard_from = 0  # steps: of the next snapshot; from which on losses are of what was put back
        self._is_fresh = True  # what is there now is to be kept first of all
        self._vetoed: set[int] = set()
        self._arrived: list[_StepSeen] = []
        self._cause = ""  # as this process alone has found it
        self._clip: Any = _UNSET  # the given policy, while another stands in for it
        self._flags: list[tuple[int, torch.Tensor, str]] = []  # whether what was kept is finite
        self._random: RandomStates | None = RandomStates(model) if settings.recompute and model is not None else None
        ledger.instead, ledger.seen = _while_alive(self._note_due), _while_alive(self.see)
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
            self._arrived.append(_StepSeen(header.loss, header.norm, header.skipped, vetoed))
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
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            arrived = self._exchanged(arrived)
        ladder.cause, self._cause = self._cause, ""
        for one in arrived:
            ladder.see(one.loss, one.norm, skipped=one.skipped, vetoed=one.vetoed)
        if self._is_fresh:
            self._is_fresh = False
            self._take(step, is_proved=True)
        self._snapshots.prove(step, is_healthy=ladder.is_healthy)
        can_veto = all(member.can_skip for member in run.members)
        if ladder.is_waiting and not ladder.cause:
            self._sit_out(step, heard=any(one.loss is not None for one in arrived), can_veto=can_veto)
        elif reason := ladder.reason():
            self._roll_back(step, reason, has_closure, can_veto)
        self.lr_factor = ladder.lr_factor(step)
        limit = ladder.norm_limit
        if limit < math.inf and not run.is_vetoed:
            given = None if run.clip is None else run.clip.limit
            self._clip = run.clip, run.ring.tell_of_parts
            run.clip_by(GlobalNorm(limit if given is None else min(limit, given)))
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
        if run.step < self._due or was_vetoed or not self.ladder.is_healthy:
            return
        if not (self._judge.waits and run.ring.newest >= 0 and run.ring.is_skipped):
            self._take(run.step)

    def _end_veto(self) -> None:
        run = self._run
        if run.is_vetoed:
            self._vetoed.add(self._begun)
            run.is_vetoed = False
        if self._clip is not _UNSET:
            if run.ring.newest >= 0:
                run.ring.latest()  # while what it says of the policy is so
            (run.clip, run.ring.tell_of_parts), self._clip = self._clip, _UNSET

    def _take(self, step: int, *, is_proved: bool = False) -> None:
        run = self._run
        self._due = step + self._settings.every
        buffers = [] if run.buffers is None else run.buffers.places

        def fill(snapshot: Snapshot) -> None:
            replay = self._settings.replay
            snapshot.take(run.optimizers(), buffers, self._settings.state, with_random_state=replay)
            clip = run.clip if self._clip is _UNSET else self._clip[0]
            clip_state = None if clip is None else copy.deepcopy(clip.state_dict())
            snapshot.baseline = {"ladder": self.ladder.baseline(), "clip": clip_state}
            snapshot.loss = self.ladder.loss

        with run.failures.kept(_WHAT, "No snapshot was taken."):
            self._snapshots.take(step, fill, is_proved=is_proved)
            params = [p for one in run.optimizers() for group in one.param_groups for p in group["params"]]
            written = [place.tensor for place in buffers if place.is_written]
            for what, tensors in (("parameters", params), ("buffers", written)):
                flag = _are_finite([t for t in tensors if t is not None])
                if flag is not None:
                    self._flags.append((step, flag, f"{what} are not finite"))

    def _look_for_causes(self, step: int) -> None:
        """What this process alone can tell."""
        late = self._settings.quarantine or 0
        for flag in [flag for flag in self._flags if flag[1].is_cpu or step >= flag[0] + late]:
            self._flags.remove(flag)
            if not flag[1]:
                self._cause = flag[2]
        checkup = self._ledger.checkup
        found = [] if checkup is None else checkup.take_new()
        critical = [f for f in found if f.severity == "critical" and f.rule in self._settings.rules]
        back = max((event["step"] for event in self.events if event["kind"] == "rollback"), default=None)
        if back is not None:  # what is found in the losses of the model that was given up is known
            critical = [f for f in critical if f.last_step is None or f.last_step > back + _GRACE]
        if critical and not self.ladder.is_waiting:
            self._cause = f"of {critical[0].rule}: {critical[0].summary.rstrip('.')}"
        count = self.ladder.num_bad
        if count >= 2 and count & (count - 1) == 0:  # at the second, the fourth, the eighth in a row
            params = [p for one in self._run.optimizers() for group in one.param_groups for p in group["params"]]
            are_finite = _are_finite(params)
            if are_finite is not None and not are_finite:
                self._cause = "parameters are not finite"

    def _exchanged(self, arrived: list[_StepSeen]) -> list[_StepSeen]:
        """What all processes have seen, on average: on this every one decides alike. One `all_reduce`."""
        losses = [one.loss for one in arrived if one.loss is not None]
        sums = [sum(losses), len(losses), sum(one.norm for one in arrived), len(arrived)]
        flags = [sum(one.skipped for one in arrived), sum(one.vetoed for one in arrived), bool(self._cause)]
        device = torch.device("cpu")
        if dist.get_backend() == "nccl":
            device = self._run.optimizers()[0].param_groups[0]["params"][0].device
        told = torch.tensor([float(x) for x in (*sums, *flags)], dtype=torch.float64, device=device)
        dist.all_reduce(told)
        loss, num_losses, norm, count, skipped, vetoed, num_causes = told.tolist()
        if num_causes and not self._cause:
            self._cause = "another process says so"
        if not count:
            return []
        return [_StepSeen(loss / num_losses if num_losses else None, norm / count, skipped > 0, vetoed > 0)]

    def _note_due(self, error: FastguardError) -> None:
        """Too many steps in a row were skipped: in place of the error that would be raised."""
        if not self.ladder.is_waiting and not self._run.is_vetoed:
            self._cause = f"{self._ledger.max_consecutive_skips} steps in a row were skipped"

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

    def _roll_back(self, step: int, reason: str, has_closure: bool, can_veto: bool) -> None:
        run, ladder, ledger = self._run, self.ladder, self._ledger
        self._judge.arrive_all()
        earlier = ladder.attempts_before(step)
        if earlier >= self._settings.attempts:
            self._fail(step, reason)
        newest = next((one for one in self._snapshots if one.is_proved), None)
        is_tried = earlier > 0 and newest is not None and newest.step == self._newest_to
        snapshot = self._snapshots.choose(older=is_tried)
        if snapshot is None:
            self._fail(step, f"{reason}, and there was no snapshot that counts")
            return
        self._restore(snapshot)
        self._newest_to = snapshot.step
        factor = ladder.went_back(step, snapshot.baseline["ladder"])
        run.is_vetoed = can_veto
        self._heard_from = step if has_closure else step + 1
        until = step + (self._settings.ramp if factor != 1.0 else 0)
        num_batches = step - snapshot.step + (1 if can_veto or not has_closure else 0)
        event = {"kind": "rollback", "step": step, "to": snapshot.step, "reason": reason, "num_batches": num_batches}
        self._tell({**event, "lr_factor": factor, "until": until})
        ledger.skipped_run.clear()
        ledger.skipped_by_policy.clear()
        ledger.skipped_tensors.clear()
        self._due = step + self._settings.every

    def _restore(self, snapshot: Snapshot) -> None:
        run = self._run
        snapshot.restore()
        if run.clip is not None and snapshot.baseline["clip"] is not None:
            run.clip.load_state_dict(copy.deepcopy(snapshot.baseline["clip"]))
        if run.buffers is not None:
            run.buffers.refresh()
        self._sampling.forget()
        self._ledger.due = None
        self._flags.clear()

    def _fail(self, step: int, reason: str) -> None:
        best = self._snapshots.best()
        if best is not None:
            self._restore(best)
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

    def _note(self) -> None:
        with self._run.failures.kept("model facts", "The report does not tell what recovery did."):
            self._ledger.history.note_model(recoveries=self.events)

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
        self._ledger.instead = self._ledger.seen = None

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
        self._arrived = [_StepSeen(*one) for one in ([] if state is None else state["arrived"])]
        self._snapshots.forget()
        self._is_fresh = True
        self._begun = self._seen = step - 1
        self._heard_from, self._newest_to = step, -1
        self._flags = []
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

    def seen(plain: Any) -> None:
        if len(values.row(plain)) != 4:
            raise values.MisfitError(f"must have 4 entries, got {len(plain)}")
        for read, value in zip((values.maybe(values.number), values.number, values.truth, values.truth), plain):
            read(value)

    values.entry(state, "arrived", lambda plain: values.each(seen, plain))
    return state


def _are_finite(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Whether they are, as a tensor on the device of the first; None where there is nothing to ask."""
    asked = [t.detach() for t in tensors if (t.is_floating_point() or t.is_complex()) and t.itemsize > 1]
    asked = [t for t in asked if t.numel() and t.layout is torch.strided and not t.is_meta]
    if not asked:
        return None
    with torch.no_grad():
        largest = torch._foreach_norm(asked, math.inf)
        return torch.stack([x.to(asked[0].device, torch.float64) for x in largest]).isfinite().all()


class Slowed:
    """The learning rate times a factor, for one step of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        self._entries = [(group, group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
        self._slow = [lr * factor for _, lr in self._entries]

    def apply(self) -> None:
        for (group, _), slow in zip(self._entries, self._slow):
            group["lr"] = slow

    def give_back(self) -> None:
        """The very objects that were there before."""
        for (group, lr), slow in zip(self._entries, self._slow):
            if group["lr"] is slow:
                group["lr"] = lr
