"""Dead neurons in one batch of activations."""

from __future__ import annotations

from typing import Any

from .. import kernels


def detect_dead_neurons(activations: Any, threshold: float = 0.01) -> tuple[int, float]:
    """How many neurons have a mean |activation| over the batch below `threshold`, and their share.

    Equivalent to: `dead = activations.abs().mean(0) < threshold; return dead.sum(), dead.mean()`.

    Args:
        activations: [batch, ...] tensor or ndarray of floating-point numbers; each place behind the first dimension is
            a neuron.
        threshold: a neuron with NaN or Inf is not dead; nor is one without a batch.

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
