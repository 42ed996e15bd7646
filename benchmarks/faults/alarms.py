"""What the rules say of a run, asked after each of its steps as if it were still going on."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastguard import diagnosis
from fastguard.diagnosis import Finding, diagnose
from fastguard.history import TrainingHistory

from .runs import Run


@dataclass(frozen=True)
class Alarm:
    """The first time that a rule spoke, at severity warning or above.

    Attributes:
        rule: which.
        families: what it can stand for; of our own rules one.
        step: the step after which it spoke.
    """

    rule: str
    families: tuple[str, ...]
    step: int


@dataclass(frozen=True)
class Said:
    """What a watcher said of one run.

    Attributes:
        alarms: in the order of their steps.
        cause: the root cause that comes first at the end of the run; None if the watcher names none.
        layers: the layers that it blames, most suspicious first.
    """

    alarms: tuple[Alarm, ...]
    cause: str | None = None
    layers: tuple[str, ...] = field(default=())


def history_of(run: Run) -> TrainingHistory:
    """An empty history that knows of the model what the guard's did."""
    history = TrainingHistory()
    if run.notes:
        history.model = type(history.model).of(run.notes)
    return history


def ask(run: Run, check_every: int = 1) -> Said:
    """Asks all rules after every `check_every` steps, and for causes at the end."""
    history = history_of(run)
    first: dict[str, Alarm] = {}
    findings: list[Finding] = []
    last = len(run.records) - 1
    for number, record in enumerate(run.records):
        history.add(record)
        if (number + 1) % check_every and number != last:
            continue
        findings = diagnose(history)
        for finding in findings:
            if finding.severity != "info" and finding.rule not in first:
                family = diagnosis.RULES[finding.rule].family
                first[finding.rule] = Alarm(finding.rule, (family,), record.step)
    causes = [cause for cause in diagnosis.find_causes(findings, history) if cause.severity != "info"]
    rest = [finding for finding in diagnosis.unexplained(findings, causes) if finding.severity != "info"]
    top = next(iter([*causes, *rest]), None)
    return Said(tuple(first.values()), top and top.rule, top.layers if top else ())
