"""Guard: what a user sees of a guarded optimizer: the newest record, the history, the report."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .. import _env
from .._text import listed
from ..clip import CheckedPolicy, as_policy
from ..diagnosis.checkup import Checkup
from ..errors import NotGuardedError
from ..kernels.cpu import GuardState, observing
from ..names import Namer
from ..observers.activations.monitor import ActivationMonitor, ActivationWatch, monitor_for
from ..observers.buffers import Buffers
from ..observers.facts import ModelFacts
from ..observers.observer import Observer, while_alive
from ..observers.owner import Observers
from ..observers.weights import WeightWatch
from ..ranks import Ranks
from ..records import StepStats, TrainingHistory
from ..records.events import describe_recovery
from ..recovery import Rescue
from ..report import Report, build_report
from .endings import flush_at_end, forget
from .hooks import Hooks
from .judge import Judge
from .ledger import Ledger
from .observed import Observed
from .resuming import VERSION, StatefulGuard, checked
from .run import Run
from .settings import GuardSettings
from .wrappers import inwards

_log = logging.getLogger("fastguard")
GUARD = "_guard"  # the attribute of an optimizer; torch expects copies to have the public ones, too


class Guard(GuardState):
    """Watches the gradients of one optimizer, or of several that share one norm. Made by `fastguard.wrap`.

    Cost a step: one read of the gradients, and one more read and write if they are clipped. On a GPU two launches, a
    third to clip; no sync with a fused optimizer, one with any other that may skip. For options see `wrap`. Memory: two
    tables of 80 bytes a tensor, and 0.4 KB for each of the newest 512 steps.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        model: torch.nn.Module | None,
        settings: GuardSettings,
        *,
        made: contextlib.ExitStack,  # closed if this fails, and by `detach`
        sinks: Iterable[Any],
        is_quiet: bool,
        proxies: Sequence[Any] = (),
        names: Sequence[str] | Mapping[torch.Tensor, str] | None = None,
        over: Ranks | None = None,
    ) -> None:
        self._namer = namer = Namer(model, optimizers)
        if names is not None:
            namer.give(names, optimizers)
        namer.check(optimizers)
        self._asked, self._made = settings, made
        self._run = Run(optimizers, proxies, namer, settings)
        self._run.ranks = over
        buffers = None if model is None else Buffers(model, self._run.failures)
        if buffers is not None and not buffers.is_empty:
            self._run.buffers, self._run.buffers_at, self._run.copies = buffers, 0, buffers.copies
            made.callback(buffers.close)
        self._ledger = Ledger(self._run.ring, self._run.failures, sinks, settings.max_consecutive_skips)
        if over is not None:
            self._ledger.where_among_ranks = over.describe_trouble
        if is_quiet:
            self._ledger.level = logging.DEBUG
        if _env.num_restarts():
            _log.log(self._ledger.level, "torchrun restarted this run: attempt %d", _env.num_restarts() + 1)
        self._judge = Judge(self._run, self._ledger, settings.clip_through)
        self._is_loss_new = True
        weights = None if settings.weights is None else WeightWatch(self._run, self._judge, settings.weights)
        others: list[Observer] = [] if weights is None else [weights]
        self._monitor = monitor_for(settings.activations.value, model)
        self._activations: ActivationWatch | None = None
        if self._monitor is not None:
            made.callback(self._monitor.detach)
            self._monitor.failures = self._run.failures
            self._activations = ActivationWatch(self._run, self._judge, self._monitor)
            others.append(self._activations)
        self._observers = observers = Observers(self._run, model, optimizers, others)
        made.callback(observers.close)
        if self._activations is not None:
            self._activations.start()
            self._ledger.fetch = while_alive(self._activations.attach)
        self._observed = Observed(self._run, self._judge, observers)
        self._rescue: Rescue | None = None
        if settings.recovery is not None:
            parts = self._run, self._ledger, self._judge, observers
            self._rescue = Rescue(settings.recovery, *parts, settings.objective)
            made.callback(self._rescue.close)
        self._hooks: list[Any] = []
        for hooks in self._attach():
            made.callback(hooks.remove)
            self._hooks.append(hooks)
        self._facts = ModelFacts(self._run, self._ledger, observers, model, namer, settings.objective)
        asks = self._run.failures, self._facts.record, settings.check_every
        self._checkup = Checkup(self.history, *asks, is_quiet=is_quiet)
        self._ledger.watch(self._checkup)
        flush_at_end(self, self._ledger, self._judge.flush)

    def __repr__(self) -> str:
        run, kinds = self._run, ", ".join(type(one).__name__ for one in self.optimizers)
        return f"<fastguard.Guard of {kinds} at step {run.step}, clip={run.clip!r}>"

    def _settle(self) -> None:
        """Ends the newest step, for guards that cannot tell when it ends."""

    def _attach_samples(self) -> None:
        """Adds all samples to their records, and waits for those on their way."""
        self._run.ring.bring_forward(self._run.step)
        if self._activations is not None:
            self._activations.attach(waits=True)

    def _attach(self) -> Iterator[Any]:
        """Registers the hooks on the optimizers, one after the other; each has `remove`."""
        parts = self._judge, self._ledger, self._observed, self._rescue
        return (Hooks(self._run, member, *parts) for member in self._run.members)

    @staticmethod
    def of(optimizer: Any) -> Guard:
        """The guard of `optimizer`, or of the optimizer inside a wrapper of accelerate or Lightning.

        Raises:
            NotGuardedError: it has none.
        """
        for layer in inwards(optimizer):
            guard = getattr(layer, "__dict__", {}).get(GUARD)
            if isinstance(guard, Guard):
                return guard
        raise NotGuardedError(
            f"this {type(optimizer).__name__} is not guarded. Guard it with `optimizer = fastguard.wrap(optimizer, "
            "model)`; a pickled or deep-copied optimizer has lost its guard."
        )

    @property
    def clip(self) -> Any:
        """The clip policy, or None. Assign the same on all ranks, at the same step."""
        return self._run.policy

    @clip.setter
    def clip(self, clip: Any) -> None:
        self._run.clip_by(None if clip is None else as_policy(clip))
        self._run.compare_changes()

    @property
    def skip_nonfinite(self) -> bool:
        """Whether steps whose gradients contain NaN or Inf are skipped."""
        return self._run.skip_nonfinite

    @skip_nonfinite.setter
    def skip_nonfinite(self, skip: bool) -> None:
        self._run.skip_nonfinite = skip
        self._run.compare_changes()

    @property
    def model(self) -> torch.nn.Module | None:
        """The model given to `wrap`; None without one, or once it is freed."""
        return self._namer.model

    @property
    def optimizers(self) -> list[Optimizer]:
        """The guarded optimizers, without wrappers."""
        return self._run.optimizers()

    @property
    def backend(self) -> str:
        """ "auto" or a name from `fastguard.backends()`."""
        return self._run.backend

    @property
    def history(self) -> TrainingHistory:
        """The run so far, without the newest step, to which `observe` may still add."""
        self._settle()
        return self._ledger.history

    @property
    def last(self) -> StepStats | None:
        """The newest record, or None before the first. Never blocks: on a GPU it is `lag` steps old.

        Cost: 5 us for the first access after a step, and 10 ns a tensor; the step itself makes no record.
        """
        self._settle()
        ring = self._run.ring
        return None if ring.newest < 0 else ring.latest()

    @property
    def lag(self) -> int:
        """Number of steps taken since that of `last`: 0 on the CPU, and after `flush`."""
        device = self._judge.on_device
        return 0 if self._run.waits else device.newest - device.newest_complete

    @property
    def max_consecutive_skips(self) -> int:
        """Number of skipped steps in a row that raises."""
        return self._ledger.skips.limit

    @max_consecutive_skips.setter
    def max_consecutive_skips(self, number: int) -> None:
        self._ledger.skips.limit = number

    @observing
    def observe(self, loss: Any = None, val_loss: Any = None, **metrics: Any) -> None:
        """Adds a loss to the step that it was computed for: the newest, or the next.

        Call it at any time: autograd tells which step a loss belongs to. Losses of one step, as of accumulated
        micro-batches, are averaged. A number or a detached tensor belongs to the newest step. If that step has a loss,
        or earlier losses came before their steps, it belongs to the next, provided anything was computed since.

        Args:
            loss, val_loss: a float, or a tensor of one element. `val_loss` belongs to the newest step, or the first.

        Raises:
            RuntimeError: `flush` has delivered the record of that step.
            ValueError: not a number, or a tensor of several elements; nothing is added then.
            TypeError: another metric, by its name.

        Cost: no sync. A tensor on the device of the gradients is copied there: one launch.
        """
        if metrics:
            raise TypeError(f"`observe` takes `loss` and `val_loss`, got {listed(metrics)}. Log it with your tracker.")
        if self._is_loss_new and loss is not None:
            self._is_loss_new = False
            self._facts.record_loss_graph(loss)
        self._observed.observe(loss, val_loss)

    def change_sinks(self, sinks: Iterable[Any]) -> None:
        """Sends further records to `sinks`; closes the present sinks that are not among them."""
        self.flush()
        self.history.has_ended = False
        self._ledger.change_sinks(sinks)
        flush_at_end(self, self._ledger, self._judge.flush)

    def flush(self) -> None:
        """Delivers the newest record to history and sinks; `observe` can no longer add to it. Syncs."""
        self._settle()
        self._attach_samples()
        self._judge.flush()

    @property
    def activations(self) -> ActivationMonitor | None:
        """The activation monitor, or None."""
        return self._monitor

    @property
    def recoveries(self) -> list[str]:
        """What recovery has done so far, a sentence for each event."""
        return [] if self._rescue is None else [describe_recovery(event) for event in self._rescue.events]

    def report(self) -> Report:
        """The run so far, including the newest step: status, findings, recommendations, numbers.

        Never raises: a check that failed is a finding. Cost: about 1 ms. Syncs.
        """
        failures = self._run.failures
        self._settle()
        self._attach_samples()
        with failures.kept("delivery", "The report lacks steps."):
            self._judge.arrive_all()
        self._facts.record()
        lost = self._ledger.lost()
        history = self.history
        with failures.kept("the step just taken", "The report is without it."):
            history = self._ledger.history_with_held()
        guard, sinks, ranks = weakref.ref(self), self._ledger.costs(), self._run.ranks
        about: dict[str, Any] = {"sinks_lost": lost, "failures": failures, "numbers": ranks.costs() if ranks else {}}
        return build_report(history, sinks=sinks, source=lambda: guard() or history, **about)

    def detach(self) -> None:
        """Leaves the optimizer as it was before `wrap`. You can still read the records; sinks stay open."""
        self.flush()
        self._made.close()
        for one in self._run.living_optimizers():
            one.__dict__.pop(GUARD, None)
        for proxy in (ref() for ref in self._run.proxies):
            if isinstance(getattr(proxy, "__dict__", {}).get("guard"), Guard):
                del proxy.__dict__["guard"]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Neither checks, clips nor records steps within this context, such as those of a learning-rate test.

        >>> import torch, fastguard
        >>> p = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1))
        >>> with optimizer.guard.paused():
        ...     optimizer.step()
        >>> optimizer.guard.last is None
        True
        """
        with contextlib.ExitStack() as afterwards:
            parts: list[Any] = [self._run, self._observers, *filter(None, [self._monitor])]
            for one in parts:
                afterwards.callback(one.pause, one.pause(True))
            yield

    def close(self) -> None:
        """Delivers the newest record and closes the sinks. Call it at the end of training.

        The log then says that the run has ended, and later reports judge it as a whole: whether it stopped too early,
        for example.

        If you do not call it, the newest record is delivered when the guard is freed or the process ends by `sys.exit`,
        an exception or SIGTERM. `wrap` installs a SIGTERM handler if there are sinks and no other handler.
        """
        self._settle()
        self._facts.record(is_over=True)
        self.flush()
        self.history.has_ended = True
        self._observers.close()
        self._ledger.close()
        forget(self._ledger)

    def state_dict(self) -> dict[str, Any]:
        """Step number, consecutive skips, history, clip policy, as plain data for torch.save. Syncs.

        Includes the newest step as it is now: what `observe` adds later is missing.
        """
        self._settle()
        self._attach_samples()
        self._judge.arrive_all()
        self._facts.record()
        clip, loss = self._run.clip, self._run.ring.loss
        if loss is None and isinstance(clip, CheckedPolicy):
            loss = clip.loss
        return {
            "version": VERSION,
            **self._ledger.state_dict(self._run.step),
            "checkup": self._checkup.watch.state_dict(),
            "clip": None if clip is None else clip.state_dict(),
            "clip_loss": loss,
            "recovery": None if self._rescue is None else self._rescue.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from `state_dict`: completely, or, if it raises, not at all.

        Raises:
            ValueError: `state` has another version, or an entry is missing or wrong; names it.
        """
        history, clip = self.history, self._run.clip
        given = checked(state, history, self._checkup.watch, clip)
        self.flush()
        if isinstance(clip, CheckedPolicy):
            clip.loss = given.clip_loss
        self._observed.forget()
        self._ledger.go_on(given.history, given.skipped_run, given.skipped_tensors, given.skipped_by_policy)
        history.has_ended = False
        self._run.step = given.step
        if history.model.num_seen is not None:
            self._run.ring.seen.go_on(history.model.never_seen)
        if self._rescue is not None:
            self._rescue.go_on(given.recovery, given.step)
        self._observers.resume(history.model)
        if given.checkup is not None:
            self._checkup.watch.load_state_dict(given.checkup)

    @property
    def stateful(self) -> StatefulGuard:
        """This guard for `torch.distributed.checkpoint`: `dcp.save({"guard": guard.stateful})`, and the same to load.

        DCP expects a new process to have a state of the saved shape, but its history is empty. This one is a string.
        """
        return StatefulGuard(self)
