"""What the outputs of a model's modules look like: sampled, in one read each, without waiting for a device."""

from __future__ import annotations

from typing import Any

from torch import nn

from .arrivals import Origin as Origin
from .budget import Cost as Cost
from .monitor import ActivationMonitor as ActivationMonitor
from .replay import Replay as Replay
from .replay import replay as replay
from .units import detect_dead_neurons as detect_dead_neurons


def monitor_for(activations: Any, model: nn.Module | None) -> ActivationMonitor | None:
    """The monitor that `wrap(..., activations=...)` asks for, following the guard; None if it asks for none."""
    if activations is None or activations is False:
        return None
    if not isinstance(activations, ActivationMonitor):
        if not (activations is True or isinstance(activations, (str, dict))):
            raise TypeError(
                "`activations` must be True, a pattern of module names, a dict of settings of ActivationMonitor, or an "
                f"ActivationMonitor, got {activations!r}"
            )
        if model is None:
            raise ValueError("`activations` must come with a model, got none. Call wrap(optimizer, model, …).")
        settings = activations if isinstance(activations, dict) else {}
        if isinstance(activations, str):
            settings = {"modules": activations}
        activations = ActivationMonitor(model, **settings)
    activations.follow_guard()
    return activations
