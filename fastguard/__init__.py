"""fastguard: every gradient checked, clipped and explained at every step, for less than `clip_grad_norm_` costs.

The door: the names that most programs need. More are in the modules `clip`, `diagnosis`, `errors`, `integrations`,
`sinks`, `tools` and `visualization`. Everything is imported when first used, so that `import fastguard` stays light and
the parts that read logs work without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _env

__version__ = "0.3.0"

if TYPE_CHECKING:
    from .errors import FastguardError as FastguardError
    from .kernels import activation_stats as activation_stats
    from .kernels import backends as backends
    from .kernels import tensor_stats as tensor_stats
    from .observers.activations import ActivationMonitor as ActivationMonitor
    from .records import GradientStats as GradientStats
    from .records import StepStats as StepStats
    from .records import TrainingHistory as TrainingHistory
    from .recovery import Recovery as Recovery
    from .report import Report as Report
    from .sinks import JsonlSink as JsonlSink
    from .sinks import MemorySink as MemorySink
    from .step import Guard as Guard
    from .step import wrap as wrap
    from .step import wrap_backward as wrap_backward
    from .tools.checkpoints import Checkpoints as Checkpoints
    from .tools.clipping import clip_grad_norm_ as clip_grad_norm_
    from .tools.clipping import get_total_norm as get_total_norm
    from .tools.debugger import TrainingDebugger as TrainingDebugger
    from .tools.early_stopping import EarlyStopping as EarlyStopping
    from .tools.lr_finder import LearningRateFinder as LearningRateFinder
    from .tools.param_groups import param_groups as param_groups
    from .tools.preflight import preflight as preflight
    from .tools.settings import settings as settings

_NAMES_OF = {
    "errors": ("FastguardError",),
    "kernels": ("activation_stats", "backends", "tensor_stats"),
    "observers.activations": ("ActivationMonitor",),
    "records": ("GradientStats", "StepStats", "TrainingHistory"),
    "recovery": ("Recovery",),
    "report": ("Report",),
    "sinks": ("JsonlSink", "MemorySink"),
    "step": ("Guard", "wrap", "wrap_backward"),
    "tools.checkpoints": ("Checkpoints",),
    "tools.clipping": ("clip_grad_norm_", "get_total_norm"),
    "tools.debugger": ("TrainingDebugger",),
    "tools.early_stopping": ("EarlyStopping",),
    "tools.lr_finder": ("LearningRateFinder",),
    "tools.param_groups": ("param_groups",),
    "tools.preflight": ("preflight",),
    "tools.settings": ("settings",),
}
# Version 0.2 had these names here too. They stay importable; their home is one dot further.
_OLDER_NAMES_OF = {
    "clip": (
        *("AGC", "AdaGC", "ClipPolicy", "GlobalNorm", "PerGroup", "Percentile", "SkipSpikes", "Spikes"),
        *("Value", "ZClip"),
    ),
    "errors": (
        *("AlreadyGuardedError", "BackendUnavailableError", "NonFiniteGradientsError", "NotGuardedError"),
        *("PolicySkipsError", "RecoveryFailedError", "UnsupportedTensorError"),
    ),
    "kernels": ("scale_",),
    "records": ("ActivationStats", "TensorStats"),
    "tools": (
        *("check_initialization", "clip_gradients", "detect_dead_neurons", "overfit_one_batch"),
        *("stable_weight_init", "warmup_cosine"),
    ),
}
_HOME = {name: home for home, names in _NAMES_OF.items() for name in names}
_OLDER = {name: home for home, names in _OLDER_NAMES_OF.items() for name in names}
_MODULES = ("clip", "diagnosis", "errors", "integrations", "sinks", "tools", "visualization")
_MORE_MODULES = ("kernels", "observers", "page", "records", "recovery", "report")
__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _MORE_MODULES:
        return importlib.import_module(f".{name}", __name__)
    home = _HOME.get(name) or _OLDER.get(name)
    if home is None:
        from ._text import did_you_mean

        known = did_you_mean(name, {*__all__, *_OLDER, *_MORE_MODULES}, 8)
        raise AttributeError(f"module 'fastguard' has no attribute {name!r}. {known}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if _env.keeps_memory():
    importlib.import_module(".tools", __name__).keep_memory()
