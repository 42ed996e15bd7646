"""Tensors in, figures out: what users call. `registry` has the backends, `dispatch` the ways to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UnsupportedTensorError
from ..records import TensorStats
from .activations import activation_stats as activation_stats
from .activations import channel_stats as channel_stats
from .activations import magnitude_histogram as magnitude_histogram
from .dispatch import clip_gradients as clip_gradients
from .dispatch import collect_gradients as collect_gradients
from .dispatch import fold_rows as fold_rows
from .dispatch import gradient_stats as gradient_stats
from .dispatch import plain_stats as plain_stats
from .dispatch import run_copy as run_copy
from .dispatch import run_scale as run_scale
from .dispatch import run_stats as run_stats
from .dispatch import stats_and_checksums as stats_and_checksums
from .dispatch import tell_autograd as tell_autograd
from .registry import BackendStatus as BackendStatus
from .registry import backends as backends
from .registry import require_devices as require_devices
from .registry import resolve_backend as resolve_backend
from .registry import takes_cpu as takes_cpu
from .registry import takes_triton as takes_triton
from .tensors import as_list as as_list
from .tensors import as_tensor as as_tensor
from .tensors import lacks_memory as lacks_memory


def tensor_stats(
    tensors: Sequence[torch.Tensor], *, names: Sequence[str] | None = None, backend: str = "auto"
) -> TensorStats:
    """One row of statistics a tensor, in one pass: `numel, sum_sq, sum, abs_max, abs_min_nonzero, num_zeros, …`.

    Counts and extremes are exact; `norm` is within 1e-6 of float64 for any dtype. The result does not depend on the
    number of threads or on the instruction set. NaN and Inf are counted and left out of every other column.

    Args:
        tensors: float16, bfloat16, float32, float64, complex (read as real and imaginary parts) or float8 tensors of
            any shape and layout, on any device; sparse ones are read as their (coalesced) values, DTensors as their
            local shard. A single tensor counts as a list of one.
        names: one for each tensor; default `tensor0`, `tensor1`, …
        backend: "auto" (the best for each tensor's device) or a name from `fastguard.backends()`.

    Raises:
        UnsupportedTensorError: a tensor that cannot be read (integer, meta, …); names it.
        BackendUnavailableError: the backend that was asked for cannot run here.

    Cost: one read of every element. CPU: no launch, no sync. GPU: two launches for tensors of one dtype, one sync.
    `reference`: about a dozen passes, one sync a device.

    >>> import torch
    >>> tensor_stats([torch.tensor([1.0, 0.0, float("nan")])])[0].num_nans
    1
    """
    tensors = as_list(tensors)
    if names is not None:
        names = tuple(names)
        if len(names) != len(tensors):
            raise ValueError(f"`names` must have one name a tensor ({len(tensors)}), got {len(names)}")
    try:
        table, total = run_stats(tensors, resolve_backend(backend))
    except UnsupportedTensorError as error:
        raise UnsupportedTensorError(
            error.index, error.problem, None if names is None else names[error.index]
        ) from None
    return TensorStats(table, names, total)


def scale_(tensors: Sequence[torch.Tensor], factor: float, *, backend: str = "auto") -> None:
    """Multiplies every tensor by `factor` in place, with one rounding.

    Equivalent to: `for t in tensors: t.mul_(factor)`.

    Args:
        tensors: float16, bfloat16, float32, float64 or complex, any shape, layout and device; must not overlap
            themselves.
        factor: any float. 1.0 returns at once, without touching memory; other factors multiply NaN and Inf as torch
            does.

    Raises:
        UnsupportedTensorError: a tensor that cannot be written, or whose indices share memory. Nothing is scaled then.

    Cost: one read and one write of every element; no sync.
    """
    tensors = as_list(tensors)
    backend = resolve_backend(backend)
    if factor == 1.0:
        return
    run_scale(tensors, float(factor), backend)
