"""Batches of any nesting: taken from what was given, copied, taken apart."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def take(batch: Any, most: int) -> list[Any]:
    """The first batches of `batch`, which is one batch or gives them, each with tensors of its own.

    One batch is a tensor, a dict, a tuple, or a list that holds a tensor; anything else that can be iterated over
    gives batches: a DataLoader, a list of pairs.

    Raises:
        ValueError: an iterator, which would be used up; nothing in it.
        TypeError: neither a batch nor a source of batches.
    """
    if isinstance(batch, Iterator):
        raise ValueError(
            f"`batch` must be a batch, or be iterable again and again, got {type(batch).__name__}, an iterator, which "
            "would be used up. Pass the loader itself, or a list of batches."
        )
    if isinstance(batch, torch.utils.data.Dataset) and not isinstance(batch, Iterable):
        raise TypeError(
            f"`batch` must be a batch or give batches, got {type(batch).__name__}. Pass a DataLoader of it."
        )
    if _is_one(batch):
        return [mapped(_own, batch)]
    if not isinstance(batch, Iterable) or isinstance(batch, (str, bytes)):
        raise TypeError(f"`batch` must be a batch or give batches, got {type(batch).__name__}")
    taken = [mapped(_own, one) for one in itertools.islice(batch, most)]
    if not taken:
        raise ValueError("`batch` must give at least one batch, got none")
    return taken


def _is_one(batch: Any) -> bool:
    if isinstance(batch, list):
        return any(isinstance(part, Tensor) for part in batch)
    return isinstance(batch, (Tensor, Mapping, tuple))


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def mapped(function: Callable[[Tensor], Any], nested: Any) -> Any:
    """`nested` again, with `function` of each tensor in its place."""
    if isinstance(nested, Tensor):
        return function(nested)
    if isinstance(nested, Mapping):
        values = {key: mapped(function, value) for key, value in nested.items()}
        if type(nested) is dict:
            return values
        other = copy.copy(nested)
        if hasattr(other, "update"):
            other.update(values)
            return other
        return values
    if isinstance(nested, tuple) and hasattr(nested, "_fields"):
        return type(nested)(*(mapped(function, value) for value in nested))
    if type(nested) in (list, tuple):
        return type(nested)(mapped(function, value) for value in nested)
    return nested


def tensors_in(nested: Any) -> list[Tensor]:
    """All tensors of `nested`, in order; a dataclass or the like of outputs is looked into as well."""
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    elif hasattr(nested, "__dataclass_fields__"):
        nested = [getattr(nested, name, None) for name in nested.__dataclass_fields__]
    if isinstance(nested, (list, tuple)):
        return [tensor for part in nested for tensor in tensors_in(part)]
    return []


def first_tensor(nested: Any, *, floating: bool = False) -> Tensor | None:
    """The first tensor in `nested`; with `floating`, the first of a floating dtype."""
    found = (t for t in tensors_in(nested) if t.numel() and (not floating or t.is_floating_point()))
    return next(found, None)


def is_pair(batch: Any) -> bool:
    """Whether a batch is (inputs, targets)."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2
