"""The numbers of a report, and its tables: activations by module, and updates by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._text import count, duration, in_columns, number, shown
from ..records import TrainingHistory

MAX_ROWS = 12
_USUAL_UPDATE = 1e-3
_COUNTED = ("num_steps", "num_skipped", "skip_rate", "longest_skip_run", "num_clipped", "num_clean", "clip_rate",
            "num_nonfinite")  # fmt: skip
_Columns = Sequence[tuple[str, str, str | int]]  # head, key, and the format of a number or the width of a name
_OF_MODULES: _Columns = (
    ("activations of", "module", 36), ("family", "family", 9), ("mean", "mean", ".3g"), ("std", "std", ".3g"),
    ("zero", "zero_ratio", ".0%"), ("saturated", "saturation_ratio", ".0%"), ("dead units", "dead_ratio", ""),
)  # fmt: skip
_OF_WEIGHTS: _Columns = (
    ("weights of", "parameter", 36), ("norm", "norm", ".3g"), ("std", "std", ".3g"),
    ("update/weight", "update_ratio", ".3g"), ("gradient/weight", "gradient_ratio", ".3g"),
)  # fmt: skip

Row = dict[str, Any]


def numbers_of(history: TrainingHistory) -> dict[str, float]:
    """Counts, rates and quantiles of a run; an unknown number has no key."""
    model = history.model
    known: dict[str, float | None] = {
        **{name: getattr(history, name) for name in _COUNTED},
        "num_skipped_by_policy": (history.num_skipped_by_policy or None) if model.clip_policy else None,
        "num_left_out": model.num_left_out or None,
        "num_ranks": model.num_ranks,
        "num_bad_ranks": None if model.num_ranks is None else len(model.bad_ranks),
        "num_restarts": model.num_restarts,
    }
    numbers = {name: value for name, value in known.items() if value is not None}
    if history.recent:
        first, last = history.recent[0], history.recent[-1]
        numbers.update(first_step_in_window=first.step, last_step=last.step, norm_last=last.norm)
    if history.clean:
        numbers["num_in_window"] = len(history.clean)
        q05, q50, q95 = history.norm_quantiles((0.05, 0.5, 0.95))
        numbers.update(norm_q05=q05, norm_median=q50, norm_q95=q95, norm_max=history.norm_max)
    for name, values in (("loss", history.loss), ("val_loss", history.val_loss), ("lr", history.learning_rate)):
        if values:
            numbers[f"{name}_last"] = values[-1]
    if history.losses.count:
        numbers["loss_min"] = history.losses.min
    if history.num_timed:
        numbers["overhead_mean_us"] = 1e6 * history.overhead_total_s / history.num_timed
        median = history.overhead_quantiles((0.5,))[0]
        if math.isfinite(median):
            numbers["overhead_median_us"] = 1e6 * median
        numbers["overhead_total_s"] = history.overhead_total_s
    return numbers


def number_rows(numbers: Mapping[str, float], sinks: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The numbers of a report in words, each with its name; empty without steps."""
    if not numbers["num_steps"] or "skip_rate" not in numbers:
        return []
    n = {key: number(value) for key, value in numbers.items()}
    rows = [("steps", f"{n['num_steps']}, the last is step {n['last_step']}")]
    norm = f"last {n['norm_last']}"
    if "norm_median" in n:
        norm += f", largest {n['norm_max']}; over the last {n['num_in_window']} good steps "
        norm += f"{n['norm_q05']} (5 %), {n['norm_median']} (median), {n['norm_q95']} (95 %)"
    rows.append(("gradient norm", norm))
    if numbers["num_clean"]:
        clipped = f"{100 * numbers['clip_rate']:.3g} % ({n['num_clipped']} of {n['num_clean']} good steps)"
        rows.append(("clipped", clipped))
    skipped = f"{100 * numbers['skip_rate']:.3g} % ({n['num_skipped']} of {n['num_steps']} steps)"
    if numbers["longest_skip_run"] > 1:
        skipped += f", at most {n['longest_skip_run']} in a row"
    if "num_skipped_by_policy" in n:
        skipped += f"; {n['num_skipped_by_policy']} by the clip policy"
    if "num_left_out" in n:
        skipped += f"; {n['num_left_out']} left out by recovery"
    rows.append(("skipped", skipped))
    nonfinite = f"in {count(numbers['num_nonfinite'], 'step')}" if numbers["num_nonfinite"] else "never"
    rows.append(("NaN or Inf", nonfinite))
    if "loss_last" in n:
        rows.append(("loss", f"last {n['loss_last']}" + (f", lowest {n['loss_min']}" if "loss_min" in n else "")))
    elif "loss_min" not in n:
        rows.append(("loss", "not observed, so rules on the loss were not checked"))
    for key, name in (("val_loss_last", "validation loss"), ("lr_last", "learning rate")):
        if key in n:
            rows.append((name, f"last {n[key]}"))
    if "overhead_mean_us" in n:
        median = f"median {duration(1e-6 * numbers['overhead_median_us'])}, " if "overhead_median_us" in n else ""
        mean = duration(1e-6 * numbers["overhead_mean_us"])
        rows.append(("cost of guarding", f"{median}mean {mean} a step; {n['overhead_total_s']} s in all"))
    if "num_ranks" in n:
        bad = f"; {n['num_bad_ranks']} held NaN or Inf" if numbers["num_bad_ranks"] else ""
        rows.append(("ranks", f"{n['num_ranks']}{bad}"))
    if "num_restarts" in n:
        rows.append(("restarts", f"{n['num_restarts']} by torchrun"))
    if "num_collectives_per_step" in n:
        sent = f"{numbers['collective_bytes_per_step']:.0f} bytes from each rank"
        rows.append(("cost of ranks", f"{n['num_collectives_per_step']} collectives a step, {sent}"))
    for place, sink in enumerate(sinks):
        cost = f"mean {duration(1e-6 * sink['mean_us'])} a step, {number(sink['total_s'])} s in all"
        lost = f", {sink['num_lost']} of {count(sink['num_steps'], 'step')} lost" if sink["num_lost"] else ""
        rows.append(("" if place else "cost of sinks", f"{cost}{lost}: {sink['name']}"))
    if numbers["num_records_lost"]:
        rows.append(("records lost", f"{n['num_records_lost']} by the sinks"))
    return rows


