"""Guard: the face of what watches an optimizer: the newest record, the history, the report. It takes no step."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .. import _env, kernels
from ..activations import ActivationMonitor, Replay
from ..diagnosis import Finding
from ..errors import NotGuardedError
from ..history import TrainingHistory
from ..history.recoveries import sentence
from ..names import Namer
from ..report import Report, build_report
from ..stats import StepStats
from ..stats.magnitudes import MagnitudeHistogram
from .asked import Asked
from .checkup import Checkup
from .endings import hold, let_go
from .evidence import EvidenceSampling
from .facts import ModelFacts
from .hooks import Hooks
from .judge import Judge
from .ledger import Ledger
from .observed import Observed
from .policies import ClipPolicy, GivenPolicy, as_policy
from .ranks import LocalGradients, Parity, Ranks
from .recovery import Recomputation, Recovery, Rescue
from .resuming import VERSION, StatefulGuard, read
from .run import Run, held_weakly
from .sampling import Sampling
from .told import Told
from .wrappers import inwards

_log = logging.getLogger("fastguard")
GUARD = "_guard"  # where an optimizer has it: no public attribute, of which torch expects that copies have it too
_HOW_TO_GUARD = (
    "Guard it with `optimizer = fastguard.wrap(optimizer, model)`; "
    "a pickled or deep-copied optimizer has lost its guard."
)


class Guard:
    """Watches the gradients of one optimizer, or of several that share one norm. Made by `fastguard.wrap`.

    Attributes:
        run, ledger, judge, sampling, told: its parts.
        asked: what `wrap` was asked for.

    Cost a step: one read of the gradients, and one more read and write where they are clipped. On a GPU two launches, a
    third to clip; no sync with a fused optimizer, one with any other that may skip. `wrap` says what its arguments add.
    Memory: two tables of 80 bytes a tensor, and 0.4 KB for each of the newest 512 steps.
    """

    asked = Asked()

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: torch.nn.Module | None,
        *,
        proxies: Sequence[Any],
        clip: ClipPolicy | None,
        skip_nonfinite: bool,
        max_consecutive_skips: int,
        sinks: Iterable[Any],
        backend: str,
        when_behind: str,
        clip_through: str,
        activations: ActivationMonitor | None = None,
        weights: Mapping[str, Any] | None = None,
        check_every: int | None = None,
        objective: str | None = None,
        recovery: Recovery | None = None,
        names: Sequence[str] | Mapping[torch.Tensor, str] | None = None,
        is_quiet: bool = False,
        over: Ranks | None = None,
        parity: Parity | None = None,
        local: LocalGradients | None = None,
    ) -> None:
        self._namer = namer = Namer(model)
        if names is not None:
            namer.give(names, optimizers)
        namer.check(optimizers)
        backend = kernels.resolve_backend(backend)
        self.run = Run(optimizers, proxies, namer, clip=clip, skip_nonfinite=skip_nonfinite, backend=backend)
        self.run.ranks = over
        self.run.watch_buffers(model)
        self.ledger = Ledger(self.run.ring, self.run.failures, sinks, max_consecutive_skips)
        self._local = local
        if local is not None:
            local.start(self.run, partial(getattr, self.ledger, "history"))
            self.ledger.where_among_ranks = local.told_trouble
        if over is not None:
            over.own = local
            self.ledger.where_among_ranks = over.told_trouble
        if is_quiet:
            self.ledger.level = logging.DEBUG
        if _env.num_restarts():
            _log.log(self.ledger.level, "torchrun has started this run anew: attempt %d", _env.num_restarts() + 1)
        self.judge = Judge(self.run, self.ledger, when_behind, clip_through)
        if self.judge.waits:
            self.ledger.lend(held_weakly(self.magnitudes))
        self._is_loss_new = True
        facts = ModelFacts(model, optimizers, namer, backend)
        evidence = EvidenceSampling(self.run, model, optimizers, parity, local)
        self._observed = Observed(self.run, self.judge)
        parts = facts, evidence, self._observed
        self.sampling = Sampling(self.run, self.judge, *parts, model, activations, weights)
        if activations is not None:
            self.ledger.fetch = held_weakly(self.sampling.attach_arrived)
        mine = self.run, self.ledger, self.judge, self.sampling
        self._rescue = None if recovery is None else Rescue(recovery, *mine, model, objective)
        self._hooks = self._attach()
        self.told = Told(self.run, self.ledger, self.sampling, facts, namer, objective, local)
        tell = _say_nothing if is_quiet else None
        self._checkup = Checkup(self.history, self.run.failures, self.told.tell, check_every, tell)
        self.ledger.watch(self._checkup)
        hold(self, self.ledger, self.judge.flush)

    def __repr__(self) -> str:
        kinds = ", ".join(type(one).__name__ for one in self.run.optimizers())
        return f"<fastguard.Guard of {kinds} at step {self.run.step}, clip={self.run.clip!r}>"

    def _attach(self) -> list[Any]:
        """Sets hooks on the optimizers; each has `remove`."""
        parts = self.judge, self.ledger, self.sampling, self._rescue
        return [Hooks(self.run, member, *parts) for member in self.run.members]

    @staticmethod
    def of(optimizer: Any) -> Guard:
        """The guard of `optimizer`, also of one inside the wrappers of accelerate and Lightning.

        Raises:
            NotGuardedError: there is none; says how to guard it.
        """
        for layer in inwards(optimizer):
            guard = getattr(layer, "__dict__", {}).get(GUARD)
            if isinstance(guard, Guard):
                return guard
        raise NotGuardedError(f"this {type(optimizer).__name__} is not guarded. {_HOW_TO_GUARD}")

    @property
    def clip(self) -> Any:
        """The clip policy; None for no clipping."""
        clip = self.run.clip
        return clip.given if isinstance(clip, GivenPolicy) else clip

    @clip.setter
    def clip(self, clip: Any) -> None:
        self.run.clip_by(None if clip is None else as_policy(clip))

    @property
    def skip_nonfinite(self) -> bool:
        """Whether steps with NaN or Inf gradients are skipped."""
        return self.run.skip_nonfinite

    @skip_nonfinite.setter
    def skip_nonfinite(self, skip: bool) -> None:
        self.run.skip_nonfinite = skip

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that `wrap` was given; None if there was none, or it no longer exists."""
        return self._namer.model

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers under this guard, without what stands around them."""
        return self.run.optimizers()

    @property
    def backend(self) -> str:
        """What was asked for: "auto" or a name from `fastguard.backends()`."""
        return self.run.backend

    @property
    def history(self) -> TrainingHistory:
        """The run so far, without the step just taken, to which `observe` may still add."""
        return self.ledger.history

    @property
    def last(self) -> StepStats | None:
        """The newest record, or None before the first one. Never blocks.

        On the CPU it is of the step just taken. On a GPU it is the newest that has arrived, and `lag` steps old.

        Cost: 5 us when it is asked for first, and 10 ns a tensor; the step itself makes no record.
        """
        ring = self.run.ring
        return None if ring.newest < 0 else ring.latest()

    @property
    def lag(self) -> int:
        """How many steps were taken since the one that `last` is of: 0 on the CPU, and after `flush`."""
        return self.judge.lag

    @property
    def max_consecutive_skips(self) -> int:
        """How many skipped steps in a row raise."""
        return self.ledger.skips.limit

    @max_consecutive_skips.setter
    def max_consecutive_skips(self, number: int) -> None:
        self.ledger.skips.limit = number

    def observe(self, loss: Any = None, val_loss: Any = None) -> None:
        """Adds a loss to its step: that just taken, or the one to come, whichever the loss was computed for.

        Several of one step, as of micro-batches whose gradients are accumulated, are averaged. A loss may come before
        the first step, before `backward`, and between micro-batches: which step it is of, autograd knows. A number, or
        a detached tensor, is of the step just taken; unless others came ahead of their steps, as with micro-batches
        they do, or that step has one: then it is of the next if anything was computed since.

        Args:
            loss, val_loss: a float, or a tensor of one element. A `val_loss` is of the step just taken, or the first.

        Raises:
            RuntimeError: the record of that step was handed over by `flush`.
            ValueError: what is no number, or a tensor of more than one element; nothing is added then.

        Cost: no sync. A tensor on the device of the gradients is copied there: one launch.
        """
        if self._is_loss_new and loss is not None:
            self._is_loss_new = False
            self.told.tell_of_loss(loss)
        run = self.run
        is_plain = val_loss is None and loss is not None and self._observed.marked != run.step - 1
        if is_plain and self.judge.waits and run.ring.note_loss(loss):
            return  # the ordinary case: one more number in the header
        self._observed.observe(loss, val_loss)

    def change_sinks(self, sinks: Iterable[Any]) -> None:
        """Has the records of the steps to come go to `sinks` instead; those that are not among them are closed."""
        self.flush()
        self.ledger.change_sinks(sinks)
        self.history.has_ended = False
        hold(self, self.ledger, self.judge.flush)

    def flush(self) -> None:
        """Hands the record of the step just taken to history and sinks. `observe` can no longer add to it.

        Cost: on a GPU, waits for the device.
        """
        self.sampling.arrive_all()
        self.judge.flush()

    @property
    def activations(self) -> ActivationMonitor | None:
        """The monitor of activations, if they are watched."""
        return self.sampling.monitor

    def replay(self, forward: Callable[[], Any]) -> Replay:
        """Runs `forward` once more with every module watched, and says where NaN or Inf came up.

        Meant for after a skipped step, whose parameters are as they were: `guard.replay(lambda: model(x))`. What it saw
        goes on the record of that step. See `fastguard.activations.replay`; it leaves the training as it was.

        Raises:
            ValueError: the guard has no model; `forward` did not call it.

        Cost: a forward pass, one read of each output, and a copy of the buffers; on a GPU, waits for the device.
        """
        self.judge.arrive_all()
        return self.sampling.replay(forward)

    def magnitudes(self) -> MagnitudeHistogram:
        """How large the gradients are that the parameters have now: counts of floor(log2 |g|), as they lie in memory.

        A GradScaler's scale is in them until it has unscaled them.

        Cost: one pass over the gradients; on a GPU, waits for the device.
        """
        groups = [group for member in self.run.members if member.is_alive for group in member.optimizer.param_groups]
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        return kernels.magnitude_histogram(gradients, backend=self.run.backend)

    @property
    def recoveries(self) -> list[str]:
        """What recovery has done so far, in words."""
        return [] if self._rescue is None else [sentence(event) for event in self._rescue.events]

    def recompute(self, closure: Callable[[], Any]) -> Recomputation:
        """Computes the gradients of the step just skipped once more, and says whether they have the same bits.

        The same bits: it is the data or the model. Other bits: a transient fault of the machine, or an operation that
        is not deterministic. What came of it is in the report. `closure` clears the gradients, and runs the forward and
        backward passes of that step again. Afterwards gradients, buffers and random state are as they were before.

        Raises:
            RuntimeError: the guard has no recovery with `recompute=True`; the newest step was not skipped, so that its
                parameters are others.

        Cost: what `closure` costs, a copy and a read of the gradients; on a GPU, waits for the device.
        """
        self.judge.arrive_all()
        ring = self.run.ring
        if self._rescue is None or not self._rescue.recomputes:
            raise RuntimeError("`recompute` must have been asked for: wrap(..., recovery=Recovery(recompute=True))")
        if ring.newest < 0 or not ring.is_skipped:
            raise RuntimeError(
                "`recompute` must follow a step that was skipped: after any other, parameters have moved"
            )
        with self.sampling.paused():
            return self._rescue.recompute(closure, ring.step)[0]

    def report(self) -> Report:
        """What the run looks like so far, the step just taken included: status, findings, recommendations, numbers.

        Never raises: what failed, and so was not checked, is a finding.

        Cost: about 1 ms. On a GPU, waits for the device.
        """
        failures = self.run.failures
        self.sampling.arrive_all()
        with failures.kept("delivery", "The report lacks steps."):
            self.judge.arrive_all()
        self.told.tell()
        lost = self.ledger.lost()
        if self.judge.num_dropped:
            lost["the guard, which was behind (when_behind='drop')"] = self.judge.num_dropped
        history = self.history
        with failures.kept("the step just taken", "The report is without it."):
            history = self.ledger.history_with_held()
        source = partial(_drawn, weakref.ref(self), history)
        costs = self.ledger.costs()
        asked = self.run.ranks or self._local
        more = {} if asked is None else asked.costs()
        return build_report(history, sinks_lost=lost, sinks=costs, numbers=more, failures=failures, source=source)

    def detach(self) -> None:
        """Leaves the optimizer as it was before `wrap`. Records stay readable; sinks stay open."""
        self.flush()
        self.sampling.close()
        for hooks in self._hooks:
            hooks.remove()
        self._hooks = []
        if self.run.buffers is not None:
            self.run.buffers.close()
        if self._rescue is not None:
            self._rescue.close()
        for member in self.run.members:
            if member.is_alive:
                member.optimizer.__dict__.pop(GUARD, None)
        for proxy in (ref() for ref in self.run.proxies):
            if proxy is not None and isinstance(proxy.__dict__.get("guard"), Guard):
                del proxy.__dict__["guard"]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For steps that are no part of the run, as those of a learning-rate test: not judged, clipped or recorded.

        >>> import torch, fastguard
        >>> p = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1))
        >>> with optimizer.guard.paused():
        ...     optimizer.step()
        >>> optimizer.guard.last is None
        True
        """
        members = self.run.members
        before = [member.is_paused for member in members]
        self.run.is_short = False
        for member in members:
            member.is_paused = True
        try:
            with self.sampling.paused():
                yield
        finally:
            for member, was in zip(members, before, strict=True):
                member.is_paused = was

    def close(self) -> None:
        """Hands over what is held back and closes the sinks. Call it at the end of training.

        A report that is asked for after it says, too, whether the loss was still falling at the end.

        Where it is not called, what is held back is handed over when the guard is dropped or the process ends: by
        `sys.exit`, an exception, or SIGTERM, for which `wrap` sets a handler if there are sinks and it has none.
        """
        self.told.tell()
        self.flush()
        self.history.has_ended = True
        self.sampling.close()
        self.ledger.close()
        let_go(self.ledger)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: step number, run of skips, history, clip policy. Plain data, fit for torch.save.

        The step just taken is in it; `observe` may still add to that step, for this run only. On a GPU, waits for it.
        """
        self.sampling.arrive_all()
        self.judge.arrive_all()
        self.told.tell()
        return {
            "version": VERSION,
            **self.ledger.state_dict(self.run.step),
            "checkup": self._checkup.state_dict(),
            "evidence": self.sampling.state_dict(),
            "clip": None if self.run.clip is None else self.run.clip.state_dict(),
            "clip_loss": self.run.ring.loss if self.run.ring.loss is not None else self._policy_loss,
            "recovery": None if self._rescue is None else self._rescue.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, which came from `state_dict`: all of it, or, where it raises, nothing.

        Raises:
            ValueError: `state` has another version, lacks an entry or has a wrong one, which is named; or the clip
                policy refuses its part. Nothing is changed then.
        """
        given = read(state, self.history, self._checkup.check_state, self.run.clip)
        self.flush()
        if isinstance(self.run.clip, GivenPolicy):
            self.run.clip.loss = given.clip_loss
        self._observed.forget()
        self.ledger.go_on(given.history, given.skipped_run, given.skipped_tensors, given.by_policy)
        self.run.step = given.step
        if self.history.model.num_seen is not None:
            self.run.ring.seen.go_on(self.history.model.never_seen)
        if self._rescue is not None:
            self._rescue.go_on(given.recovery, given.step)
        if given.evidence is None:
            self.sampling.forget()
        else:
            self.sampling.load_state_dict(given.evidence, self.history.model.overwritten)
        if given.checkup is not None:
            self._checkup.load_state_dict(given.checkup)

    @property
    def stateful(self) -> StatefulGuard:
        """This guard for `torch.distributed.checkpoint`: `dcp.save({"guard": guard.stateful})`; `dcp.load` likewise.

        That takes a state apart into tensors and lists of known lengths, and looks for the same in the new process,
        whose history is empty. Here the whole state is one text.
        """
        return StatefulGuard(self)

    @property
    def _policy_loss(self) -> float | None:
        """The newest finite loss that the clip policy knows of."""
        return self.run.clip.loss if isinstance(self.run.clip, GivenPolicy) else None


def _say_nothing(finding: Finding) -> None:
    """Another process says the same; the report has it."""


def _drawn(guard: weakref.ref[Guard], history: TrainingHistory) -> Guard | TrainingHistory:
    """What a report's page is drawn of: the guard with its log, while it is there."""
    return guard() or history
