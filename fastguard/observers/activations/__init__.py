"""Samples the outputs of a model's modules, in one read each, without waiting for a device."""

from __future__ import annotations

from typing import Any

import torch

from ... import kernels
from .monitor import ActivationMonitor as ActivationMonitor


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
