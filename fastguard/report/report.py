"""The report on a run: as text, and as plain data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .._text import count
from ..diagnosis import RULES, UNKNOWN, Finding, Rule, diagnose, find_causes
from ..records import TrainingHistory, strict_json
from ..records.failures import Failure, Failures
from .tables import Row, module_rows, number_rows, numbers_of, sample_tables, weight_rows
from .text import blocks, num_of_each, wrap

Status = Literal["no-evidence", "healthy", "warning", "critical"]


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The report on a run. `print(report)` shows plain ASCII, at most 100 columns wide; a notebook shows HTML.

    Printed names and messages are escaped, and very long ones are shortened; `to_dict` has them in full.

    Attributes:
        status: the worst severity among the findings, apart from "info". Without findings "healthy", or "no-evidence"
            if the run has no gradients.
        findings: problems and remarks, the most severe first.
        recommendations: what to do, each once: those of the causes, then those of the findings.
        numbers: counts, rates, quantiles. An unknown number has no key.
        causes: root causes of the findings, the most likely first, each with its findings as `symptoms`.
        modules: a row for each module whose activations were sampled, from the newest sample.
        weights: a row for each sampled parameter.
        sinks: what each sink costs the training thread: `name`, `num_steps`, `mean_us`, `total_s`, `num_lost`.
        source: returns what the figures are drawn from; None for a report without a run. Not compared or copied.
    """

    status: Status
    findings: tuple[Finding, ...]
    recommendations: list[str]
    numbers: dict[str, float]
    causes: tuple[Finding, ...] = ()
    modules: tuple[dict[str, Any], ...] = ()
    weights: tuple[dict[str, Any], ...] = ()
    sinks: tuple[dict[str, Any], ...] = ()
    source: Callable[[], Any] | None = field(default=None, compare=False)

    def save(self, path: str | os.PathLike[str], *, title: str = "") -> Path:
        """Writes one HTML file with this report and figures of its run so far. It opens offline.

        Args:
            path: an existing file is replaced, completely or not at all.
            title: of the page; by default the name of the run.

        Returns:
            The path.

        Raises:
            ImportError: plotly is missing: `pip install fastguard[report]`.
            ValueError: there is no step to plot, as in a report of `preflight`.
            OSError: the file cannot be written.

        Cost: half a second, and 25 us for each line of the guard's `JsonlSink`, if there is one.
        """
        from ..visualization.runs import run_of
        from .page import render, save_page

        if self.source is None:
            raise ValueError("This report has no recorded steps to plot; print it instead.")
        return save_page(render(run_of(self.source()), self, title), path, force=True)

    def __repr__(self) -> str:
        steps = f", {count(self.numbers['num_steps'], 'step')}" if "num_steps" in self.numbers else ""
        return f"<{type(self).__name__}: {self.status}{steps}, {count(len(self.findings), 'finding')}>"

    def _repr_html_(self) -> str:
        from .page import fragment

        return fragment(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, one.name) for one in fields(self) if one.name != "source")

    def to_dict(self) -> dict[str, Any]:
        """The report as plain types that strict JSON can hold; NaN and Inf are strings.

        The symptoms of a cause are names of rules; the findings themselves are in "findings". The `symptoms` of a
        finding are the signs of its rule, if there were several.
        """
        causes = [{**one.to_dict(), "symptoms": [symptom.rule for symptom in one.symptoms]} for one in self.causes]
        findings = [finding.to_dict() for finding in self.findings]
        return {
            "status": self.status,
            "causes": causes,
            "findings": [{k: v for k, v in one.items() if v or k != "symptoms"} for one in findings],
            "recommendations": list(self.recommendations),
            "numbers": strict_json.encode(self.numbers),
            "modules": strict_json.encode(list(self.modules)),
            "weights": strict_json.encode(list(self.weights)),
            "sinks": strict_json.encode(list(self.sinks)),
        }

    def __str__(self) -> str:
        lines, numbers = [self._verdict()], self.numbers
        seen = {"validation loss": "val_loss_last" in numbers, "activations": self.modules, "weights": self.weights}
        missing = [name for name, there in seen.items() if not there]
        if missing and self.status == "healthy" and numbers["num_steps"] and "skip_rate" in numbers:
            lines.append(f"    not observed: {', '.join(missing)}")  # no finding there does not mean healthy
        for _, head, paragraphs in blocks(self.causes, self.findings):
            lines += ["", *wrap(head, "")]
            for paragraph in paragraphs:
                lines += wrap(paragraph, "    ")
        rows = number_rows(self.numbers, self.sinks)
        lines += [""] * bool(rows)
        for name, text in rows:
            lines += wrap(f"{name:<18}{text}", "", " " * 18)
        for table in sample_tables(self.modules, self.weights):
            lines += ["", *table]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if not self.numbers["num_steps"]:
            return "NOTHING TO REPORT: no step has been recorded yet"
        after = count(self.numbers["num_steps"], "step")
        return f"{self.status.upper().replace('-', ' ')} after {after}: {num_of_each(self.findings)}"