def module_rows(history: TrainingHistory) -> tuple[Row, ...]:
    """The newest sample of each module's activations, in the order of execution."""
    newest = sorted((window.last.value for _, window in history.activations.items()), key=lambda module: module.order)
    return tuple(
        {
            "module": m.name,
            "family": m.family,
            **{name: getattr(m.stats, name) for name in ("mean", "std", "zero_ratio", "saturation_ratio")},
            "num_nonfinite": m.stats.num_nans + m.stats.num_infs,
            **{name: getattr(m, name) for name in ("num_units", "num_dead_units")},
        }
        for m in newest
    )


def weight_rows(history: TrainingHistory) -> tuple[Row, ...]:
    """The newest sample of each parameter, in the order of the model; unknown ratios are NaN."""
    return tuple(
        {
            "parameter": w.name,
            "norm": w.norm,
            "std": w.std,
            "update_ratio": math.nan if w.update_ratio is None else w.update_ratio,
            "gradient_ratio": math.nan if w.gradient_ratio is None else w.gradient_ratio,
            "num_nonfinite": w.num_nonfinite,
        }
        for w in (window.last.value for _, window in history.weights.items())
    )


def sample_tables(modules: Sequence[Row], weights: Sequence[Row]) -> list[list[str]]:
    """Tables of activations and of updates: the twelve worst rows of each, in order."""
    updates = [dict(row) for row in weights if row["num_nonfinite"] or not math.isnan(row["update_ratio"])]
    for row in updates:
        row["oddness"] = abs(math.log(max(row["update_ratio"], 1e-12) / _USUAL_UPDATE))
    tables = (
        _worst(_OF_MODULES, modules, ("num_nonfinite", "dead_ratio", "saturation_ratio", "zero_ratio"), "modules"),
        _worst(_OF_WEIGHTS, updates, ("num_nonfinite", "oddness"), "parameters"),
    )
    return list(filter(None, tables))


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
