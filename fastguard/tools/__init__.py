"""The toolkit: functions and classes that work without a guard. Each is imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .._text import did_you_mean
from .allocator import KeptMemory as KeptMemory
from .allocator import keep_memory as keep_memory

if TYPE_CHECKING:
    from ..observers.activations import detect_dead_neurons as detect_dead_neurons
    from .clipping import clip_gradients as clip_gradients
    from .initialization import check_initialization as check_initialization
    from .initialization import stable_weight_init as stable_weight_init
    from .overfit import OverfitResult as OverfitResult
    from .overfit import overfit_one_batch as overfit_one_batch
    from .settings import warmup_cosine as warmup_cosine

_HOME = {
    "detect_dead_neurons": "..observers.activations",
    "clip_gradients": ".clipping",
    "check_initialization": ".initialization",
    "stable_weight_init": ".initialization",
    "OverfitResult": ".overfit",
    "overfit_one_batch": ".overfit",
    "warmup_cosine": ".settings",
}
__all__ = ["KeptMemory", "keep_memory", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __all__)}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
