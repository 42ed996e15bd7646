"""One operation, several backends: choose one, call it.

A backend is a module with `unavailable() -> str | None`, `detail() -> str`, `accepts(device) -> bool`,
`tensor_stats(tensors) -> (rows as float64 bytes, their fold or None)` and `scale_(tensors, factor)`. `reference`
defines what each column means; the others give the same, faster.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .. import _env
from .. import stats as _stats
from ..errors import BackendUnavailableError, UnsupportedTensorError
from ..stats import TensorStats
from ..stats.columns import ROW_BYTES, norm_parts
from . import cpu, reference, triton
from .tensors import as_tensor as as_tensor

# In the order in which "auto" tries them.
_BACKENDS: dict[str, ModuleType] = {"cpu": cpu, "triton": triton, "reference": reference}
_log = logging.getLogger("fastguard")


class BackendStatus(NamedTuple):
    """Whether a backend can run here, and if not, why."""

    available: bool
    reason: str | None
    detail: str


def backends() -> dict[str, BackendStatus]:
    """Every backend by name, whether it can run here, and if not, why.

    >>> import fastguard
    >>> fastguard.backends()["reference"].available
    True
    """
    status = {}
    for name, module in _BACKENDS.items():
        reason = module.unavailable()
        status[name] = BackendStatus(reason is None, reason, module.detail() if reason is None else "")
    return status


def resolve_backend(name: str) -> str:
    """A backend that can run here, or "auto"; `name` "auto" is what the environment says, "auto" if nothing.

    Raises:
        ValueError: unknown name; lists the known ones.
        BackendUnavailableError: known, but it cannot run here; says why, for this and for every other backend.
    """
    source = "`backend`"
    if name == "auto":
        source, name = "`FASTGUARD_BACKEND`", _env.backend()
    if name == "auto":
        return name
    if name not in _BACKENDS:
        known = ", ".join(["auto", *_BACKENDS])
        raise ValueError(f"{source} must be one of [{known}], got {name!r}")
    if _BACKENDS[name].unavailable() is not None:
        every = "; ".join(f"{n}: {s.reason or 'can run'}" for n, s in backends().items())
        raise BackendUnavailableError(f"{source}: {name!r} cannot run here. {every}")
    return name


def require_devices(backend: str, groups: Iterable[Iterable[torch.Tensor]]) -> None:
    """Raises BackendUnavailableError if a tensor of `groups` is on a device that the backend asked for can't serve."""
    name = resolve_backend(backend)
    if name == "auto":
        return
    for device in {t.device for group in groups for t in group}:
        if not _BACKENDS[name].accepts(device):
            raise BackendUnavailableError(
                f"`backend` {name!r} cannot serve tensors on {device}. "
                'Leave it "auto", which takes the best backend for each device.'
            )


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)


def _backend_for(device: torch.device, backend: str) -> ModuleType:
    if backend != "auto":
        return _BACKENDS[backend]
    for name, module in _BACKENDS.items():
        if not module.accepts(device):
            continue
        reason = module.unavailable()
        if reason is None and module is triton:
            reason = triton.problem_on(device)
        if reason is None:
            return module
        _say_once(f"backend {name!r} cannot run: {reason}. Falling back; the results are the same, only slower.")
    return reference


def takes_triton(device: torch.device, backend: str) -> bool:
    """Whether `backend` means the Triton kernels on `device`; says once why "auto" has to pass them over."""
    return triton.accepts(device) and _backend_for(device, backend) is triton


def _device_of(tensor: Any) -> torch.device:
    return tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")


def _split_by_device(tensors: Sequence[Any]) -> dict[torch.device, list[int]]:
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(_device_of(tensor), []).append(i)
    return groups


@contextlib.contextmanager
def renumbering(indices: Sequence[int]) -> Iterator[None]:
    """Errors about a part of a list, told in terms of the whole."""
    try:
        yield
    except UnsupportedTensorError as error:
        raise UnsupportedTensorError(indices[error.index], error.problem) from None


_CPU_RUNS = cpu.unavailable() is None


def run_stats(tensors: Sequence[Any], backend: str, unscale: float = 1.0) -> tuple[bytearray, tuple[float, ...] | None]:
    """Rows of `tensors` times `unscale` as float64 bytes and, where the backend folds them itself, their fold.

    `backend` has been through `resolve_backend`, here and below.
    """
    if not tensors:
        return bytearray(), None
    quick = plain_stats(tensors, backend, unscale)
    if quick is not None:
        return quick[0], quick[1]
    groups = _split_by_device(tensors)
    if len(groups) == 1:
        return _backend_for(next(iter(groups)), backend).tensor_stats(tensors, unscale)
    table = bytearray(ROW_BYTES * len(tensors))
    for device, indices in groups.items():
        with renumbering(indices):
            rows, _ = _backend_for(device, backend).tensor_stats([tensors[i] for i in indices], unscale)
        for place, i in enumerate(indices):
            table[i * ROW_BYTES : (i + 1) * ROW_BYTES] = rows[place * ROW_BYTES : (place + 1) * ROW_BYTES]
    return table, None


