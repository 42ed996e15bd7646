"""fastguard: every gradient checked, clipped and explained at every step, for less than `clip_grad_norm_` costs.

The door: public names only. They are imported when first used, so that `import fastguard` stays light and the parts
that read logs work without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _env

__version__ = "0.3.0"

if TYPE_CHECKING:
    from .clip import AGC as AGC
    from .clip import AdaGC as AdaGC
    from .clip import ClipPolicy as ClipPolicy
    from .clip import GlobalNorm as GlobalNorm
    from .clip import Percentile as Percentile
    from .clip import PerGroup as PerGroup
    from .clip import SkipSpikes as SkipSpikes
    from .clip import Spikes as Spikes
    from .clip import Value as Value
    from .clip import ZClip as ZClip
    from .errors import AlreadyGuardedError as AlreadyGuardedError
    from .errors import BackendUnavailableError as BackendUnavailableError
    from .errors import FastguardError as FastguardError
    from .errors import NonFiniteGradientsError as NonFiniteGradientsError
    from .errors import NotGuardedError as NotGuardedError
    from .errors import PolicySkipsError as PolicySkipsError
    from .errors import RecoveryFailedError as RecoveryFailedError
    from .errors import UnsupportedTensorError as UnsupportedTensorError
    from .kernels import activation_stats as activation_stats
    from .kernels import backends as backends
    from .kernels import channel_stats as channel_stats
    from .kernels import magnitude_histogram as magnitude_histogram
    from .kernels import scale_ as scale_
    from .kernels import tensor_stats as tensor_stats
    from .observers.activations import ActivationMonitor as ActivationMonitor
    from .observers.activations import detect_dead_neurons as detect_dead_neurons
    from .observers.weights import check_gradients as check_gradients
    from .records import GradientStats as GradientStats
    from .records import StepStats as StepStats
    from .records import TensorStats as TensorStats
    from .records import TrainingHistory as TrainingHistory
    from .records.magnitudes import MagnitudeHistogram as MagnitudeHistogram
    from .records.samples import ActivationStats as ActivationStats
    from .records.samples import ChannelStats as ChannelStats
    from .recovery import Recomputation as Recomputation
    from .recovery import Recovery as Recovery
    from .report import Report as Report
    from .sinks import JsonlSink as JsonlSink
    from .sinks import MemorySink as MemorySink
    from .step import Guard as Guard
    from .step import wrap as wrap
    from .step import wrap_backward as wrap_backward
    from .tools.checkpoints import Checkpoints as Checkpoints
    from .tools.clipping import clip_grad_norm_ as clip_grad_norm_
    from .tools.clipping import clip_gradients as clip_gradients
    from .tools.clipping import get_total_norm as get_total_norm
    from .tools.debugger import TrainingDebugger as TrainingDebugger
    from .tools.early_stopping import EarlyStopping as EarlyStopping
    from .tools.initialization import check_initialization as check_initialization
    from .tools.initialization import stable_weight_init as stable_weight_init
    from .tools.lr_finder import LearningRateFinder as LearningRateFinder
    from .tools.overfit import overfit_one_batch as overfit_one_batch
    from .tools.param_groups import param_groups as param_groups
    from .tools.preflight import preflight as preflight
    from .tools.schedules import warmup_cosine as warmup_cosine
    from .tools.settings import settings as settings

_NAMES_OF = {
    "observers.activations": ("ActivationMonitor", "detect_dead_neurons"),
    "errors": (
        *("AlreadyGuardedError", "BackendUnavailableError", "FastguardError", "NonFiniteGradientsError"),
        *("NotGuardedError", "PolicySkipsError", "RecoveryFailedError", "UnsupportedTensorError"),
    ),
    "step": ("Guard", "wrap", "wrap_backward"),
    "clip": (
        *("AGC", "AdaGC", "ClipPolicy", "GlobalNorm", "PerGroup", "Percentile", "SkipSpikes", "Spikes"),
        *("Value", "ZClip"),
    ),
    "recovery": ("Recomputation", "Recovery"),
    "kernels": ("activation_stats", "backends", "channel_stats", "magnitude_histogram", "scale_", "tensor_stats"),
    "report": ("Report",),
    "sinks": ("JsonlSink", "MemorySink"),
    "records": ("GradientStats", "StepStats", "TensorStats", "TrainingHistory"),
    "records.magnitudes": ("MagnitudeHistogram",),
    "records.samples": ("ActivationStats", "ChannelStats"),
    "tools.checkpoints": ("Checkpoints",),
    "tools.clipping": ("clip_grad_norm_", "clip_gradients", "get_total_norm"),
    "tools.debugger": ("TrainingDebugger",),
    "tools.early_stopping": ("EarlyStopping",),
    "tools.initialization": ("check_initialization", "stable_weight_init"),
    "tools.lr_finder": ("LearningRateFinder",),
    "tools.overfit": ("overfit_one_batch",),
    "tools.param_groups": ("param_groups",),
    "tools.preflight": ("preflight",),
    "tools.schedules": ("warmup_cosine",),
    "tools.settings": ("settings",),
    "observers.weights": ("check_gradients",),
}
_HOME = {name: home for home, names in _NAMES_OF.items() for name in names}
_ROOMS = ("integrations", "page", "sinks", "tools", "visualization")  # public as modules
__all__ = ["__version__", *_HOME, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        from ._text import did_you_mean

        raise AttributeError(f"module 'fastguard' has no attribute {name!r}. {did_you_mean(name, __all__, 8)}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if _env.keeps_memory():
    importlib.import_module(".tools", __name__).keep_memory()
