"""ActivationMonitor: samples the outputs of a model's modules within a budget of time."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from torch import nn

from ... import kernels
from ...records import values
from ...records.failures import Failures
from ...records.samples import ActivationStats, ModuleActivity
from ..facts import kind_of
from ..observer import Observer, unwrapped, while_alive
from .arrivals import Arrivals
from .collector import Budget, Collector, Cost, Hook
from .selection import choose, names_of, searched

_log = logging.getLogger("fastguard")
_LOOK_BACK = 10  # records of a layer
_DEAD, _SATURATED = 0.5, 0.1  # shares beyond which it is called so
_NUM_SILENT = 3  # steps in a row in which hooks saw nothing, before a warning


class ActivationMonitor:
    """Watches the outputs of a model's modules: mean, std, range, zeros, saturation, NaN, Inf, dead units.

    With a model it sets forward hooks, and only at the steps that it samples. A step is a step of the guard
    (`fastguard.wrap(optimizer, model, activations=...)`); without a guard, it is one pass through the model in training
    mode. Without a model it takes what you give it: `record(name, array)`.

    Args:
        model: the model to watch, also one wrapped by DDP, FSDP or torch.compile. Make the monitor before the first
            call of a compiled model; sampled steps then run a graph of their own.
        window_size: number of records of each layer for `diagnose` and `history`.
        modules: "default" (activation functions, attention, norms, blocks, hidden layers of gated MLPs, and the model
            as a whole; other modules make a record only if an output is not finite), "all", or a regular
            expression that is searched in the names.
        every: steps from one sample to the next, beginning with the first step.
        overhead_budget: share of the training time that sampling may take. If it takes more, samples become rarer, in
            multiples of `every`. None: no limit.
        backend: "auto" or a name from `fastguard.backends()`.

    Raises:
        ValueError: there is nothing to watch, a number is out of its range, or the backend is unknown.
        TypeError: the model is not a module, or `modules` not a text.

    Cost of a sampled step: one read of every watched tensor, and about 20 us a module. Of any other step: nothing with
    a guard, otherwise two hooks on the model (3 us). On a GPU nothing synchronises, figures arrive a step or two later,
    and `cost` counts the time of the host only.

    Limits: an activation function that is not a module shows in the output of the module around it. Each process of a
    distributed run sees its own part. nn.DataParallel on several GPUs runs hooks in threads, which the monitor does not
    tell apart. Replays of CUDA graphs, and so torch.compile(mode="reduce-overhead"), call no hooks.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    >>> _ = model[0].bias.data.fill_(-100.0)
    >>> monitor = ActivationMonitor(model)
    >>> _ = model(torch.ones(8, 2))
    >>> [(record.name, record.num_dead_units) for record in monitor.activities if record.family == "relu"]
    [('1', 4)]
    """

    def __init__(
        self,
        model: nn.Module | int | None = None,
        *,
        window_size: int = 100,
        modules: str = "default",
        every: int = 10,
        overhead_budget: float | None = 0.01,
        backend: str = "auto",
    ) -> None:
        if isinstance(model, int) and not isinstance(model, bool):  # ActivationMonitor(100)
            window_size, model = model, None
        for name, count in (("window_size", window_size), ("every", every)):
            values.at_least(1, name, count)
        if overhead_budget is not None and not overhead_budget > 0.0:
            raise ValueError(f"`overhead_budget` must be > 0 or None, got {overhead_budget!r}")
        if not isinstance(model, (nn.Module, type(None))):
            raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
        self._backend = kernels.resolve_backend(backend)
        self._budget = Budget(every, overhead_budget)
        self._arrivals = Arrivals(window_size)
        self._collector = Collector(self._backend)
        self._step = self._next_sample = self._num_silent = 0
        self._ended_at: float | None = None
        self._is_guarded = False
        self._hooks: list[Hook] = []  # none without a model
        self._pass_hooks: list[Hook] = []
        self.names: tuple[str, ...] = ()
        if model is None:
            return
        root, named, fits = unwrapped(model), names_of(model), searched(modules)
        targets = choose(named, modules == "default", fits)
        self.names = tuple(target.name for target in targets if not target.is_quiet)
        self._arrivals.root = kind_of(named[""])
        collector = self._collector
        collector.root = weakref.ref(root)
        self._hooks = [Hook(target.module, collector, target, at_end=not target.of_input) for target in targets]
        self._pass_hooks = [
            Hook(root, collector, call=collector.begin, at_end=False),
            Hook(root, collector, call=while_alive(self._pass_ends)),
        ]
        # The hooks do not keep the monitor alive, and go when it does.
        hooks = (*self._hooks, *self._pass_hooks)
        self._remove = weakref.finalize(self, _remove, collector, hooks)
        self._remove.atexit = False
        self._arm()

    def record(self, layer_name: str, activations: Any) -> ActivationStats:
        """Measures `activations` and adds the result to the records of `layer_name`.

        Args:
            activations: tensor or ndarray of floating-point numbers, any shape.

        Cost: one read of every element.
        """
        stats = kernels.activation_stats(activations, backend=self._backend)
        self._arrivals.add(layer_name, stats, stats.zero_ratio)
        return stats

    def diagnose(self) -> dict[str, str]:
        """Problems by layer, from its last 10 records, without healthy layers.

        "Dead": more than half of the elements are zero, on average; if the layer has units, more than half of them are
        dead, because a healthy ReLU returns zero half of the time. "Saturated": more than a tenth of the elements are
        beyond the threshold. Both: "Dead, Saturated".

        >>> import torch
        >>> monitor = ActivationMonitor(window_size=100)
        >>> _ = monitor.record("relu1", torch.tensor([0.0, 0.0, 0.5]))
        >>> monitor.diagnose()
        {'relu1': 'Dead'}
        """
        issues = {}
        for layer, kept in self._arrivals.collect().layers.items():
            recent = list(kept)[-_LOOK_BACK:]
            is_dead = fmean(dead for _, dead in recent) > _DEAD
            is_saturated = fmean(stats.saturation_ratio for stats, _ in recent) > _SATURATED
            if is_dead or is_saturated:
                issues[layer] = ", ".join(["Dead"] * is_dead + ["Saturated"] * is_saturated)
        return issues

    @property
    def history(self) -> dict[str, list[ActivationStats]]:
        """The last `window_size` records of each layer, oldest first."""
        layers = self._arrivals.collect().layers
        return {layer: [stats for stats, _ in kept] for layer, kept in layers.items()}

    @property
    def activities(self) -> tuple[ModuleActivity, ...]:
        """The newest sampled step's records, in the order of execution. Never blocks; on a GPU it lags."""
        return self._arrivals.collect().latest

    @property
    def cost(self) -> Cost:
        """Cost so far: seconds, samples, steps, interval."""
        return self._budget.cost()

    def _follow_guard(self) -> None:
        """Counts steps by calls of `end_step`, which the guard makes, instead of passes through the model."""
        if not self._hooks:
            raise ValueError("`activations` must be a monitor of a model. Make it with ActivationMonitor(model).")
        if self._is_guarded:
            raise RuntimeError("`activations` must be a monitor that follows no other guard. Make one for each guard.")
        self._is_guarded = True
        for hook in self._pass_hooks:
            hook.on_every_step = False

    def end_step(self, step: int) -> float:
        """Ends step `step` of the guard, and sets or removes the hooks for the next one.

        Returns the seconds that the monitor took in this step. Never waits. A second call does nothing.

        Cost: a microsecond on a step that was not sampled.
        """
        if step == self._step - 1 or not self._hooks:
            return 0.0
        if step < self._step:  # the run went back
            self._next_sample = min(self._next_sample, step + 1)
        collector, started = self._collector, time.perf_counter()
        sampled = False
        if collector.is_on:
            sightings, events = collector.deliver()
            sampled = bool(sightings)
            if sampled:
                self._arrivals.pending.append((step, sightings, events))
            self._num_silent = 0 if sampled else self._num_silent + 1
            if self._num_silent == _NUM_SILENT:
                _log.warning(
                    "no output of the %d watched modules was seen in %d steps. Make the monitor (or the guard) before "
                    "the first call of a compiled model. Check that the modules are called in training mode.",
                    len(self.names),
                    _NUM_SILENT,
                )
        num_steps, self._step = max(1, step + 1 - self._step), step + 1
        cost_s = time.perf_counter() - started
        self._arrivals.collect()
        cost_s += collector.seconds + self._arrivals.seconds
        collector.seconds = self._arrivals.seconds = 0.0
        elapsed = None if self._ended_at is None else started - self._ended_at
        self._budget.step(elapsed, cost_s, sampled, num_steps)
        self._ended_at = started
        if sampled:
            self._next_sample = step - step % self._budget.every + self._budget.interval
        if (step + 1 >= self._next_sample) is not collector.is_on:
            self._disarm() if collector.is_on else self._arm()
        return cost_s

    def pause(self, is_paused: bool) -> bool:
        """Neither counts nor records passes while it is paused. Returns whether it was paused before."""
        before, self._collector.is_paused = self._collector.is_paused, is_paused
        return before

    def arrived(self) -> list[tuple[int, tuple[ModuleActivity, ...]]]:
        """Steps with records that were not taken yet, oldest first. Returns each once; never blocks."""
        unclaimed = self._arrivals.collect().unclaimed
        found = list(unclaimed)
        unclaimed.clear()
        return found

    def flush(self) -> None:
        """Waits for pending figures."""
        self._arrivals.collect(wait=True)

    def detach(self) -> None:
        """Removes all hooks; records stay readable. A compiled graph continues without."""
        self._arrivals.collect(wait=True)
        if self._hooks:
            self._remove()
        self._hooks, self._pass_hooks = [], []

    @property
    def failures(self) -> Failures:
        """Errors of the monitor, which never reach a forward pass; the report of a guard shows them."""
        return self._collector.failures

    @failures.setter
    def failures(self, failures: Failures) -> None:
        self._collector.failures = failures

    def _pass_ends(self) -> None:
        self._collector.end()
        if not self._is_guarded:
            with self.failures.kept("activation sampler", "What it saw of that pass was left out."):
                self.end_step(self._step)

    def _arm(self) -> None:
        self._collector.is_on = True
        begins, ends = self._pass_hooks
        if not ends.is_compiled:
            ends.remove()  # it must follow the hook on the output of the whole model
        for hook in (begins, *self._hooks, ends):
            hook.attach()

    def _disarm(self) -> None:
        self._collector.is_on = False
        for hook in (*self._hooks, *(self._pass_hooks if self._is_guarded else ())):
            if not hook.is_compiled:
                hook.remove()


