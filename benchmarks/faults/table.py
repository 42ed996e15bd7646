"""The suite's results as text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Results = dict[str, Any]
OURS = "fastguard"
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
COST = ("cost of all rules per step at check_every=50, µs", 20.0)


def _value(summary: dict[str, Any], path: Sequence[str]) -> float | None:
    found: Any = summary
    for key in path:
        found = found[key]
    return found


def number(value: float | None) -> str:
    """A share or a count of steps as people write it; a dash for nothing."""
    if value is None:
        return "—"
    if float(value).is_integer() and abs(value) > 1:
        return f"{value:.0f}"
    return f"{value + 1e-12:.2f}".rstrip("0").rstrip(".")  # 6 of 80 is 0.08, though its float lies below 0.075


def measures(results: Results, half: str = "report") -> list[dict[str, Any]]:
    """The measures that the suite is held to, with the baselines' beside them."""
    watchers = results["halves"][half]["watchers"]
    rows = []
    for title, path, limit, is_more_better in MEASURES:
        value = _value(watchers[OURS]["summary"], path)
        is_reached = None if value is None else (value >= limit if is_more_better else value <= limit)
        others = {name: _value(w["summary"], path) for name, w in watchers.items() if name != OURS}
        if path[0] in ("cause_right", "layer_right"):  # they name none
            others = dict.fromkeys(others)
        sign = "≥" if is_more_better else "≤" if limit else "="
        rows.append(
            {"title": title, "limit": f"{sign} {limit:g}", "value": value, "is_reached": is_reached, "others": others}
        )
    cost = results.get("cost")
    if cost is not None:
        value = cost["per_step_us"]
        rows.append(
            {
                "title": COST[0],
                "limit": f"≤ {COST[1]:g}",
                "value": value,
                "is_reached": value <= COST[1],
                "others": dict.fromkeys(name for name in watchers if name != OURS),
            }
        )
    return rows


def conditions(results: Results) -> str:
    """Under what conditions the results were taken."""
    c = results["conditions"]
    halves = results["halves"]
    report, tune = halves.get("report"), halves.get("tune")
    parts = []
    if report is not None:
        s = report["watchers"][OURS]["summary"]
        parts.append(
            f"Report half: seeds {report['seeds']}, {s['num_faulty']} faulty runs, {s['num_healthy']} healthy."
        )
    if tune is not None:
        parts.append(f"Thresholds were tuned on seeds {tune['seeds']} alone.")
    parts.append(
        "Data: digits from scikit-learn; text of Python's standard library. "
        f"Rules asked every {c['check_every']} steps, and after each of the ten from a fault on. "
        f"{c['cpu']}, one thread a run; torch {c['torch']}, scikit-learn {c['sklearn']}, Python {c['python']}, "
        f"fastguard {c['fastguard']}, {c['date']}."
    )
    return " ".join(parts)


def markdown_measures(results: Results) -> list[str]:
    """The table of measures for the README."""
    rows = measures(results)
    names = list(rows[0]["others"])
    header = ["on the report half", "to reach", OURS, "", *names]
    body = [
        [
            row["title"],
            row["limit"],
            f"**{number(row['value'])}**",
            _verdict(row["is_reached"]),
            *(number(row["others"][name]) for name in names),
        ]
        for row in rows
    ]
    return [*_markdown(header, body), "", conditions(results)]


def markdown_faults(results: Results, half: str = "report") -> list[str]:
    """A row a fault: how often it was found, after how many steps, with the right cause and layer."""
    watchers = results["halves"][half]["watchers"]
    others = [name for name in watchers if name != OURS]
    header = ["fault", "runs", "found", "delay", "cause", "layer", *others]
    body = []
    for name, row in watchers[OURS]["faults"].items():
        body.append(
            [
                f"`{name}`: {results['faults'][name]}",
                str(row["num_runs"]),
                *(number(row[key]) for key in ("found", "delay", "cause_right", "layer_right")),
                *(number(watchers[other]["faults"][name]["found"]) for other in others),
            ]
        )
    return [*_markdown(header, body), "", conditions(results)]


def markdown_confusion(results: Results, half: str = "report") -> list[str]:
    """The confusion matrix: fault planted by cause that came first."""
    faults = results["halves"][half]["watchers"][OURS]["faults"]
    columns = list(dict.fromkeys(cause for row in faults.values() for cause in row["causes"]))
    header = ["planted \\ named first", *columns]
    body = [[f"`{name}`", *(str(row["causes"].get(c, "")) for c in columns)] for name, row in faults.items()]
    return _markdown(header, body)


def _verdict(is_reached: bool | None) -> str:
    return "—" if is_reached is None else "reached" if is_reached else "missed"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    align = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (header, align, *rows)]


def text(results: Results, half: str) -> str:
    """Everything for a terminal."""
    part = results["halves"][half]
    watchers = part["watchers"]
    width = max(map(len, results["faults"])) + 2
    lines = [f"{half} half, seeds {part['seeds']}", ""]
    lines.append(f"{'fault':{width}}{'runs':>5}{'found':>7}{'delay':>7}{'cause':>7}{'layer':>7}   named first")
    for name, row in watchers[OURS]["faults"].items():
        named = ", ".join(f"{cause} {count}" for cause, count in row["causes"].items())
        cells = "".join(f"{number(row[key]):>7}" for key in ("found", "delay", "cause_right", "layer_right"))
        lines.append(f"{name:{width}}{row['num_runs']:>5}{cells}   {named}")
    alarms = watchers[OURS]["false_alarms"]
    told = ", ".join(f"{rule} {count}" for rule, count in alarms.items()) or "none"
    lines += ["", f"false alarms in healthy runs, by rule: {told}"]
    lines += [f"  {v['case']} (seed {v['seed']}): {', '.join(v['false_alarms'])}" for v in part["alarmed_healthy"]]
    if part["unproven"]:
        lines += ["", f"NOT AS PLANTED (left out): {', '.join(part['unproven'])}"]
    lines += ["", f"{'measure':50}{'to reach':>9}{OURS:>11}  " + "  ".join(f"{n:>24}" for n in watchers if n != OURS)]
    for row in measures(results, half):
        verdict = " MISSED" if row["is_reached"] is False else ""
        others = "  ".join(f"{number(value):>24}" for value in row["others"].values())
        lines.append(f"{row['title']:50}{row['limit']:>9}{number(row['value']):>11}  {others}{verdict}")
    return "\n".join(lines)
