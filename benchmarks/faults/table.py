"""The suite's results as text."""

from __future__ import annotations

from typing import Any

Results = dict[str, Any]
# measure, key path, limit, whether more is better
MEASURES: tuple[tuple[str, tuple[str, ...], float, bool], ...] = (
    ("faults found, by a symptom of the right family", ("found",), 0.95, True),
    ("root cause right", ("cause_right",), 0.85, True),
    ("layer right, where a layer is to blame", ("layer_right",), 0.90, True),
    ("false alarms per healthy run", ("false_alarms",), 0.05, False),
    ("median delay of non-finite faults, steps", ("delay", "non-finite"), 0, False),
    ("median delay of spikes, steps", ("delay", "spike"), 2, False),
    ("median delay of slow faults, steps", ("delay", "slow"), 50, False),
)


def number(value: float | None) -> str:
    """A share or a count of steps as people write it; a dash for nothing."""
    if value is None:
        return "—"
    if float(value).is_integer() and abs(value) > 1:
        return f"{value:.0f}"
    return f"{value + 1e-12:.2f}".rstrip("0").rstrip(".")  # 6 of 80 is 0.08, though its float lies below 0.075


def measures(summary: dict[str, Any]) -> list[str]:
    """A line for each measure that the suite must reach."""
    lines = [f"{'measure':50}{'to reach':>9}{'reached':>9}"]
    for title, path, limit, is_more_better in MEASURES:
        value: Any = summary
        for key in path:
            value = value[key]
        missed = value is not None and (value < limit if is_more_better else value > limit)
        sign = "≥" if is_more_better else "≤" if limit else "="
        lines.append(f"{title:50}{f'{sign} {limit:g}':>9}{number(value):>9}{' MISSED' if missed else ''}")
    return lines


def text(results: Results, half: str) -> str:
    """Everything for a terminal."""
    part = results["halves"][half]
    width = max(map(len, results["faults"])) + 2
    lines = [f"{half} half, seeds {part['seeds']}", ""]
    lines.append(f"{'fault':{width}}{'runs':>5}{'found':>7}{'delay':>7}{'cause':>7}{'layer':>7}   named first")
    for name, row in part["faults"].items():
        named = ", ".join(f"{cause} {count}" for cause, count in row["causes"].items())
        cells = "".join(f"{number(row[key]):>7}" for key in ("found", "delay", "cause_right", "layer_right"))
        lines.append(f"{name:{width}}{row['num_runs']:>5}{cells}   {named}")
    by_rule = ", ".join(f"{rule} {count}" for rule, count in part["false_alarms"].items()) or "none"
    lines += ["", f"false alarms in healthy runs, by rule: {by_rule}"]
    lines += [f"  {v['case']} (seed {v['seed']}): {', '.join(v['false_alarms'])}" for v in part["alarmed_healthy"]]
    if part["unproven"]:
        lines += ["", f"NOT AS PLANTED (left out): {', '.join(part['unproven'])}"]
    return "\n".join([*lines, "", *measures(part["summary"])])
