"""A sampler around the steps of a guarded optimizer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .sampler import Sample, WeightSampler

if TYPE_CHECKING:
    from ..guard import Guard
    from ..guard.hooks import Attachment


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


class WeightCollector:
    """Samples around the steps of one attachment, and hands what it finds to the record of the step."""

    def __init__(self, sampler: WeightSampler) -> None:
        self._sampler = sampler
        self._sample: Sample | None = None
        self._step = 0
        self._seconds = 0.0

    def before(self, guard: Guard, caller: Attachment, optimizer: torch.optim.Optimizer) -> None:
        """Ahead of a step, also of its closure. Cost at a step that is not due: 0.5 us."""
        self._sample = None  # of a step that raised
        self._step = guard.step_of(caller)
        if self._sampler.is_due(self._step):
            started = time.perf_counter()
            self._sample = self._sampler.before(optimizer)
            self._seconds = time.perf_counter() - started

    def after(self, guard: Guard, caller: Attachment, optimizer: torch.optim.Optimizer) -> None:
        """Once the step is taken. On a GPU waits for its record, which says whether it was skipped."""
        sample, self._sample = self._sample, None
        if sample is None:
            return
        started = time.perf_counter()
        guard.judges.now.catch_up()
        record = guard.recorder.last
        if record is None or record.step != self._step:
            return  # it was dropped on its way
        found = self._sampler.after(
            optimizer,
            sample,
            names=guard.names_of(caller),
            gradient_norms=dict(zip(record.tensors.names, record.tensors.norm, strict=True)),
            skipped=record.skipped,
        )
        guard.recorder.attach(record.step, weights=record.weights + found)
        guard.judges.now.add_overhead(self._seconds + time.perf_counter() - started)
