"""Adapter over `fastguard._C`, the C++ kernels for CPU tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .. import _env
from ..errors import BackendUnavailableError, UnsupportedTensorError
from .reference import Limits, ReferenceBackend, Row
from .tensors import DTYPES, MOST_ELEMENTS, OVERLAP, lacks_memory, plain

_EXCHANGE_API = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if _env.exchange_api() else None
_Function = TypeVar("_Function")
_problem: str | None = None
try:
    from .. import _C
except ImportError as error:
    _problem = (
        f"the extension fastguard._C cannot be imported ({error}); install a C++17 compiler and reinstall fastguard"
    )


def _prepare(tensor: object, index: int, writable: bool = False) -> torch.Tensor:
    values = plain(tensor, index, writable=writable)
    if values.device.type != "cpu":
        raise UnsupportedTensorError(index, f'must be on the CPU for backend "cpu", got {values.device}')
    return values


def _describe(tensor: torch.Tensor) -> tuple[int, str, tuple[int, ...], tuple[int, ...]] | None:
    """What the exchange API would tell; None for a tensor that has to be prepared first."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        return None
    if tensor.is_nested or tensor.numel() > MOST_ELEMENTS:  # nested: strided by its layout, and an older torch raises
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor() or lacks_memory(tensor):
        return None
    return tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride()


def _initialise() -> None:
    kinds, gradient = (torch.Tensor, torch.nn.Parameter), inspect.getattr_static(torch.Tensor, "grad")
    # Tensors and their negatives, from which the extension learns where torch keeps what.
    examples = [torch.zeros(shape, device="cpu") for shape in ((), (5,), (2, 3), (1, 7, 11))]
    examples.append(torch.nn.Parameter(torch.zeros(13, device="cpu")))
    pairs = [(x, torch._neg_view(x)) for x in examples if type(x) in kinds]
    prepare = _prepare, functools.partial(_prepare, writable=True)
    _C.set_tensor_access(*kinds, gradient, *prepare, _describe, _EXCHANGE_API, pairs)
    isa = _env.isa()
    if isa is not None:
        try:
            _C.select_isa(isa)
        except ValueError as error:
            raise BackendUnavailableError(f"FASTGUARD_ISA: {error}") from None


extension: Any = None if _problem is not None else _C
# Base classes of the step, whose attributes lie in C structs (csrc/state.h), and hooks in C++. Without the extension
# each class is `object`, the hooks are None, and Python does everything.
RingState: Any = getattr(extension, "RingState", object)
RunState: Any = getattr(extension, "RunState", object)
HooksState: Any = getattr(extension, "HooksState", object)
LedgerState: Any = getattr(extension, "LedgerState", object)
GuardState: Any = getattr(extension, "GuardState", object)
StepPreHook: Any = getattr(extension, "StepPreHook", None)
StepPostHook: Any = getattr(extension, "StepPostHook", None)
guard_attribute: Any = getattr(extension, "guard_attribute", None)
# The whole step of a guard, where every tensor is plain; a step as a line of a log, written too; see `AdaGC` and
# `fastguard.ranks.exchange` for the others.
take_step: Any = getattr(extension, "take_step", None)
json_line: Any = getattr(extension, "json_line", None)
follow: Any = getattr(extension, "follow", None)
ShardPlan: Any = getattr(extension, "ShardPlan", None)
if extension is not None:
    _initialise()
    extension.set_step_calls(torch.get_num_threads, torch.is_grad_enabled, torch._C._autograd._get_sequence_nr)


def observing(function: _Function) -> _Function:
    """Returns `function` as the method `Guard.observe`. C++ replaces it for plain losses of the newest step."""
    return function if extension is None else extension.observe_method(function)


@functools.cache
def dtypes(bits: int) -> frozenset[torch.dtype]:
    return frozenset(dtype for i, dtype in enumerate(DTYPES) if bits >> i & 1)


def _prepared(x: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> Any:
    values = _prepare(x, 0)
    found = call(values)
    if found is None:
        raise UnsupportedTensorError(0, f"must be real and strided, got {values.dtype}")
    return found


class CpuBackend(ReferenceBackend):
    """The C++ kernels, for tensors on the CPU."""

    name = "cpu"

    def unavailable(self) -> str | None:
        return _problem

    def detail(self) -> str:
        sets = ", ".join(_C.isa_names())
        threads = f"threads: {torch.get_num_threads()} (OpenMP)" if _C.openmp else "threads: 1 (built without OpenMP)"
        access = "DLPack exchange API" if _EXCHANGE_API is not None else "Python calls"
        return f"{_C.isa()} of [{sets}], {threads}, tensors through {access}, {_C.compiler}"

    def accepts(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def tensor_stats(self, tensors: Sequence[torch.Tensor], unscale: float = 1.0) -> tuple[bytearray, Row]:
        """Cost: one read of every element, with `torch.get_num_threads()` threads; a row a tensor in the result. The
        GIL is released unless there is next to nothing to do."""
        result = _C.tensor_stats(tensors, torch.get_num_threads(), unscale, False)
        assert result is not None  # only `plain_only` gives None
        return result[0], result[1]

    def scale_(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        try:
            _C.scale_(tensors, factor, torch.get_num_threads())
        except IndexError as error:
            raise UnsupportedTensorError(int(str(error)), OVERLAP) from None

    def activation(self, x: torch.Tensor, dim: int | None, limits: Limits) -> tuple[Row, bytes | None]:
        """Cost: as of `tensor_stats`; about a microsecond a call. A channel takes 32 bytes in the result, and at most
        320 on the way."""
        threads = torch.get_num_threads()
        if dim is None:
            row = _C.activation_stats(x, *limits, threads)
            return row or _prepared(x, lambda values: _C.activation_stats(values, *limits, threads)), None
        found = _C.channel_stats(x, dim, *limits, threads)
        if found is None and (x.layout is not torch.strided or x.is_nested):
            raise UnsupportedTensorError(0, "must be dense to have channels. Call to_dense first")
        return found or _prepared(x, lambda values: _C.channel_stats(values, dim, *limits, threads))
