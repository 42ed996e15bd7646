"""Experiments: the same training steps with one thing changed (`arms`), and what that did to the loss (`paired`)."""

from __future__ import annotations

from . import model_arms as _model_arms  # which enters its arms
from .arms import ARMS as ARMS
from .arms import Arm as Arm
from .arms import Context as Context
from .arms import arms_for as arms_for
from .beside import Experiments as Experiments
from .paired import Comparison as Comparison
from .paired import compare as compare
from .paired import noise_between as noise_between

del _model_arms