def _remove(collector: Collector, hooks: Iterable[Hook]) -> None:
    collector.is_on = False
    for hook in hooks:
        hook.remove()


def monitor_for(activations: Any, model: nn.Module | None) -> ActivationMonitor | None:
    """The monitor that `wrap(..., activations=...)` asks for, following the guard; None if it asks for none."""
    if activations is None or activations is False:
        return None
    if activations is True or isinstance(activations, str):
        activations = {"modules": "default" if activations is True else activations}
    if isinstance(activations, dict):
        if model is None:
            raise ValueError("`activations` must come with a model, got none. Call wrap(optimizer, model, …).")
        activations = ActivationMonitor(model, **activations)
    if not isinstance(activations, ActivationMonitor):
        raise TypeError(
            "`activations` must be True, a pattern of module names, a dict of settings of ActivationMonitor, or an "
            f"ActivationMonitor, got {activations!r}"
        )
    activations._follow_guard()
    return activations


class ActivationWatch(Observer):
    """Tells a monitor when steps of a guard end, and hands its records to theirs. Cost: that of the monitor."""

    what = "activation sampler"

    def __init__(self, run: Any, judge: Any, monitor: ActivationMonitor) -> None:
        self._run, self._judge, self._monitor = run, weakref.proxy(judge), monitor  # it leads to what closes this
        monitor._disarm()  # until `start`

    def start(self) -> None:
        """Sets the hooks. `QuietHooks` takes the place of a model's hooks only while there are none."""
        self._monitor._arm()

    def next_after(self, step: int) -> float:
        monitor = self._monitor
        is_next = monitor._arrivals.pending or monitor._collector.is_on
        return step + 1 if is_next else max(step + 1, monitor._next_sample - 1)

    def after(self, step: int) -> None:
        self._judge.add_overhead(self._monitor.end_step(step))
        self.attach()

    def attach(self, *, waits: bool = False) -> None:
        """Attaches figures that have arrived to their records; with `waits` also those on their way."""
        with self._run.failures.kept(self.what, self.so):
            if waits:
                self._monitor.flush()
            for step, records in self._monitor.arrived():
                self._run.ring.attach(step, activations=records)

    def close(self) -> None:
        self.attach(waits=True)
        self._monitor.detach()
