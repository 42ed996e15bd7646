"""Finds the tensors that a module takes or returns, says whether they can be read, and views parts of them."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import kernels
from ..kernels.cpu import extension

MAX_LEAVES = 8
_MAX_DEPTH = 4


def leaves(value: Any, path: str = "", depth: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Every tensor in `value` with its path, in order; objects of unknown kind hold none."""
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if depth >= _MAX_DEPTH:
        return []
    found: list[tuple[str, torch.Tensor]] = []
    if isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            found += leaves(item, f"{path}[{i}]", depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found += leaves(item, f"{path}[{key!r}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            found += leaves(getattr(value, field.name), f"{path}.{field.name}", depth + 1)
    return found


def mapped(function: Callable[[torch.Tensor], Any], nested: Any) -> Any:
    """`nested` again, with `function` of each tensor in its place."""
    if isinstance(nested, torch.Tensor):
        return function(nested)
    if isinstance(nested, Mapping):
        values = {key: mapped(function, value) for key, value in nested.items()}
        if type(nested) is dict or not hasattr(nested, "update"):
            return values
        other = copy.copy(nested)
        other.update(values)
        return other
    if isinstance(nested, tuple) and hasattr(nested, "_fields"):
        return type(nested)(*(mapped(function, value) for value in nested))
    if type(nested) in (list, tuple):
        return type(nested)(mapped(function, value) for value in nested)
    return nested


def labelled(output: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in `output`, each with its path; the first with floating-point numbers has no path."""
    found = leaves(output)[:MAX_LEAVES]
    first = next((i for i, (_, x) in enumerate(found) if x.is_floating_point() or x.is_complex()), -1)
    return [("" if i == first else path, x) for i, (path, x) in enumerate(found)]


def inputs_of(args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a module was given, those called a mask or a bias left out: they hold -Inf by intent."""
    named = {key: value for key, value in kwargs.items() if "mask" not in key and "bias" not in key}
    return [tensor for _, tensor in leaves((args, named))]


def has_values(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has floating-point values, on any device, and is neither inside a torch.func transform nor
    inside a CUDA graph that is captured: its replays call no hooks."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or isinstance(tensor, torch._subclasses.FakeTensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def can_be_read(x: torch.Tensor) -> bool:
    """Whether the values of `x` are in memory of the CPU, with strides."""
    if extension is not None and extension.can_read(x):
        return True  # nearly every tensor
    if not x.is_cpu or not is_dense(x) or isinstance(x, torch._subclasses.FakeTensor) or kernels.lacks_memory(x):
        return False
    functorch = torch._C._functorch
    return not (functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x))


def is_dense(x: torch.Tensor) -> bool:
    """Whether `x` is memory with strides, and neither sparse nor nested nor made of other tensors."""
    return x.layout is torch.strided and not x.is_nested and not is_traceable_wrapper_subclass(x)


def unit_dim_of(tensor: torch.Tensor, preferred: int | None) -> int | None:
    """The dimension of the units: `preferred` where the tensor has it, else 1 of images and -1 of anything smaller."""
    if tensor.ndim < 2:
        return None
    if tensor.ndim == 2:
        return 1
    if preferred is not None and -tensor.ndim <= preferred < tensor.ndim:
        return preferred % tensor.ndim
    return 1 if tensor.ndim > 3 else tensor.ndim - 1


def thinned(x: torch.Tensor, most: int, dims: Iterable[int] | None = None) -> torch.Tensor:
    """A view of some `most` elements of `x` at most, with fewer indices of `dims`, in order; by default last first."""
    for dim in reversed(range(x.dim())) if dims is None else dims:
        step = min(-(-x.numel() // max(1, most)), x.shape[dim])
        if step > 1:
            x = x[(slice(None),) * dim + (slice(None, None, step),)]
    return x


def index_of(places: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """As `torch.unravel_index`, whose first call imports 500 modules: 0.5 s."""
    found: list[torch.Tensor] = []
    for size in reversed(shape):
        found.insert(0, places % size)
        places = places // size
    return tuple(found)


def some_of(x: torch.Tensor, each: int, step: int) -> torch.Tensor:
    """Every `each`-th sample of `x` at every `step`-th of its places, [n, places]; a view where `x` is contiguous."""
    if x.is_contiguous():
        return x.view(len(x), -1)[::each, ::step]
    rows = x[::each].unsqueeze(-1)
    places = torch.arange(0, x.numel() // len(x), step, device=x.device)
    return rows.movedim(0, -1)[index_of(places, rows.shape[1:])].T


def strided(x: torch.Tensor, most: int) -> torch.Tensor:
    """A view of at most some `most` elements of `x`; of all places of the last dimension where `x` is contiguous."""
    if x.numel() <= most or not x.is_contiguous():
        return thinned(x, most, sorted(range(x.dim()), key=lambda d: -x.shape[d]))
    step = -(-x.numel() // max(1, most))
    while math.gcd(step, x.shape[-1]) > 1:
        step += 1
    return x.view(-1)[::step]
