"""Clip policies: from which norm on the gradients are scaled, and to what. One file each."""

from .adagc import AdaGC as AdaGC
from .agc import AGC as AGC
from .global_norm import GlobalNorm as GlobalNorm
from .limits import CheckedPolicy as CheckedPolicy
from .limits import Limits as Limits
from .limits import as_policy as as_policy
from .limits import limits_of as limits_of
from .limits import trigger_of as trigger_of
from .per_group import PerGroup as PerGroup
from .percentile import Percentile as Percentile
from .policy import ClipPolicy as ClipPolicy
from .policy import Place as Place
from .skip_spikes import SkipSpikes as SkipSpikes
from .spikes import Spikes as Spikes
from .value import Value as Value
from .zclip import ZClip as ZClip

__all__ = ["ClipPolicy", "Place", "AGC", "AdaGC", "GlobalNorm", "PerGroup", "Percentile", "SkipSpikes", "Spikes",
           "Value", "ZClip"]  # fmt: skip
