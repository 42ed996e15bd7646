"""Tensors in, figures out: what users and guards call, and the shortest ways for plain tensors on the CPU. `registry`
has the backends. Names of backends have been through `resolve_backend`, but for `tensor_stats` and
`activation_stats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ..errors import UnsupportedTensorError
from ..records import ActivationStats, TensorStats, columns
from . import cpu
from .reference import Limits, Row
from .registry import BACKENDS, CPU_NAMES, choose, renumbering, split_by_device
from .registry import BackendStatus as BackendStatus
from .registry import backends as backends
from .registry import require_devices as require_devices
from .registry import resolve_backend as resolve_backend
from .tensors import as_list as as_list
from .tensors import as_tensor as as_tensor
from .tensors import lacks_memory as lacks_memory

NEAR_ZERO = 1e-6
_SMALLEST = 5e-324
Range: TypeAlias = float | tuple[float, float]


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
        name = None if names is None else names[error.index]
        raise UnsupportedTensorError(error.index, error.problem, name) from None
    return TensorStats(table, names, total)


def _may_be_plain(first: Any, backend: str) -> bool:
    """Whether to ask the CPU kernels at all. They would read through a whole list on a GPU before they refuse it."""
    return backend in CPU_NAMES and getattr(first, "is_cpu", False)


def run_stats(tensors: Sequence[Any], backend: str, unscale: float = 1.0) -> tuple[bytearray, tuple[float, ...] | None]:
    """Rows of `tensors` times `unscale` as float64 bytes and, where the backend folds them itself, their fold."""
    if not tensors:
        return bytearray(), None
    quick = plain_stats(tensors, backend, unscale)
    if quick is not None:
        return quick[0], quick[1]
    groups = split_by_device(tensors)
    if len(groups) == 1:
        return choose(next(iter(groups)), backend).tensor_stats(tensors, unscale)
    size = columns.ROW_BYTES
    table = bytearray(size * len(tensors))
    for device, indices in groups.items():
        with renumbering(indices):
            rows, _ = choose(device, backend).tensor_stats([tensors[i] for i in indices], unscale)
        for place, i in enumerate(indices):
            table[i * size : (i + 1) * size] = rows[place * size : (place + 1) * size]
    return table, None


def plain_stats(
    tensors: Sequence[Any], backend: str, unscale: float = 1.0
) -> tuple[bytearray, tuple[float, ...], frozenset[torch.dtype]] | None:
    """As `run_stats`, and the dtypes, complex tensors under their real one; None if one is not plain CPU memory, or the
    CPU kernels are not chosen. This is the quickest way in: no Python code runs for any tensor."""
    if not tensors or not _may_be_plain(tensors[0], backend):
        return None
    found = cpu.extension.tensor_stats(tensors, torch.get_num_threads(), unscale, True)
    return None if found is None else (found[0], found[1], cpu.dtypes(found[2]))


def clip_gradients(
    parameters: list[torch.Tensor], max_norm: float, backend: str, *, finite_only: bool = False
) -> tuple[float, frozenset[torch.dtype]] | None:
    """Norm and dtypes of the gradients, which are multiplied by max_norm / (norm + 1e-6) where that is below 1; with
    `finite_only` not for a norm that is not finite. None, and nothing was done, if there is no gradient or one that is
    not plain CPU memory or overlaps itself."""
    if not parameters or not _may_be_plain(parameters[0], backend):
        return None
    found = cpu.extension.clip_gradients(parameters, torch.get_num_threads(), max_norm, finite_only)
    if found is None:
        return None
    norm, bits, written = found
    if written is not None:
        tell_autograd(written)
    return norm, cpu.dtypes(bits)


def run_scale(tensors: Sequence[Any], factor: float, backend: str) -> None:
    """x *= factor on the backend of each tensor's device; tells autograd."""
    if not tensors:
        return
    try:
        is_done = _may_be_plain(tensors[0], backend)
        if is_done:
            cpu.extension.scale_(tensors, factor, torch.get_num_threads())
    except (IndexError, UnsupportedTensorError):  # one cannot be written to just as it is: none was
        is_done = False
    for device, indices in () if is_done else split_by_device(tensors).items():
        with renumbering(indices):
            choose(device, backend, "scale_").scale_([tensors[i] for i in indices], factor)
    tell_autograd(tensors)


def run_copy(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """`torch._foreach_copy_(to, source)` for tensors of the same shapes, unnoticed by autograd where that is possible:
    on the CPU one call that bypasses the caches where both have the same strides, queued on a GPU."""
    others: Sequence[int] = range(len(to))
    if "cpu" in CPU_NAMES:
        others = cpu.extension.copy(to, source, torch.get_num_threads())
    if others:
        to, source = [to[i].data for i in others], [source[i].detach() for i in others]
        is_queued = any(t.is_cuda for t in to) or any(t.is_cuda for t in source)
        torch._foreach_copy_(to, source, non_blocking=is_queued)


def tell_autograd(tensors: Sequence[Any]) -> None:
    """A graph that saved these tensors, which were written to, has to fail rather than go on with changed values."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # inference tensors have no version; asking each would take longer than telling all
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def collect_gradients(groups: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[int] | None, int]:
    """Gradients that are not None, flat over `groups`; their flat positions, or None if none is missing; and a
    fingerprint of the parameters."""
    if "cpu" in CPU_NAMES:
        try:
            return cpu.extension.collect_gradients(groups)
        except TypeError:  # a group may be a tuple, which optimizers take too
            return cpu.extension.collect_gradients([*map(list, groups)])
    every = [p.grad for params in groups for p in params]
    positions = [i for i, g in enumerate(every) if g is not None]
    gradients = [g for g in every if g is not None]
    fingerprint = hash(tuple(tuple(map(id, params)) for params in groups))
    return gradients, None if len(gradients) == len(every) else positions, fingerprint


def gradient_stats(
    groups: list[list[torch.Tensor]], backend: str, unscale: float
) -> tuple[bytearray, tuple[float, ...] | None, list[int] | None, int]:
    """Rows of the gradients of `groups` times `unscale`, their fold, their positions and the fingerprint, as above."""
    first = next((params[0] for params in groups if params), None)
    if _may_be_plain(first, backend):
        lists = groups if all(type(group) is list for group in groups) else [*map(list, groups)]
        found = cpu.extension.gradient_stats(lists, torch.get_num_threads(), unscale)
        if found is not None:
            return found[:4]
    gradients, positions, fingerprint = collect_gradients(groups)
    table, fold = run_stats(gradients, backend, unscale)
    return table, fold, positions, fingerprint


def fold_rows(table: bytearray) -> tuple[float, ...]:
    """The fold of rows, first to last. Cost: 10 ns a row in C++."""
    return cpu.extension.fold_rows(table) if "cpu" in CPU_NAMES else columns.fold_rows(columns.ROW.iter_unpack(table))


def thresholds(saturation: Range, near_zero: float) -> Limits:
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
    `real`, `thresholds` and `resolve_backend`."""
    is_quick = x.is_cpu and backend in CPU_NAMES
    chosen = BACKENDS["cpu"] if is_quick else choose(x.device, backend, "activation")
    return chosen.activation(x, dim, limits)


def activation_stats(
    x: Any, *, saturation: Range = 0.99, near_zero: float = NEAR_ZERO, backend: str = "auto"
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
    x, limits = real(x, where), thresholds(saturation, near_zero)
    try:
        return ActivationStats.from_row(run_activation(x, limits, None, resolve_backend(backend))[0])
    except UnsupportedTensorError as error:
        raise UnsupportedTensorError(0, error.problem, "x", where) from None
