"""Finds the optimizer classes of a package by walking its modules."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import types
from collections.abc import Iterator

import torch


def _without_init(name: str) -> None:
    """Enters package `name` as an empty one, so that its submodules can be imported without what it asks for."""
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        module = types.ModuleType(name)
        module.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = module


def _subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def classes(roots: tuple[str, ...], bare: tuple[str, ...] = ()) -> tuple[list[type], dict[str, str]]:
    """The subclasses of torch.optim.Optimizer defined below the modules `roots`, by module and name, and the modules
    below them that could not be imported, with the reason.

    Args:
        bare: packages whose own `__init__` is not run.

    Raises:
        ImportError: of one of the roots.
    """
    for name in bare:
        _without_init(name)
    failed: dict[str, str] = {}
    for root in roots:
        module = importlib.import_module(root)
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{root}.", onerror=lambda name: None):
            try:
                importlib.import_module(found.name)
            except Exception as error:
                failed[found.name] = f"{type(error).__name__}: {error}"
    own = tuple(f"{root}." for root in roots)
    found_below = (c for c in _subclasses(torch.optim.Optimizer) if f"{c.__module__}.".startswith(own))
    distinct = dict.fromkeys(c for c in found_below if "<locals>" not in c.__qualname__)
    return sorted(distinct, key=lambda c: (c.__module__, c.__qualname__)), failed
