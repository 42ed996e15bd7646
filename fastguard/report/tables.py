"""The report's tables: activations by module, and updates by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._text import in_columns, shown
from ..history import TrainingHistory

MAX_ROWS = 12
_USUAL_UPDATE = 1e-3
_NAME_WIDTH = 36
_FAMILY_WIDTH = 9
_CHOICES = (("entropy", ".0%"), ("max_logit", ".3g"), ("max_load", ".0%"))

Row = dict[str, Any]


def module_rows(history: TrainingHistory) -> tuple[Row, ...]:
    """The newest sample of each module's activations, in the order of execution."""
    newest = sorted((window.last.value for _, window in history.activations.items()), key=lambda module: module.order)
    return tuple(
        {
            "module": m.name,
            "family": m.family,
            "mean": m.stats.mean,
            "std": m.stats.std,
            "zero_ratio": m.stats.zero_ratio,
            "saturation_ratio": m.stats.saturation_ratio,
            "num_nonfinite": m.stats.num_nans + m.stats.num_infs,
            "num_units": m.num_units,
            "num_dead_units": m.num_dead_units,
            "is_choice": m.is_choice,
            "entropy": math.nan if m.entropy is None else m.entropy,
            "max_logit": math.nan if m.max_logit is None else m.max_logit,
            "max_load": max(m.load) if m.load else math.nan,
        }
        for m in newest
    )


def weight_rows(history: TrainingHistory) -> tuple[Row, ...]:
    """The newest sample of each parameter, in the order of the model; ratios that are not known are NaN."""
    newest = [window.last.value for _, window in history.weights.items()]
    return tuple(
        {
            "parameter": w.name,
            "norm": w.norm,
            "std": w.std,
            "update_ratio": math.nan if w.update_ratio is None else w.update_ratio,
            "gradient_ratio": math.nan if w.gradient_ratio is None else w.gradient_ratio,
            "num_nonfinite": w.num_nonfinite,
        }
        for w in newest
    )


def module_lines(rows: Sequence[Row]) -> list[str]:
    """A table for a person: the dozen modules that look worst, in the order of execution."""
    rows = [row for row in rows if not row["is_choice"]]
    if not rows:
        return []
    chosen = _worst(
        rows, lambda row: (row["num_nonfinite"], _dead_ratio(row), row["saturation_ratio"], row["zero_ratio"])
    )
    head = ("activations of", "family", "mean", "std", "zero", "saturated", "dead units")
    body = [
        (
            shown(row["module"], _NAME_WIDTH),
            shown(row["family"], _FAMILY_WIDTH),
            f"{row['mean']:.3g}",
            f"{row['std']:.3g}",
            f"{row['zero_ratio']:.0%}",
            f"{row['saturation_ratio']:.0%}",
            f"{row['num_dead_units']} of {row['num_units']}" if row["num_units"] else "-",
        )
        for row in chosen
    ]
    return _table(head, body, len(rows) - len(chosen), "modules")


def choice_lines(rows: Sequence[Row]) -> list[str]:
    """A table for a person of attention and routers: the dozen that look worst, in the order of execution."""
    rows = [row for row in rows if row["is_choice"]]
    if not rows:
        return []
    chosen = _worst(rows, lambda row: (row["num_nonfinite"], _dead_ratio(row), _or_zero(row["max_logit"])))
    head = ("choices of", "entropy", "max logit", "max load", "unused experts")
    body = [
        (
            shown(row["module"], _NAME_WIDTH),
            *("-" if math.isnan(row[key]) else f"{row[key]:{as_}}" for key, as_ in _CHOICES),
            f"{row['num_dead_units']} of {row['num_units']}" if row["num_units"] else "-",
        )
        for row in chosen
    ]
    return _table(head, body, len(rows) - len(chosen), "modules")


def weight_lines(rows: Sequence[Row]) -> list[str]:
    """A table for a person: the dozen parameters whose updates are furthest from the usual thousandth."""
    known = [row for row in rows if row["num_nonfinite"] or not math.isnan(row["update_ratio"])]
    if not known:
        return []
    chosen = _worst(known, lambda row: (row["num_nonfinite"], _oddness(row["update_ratio"])))
    head = ("weights of", "norm", "std", "update/weight", "gradient/weight")
    body = [
        (
            shown(row["parameter"], _NAME_WIDTH),
            *(f"{row[key]:.3g}" for key in ("norm", "std", "update_ratio", "gradient_ratio")),
        )
        for row in chosen
    ]
    return _table(head, body, len(known) - len(chosen), "parameters")


def _dead_ratio(row: Mapping[str, Any]) -> float:
    return row["num_dead_units"] / row["num_units"] if row["num_units"] else 0.0


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _oddness(ratio: float) -> float:
    if math.isnan(ratio):
        return math.inf
    return abs(math.log(max(ratio, 1e-12) / _USUAL_UPDATE))


def _worst(rows: Sequence[Row], badness: Any) -> list[Row]:
    order = sorted(range(len(rows)), key=lambda i: badness(rows[i]), reverse=True)[:MAX_ROWS]
    return [rows[i] for i in sorted(order)]


def _table(head: Sequence[str], body: Sequence[Sequence[str]], more: int, what: str) -> list[str]:
    lines = in_columns([head, *body])
    return [*lines, f"and {more} more {what}"] if more > 0 else lines
