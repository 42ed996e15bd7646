"""The results as text."""

from __future__ import annotations

from typing import Any

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
    lines.append(f"{results['seconds']} s, of which {results['training_s']} s are recorded training")
    return "\n".join(lines)
