"""Hooks while a model is guarded: set as long as they are wanted, keeping nothing alive, in no copy of the model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook


class Transient:
    """A hook that, in a copy of the model or in a file, is something that does nothing, and is there
    without this package."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class ParameterHook:
    """A hook on a parameter that calls a method, and does not keep whose method it is alive."""

    def __init__(self, method: Callable[[torch.Tensor], None]) -> None:
        self._method = weakref.WeakMethod(method)
        unserializable_hook(self)

    def __call__(self, tensor: torch.Tensor) -> None:
        method = self._method()
        if method is not None:
            method(tensor)


class Hooked:
    """What has a hook while it is wanted."""

    _handle: Any

    def close(self) -> None:
        """Takes the hook away."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
