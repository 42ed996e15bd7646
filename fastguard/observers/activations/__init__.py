"""Samples the outputs of a model's modules, in one read each, without waiting for a device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ... import kernels
from ..observer import Observer
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

    Cost: two passes and a copy; one sync elsewhere than on a CPU.

    >>> import torch
    >>> detect_dead_neurons(torch.tensor([[0.0, 1.0], [0.01, -1.0]]))
    (1, 0.5)
    """
    x = kernels.tensors.plain(kernels.real(activations, "detect_dead_neurons(activations)").to_dense(), 0)
    if x.ndim < 1:
        raise ValueError("`activations` must have a batch dimension, got a scalar")
    means = x.to(torch.promote_types(x.dtype, torch.float32)).abs().mean(0)
    dead = int((means < threshold).sum())
    return dead, dead / means.numel() if means.numel() else 0.0