def build_report(
    history: TrainingHistory,
    *,
    sinks_lost: Mapping[str, int] | None = None,
    sinks: Iterable[dict[str, Any]] = (),
    rules: Iterable[Rule] | None = None,
    thresholds: Mapping[str, Mapping[str, float]] | None = None,
    findings: Iterable[Finding] = (),
    numbers: Mapping[str, float] | None = None,
    failures: Failures | None = None,
    source: Callable[[], Any] | None = None,
) -> Report:
    """A report on `history`. If a part of it raises, such as a rule, it is left out, and a finding names it."""
    failures = Failures() if failures is None else failures
    before = failures.counts()
    asked = list(RULES.values() if rules is None else rules)
    found = [*diagnose(history, rules=asked, thresholds=thresholds, failures=failures), *findings]
    found.sort(key=lambda finding: finding.weight, reverse=True)
    causes = find_causes(found, history, failures=failures)
    figures: dict[str, float] = {"num_steps": history.num_steps}
    modules = weights = tuple[Row, ...]()
    with failures.kept("the report's numbers", "They are missing."):
        figures = {**numbers_of(history), **(numbers or {})}
    with failures.kept("the report's tables", "They are missing."):
        modules, weights = module_rows(history), weight_rows(history)
    lost = {name: num for name, num in (sinks_lost or {}).items() if num}
    figures["num_records_lost"] = sum(lost.values())
    failed_now = failures.since(before)
    failed_before = [failure for failure in failures if failure not in failed_now]
    found += [*not_checked(failed_now, len(asked)), *_remarks(history, found, lost, failed_before)]
    found.sort(key=lambda finding: finding.weight, reverse=True)
    status: Status = "healthy" if history.has_gradients else "no-evidence"
    for finding in reversed(found):
        if finding.severity != "info":
            status = finding.severity
    advising = (*(one for one in causes if one.rule != UNKNOWN), *found)
    recommendations = list(dict.fromkeys(one.recommendation for one in advising if one.recommendation))
    whole = status, tuple(found), recommendations, figures, tuple(causes), modules, weights, tuple(sinks)
    return Report(*whole, source or (lambda: history))


def not_checked(failed: list[Failure], num_asked: int) -> list[Finding]:
    """The finding about rules and other parts that raised while the report was made, if there are any."""
    num_rules = sum(failure.what.startswith("rule ") for failure in failed)
    what = count(num_rules, "rule") if num_rules == len(failed) else f"{len(failed)} parts"
    said = f"{what} failed and {'was' if len(failed) == 1 else 'were'} not checked. {_errors_of(failed)}."
    evidence = {"num_failed": num_rules, "num_asked": num_asked, "failed": [failure.what for failure in failed]}
    remedy = "Fix the rule if it is your own. If it is one of fastguard's, please report it, with the log."
    return [Finding(said, evidence=evidence, recommendation=remedy, rule="failed-rules")] if failed else []


def _errors_of(failures: Iterable[Failure]) -> str:
    return "; ".join(f"{failure.what}: {failure.error}" for failure in failures)


def _remarks(
    history: TrainingHistory, found: Iterable[Finding], lost: Mapping[str, int], failed: list[Failure]
) -> Iterator[Finding]:
    """On records that were lost, parts of the monitoring that raised earlier in the run, and missing evidence."""
    if lost:
        total = sum(lost.values())
        by_sink = ", ".join(f"{num} by {name}" for name, num in lost.items())
        said = f"{count(total, 'record')} could not be written: {by_sink}."
        remedy = "Look up the reason in the sink's warning (a full disk, a closed file). The log has gaps."
        yield Finding(said, evidence={"num_lost": total}, recommendation=remedy, rule="lost-records")
    if failed:
        times = ", ".join(f"{one.what} {count(one.times, 'time')}" for one in failed)
        said = f"Some of the monitoring failed: {times}. {_errors_of(failed)}."
        remedy = "Look up the consequence of each in the messages of the logger fastguard. Training went on."
        evidence = {failure.what: failure.times for failure in failed}
        yield Finding(said, evidence=evidence, recommendation=remedy, rule="failed-parts")
    if not history.num_steps:
        remedy = "Call optimizer.step() on the optimizer that was wrapped, then guard.flush()."
        yield Finding("The guard has not seen a step.", severity="info", recommendation=remedy, rule="no-steps")
    elif not history.has_gradients and all(finding.rule != "no-gradient" for finding in found):
        what, remedy = "The log has no gradient norm", "Log `grad/norm`, as a JsonlSink does."
        if not history.lacks_norms:
            what = "All gradients were zero"
            remedy = "Take a few more steps; the rule no-gradient then says what may be wrong."
        yield Finding(
            f"{what} in {count(history.num_steps, 'step')}: there is no evidence that this run is healthy.",
            history.recent[0].step,
            history.recent[-1].step,
            severity="info",
            evidence={"num_steps": history.num_steps},
            recommendation=remedy,
            rule="no-evidence",
        )
