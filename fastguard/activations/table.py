"""Records of activations as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..stats.samples import ModuleActivity
from .budget import Cost

_HEAD = ("module", "family", "mean", "std", "|max|", "zero", "saturated", "dead units", "")
_MAX_NAMED = 6  # modules that could not be read


def draw(records: Sequence[ModuleActivity]) -> str:
    """One line a record, in the order of execution."""
    rows = [_HEAD, *(_row(record) for record in sorted(records, key=lambda record: record.order))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
    cells[-1] = row[-1]
    return "  ".join(cells).rstrip()


def _row(record: ModuleActivity) -> tuple[str, ...]:
    stats = record.stats
    units = f"{record.num_dead_units} of {record.num_units}" if record.num_units else ""
    return (
        record.name,
        record.family,
        f"{stats.mean:.3g}",
        f"{stats.std:.3g}",
        f"{stats.abs_max:.3g}",
        f"{stats.zero_ratio:.1%}",
        f"{stats.saturation_ratio:.1%}",
        units,
        _remark(record),
    )


def _remark(record: ModuleActivity) -> str:
    stats = record.stats
    if stats.is_finite:
        return ""
    counts = [f"{count} {name}" for count, name in ((stats.num_nans, "NaN"), (stats.num_infs, "Inf")) if count]
    return ", ".join(counts) + (" came up here" if record.is_origin else "")


def describe_cost(cost: Cost, budget: float | None) -> str:
    """What watching cost, in a line."""
    limit = "" if budget is None else f", {budget:.1%} allowed"
    steps = "step" if cost.interval == 1 else f"{cost.interval} steps"
    return (
        f"sampled {cost.num_samples} of {cost.num_steps} steps, now every {steps}; "
        f"took {cost.seconds * 1e3:.3g} ms ({cost.share:.2%} of the time{limit})"
    )


def describe_skipped(skipped: Mapping[str, str]) -> Iterable[str]:
    """What could not be read, in a line at most."""
    if skipped:
        shown = [f"{name} ({why})" for name, why in list(skipped.items())[:_MAX_NAMED]]
        more = f" and {len(skipped) - _MAX_NAMED} more" if len(skipped) > _MAX_NAMED else ""
        yield f"not read: {', '.join(shown)}{more}"
