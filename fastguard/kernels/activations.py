"""Activations: one tensor, one pass. Checks arguments, chooses a backend, calls it."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import UnsupportedTensorError
from ..records.samples import ActivationStats, ChannelStats
from .backend import Limits, Row
from .registry import BACKENDS, CPU_NAMES, choose, choose_or_fall_back, resolve_backend
from .tensors import as_tensor

NEAR_ZERO = 1e-6
_SMALLEST = 5e-324


def thresholds(saturation: float | tuple[float, float], near_zero: float) -> Limits:
    """(low, high, near_zero) as the kernels take them; raises ValueError for what makes no range."""
    if isinstance(saturation, (tuple, list)):
        low, high = map(float, saturation)
        if not low <= high:
            raise ValueError(f"`saturation` must be a range (low, high) with low <= high, got {saturation!r}")
    else:
        high = float(saturation)
        low = -high
        if not high >= 0:
            raise ValueError(f"`saturation` must be >= 0 or a range (low, high), got {saturation!r}")
    if not near_zero >= 0:
        raise ValueError(f"`near_zero` must be >= 0, got {near_zero!r}")
    return low, high, max(float(near_zero), _SMALLEST)


def real(x: Any, where: str) -> torch.Tensor:
    """`x` as a tensor of real floating-point numbers; raises UnsupportedTensorError with a remedy."""
    problem = ""
    try:
        x = as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = f"must be a torch.Tensor or an ndarray of numbers, got {type(x).__name__} ({error})"
    else:
        if x.is_complex():
            problem = f"must be real, got {x.dtype}. Call torch.view_as_real on it to have its parts read"
        elif not x.is_floating_point():
            allowed = "float16, bfloat16, float32, float64 or float8"
            problem = f"must be {allowed}, got {x.dtype}. Convert it, e.g. by .float()"
    if problem:
        raise UnsupportedTensorError(0, problem, "x", where)
    return x.to_local() if hasattr(x, "to_local") else x


def run_activation(x: torch.Tensor, limits: Limits, dim: int | None, backend: str) -> tuple[Row, bytes | None]:
    """The row of `x` and, with a `dim`, the table of its channels, for training loops: the arguments have been through
    `real`, `thresholds` and `resolve_backend`; plain torch replaces a backend without this operation."""
    is_quick = x.is_cpu and backend in CPU_NAMES
    chosen = BACKENDS["cpu"] if is_quick else choose_or_fall_back(x.device, backend, "activation")
    return chosen.activation(x, dim, limits)


def _run(x: torch.Tensor, limits: Limits, dim: int | None, backend: str, where: str) -> tuple[Row, bytes | None]:
    chosen = choose(x.device, resolve_backend(backend), "activation")
    try:
        return chosen.activation(x, dim, limits)
    except UnsupportedTensorError as error:
        raise UnsupportedTensorError(0, error.problem, "x", where) from None


def activation_stats(
    x: Any, *, saturation: float | tuple[float, float] = 0.99, near_zero: float = NEAR_ZERO, backend: str = "auto"
) -> ActivationStats:
    """Mean, std, extremes, zeros, near-zero, saturated, NaN and Inf elements of one tensor, in one pass.

    Counts and extremes are exact, `std` is within 1e-6 of float64 also where the mean is a thousand times as large, and
    the result depends neither on the number of threads nor on the instruction set. (Float64 deviations above 1e150 have
    no squares in float64: `std` is Inf then.)

    Args:
        x: float16, bfloat16, float32, float64 or float8 tensor of any shape and layout, on any device, or an ndarray.
            Sparse ones are read as their (coalesced) values, DTensors as their local shard.
        saturation: t for elements with |x| > t, (low, high) for those outside a range. Inf is always saturated, NaN
            never.
        near_zero: elements with |x| below it, and zeros, count as near zero.
        backend: "auto" (the best for the tensor's device) or a name from `fastguard.backends()`.

    Raises:
        UnsupportedTensorError: integers, bools, complex numbers, tensors without data.
        ValueError: a threshold that makes no sense.
        BackendUnavailableError: the backend that was asked for cannot run here.

    Cost: one read of every element. CPU: no launch, no sync, a few microseconds a call. Elsewhere one sync, as the
    figures go to the host. `reference`: about two dozen passes.

    >>> import torch
    >>> stats = activation_stats(torch.tensor([0.0, 0.5, -1.0, 1.0]))
    >>> stats.zero_ratio, stats.saturation_ratio, stats.abs_max
    (0.25, 0.5, 1.0)
    """
    where = "activation_stats(x)"
    return ActivationStats.from_row(_run(real(x, where), thresholds(saturation, near_zero), None, backend, where)[0])


def channel_stats(
    x: Any,
    dim: int = -1,
    *,
    saturation: float | tuple[float, float] = 0.99,
    near_zero: float = NEAR_ZERO,
    backend: str = "auto",
) -> ChannelStats:
    """`activation_stats`, and near-zero, saturated, non-finite elements and mean |x| of each channel, in the same pass.

    Args:
        x: as for `activation_stats`, but dense.
        dim: the dimension whose indices are the channels (units): -1 for [..., features], 1 for [N, C, H, W].
        saturation, near_zero, backend: as for `activation_stats`.

    Raises:
        IndexError: `x` has no such dimension.
        UnsupportedTensorError, ValueError, BackendUnavailableError: as `activation_stats`.

    Cost: one read of every element, and 32 bytes a channel in the result; fastest where channels are adjacent in
    memory (`dim` -1, channels_last) or each in runs (`dim` 1 of [N, C, H, W]). One sync elsewhere than on a CPU.

    >>> import torch
    >>> found = channel_stats(torch.tensor([[0.0, 2.0], [0.0, -1.0]]))
    >>> found.near_zero_ratios, found.mean_abs
    ([1.0, 0.0], [0.0, 1.5])
    """
    limits = thresholds(saturation, near_zero)
    where = "channel_stats(x)"
    x = real(x, where)
    if x.layout is not torch.strided or x.is_nested:
        what = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise UnsupportedTensorError(0, f"must be dense, got {what}. Call to_dense first", "x", where)
    rank = max(1, x.dim())
    if not -rank <= dim < rank:
        raise IndexError(f"`dim` must be in [{-rank}, {rank - 1}], got {dim} - at {where} of shape {tuple(x.shape)}")
    row, table = _run(x, limits, dim := dim % rank, backend, where)
    shape = list(x.shape) or [1]
    num_channels = shape.pop(dim)
    assert table is not None
    return ChannelStats(ActivationStats.from_row(row), num_channels, math.prod(shape), table)
