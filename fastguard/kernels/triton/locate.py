"""Addresses and sizes of tensors on a device, as bytes: the keys of the tables."""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ... import _env
from ...errors import UnsupportedTensorError
from ..tensors import OVERLAP, lacks_memory, may_overlap, plain
from .tables import DTYPES

try:
    from ... import _C
except ImportError:  # Python calls do the same, five times as slowly
    _C = None  # type: ignore[assignment]

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def accepts(device: torch.device) -> bool:
    """Whether the kernels, compiled or interpreted, read tensors on `device`."""
    return device.type == "cpu" if _env.triton_interpreter() else device.type in ("cuda", "xpu")


def device_for(tensors: Sequence[Any]) -> torch.device:
    """The device of the first of `tensors`, or, if the kernels are not for that, one on which others are refused."""
    device = tensors[0].device if isinstance(tensors[0], torch.Tensor) else torch.device("cpu")
    return device if accepts(device) else torch.device("cpu" if _env.triton_interpreter() else "cuda")


class Located(NamedTuple):
    """Tensors as the kernels address them.

    Attributes:
        addresses, sizes: keys for `Tables.find`.
        keep: tensors that were made to serve; they must live until the launches are under way.
        write_back: (where to, copy) for those that were copied and are to be written; None if all tensors are plain.
    """

    addresses: bytes
    sizes: bytes
    keep: list[torch.Tensor]
    write_back: list[tuple[torch.Tensor, torch.Tensor]] | None


def locate(tensors: Sequence[torch.Tensor], device: torch.device, *, writable: bool = False) -> Located:
    """Addresses and sizes of `tensors`, which must be on `device`.

    A tensor whose elements do not fill a stretch of memory is copied first, and one that is not plain memory (sparse,
    float8, lazily conjugated, …) is prepared.

    Raises:
        UnsupportedTensorError: a tensor that cannot be read, is on another device, or (`writable`) cannot be written.

    Cost: about 50 ns a tensor through the exchange API, 1 us without; a copy of each tensor that is not dense.
    """
    if _C is not None:
        # The device of the first speaks for all: this returns None if they are on several.
        found = _C.locate_tensors(tensors)
        if found is not None and (not tensors or tensors[0].device == device):
            return Located(*found, [], None)
    words = struct.Struct(f"={len(tensors)}q")
    if _are_plain(tensors, device) and all(map(torch.Tensor.is_contiguous, tensors)) and not _any_is_short(tensors):
        sizes = [numel << 2 | _CODES[t.dtype] for numel, t in zip(map(torch.Tensor.numel, tensors), tensors)]
        return Located(words.pack(*map(torch.Tensor.data_ptr, tensors)), words.pack(*sizes), [], None)
    addresses, sizes = [], []
    keep: list[torch.Tensor] = []
    write_back: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, tensor in enumerate(tensors):
        if not (_are_plain([tensor], device) and not lacks_memory(tensor) and is_dense(tensor)):
            tensor = _prepared(tensor, i, device, writable, write_back)
            keep.append(tensor)
        addresses.append(tensor.data_ptr())
        sizes.append(tensor.numel() << 2 | _CODES[tensor.dtype])
    return Located(words.pack(*addresses), words.pack(*sizes), keep, write_back if keep else None)


def _are_plain(tensors: Sequence[Any], device: torch.device) -> bool:
    """Whether the kernels can read all of `tensors` as they are. Each check is one loop in C."""
    return (
        set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}
        and set(map(operator.attrgetter("layout"), tensors)) <= {torch.strided}
        and set(map(operator.attrgetter("device"), tensors)) <= {device}
        and set(map(operator.attrgetter("dtype"), tensors)) <= _CODES.keys()
        and not any(map(torch.Tensor.is_neg, tensors))
        and not any(map(torch.Tensor._is_zerotensor, tensors))
        and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
    )


def _any_is_short(tensors: Sequence[Any]) -> bool:
    """As `lacks_memory`, for contiguous tensors."""
    places = zip(map(torch.Tensor.storage_offset, tensors), map(torch.Tensor.numel, tensors), tensors)
    ends = [(offset + numel) * tensor.itemsize for offset, numel, tensor in places]
    return any(map(operator.gt, ends, map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill the memory from the first one on, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _prepared(
    tensor: object,
    index: int,
    device: torch.device,
    writable: bool,
    write_back: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    values = plain(tensor, index, writable=writable)
    if values.device != device:
        raise UnsupportedTensorError(index, f'must be on {device} for backend "triton", got {values.device}')
    if values.is_complex():
        values = torch.view_as_real(values)
    if writable and may_overlap(values):
        raise UnsupportedTensorError(index, OVERLAP)
    if is_dense(values):
        return values
    copy = values.contiguous()
    if writable:
        write_back.append((values, copy))
    return copy
