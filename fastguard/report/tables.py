"""The report's tables: activations by module, and updates by parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .._text import in_columns, shown
from ..records import TrainingHistory

MAX_ROWS = 12
_USUAL_UPDATE = 1e-3
_Columns = Sequence[tuple[str, str, str | int]]  # head, key, and the format of a number or the width of a name
_OF_MODULES: _Columns = (
    ("activations of", "module", 36), ("family", "family", 9), ("mean", "mean", ".3g"), ("std", "std", ".3g"),
    ("zero", "zero_ratio", ".0%"), ("saturated", "saturation_ratio", ".0%"), ("dead units", "dead_ratio", ""),
)  # fmt: skip
_OF_CHOICES: _Columns = (
    ("choices of", "module", 36), ("entropy", "entropy", ".0%"), ("max logit", "max_logit", ".3g"),
    ("max load", "max_load", ".0%"), ("unused experts", "dead_ratio", ""),
)  # fmt: skip
_OF_WEIGHTS: _Columns = (
    ("weights of", "parameter", 36), ("norm", "norm", ".3g"), ("std", "std", ".3g"),
    ("update/weight", "update_ratio", ".3g"), ("gradient/weight", "gradient_ratio", ".3g"),
)  # fmt: skip

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
    seen = [row for row in rows if not row["is_choice"]]
    return _worst(_OF_MODULES, seen, ("num_nonfinite", "dead_ratio", "saturation_ratio", "zero_ratio"), "modules")


def choice_lines(rows: Sequence[Row]) -> list[str]:
    """A table for a person of attention and routers: the dozen that look worst, in the order of execution."""
    seen = [row for row in rows if row["is_choice"]]
    return _worst(_OF_CHOICES, seen, ("num_nonfinite", "dead_ratio", "max_logit"), "modules")


def weight_lines(rows: Sequence[Row]) -> list[str]:
    """A table for a person: the dozen parameters whose updates are furthest from the usual thousandth."""
    seen = [{**row, "oddness": _oddness(row["update_ratio"])} for row in rows]
    seen = [row for row in seen if row["num_nonfinite"] or not math.isnan(row["update_ratio"])]
    return _worst(_OF_WEIGHTS, seen, ("num_nonfinite", "oddness"), "parameters")


def _oddness(ratio: float) -> float:
    return math.inf if math.isnan(ratio) else abs(math.log(max(ratio, 1e-12) / _USUAL_UPDATE))


def _cell(row: Row, key: str, look: str | int) -> str:
    if isinstance(look, int):
        return shown(row[key], look)
    if key == "dead_ratio":
        return f"{row['num_dead_units']} of {row['num_units']}" if row["num_units"] else "-"
    return "-" if math.isnan(row[key]) else f"{row[key]:{look}}"


def _worst(columns: _Columns, rows: Sequence[Row], badness: Sequence[str], what: str) -> list[str]:
    if not rows:
        return []
    for row in (rows := [dict(row) for row in rows]):
        row["dead_ratio"] = row["num_dead_units"] / row["num_units"] if row.get("num_units") else 0.0

    def bad(place: int) -> list[float]:
        return [0.0 if math.isnan(rows[place][key]) else rows[place][key] for key in badness]

    chosen = sorted(sorted(range(len(rows)), key=bad, reverse=True)[:MAX_ROWS])
    cells = [[_cell(rows[place], key, look) for _, key, look in columns] for place in chosen]
    more = len(rows) - len(chosen)
    lines = in_columns([[head for head, _, _ in columns], *cells])
    return [*lines, f"and {more} more {what}"] if more > 0 else lines
