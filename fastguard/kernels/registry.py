"""Which backends there are, and which one serves what."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .. import _env
from ..errors import BackendUnavailableError, UnsupportedTensorError
from .cpu import CpuBackend
from .reference import ReferenceBackend
from .triton import TritonBackend

# In the order in which "auto" tries them.
BACKENDS: dict[str, ReferenceBackend] = {b.name: b for b in (CpuBackend(), TritonBackend(), ReferenceBackend())}
_log = logging.getLogger("fastguard")
say_once = functools.cache(_log.warning)


class BackendStatus(NamedTuple):
    """Whether a backend can run here, and if not, why."""

    available: bool
    reason: str | None
    detail: str


def backends() -> dict[str, BackendStatus]:
    """Every backend by name, whether it can run here, and if not, why. Cost: once a search; 3 us when it is known.

    >>> import fastguard
    >>> fastguard.backends()["reference"].available
    True
    """
    status = {}
    for name, backend in BACKENDS.items():
        reason = backend.unavailable()
        status[name] = BackendStatus(reason is None, reason, backend.detail() if reason is None else "")
    return status


def resolve_backend(name: str) -> str:
    """A backend that can run here, or "auto"; `name` "auto" is what the environment says, "auto" if nothing. Raises
    ValueError for an unknown name, and BackendUnavailableError for a backend that cannot run here; says why."""
    source = "`backend`"
    if name == "auto":
        source, name = "`FASTGUARD_BACKEND`", _env.backend()
    if name == "auto":
        return name
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ValueError(f"{source} must be one of [{known}], got {name!r}")
    if BACKENDS[name].unavailable() is not None:
        every = "; ".join(f"{n}: {s.reason or 'can run'}" for n, s in backends().items())
        raise BackendUnavailableError(f"{source}: {name!r} cannot run here. {every}")
    return name


def require_devices(backend: str, groups: Iterable[Iterable[torch.Tensor]]) -> None:
    """Raises BackendUnavailableError if a tensor of `groups` is on a device that the backend asked for can't serve."""
    name = resolve_backend(backend)
    if name == "auto":
        return
    for device in {t.device for group in groups for t in group}:
        if not BACKENDS[name].accepts(device):
            raise BackendUnavailableError(
                f"`backend` {name!r} cannot serve tensors on {device}. "
                'Leave it "auto", which takes the best backend for each device.'
            )


def choose(device: torch.device, name: str, operation: str = "tensor_stats") -> ReferenceBackend:
    """The backend `name`, or for "auto" the first one that does `operation` on `device`; says once why it passes over
    one that would be faster. `name` has been through `resolve_backend`, here and below."""
    if name != "auto":
        return BACKENDS[name]
    for backend in BACKENDS.values():
        if not backend.accepts(device):
            continue
        reason = backend.unavailable() or backend.problem_on(device, operation)
        if reason is None:
            return backend
        say_once(f"backend {backend.name!r} cannot run: {reason}. Falling back; the results are the same, only slower.")
    return BACKENDS["reference"]


# Under which names tensors on the CPU go to the C++ kernels, which then have shorter ways than an operation.
CPU_NAMES = frozenset({"auto", "cpu"} if BACKENDS["cpu"].unavailable() is None else ())


def split_by_device(tensors: Sequence[Any]) -> dict[torch.device, list[int]]:
    """Indices of `tensors` by device; what is no tensor counts as on the CPU, whose backend refuses it in words."""
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        device = tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")
        groups.setdefault(device, []).append(i)
    return groups


@contextlib.contextmanager
def renumbering(indices: Sequence[int]) -> Iterator[None]:
    """Renumbers the tensor in an error about part of a list, so that it is an index into the whole list."""
    try:
        yield
    except UnsupportedTensorError as error:
        raise UnsupportedTensorError(indices[error.index], error.problem) from None