def plain_stats(
    tensors: Sequence[Any], backend: str, unscale: float = 1.0
) -> tuple[bytearray, tuple[float, ...], frozenset[torch.dtype]] | None:
    """`cpu.plain_stats` where the CPU kernels are chosen and serve every tensor as it is, else None."""
    if not tensors or not _may_be_plain(tensors[0], backend):
        return None
    return cpu.plain_stats(tensors, unscale)


def _may_be_plain(first: Any, backend: str) -> bool:
    """Whether to ask the CPU kernels at all; not on behalf of a list on a GPU, which they would look at in vain."""
    return _CPU_RUNS and backend in ("auto", "cpu") and getattr(first, "is_cpu", False)


def gradient_norm(parameters: list[torch.Tensor], backend: str) -> tuple[float, frozenset[torch.dtype]] | None:
    """2-norm of the gradients and their dtypes, by the shortest way; None where `plain_stats` would give None."""
    if not parameters or not _may_be_plain(parameters[0], backend):
        return None
    found = cpu.gradient_stats([parameters], 1.0)
    if found is None or not found[0]:
        return None
    return _stats.norm_of(*norm_parts(found[1])), cpu.dtypes(found[4])


def run_scale(tensors: Sequence[Any], factor: float, backend: str) -> None:
    """x *= factor on the backend of each tensor's device; tells autograd."""
    for device, indices in _split_by_device(tensors).items():
        with renumbering(indices):
            _backend_for(device, backend).scale_([tensors[i] for i in indices], factor)
    tell_autograd(tensors)


def tell_autograd(tensors: Sequence[Any]) -> None:
    """A graph that saved these tensors, which were written to, has to fail rather than go on with changed values."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # inference tensors have no version; asking each would take longer than telling all
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def collect_gradients(
    groups: list[list[torch.Tensor]],
) -> tuple[list[torch.Tensor], list[int] | None, int]:
    """Gradients of `groups`, flat, without the missing ones; their flat positions, or None if none is missing; and a
    fingerprint of which parameters these were."""
    return cpu.collect_gradients(groups) if _CPU_RUNS else reference.collect_gradients(groups)


def gradient_stats(
    groups: list[list[torch.Tensor]], backend: str, unscale: float
) -> tuple[bytearray, tuple[float, ...] | None, list[int] | None, int]:
    """Rows of the gradients of `groups` times `unscale`, their fold, their positions and the fingerprint, as above."""
    first = next((params[0] for params in groups if params), None)
    if _may_be_plain(first, backend):
        found = cpu.gradient_stats(groups, unscale)
        if found is not None:
            return found[:4]
    gradients, positions, fingerprint = collect_gradients(groups)
    table, fold = run_stats(gradients, backend, unscale)
    return table, fold, positions, fingerprint


def fold_rows(table: bytearray) -> tuple[float, ...]:
    """The fold of rows, first to last."""
    return cpu.fold_rows(table) if _CPU_RUNS else _stats.fold_rows(TensorStats(table))


def as_list(tensors: Any, argument: str = "tensors") -> list[Any]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    try:
        return list(tensors)
    except TypeError:
        raise TypeError(f"`{argument}` must be tensors, got {type(tensors).__name__}") from None


def _naming(run: Callable[[], Any], names: Sequence[str] | None) -> Any:
    try:
        return run()
    except UnsupportedTensorError as error:
        if names is None:
            raise
        raise UnsupportedTensorError(error.index, error.problem, names[error.index]) from None


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
    backend = resolve_backend(backend)
    table, total = _naming(lambda: run_stats(tensors, backend), names)
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
        UnsupportedTensorError: a tensor that cannot be written, or of which several indices share one memory location.
            Nothing is scaled then.

    Cost: one read and one write of every element; no sync.
    """
    tensors = as_list(tensors)
    backend = resolve_backend(backend)
    if factor == 1.0:
        return
    run_scale(tensors, float(factor), backend)


# At the end, because these choose their backends by what stands above.
from .activations import activation_stats as activation_stats  # noqa: E402
from .activations import channel_stats as channel_stats  # noqa: E402
from .activations import magnitude_histogram as magnitude_histogram  # noqa: E402
