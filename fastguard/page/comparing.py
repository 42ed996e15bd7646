"""What tells runs apart: from which step on, and in which numbers and settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .._text import shown
from ..report import Report
from ..stats.log import LogReader
from ..visualization.runs import DrawnRun

_FACTS = ("clip_limit", "clip_policy", "autocast", "dtypes", "backward_per_step", "steps_per_epoch", "loss_kind")
_Step = tuple[int, dict[str, Any]]


def parting(runs: Sequence[DrawnRun]) -> list[str]:
    """For each run but the first: the first step at which its loss or norm is another than the first run's.

    Cost: the logs are read once more, up to that step.
    """
    return [_parted(runs[0], run) for run in runs[1:]]


def _parted(base: DrawnRun, run: DrawnRun) -> str:
    num, lefts, rights = 0, _steps(base), _steps(run)
    left, right = next(lefts, None), next(rights, None)
    while left is not None and right is not None:
        if left[0] == right[0]:
            for what in ("loss", "norm"):
                one, other = left[1].get(what), right[1].get(what)
                if one != other and repr(one) != repr(other):
                    return f"{run.name}: parts from {base.name} at step {left[0]}: {what} {one} there, {other} here"
            num += 1
        at, to = left[0], right[0]
        left = next(lefts, None) if at <= to else left
        right = next(rights, None) if to <= at else right
    if not num:
        return f"{run.name}: no step in common with {base.name}"
    return f"{run.name}: the same losses and norms as {base.name} at all {num} steps in common"


def _steps(run: DrawnRun) -> Iterator[_Step]:
    """Loss and norm by step: of a log all of them, else those of the points that are drawn."""
    if run.path is not None:
        for block in LogReader(run.path).blocks():
            for line in block:
                if "step" in line:
                    yield line["step"], {"loss": line.get("loss"), "norm": line.get("grad/norm")}
        return
    drawn: dict[int, dict[str, Any]] = {}
    for what in ("loss", "norm"):
        for point in run.curves[what].points:
            drawn.setdefault(point.last_step, {})[what] = point.middle
    yield from sorted(drawn.items())


def differences(runs: Sequence[DrawnRun], reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    """A row for each number of the reports, and each setting, that the runs differ in."""
    keys = dict.fromkeys(key for report in reports for key in report.numbers)
    rows = [("status", [str(report.status) for report in reports])]
    rows += [(key, [_number(report.numbers.get(key)) for report in reports]) for key in keys]
    settings = [_settings(run) for run in runs]
    rows += [(key, [one.get(key, "-") for one in settings]) for key in dict.fromkeys(k for s in settings for k in s)]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _settings(run: DrawnRun) -> dict[str, str]:
    model = run.history.model
    found = {fact: getattr(model, fact) for fact in _FACTS}
    for place, group in enumerate(model.optimizer_settings[:8]):
        found.update({f"optimizer {key}" + (f", group {place}" if place else ""): one for key, one in group.items()})
    return {key: shown(value, 80) for key, value in found.items() if value not in (None, "", ())}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
