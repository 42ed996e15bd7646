"""The report of `preflight`: a `Report` about a training that has not begun."""

from __future__ import annotations

from dataclasses import dataclass

from ...report import Report
from ...report.report import num_of_each


@dataclass(frozen=True, slots=True, repr=False)
class PreflightReport(Report):
    """A `Report` of checks instead of steps: `numbers` has counts, the first loss, and the loss at each rate."""

    def __str__(self) -> str:
        lines = [Report.__str__(self), ""]
        numbers = self.numbers
        if "loss" in numbers:
            chance = f"; the chance level is {numbers['chance']:.4g}" if "chance" in numbers else ""
            lines.append(f"{'loss at the start':<22}{numbers['loss']:.4g}{chance}")
        rates = [(key, value) for key, value in numbers.items() if key.startswith("loss at lr ")]
        for place, (key, value) in enumerate(rates):
            head = f"after {numbers['num_trial_steps']:g} steps" if not place else ""
            lines.append(f"{head:<22}{value:.4g} at lr {key.removeprefix('loss at lr ')}")
        lines.append(f"{'checked':<22}{numbers['num_checks']:g} checks in {numbers['seconds']:.2g} s")
        return "\n".join(lines)

    def _status_line(self) -> str:
        return f"{self.status.upper()} before the first step: {num_of_each(self.findings)}"
