"""What `wrap(weights=...)` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sampler import WeightSampler


def sampler_settings(weights: bool | int | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What `wrap(weights=...)` stands for: arguments of `WeightSampler`, or None for no sampling.

    Raises:
        TypeError: it is something else, or a dict with an argument that a `WeightSampler` does not have.
        ValueError: a value that a `WeightSampler` refuses.

    >>> sampler_settings(True), sampler_settings(20), sampler_settings({"updates": False})
    ({}, {'every': 20}, {'updates': False})
    """
    if weights is None or weights is False:
        return None
    if weights is True:
        settings: dict[str, Any] = {}
    elif isinstance(weights, int):
        settings = {"every": weights}
    elif isinstance(weights, Mapping):
        settings = dict(weights)
        known = {"every", "updates", "max_bytes", "backend"}
        if not settings.keys() <= known:
            raise TypeError(f"`weights` must have keys among {sorted(known)}, got {sorted(settings.keys() - known)}")
    else:
        raise TypeError(f"`weights` must be True, a number of steps or a dict, got {weights!r}")
    WeightSampler(**settings)
    return settings
