"""Callbacks for training frameworks, one module each, which imports its framework when it is first used.

`transformers` (with TRL and PEFT), `lightning`, `accelerate`, `ignite`, `skorch` and `fastai`. docs/frameworks.md has
a short program for each.
"""

from __future__ import annotations

import importlib
from typing import Any

from .._text import did_you_mean

__all__ = ["accelerate", "fastai", "ignite", "lightning", "skorch", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __all__)}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
