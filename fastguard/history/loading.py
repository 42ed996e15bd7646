"""From a line of a log back to the record of a step."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..stats import StepStats, TensorStats
from ..stats.columns import EMPTY_ROW, TensorRow
from ..stats.samples import ModuleActivity, WeightStats


def record_of(line: Mapping[str, Any]) -> StepStats:
    """The step that a line of a log tells of.

    Without a table of tensors the record has the figures of all gradients together, and no rows; the tensors with NaN
    or Inf are then known by name only.
    """
    return StepStats(
        step=int(line["step"]),
        tensors=_tensors(line),
        clip_coef=_number(line, "clip/coef", 1.0),
        skipped=bool(line.get("skipped", False)),
        loss=line.get("loss"),
        val_loss=line.get("val_loss"),
        lr=line.get("lr"),
        loss_scale=line.get("loss_scale"),
        activations=_samples(ModuleActivity, line.get("activations")),
        weights=_samples(WeightStats, line.get("weights")),
    )


def _number(line: Mapping[str, Any], key: str, default: float) -> float:
    value = line.get(key)
    return default if value is None else float(value)


def _tensors(line: Mapping[str, Any]) -> TensorStats:
    table: Mapping[str, Sequence[float]] | None = line.get("tensors")
    if table is not None:
        return TensorStats(_pack(table.values()), tuple(table))
    norm = _number(line, "grad/norm", 0.0)
    nans, infs = _number(line, "grad/num_nans", 0.0), _number(line, "grad/num_infs", 0.0)
    if math.isnan(norm) and not nans:  # a log by hand may say no more than this
        nans = 1.0
    if math.isinf(norm) and not infs:
        infs = 1.0
    numel = _number(line, "grad/num_elements", 0.0)
    mean, std = _number(line, "grad/mean", 0.0), _number(line, "grad/std", 0.0)
    count = numel - nans - infs
    sum_sq = norm * norm if math.isfinite(norm) else max(count, 0.0) * (mean * mean + std * std)
    high, low = _number(line, "grad/max", 0.0), _number(line, "grad/min", 0.0)
    total = TensorRow(
        numel=int(numel),
        sum_sq=sum_sq,
        sum=mean * count,
        abs_max=high,
        abs_min_nonzero=low,
        num_zeros=int(_number(line, "grad/num_zeros", 0.0)),
        num_nans=int(nans),
        num_infs=int(infs),
    )
    bad = list(reversed(line.get("nonfinite", ())))  # the log has them in backward order
    rows = [TensorRow(num_nans=bool(nans), num_infs=not nans)] * len(bad)
    return TensorStats(_pack(rows), bad, total)


def _pack(rows: Iterable[Sequence[float]]) -> bytes:
    # Columns that are younger than the log are missing from its rows.
    flat = [float(value) for row in rows for value in (*row, *EMPTY_ROW[len(row) :])]
    return struct.pack(f"{len(flat)}d", *flat)


def _samples(kind: Any, items: Mapping[str, Mapping[str, Any]] | None) -> tuple[Any, ...]:
    if not items:
        return ()
    return tuple(kind.from_dict({"name": name, **plain}) for name, plain in items.items())
