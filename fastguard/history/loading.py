"""From a line of a log back to the record of a step."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..stats import StepStats, TensorStats, values
from ..stats.columns import COLUMNS, EMPTY_ROW, TensorRow
from ..stats.samples import ModuleActivity, WeightStats
from ..stats.values import MisfitError

_number_or_none = values.maybe(values.number)


def record_of(line: Mapping[str, Any]) -> StepStats:
    """The step that a line of a log tells of.

    Without a table of tensors the record has the figures of all gradients together, and no rows; the tensors with NaN
    or Inf are then known by name only.

    Raises:
        MisfitError: a value is not what the log has under its key.
    """
    return StepStats(
        step=values.entry(line, "step", values.whole),
        tensors=_tensors(line),
        clip_coef=_get(line, "clip/coef", values.number, 1.0),
        skipped=_get(line, "skipped", values.truth, False),
        loss=_get(line, "loss", values.number),
        val_loss=_get(line, "val_loss", values.number),
        lr=_get(line, "lr", values.number),
        loss_scale=_get(line, "loss_scale", values.number),
        activations=_samples(ModuleActivity, line, "activations"),
        weights=_samples(WeightStats, line, "weights"),
    )


def _get(line: Mapping[str, Any], key: str, read: Callable[[Any], Any], default: Any = None) -> Any:
    value = line.get(key)
    return default if value is None else values.at(key, read, value)


def _tensors(line: Mapping[str, Any]) -> TensorStats:
    table: Mapping[str, Any] | None = _get(line, "tensors", values.mapping)
    if table is not None:
        try:
            rows = [values.at(name, _row, plain) for name, plain in table.items()]
        except MisfitError as error:
            raise error.under("tensors") from None
        return TensorStats(_pack(rows), tuple(table))
    norm = _get(line, "grad/norm", values.number, 0.0)
    nans, infs = _get(line, "grad/num_nans", values.count, 0), _get(line, "grad/num_infs", values.count, 0)
    if math.isnan(norm) and not nans:  # a log by hand may say no more than this
        nans = 1
    if math.isinf(norm) and not infs:
        infs = 1
    numel = _get(line, "grad/num_elements", values.count, 0)
    mean, std = _get(line, "grad/mean", values.number, 0.0), _get(line, "grad/std", values.number, 0.0)
    count = float(numel - nans - infs)
    sum_sq = norm * norm if math.isfinite(norm) else max(count, 0.0) * (mean * mean + std * std)
    total = TensorRow(
        numel=numel,
        sum_sq=sum_sq,
        sum=mean * count,
        abs_max=_get(line, "grad/max", values.number, 0.0),
        abs_min_nonzero=_get(line, "grad/min", values.number, 0.0),
        num_zeros=_get(line, "grad/num_zeros", values.count, 0),
        num_nans=nans,
        num_infs=infs,
    )
    names = _get(line, "nonfinite", lambda given: values.each(values.text, given), [])
    bad = list(reversed(names))  # the log has them in backward order
    return TensorStats(_pack([TensorRow(num_nans=bool(nans), num_infs=not nans)] * len(bad)), bad, total)


def _row(plain: Any) -> list[float]:
    """A row of a table; columns that are younger than the log are 0, those that are younger than this are left out."""
    given = [float(values.number(value)) for value in values.row(plain)[: len(COLUMNS)]]
    row = [*given, *EMPTY_ROW[len(given) :]]
    for name, value in zip(COLUMNS, row):
        if name.startswith("num") and not 0.0 <= value < math.inf:
            raise MisfitError(f"must have a count for {name}, got {value}")
        if name in ("sum_sq", "abs_max", "abs_min_nonzero") and not value >= 0.0:
            raise MisfitError(f"must have a number >= 0 for {name}, got {value}")
    return row


def _pack(rows: Iterable[Iterable[float]]) -> bytes:
    flat = [float(value) for row in rows for value in row]
    return struct.pack(f"{len(flat)}d", *flat)


def _samples(kind: Any, line: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    found = []
    for name, plain in (_get(line, key, values.mapping) or {}).items():
        try:
            found.append(kind.from_dict({**values.mapping(plain), "name": name}))
        except MisfitError as error:
            raise error.under(key, name) from None
    return tuple(found)
