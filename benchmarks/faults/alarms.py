"""What the rules say of a run, asked again and again as if it were still going on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fastguard.diagnosis import RULES, Finding, by_sign, diagnose, find_causes, unexplained
from fastguard.records import StepStats, TrainingHistory
from fastguard.records.model import ModelNotes

from .runs import Run

_NEAR = 10  # steps from a fault on, after each of which the rules are asked: delays of spikes are told to the step


@dataclass(frozen=True)
class Alarm:
    """When a rule spoke, at severity warning or above: for the first time, or for the first time from the fault on.

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


def histories(run: Run) -> Iterator[tuple[StepStats, TrainingHistory]]:
    """Each record of `run`, with the history as it was after it: the same object all along."""
    history = TrainingHistory()
    known = history.model.state()
    notes = iter(run.notes)
    note = next(notes, None)
    for number, record in enumerate(run.records, 1):
        history.add(record)
        while note is not None and note[0] <= number:
            known.update(note[1])
            history.model = ModelNotes.of(known)
            note = next(notes, None)
        yield record, history


def ask(run: Run, check_every: int = 10) -> Said:
    """Asks all rules every `check_every` steps, after each of the ten steps from a fault on, and for causes at the end.

    What a rule says between two askings and takes back again is not heard; in training it would not be either.
    """
    planted = 0 if run.planted is None else run.planted.step
    alarms: dict[tuple[str, bool], Alarm] = {}
    findings: list[Finding] = []
    for number, (record, history) in enumerate(histories(run), 1):
        is_near = run.planted is not None and 0 <= record.step - run.planted.step < _NEAR
        if number % check_every and number != len(run.records) and not is_near:
            continue
        findings = diagnose(history)
        for name, finding in by_sign(findings).items():
            is_late = record.step >= planted
            is_news = (name, False) not in alarms or (finding.last_step or record.step) >= planted
            if finding.severity != "info" and is_news:
                alarm = Alarm(name, (RULES[name].family,), record.step)
                alarms.setdefault((name, is_late), alarm)
    causes = find_causes(findings, history)
    told = [finding for finding in (*causes, *unexplained(findings, causes)) if finding.severity != "info"]
    return Said(tuple(alarms.values()), told[0].rule, told[0].layers) if told else Said(tuple(alarms.values()))
