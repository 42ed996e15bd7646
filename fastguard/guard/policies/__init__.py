"""Clip policies: what the gradients are multiplied by, from their norm. One file each."""

from .global_norm import GlobalNorm as GlobalNorm
from .policy import ClipPolicy as ClipPolicy
from .policy import GivenPolicy as GivenPolicy
from .policy import as_policy as as_policy

__all__ = ["ClipPolicy", "GivenPolicy", "GlobalNorm", "as_policy"]
