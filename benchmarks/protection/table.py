"""The results as text and as Markdown."""

from __future__ import annotations

import math
from typing import Any

from fastguard.records import strict_json

from ..readme import markdown
from ..speed.table import aligned
from .criteria import MEASURES, Measure

Results = dict[str, Any]
DASH = "—"


def number(value: float | None, unit: str = "") -> str:
    """A figure as people write it: a share in percent, a count, or three digits; a dash for nothing.

    What is not finite may be a float or, out of a file, its name.
    """
    value = strict_json.decode_float(value)
    if value is None or not math.isfinite(value):
        return DASH
    if unit == "%":
        return f"{100 * value:.3g} %"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}"


def limit(measure: Measure) -> str:
    """The limit as text."""
    sign = "≥" if measure.is_more_better else "≤" if measure.limit else "="
    return f"{sign} {number(measure.limit, measure.unit)}"


def measure_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """What was to be reached, and what was."""
    words = {True: "reached", False: "missed", None: "not measured"}
    rows = []
    for measure in MEASURES:
        value = results.get("measures", {}).get(measure.key)
        rows.append([measure.title, limit(measure), number(value, measure.unit), words[measure.is_reached(value)]])
    return ["measure", "to reach", "measured", ""], rows


def policy_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Rules on recorded norms."""
    columns = (
        ("healthy steps acted on", "acted", "%"),
        ("spikes held", "held-spikes", "%"),
        ("bursts held", "held-bursts", "%"),
        ("in the first 64 steps", "held-early", "%"),
        ("steps damped after × 3: median", "damped-median", ""),
        ("95 %", "damped", ""),
    )
    part = results["parts"]["policies"]
    rows = [
        [
            f"{rule}{title}",
            *(number(found.get(key), unit) for _, key, unit in columns),
        ]
        for which, title in (("all", ""), ("faults", ", the fault suite's traces"), ("calm", ", calm traces"))
        for rule, found in part.get(which, {}).items()
    ]
    return ["rule", *(title for title, _, _ in columns)], rows


def diverging_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """How runs in trouble ended."""
    part = results["parts"]["diverging"]
    columns = (
        ("within 2 % of the clean loss", "through", "%"),
        ("gave up, and said so", "gave-up", "%"),
        ("another error", "stopped", "%"),
        ("ended worse, no warning", "silent", ""),
        ("runs", "num_runs", ""),
    )
    rows = [
        [name, *(number(found.get(key), unit) for _, key, unit in columns)]
        for name, found in part["protections"].items()
    ]
    return ["protection", *(title for title, _, _ in columns)], rows


def trouble_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Runs brought through, a row a trouble and a column a protection."""
    part = results["parts"]["diverging"]
    names = list(part["protections"])
    rows = [
        [trouble, *(number(found[name]["through"], "%") for name in names), number(found[names[0]]["num_runs"])]
        for trouble, found in part["troubles"].items()
    ]
    return ["trouble", *names, "runs"], rows


def _guide_rows(results: Results, what: str) -> tuple[list[str], list[list[str]]]:
    part = results["parts"]["guide"][what]
    tasks = list(part)
    rows = []
    for name in part[tasks[0]]:
        cells = []
        for task in tasks:
            found = part[task][name]
            final = found["final"]
            loss = (
                DASH
                if final is None
                else f"{number(final['median'])} ({number(final['min'])} – {number(final['max'])})"
            )
            cells += [f"{found['num_exploded']} of {found['num_runs']}", loss]
        rows.append([name, *cells])
    return [what, *(cell for task in tasks for cell in (f"{task}: exploded", "loss"))], rows


def guide_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Explosions and final losses by measure."""
    return _guide_rows(results, "measure")


def precision_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """The same by precision."""
    return _guide_rows(results, "precision")


ROWS = {
    "protection": ("", measure_rows),
    "protection-policies": ("policies", policy_rows),
    "protection-diverging": ("diverging", diverging_rows),
    "protection-troubles": ("diverging", trouble_rows),
    "protection-guide": ("guide", guide_rows),
    "protection-precision": ("guide", precision_rows),
}


def text(results: Results) -> str:
    """All tables for a terminal; parts that were not run are left out."""
    made = [make(results) for part, make in ROWS.values() if not part or part in results["parts"]]
    return "\n\n".join(aligned([header, *rows]) for header, rows in made)


def table_of(name: str, results: Results) -> list[str]:
    """Markdown lines of the table `name`; none if its part was not run."""
    part, make = ROWS[name]
    if part and part not in results["parts"]:
        return []
    header, rows = make(results)
    lines = markdown(header, rows, 1 if name == "protection" else 0)
    return lines if name == "protection" else [*lines, "", conditions(results, part)]


def conditions(results: Results, part: str) -> str:
    """Where and how long a part ran, in a line."""
    found = results["parts"][part]
    where = found["conditions"]
    return (
        f"{where['cpu']}, {where['num_cores']} cores, torch {where['torch']}, fastguard {where['fastguard']}, "
        f"{where['date']}; {where['seeds']} seeds; {found['seconds']:.0f} s."
    )
