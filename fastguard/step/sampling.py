"""What is sampled beside the gradients: the outputs of modules, and the weights around a step."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..observers.activations import ActivationMonitor, Replay, replay
from ..observers.owner import Observers
from ..observers.weights import Sample, WeightSampler
from .judge import Judge
from .observed import Observed
from .run import Member, Run

_WEIGHTS, _ACTIVATIONS = "weight sampler", "activation sampler"
_LEFT_OUT = "What it saw of that step was left out."


class WeightSampling:
    """A sampler around the steps of one member, which hands what it finds to the record of the step."""

    def __init__(self, run: Run, member: Member, judge: Judge, sampler: WeightSampler) -> None:
        self._run, self._member, self._judge = run, member, judge
        self._sample: Sample | None = None
        self._step = 0
        self._seconds = 0.0
        self.sampler = sampler
        self.is_due = sampler.is_due

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Ahead of a step, also of its closure. Cost at a step that is not due: 0.5 us."""
        self._sample = None  # of a step that raised
        self._step = self._judge.step_of(self._member)
        if self.is_due(self._step):
            started = time.perf_counter()
            with self._run.failures.kept(_WEIGHTS, _LEFT_OUT):
                self._sample = self.sampler.before(optimizer)
            self._seconds = time.perf_counter() - started

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Once the step is taken. On a GPU waits for its record, which says whether it was skipped."""
        sample, self._sample = self._sample, None
        if sample is None:
            return
        started = time.perf_counter()
        self._judge.arrive_all()
        ring = self._run.ring
        with self._run.failures.kept(_WEIGHTS, _LEFT_OUT):
            record = ring.latest()
            found = self.sampler.after(
                optimizer,
                sample,
                names=self._run.names_of(self._member),
                gradient_norms=dict(zip(record.tensors.names, record.tensors.norm, strict=True)),
                skipped=record.skipped,
            )
            ring.attach(record.step, weights=record.weights + found)
        self._judge.add_overhead(self._seconds + time.perf_counter() - started)


class Sampling:
    """The samplers of one guard.

    Attributes:
        monitor: of activations; None if they are not watched.
    """

    def __init__(
        self,
        run: Run,
        judge: Judge,
        observers: Observers,
        observed: Observed,
        model: torch.nn.Module | None,
        monitor: ActivationMonitor | None,
        weights: Mapping[str, Any] | None,
    ) -> None:
        self.monitor = monitor
        if monitor is not None:
            monitor.failures = run.failures
        self._run, self._judge, self.observers = run, judge, observers
        self._observed = observed
        self._model = None if model is None else weakref.ref(model)
        self._weights = {
            member.index: WeightSampling(
                run, member, judge, WeightSampler(**{"backend": run.backend, **(weights or {})})
            )
            for member in (() if weights is None else run.members)
        }

    def weights_of(self, member: Member) -> WeightSampling | None:
        """What samples the weights of one optimizer; None if nothing does."""
        return self._weights.get(member.index)

    def end_step(self) -> bool:
        """An optimizer has stepped. Whether to say this of the next step, too."""
        if not self._judge.is_between_steps:
            return True
        self.observers.end_step()
        self._observed.end_step()
        if self.monitor is None:
            return False
        with self._run.failures.kept(_ACTIVATIONS, _LEFT_OUT):
            self._judge.add_overhead(self.monitor.end_step(self._run.step - 1))
        self.attach_arrived()
        return True

    def attach_arrived(self, *, waits: bool = False) -> None:
        """Attaches to records what has arrived; with `waits`, also what is on its way."""
        if self.monitor is not None:
            with self._run.failures.kept(_ACTIVATIONS, _LEFT_OUT):
                if waits:
                    self.monitor.flush()
                for step, records in self.monitor.arrived():
                    self._run.ring.attach(step, activations=records)

    def arrive_all(self) -> None:
        """Hands over everything, waiting for what is on its way."""
        self.observers.attach()
        self.attach_arrived(waits=True)

    def close(self) -> None:
        """Hands over everything and removes all hooks."""
        self.arrive_all()
        self.observers.close()
        if self.monitor is not None:
            self.monitor.detach()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For passes through the model that are no part of the training."""
        before = self.observers.pause(True)
        try:
            with contextlib.nullcontext() if self.monitor is None else self.monitor.paused():
                yield
        finally:
            self.observers.pause(before)

    def replay(self, forward: Callable[[], Any]) -> Replay:
        """Watches all modules through one more forward pass; adds it to the step just taken, if that was skipped."""
        model = None if self._model is None else self._model()
        if model is None:
            raise ValueError("`replay` must have a model to watch, got none. Call wrap(optimizer, model, …).")
        with self.paused():
            found = replay(model, forward)
        ring = self._run.ring
        if ring.is_held and ring.is_skipped:
            ring.attach(ring.step, activations=found.activities)
        return found
