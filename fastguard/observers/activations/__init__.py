"""Samples the outputs of a model's modules, in one read each, without waiting for a device."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import kernels
from ..._text import shown
from ...records.samples import ModuleActivity
from ..buffers import forward_undone
from ..observer import Observer
from .arrivals import draw, origin_of
from .monitor import ActivationMonitor as ActivationMonitor


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
    activations.follow_guard()
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
        return self._monitor._next_end_after(step)

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


class Replay(NamedTuple):
    """Records of a replayed pass."""

    activities: tuple[ModuleActivity, ...]  # one record for each call of each module, in the order of execution
    # where NaN or Inf appeared first, as in `ActivationMonitor.origins`; None if all outputs were finite
    origin: ModuleActivity | None

    def __str__(self) -> str:
        origin = self.origin and f"NaN or Inf came up in '{shown(self.origin.name)}'"
        return f"{origin or 'every output was finite'}\n{draw(self.activities)}"


def replay(model: nn.Module, forward: Callable[[], Any]) -> Replay:
    """Runs `forward` once more with all modules of `model` watched, and says where NaN or Inf appeared.

    It runs without gradients and eagerly, also if the model is compiled. Afterwards it restores buffers (the running
    statistics of batch norm) and random states, so training is not affected. Dropout draws new masks.

    Args:
        forward: calls the model on the batch in question, under autocast if you train under it.

    Raises:
        ValueError: `forward` did not call the model.

    Cost: a forward pass, one read of each output, and a copy of the buffers; one sync of the device.
    """
    settings: dict[str, Any] = {"modules": "all", "every": 1, "overhead_budget": None}
    monitor = ActivationMonitor(model, **settings, training_only=False)
    monitor.follow_guard()  # one step, however often `forward` calls the model
    try:
        # A graph does not call hooks that were set after it was compiled. Importing dynamo takes a second.
        is_compiled = "torch._dynamo" in sys.modules
        eagerly = torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()
        with forward_undone(model), torch.no_grad(), eagerly:
            forward()
        records = monitor.take(0, wait=True)
    finally:
        monitor.detach()
    if not records:
        raise ValueError("`forward` must call the model that is guarded, got a call in which none of its modules ran")
    return Replay(records, origin_of(records))


def detect_dead_neurons(activations: Any, threshold: float = 0.01) -> tuple[int, float]:
    """The number of neurons with a mean |activation| over the batch below `threshold`, and their share.

    Equivalent to: `dead = activations.abs().mean(0) < threshold; return dead.sum(), dead.mean()`.

    Args:
        activations: [batch, ...] tensor or ndarray of floating-point numbers; each index of the other dimensions is a
            neuron.
        threshold: a neuron with NaN or Inf is not dead; nor is one of an empty batch.

    Raises:
        UnsupportedTensorError: integers, bools, complex numbers, tensors without data.
        ValueError: no batch dimension.

    Cost: one read of every element; one sync elsewhere than on a CPU.

    >>> import torch
    >>> detect_dead_neurons(torch.tensor([[0.0, 1.0], [0.01, -1.0]]))
    (1, 0.5)
    """
    x = kernels.tensors.as_tensor(activations)
    if x.ndim < 1:
        raise ValueError("`activations` must have a batch dimension, got a scalar")
    stats = kernels.channel_stats(x.reshape(x.shape[0], x[:1].numel() if len(x) else 0), 1)
    num = stats.num_channels
    dead = sum(mean < threshold and not bad for mean, bad in zip(stats.mean_abs, stats.num_nonfinite, strict=True))
    return dead, dead / num if num else 0.0
