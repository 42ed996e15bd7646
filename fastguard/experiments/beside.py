"""Experiments beside a training that goes on: which to run, when, and what they say of its causes."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from ..diagnosis import diagnose, find_causes
from ..errors import explained
from ..records.events import Experiment
from ..recovery.snapshots import load_random_state, random_state
from . import forked
from .arms import ARMS, Arm, Context, arms_for
from .paired import HARMS, UNKNOWN, Comparison, compare

_log = logging.getLogger("fastguard")
DOUBTFUL = (0.3, 0.8)  # causes with a confidence between these are tried
_NULL = next(arm for arm in ARMS.values() if arm.is_null)
_LOOK_EVERY = 50  # steps, or a tenth of those taken
_SLOWER = 4.0  # than expected, or past what is left of their share, and copies are given up
Wrap: TypeAlias = Callable[..., Any]  # `fastguard.wrap`, handed down by it


def run_on_copies(
    guard: Any,
    arms: Sequence[Arm],
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor],
    batches: Iterable[Any],
    num_steps: int,
    wrap: Wrap,
) -> dict[str, list[float]]:
    """The losses of `num_steps` steps as they are ("") and with each arm, all on copies, with the same random state."""
    if guard.model is None:
        raise ValueError("`experiments` with `loss_fn` needs the model: wrap(optimizer, model, ...)")
    batches = list(itertools.islice(batches, num_steps))
    before = random_state()
    found = {}
    try:
        for arm in (None, *arms):
            load_random_state(before)
            copied: dict[int, Any] = {}  # so that optimizers and model share their parameters as the originals do
            model = copy.deepcopy(guard.model, copied)
            optimizers = [copy.deepcopy(one, copied) for one in guard.optimizers]
            wrap(optimizers, model, clip=copy.deepcopy(guard.clip), skip_nonfinite=guard.skip_nonfinite, check_every=0)
            own: Any = optimizers[0].guard
            context = Context(optimizers, model, own, guard.history.num_steps, num_steps, known=guard.history)
            try:
                if arm is not None:
                    arm.apply(context)
                losses = list[torch.Tensor]()
                for batch in batches:
                    for one in optimizers:
                        one.zero_grad()
                    loss = loss_fn(model, batch)
                    loss.backward()
                    losses.append(loss.detach())
                    for one in optimizers:
                        one.step()
                found["" if arm is None else arm.name] = torch.stack(losses).tolist() if losses else []
            finally:
                for undo in context.undo:
                    undo()
                own.detach()
    finally:
        load_random_state(before)
    return found


@dataclass(frozen=True)
class Experiments:
    """How `fastguard.wrap(..., experiments=...)` experiments.

    On the CPU, forked copies of the process go on with the training. Where that is not safe, as on a GPU or with data
    loader workers, experiments need `loss_fn` and `batches`, and run on copies of model and optimizer.

    Attributes:
        num_steps: of each experiment.
        share: of the training time that experiments may take.
        ahead_s: seconds that they may take before the training has lasted long enough for that.
        first: number of steps after which inputs are permuted against targets for the first time.
        loss_fn: `loss_fn(model, batch)` returns the training loss.
        batches: returns the batches to experiment on, such as `lambda: itertools.islice(loader, 40)`.
    """

    num_steps: int = 40
    share: float = 0.03
    ahead_s: float = 1.5
    first: int = 30
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
    batches: Callable[[], Iterable[Any]] | None = None

    @explained
    def __post_init__(self) -> None:
        for name, least in (("num_steps", 16), ("share", 0.0), ("ahead_s", 0.0), ("first", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)!r}")
        if (self.loss_fn is None) != (self.batches is None):
            raise ValueError("`loss_fn` and `batches` must be given together")


def begin(guard: Any, asked: bool | Experiments, wrap: Wrap) -> None:
    """Has the guard experiment from now on."""
    if not isinstance(asked, (bool, Experiments)):
        raise TypeError(f"`experiments` must be True or fastguard.experiments.Experiments(...), got {asked!r}")
    experimenter = _Experimenter(guard, asked if isinstance(asked, Experiments) else Experiments(), wrap)
    guard._made.callback(guard.optimizers[-1].register_step_post_hook(experimenter.after_step).remove)


class _Experimenter:
    """Tries something now and then. Copies compare with the run's next steps: same batches, same random numbers."""

    def __init__(self, guard: Any, settings: Experiments, wrap: Wrap) -> None:
        self._guard, self._settings, self._wrap = weakref.ref(guard), settings, wrap
        self._started = time.perf_counter()
        self._spent = 0.0
        self._num_steps = 0
        self._null_at: float = settings.first  # the steps after which to permute inputs, and to look at the causes
        self._look_at: float = _LOOK_EVERY
        self._due: float = min(self._null_at, self._look_at)
        self._tried: set[str] = set()
        self._found: dict[str, list[float]] = {}  # losses of arms that wait for those of the base
        self._found_at = 0
        self._reason: str | None = ""
        self._end: Callable[[], None] | None = None  # ends this process, which is a copy

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A step was taken. Cost at one that is not due: 0.3 us."""
        self._num_steps += 1
        if self._num_steps < self._due:
            return
        if self._end is not None:
            self._end()
        guard = self._guard()
        if guard is None:
            return
        self._due = math.inf  # if it fails
        with guard._run.failures.kept("experiments", "Nothing more is tried."):
            if self._found:
                self._conclude(guard, self._found, self._losses(guard))
                self._found = {}
            else:
                self._experiment(guard)
            self._due = min(self._null_at, self._look_at)
            if self._found or self._end is not None:
                self._due = self._num_steps + self._settings.num_steps + (2 if self._end is None else 1)

    def _losses(self, guard: Any) -> list[float]:
        """Those of the steps since the experiment began, as many as it has."""
        if self._end is not None:
            guard.flush()
        steps = range(self._found_at, self._found_at + self._settings.num_steps)
        return [entry.loss for entry in guard.history.recent if entry.step in steps and entry.loss is not None]

    def _experiment(self, guard: Any) -> None:
        settings, history = self._settings, guard.history
        context = Context(guard.optimizers, guard.model, guard, self._num_steps, settings.num_steps)
        arms = [arm for arm in self._arms(guard) if arm.why_not(context) is None and not arm.by_validation]
        if not arms:
            return
        reason = forked.why_not(p for group in context.groups() for p in group["params"])
        if reason is None and (not history.recent or history.recent[-1].loss is None):
            reason = "no losses are observed"
        if reason is not None and settings.loss_fn is None:
            if reason != self._reason:
                _log.warning("no experiment at step %d: %s (see fastguard try)", self._num_steps, reason)
            self._reason = reason
            return
        began = time.perf_counter()
        elapsed = began - self._started
        expected = (elapsed - self._spent) / self._num_steps * settings.num_steps  # for each
        expected *= torch.get_num_threads() if reason is None else 1
        left = settings.ahead_s + settings.share * elapsed - self._spent
        arms = arms[: max(int(left / expected) - (reason is not None), 0)]
        if not arms:
            return
        self._tried |= {arm.name for arm in arms if not arm.is_null}
        self._found_at = guard._run.step
        if reason is None:
            copies = forked.Copies([arm.name for arm in arms], partial(self._become, context))
            if not copies.start():
                self._end = copies.end
                return
            self._found = copies.wait(min(_SLOWER * expected * len(arms) + 1.0, left))
        elif settings.loss_fn is not None and settings.batches is not None:
            with guard.paused():
                batches = settings.batches()
                found = run_on_copies(guard, arms, settings.loss_fn, batches, settings.num_steps, self._wrap)
            self._conclude(guard, found, found.pop(""))
        self._spent += time.perf_counter() - began

    def _become(self, context: Context, name: str) -> Callable[[], Any]:
        ledger = context.guard._ledger
        ledger.sinks, ledger._due, ledger.checkup = [], [], None
        ARMS[name].apply(context)
        return lambda: self._losses(context.guard)

    def _arms(self, guard: Any) -> list[Arm]:
        """What is due: the null arm, until samples come again; arms of doubtful causes that were not tried yet."""
        arms = []
        if self._num_steps >= self._null_at:
            epoch = guard.history.model.steps_per_epoch
            if epoch is None or self._num_steps + self._settings.num_steps <= epoch:
                arms.append(_NULL)
            self._null_at = 4 * self._null_at if self._null_at == self._settings.first else math.inf
        if self._num_steps >= self._look_at:
            self._look_at = max(self._num_steps + _LOOK_EVERY, 1.1 * self._num_steps)
            causes = find_causes(diagnose(guard.history), guard.history)
            doubtful = [one.rule for one in causes if DOUBTFUL[0] <= one.confidence <= DOUBTFUL[1]]
            arms += [arm for arm in arms_for(doubtful) if arm.name not in self._tried and not arm.is_null]
        return arms

    def _conclude(self, guard: Any, found: dict[str, list[float]], base: list[float]) -> None:
        news = []
        for arm in map(ARMS.__getitem__, found):
            comparison = compare(base, found[arm.name], is_null=arm.is_null)
            if arm.is_null and comparison.verdict == HARMS:
                self._null_at = math.inf
            if comparison.verdict != UNKNOWN:
                news.append(as_note(arm, comparison, self._found_at))
                _log.info("%s", news[-1]["text"])
        known = [one for one in guard.history.model.experiments if one["arm"] not in found]
        guard.history.note_model(experiments=(*known, *news))


def as_note(arm: Arm, comparison: Comparison, step: int) -> Experiment:
    """What an experiment that began at `step` says of the causes whose remedy the arm is."""
    return {
        "step": step,
        "arm": arm.name,
        "causes": list(arm.remedies),
        "verdict": comparison.verdict,
        "effect": comparison.effect,
        "t": comparison.t,
        "num_steps": comparison.num_steps,
        "ratio": comparison.ratio(is_null=arm.is_null),
        "text": comparison.text(arm.text),
    }
