"""The results as text and as Markdown."""

from __future__ import annotations

from typing import Any

from ... import readme
from ..table import number

Results = dict[str, Any]
_COLUMNS = (
    ("faulty", "num_faulty"),
    ("found", "found"),
    ("cause right", "cause_right"),
    ("wrong cause", "wrong_cause"),
    ("layer", "layer_right"),
    ("sound", "num_sound"),
    ("false alarms", "false_alarms"),
    ("sure, right", "sure_right"),
    ("calibration", "calibration_error"),
)


def rows(results: Results, half: str, settings: str) -> list[list[str]]:
    """A row a set, and one of all."""
    part = results["halves"][half]["settings"][settings]
    named = [*part["sets"].items(), ("all", part["summary"])]
    return [[name, *(number(figures[key]) for _, key in _COLUMNS)] for name, figures in named]


def markdown(results: Results, half: str = "report", settings: str = "default") -> list[str]:
    """One half with one setting: a row a set, and under what conditions."""
    header = ["set", *(title for title, _ in _COLUMNS)]
    return [*readme.markdown(header, rows(results, half, settings)), "", conditions(results, half)]


def markdown_causes(results: Results, half: str = "report", settings: str = "default") -> list[str]:
    """For each right cause, what was named first, and how often."""
    table = results["halves"][half]["settings"][settings]["confusion"]
    body = []
    for cause, named in sorted(table.items()):
        others = (
            f"{name} {count}" for name, count in sorted(named.items(), key=lambda item: -item[1]) if name != cause
        )
        body.append([f"`{cause}`", str(sum(named.values())), str(named.get(cause, 0)), ", ".join(others)])
    return readme.markdown(["cause", "runs", "named first", "other names"], body, 1)


def conditions(results: Results, half: str) -> str:
    """Under what conditions the results were taken."""
    c, part = results["conditions"], results["halves"][half]
    return (
        f"The {half} half: {len(part['kinds'])} of {sum(len(p['kinds']) for p in results['halves'].values())} kinds; "
        f"{len(part['unproven'])} of its {part['num_cases']} runs were not as meant, and are left out. "
        f"Rules asked every {c['check_every']} steps. {c['cpu']}, one thread a run; torch {c['torch']}, scikit-learn "
        f"{c['sklearn']}, Python {c['python']}, fastguard {c['fastguard']}, {c['date']}."
    )


def text(results: Results) -> str:
    """Everything for a terminal."""
    lines = []
    header = ["set", *(title for title, _ in _COLUMNS)]
    for half, part in results["halves"].items():
        for settings, found in part["settings"].items():
            if not part["num_cases"]:
                continue
            lines += [f"{half} half, settings: {settings}", ""]
            lines += ["".join(f"{cell:>13}" for cell in cells) for cells in (header, *rows(results, half, settings))]
            lines += ["", "false alarms in sound runs"]
            lines += [f"  {rule}: {', '.join(names)}" for rule, names in found["false_alarms"].items()]
            lines += ["", "missed or wrong"]
            for miss in found["misses"]:
                found_as = "found" if miss["found"] else "NOT FOUND"
                layer = ", wrong layer" if miss["layer_right"] is False else ""
                lines.append(f"  {miss['case']}: {found_as}, cause {miss['cause']}{layer}; {', '.join(miss['alarms'])}")
            lines.append("")
        if part["unproven"]:
            lines += [f"{half} half, not as meant, left out"]
            for name, figures in part["unproven"].items():
                shown = ", ".join(f"{key} {number(value)}" for key, value in figures.items())
                lines.append(f"  {name}: {shown}")
            lines.append("")
    if results["causes_not_known"]:
        lines += [f"causes that fastguard has no name for yet: {', '.join(results['causes_not_known'])}", ""]
    lines.append(f"{results['seconds']} s, of them {results['training_s']} s of training that is recorded")
    return "\n".join(lines)
