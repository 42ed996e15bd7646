"""Tensors that are not plain strided memory, made plain; or a clear reason why that cannot be done."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import UnsupportedTensorError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # by their numbers in csrc/stats.h
NATIVE_DTYPES = frozenset({*DTYPES, torch.complex64, torch.complex128, torch.complex32})
OVERLAP = (
    "cannot be scaled in place: several of its indices share one memory location (expanded?). "
    "Call .contiguous() or .clone() on it first"
)
MOST_ELEMENTS = 2**53  # more could not be counted in float64
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def as_tensor(array: Any) -> torch.Tensor:
    """A tensor over the memory of `array`, or of a copy of it where torch would not have it as it is."""
    if isinstance(array, torch.Tensor):
        return array
    # torch has no negative strides, and warns of memory that must not be written to.
    backwards = any(stride < 0 for stride in getattr(array, "strides", None) or ())
    if backwards or not getattr(getattr(array, "flags", None), "writeable", True):
        array = array.copy()
    return torch.as_tensor(array, device="cpu" if hasattr(array, "__array_interface__") else None)


def as_list(tensors: Any, argument: str = "tensors") -> list[Any]:
    """`tensors` as a list; a single one is a list of one."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    try:
        return list(tensors)
    except TypeError:
        raise TypeError(f"`{argument}` must be tensors, got {type(tensors).__name__}") from None


def plain(tensor: object, index: int, *, writable: bool = False) -> torch.Tensor:
    """A strided tensor of a native dtype that has the values of `tensor`; with `writable`, over the same memory.

    Sparse tensors give their stored values (COO: coalesced, unless `writable`), DTensors their local shard, lazy
    conjugates and negatives their resolved values, float8 its float32 equal. Raises UnsupportedTensorError if there is
    no such tensor: what is wrong and what would help. Cost: nothing for plain tensors; a copy where values have to be
    resolved."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensorError(index, f"must be a torch.Tensor, got {type(tensor).__name__}")
    values = _strided(tensor.detach(), index, writable)
    if lacks_memory(values):
        raise UnsupportedTensorError(
            index, "must hold data, got a tensor whose storage was freed or cut short under it (storage.resize_?)"
        )
    if values.numel() * (2 if values.is_complex() else 1) > MOST_ELEMENTS:
        raise UnsupportedTensorError(index, f"must have at most 2^53 elements, got shape {tuple(values.shape)}")
    if values.is_conj():
        values = values.conj() if writable else values.resolve_conj()
    if values.is_neg():
        values = torch._neg_view(values)  # of what it is the negative
        if not writable:
            values = -(values if values.dtype in NATIVE_DTYPES else values.to(torch.float32))
    if values.dtype not in NATIVE_DTYPES:
        if writable or not values.dtype.is_floating_point:
            allowed = "float16, bfloat16, float32, float64 or complex"
            raise UnsupportedTensorError(index, f"must be {allowed}, got {values.dtype}")
        values = values.to(torch.float32)
    return values


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage of a strided tensor ends before its last element, as one that was resized under it does."""
    if tensor.numel() == 0 or not torch._C._has_storage(tensor):
        return False
    last = tensor.storage_offset() + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.itemsize > tensor.untyped_storage().nbytes()


def may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two indices of a strided tensor may reach one element, as in an expanded or unfolded one."""
    reach = 0  # the farthest element that the inner dimensions address
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += (size - 1) * stride
    return False


def _strided(tensor: torch.Tensor, index: int, writable: bool) -> torch.Tensor:
    problem = ""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        problem = "must hold data, got a tensor inside a functorch transform. Call fastguard outside vmap and grad."
    elif hasattr(tensor, "to_local"):
        return _strided(tensor.to_local().detach(), index, writable)
    elif tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
        problem = "must hold data, got a meta or fake tensor, which has only a shape"
    elif tensor.layout is torch.sparse_coo:
        return tensor._values() if writable else tensor.coalesce().values()
    elif tensor.layout in _COMPRESSED or tensor.is_nested:
        return tensor.values()
    elif tensor.is_quantized or tensor.layout is not torch.strided:
        what = "a quantized tensor" if tensor.is_quantized else f"layout {tensor.layout}"
        problem = f"must be strided or sparse, got {what}. Dequantize or call to_dense first."
    elif is_traceable_wrapper_subclass(tensor):
        what = f"the wrapper subclass {type(tensor).__name__}"
        problem = f"must be a plain tensor, got {what}. Pass its inner tensors."
    elif tensor._is_zerotensor() and writable:
        problem = "must hold data, got an immutable zero tensor. Call .clone() on it."
    elif tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if problem:
        raise UnsupportedTensorError(index, problem)
    return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


def float64_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor on the CPU as float64, in order: what `tensor.double().numpy().tobytes()` would be."""
    values = tensor.double().contiguous()
    return ctypes.string_at(values.data_ptr(), 8 * values.numel()) if values.numel() else b""
