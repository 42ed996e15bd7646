"""What the rules say of a run while it goes on and at its end, and how right that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastguard.diagnosis import RULES, by_sign, diagnose, find_causes, unexplained

from ..alarms import histories
from .case import SETS, Case
from .runs import Part, Run

UNKNOWN = "unknown"  # a report that says this names no cause
NUM_BINS = 10
SURE = 0.8


@dataclass(frozen=True)
class Heard:
    """What was said of one run.

    Attributes:
        alarms: rule -> (its family, the step after which it spoke first), at severity warning or above.
        causes: (name, confidence) of the root causes of the report at the end, the first first.
        layers: what the report's first entry blames, most suspicious first.
    """

    alarms: Mapping[str, tuple[str, int]]
    causes: tuple[tuple[str, float], ...]
    layers: tuple[str, ...]


def ask(part: Part, check_every: int = 10) -> Heard:
    """Asks all rules every `check_every` steps, and for causes at the end."""
    alarms: dict[str, tuple[str, int]] = {}
    findings, history = [], None
    for number, (record, history) in enumerate(histories(part), 1):
        if number % check_every and number != len(part.records):
            continue
        history.has_ended = number == len(part.records)
        findings = diagnose(history)
        for name, finding in by_sign(findings).items():
            if finding.severity != "info":
                alarms.setdefault(name, (RULES[name].family, record.step))
    if history is None:
        return Heard({}, (), ())
    causes = [one for one in find_causes(findings, history) if one.severity != "info"]
    told = [*causes, *(one for one in unexplained(findings, causes) if one.severity != "info")]
    return Heard(alarms, tuple((one.rule, one.confidence) for one in causes), told[0].layers if told else ())


@dataclass(frozen=True)
class Verdict:
    """One run and what was said of it.

    Attributes:
        case, set, kind: which run.
        found: an alarm of a right family, or the optimizer was refused; None of a sound run.
        alarms: the rules that spoke: of a sound run false ones.
        cause: the cause named first; None where none is.
        cause_right: whether that is it; None of a sound run, and where there is no run to report on.
        layer_right: whether the first layer blamed is to blame; None where none is.
        told: (confidence, right) of every cause that is named, in a sound run too.
        quality: what the run reached.
    """

    case: str
    set: str
    kind: str
    found: bool | None
    alarms: tuple[str, ...]
    cause: str | None
    cause_right: bool | None
    layer_right: bool | None
    told: tuple[tuple[float, bool], ...]
    quality: float


def judge(case: Case, run: Run, heard: Sequence[Heard]) -> Verdict:
    """Holds what was said of `run`, by each of its guards, against what is true of it."""
    families = {family for one in heard for family, _ in one.alarms.values()}
    rules = tuple(dict.fromkeys(rule for one in heard for rule in one.alarms))
    named = [(name, confidence) for one in heard for name, confidence in one.causes if name != UNKNOWN]
    first = named[0][0] if named else None
    right = () if case.truth is None else case.truth.causes
    told = tuple((confidence, name in right) for name, confidence in named)
    common = (case.name, case.set, case.kind)
    if case.truth is None:
        return Verdict(*common, None, rules, first, None, None, told, run.outcome.quality)
    is_refused = run.outcome.refused is not None
    layer_right = None
    if case.truth.layers is not None and not is_refused:
        blamed = heard[0].layers[:1] if heard else ()
        layer_right = any(_is_within(name, case.truth.layers) for name in blamed)
    found = is_refused or bool(families & set(case.truth.families))
    cause_right = None if is_refused else first in right
    return Verdict(*common, found, rules, first, cause_right, layer_right, told, run.outcome.quality)


def _is_within(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def summary(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """The measures over `verdicts`: shares from 0 to 1; None where nothing was measured."""
    verdicts = list(verdicts)
    faulty = [v for v in verdicts if v.found is not None]
    sound = [v for v in verdicts if v.found is None]
    asked = [v for v in faulty if v.cause_right is not None]
    naming = [v for v in asked if v.cause is not None]
    told = [pair for v in verdicts for pair in v.told]
    return {
        "num_faulty": len(faulty),
        "num_sound": len(sound),
        "found": _share(bool(v.found) for v in faulty),
        "alarmed": _share(bool(v.alarms) for v in faulty),
        "cause_right": _share(bool(v.cause_right) for v in asked),
        "wrong_cause": _share(not v.cause_right for v in naming),
        "names_a_cause": _share(v.cause is not None for v in asked),
        "layer_right": _share(v.layer_right for v in faulty if v.layer_right is not None),
        "false_alarms": sum(len(v.alarms) for v in sound) / len(sound) if sound else None,
        "sound_alarmed": _share(bool(v.alarms) for v in sound),
        "sure_right": _share(right for confidence, right in told if confidence >= SURE),
        "num_sure": sum(confidence >= SURE for confidence, _ in told),
        "calibration_error": calibration_error(told),
        "num_told": len(told),
    }


def calibration_error(told: Sequence[tuple[float, bool]]) -> float | None:
    """Expected calibration error: |mean confidence - share right| over ten bins, by how many are in each."""
    if not told:
        return None
    bins: dict[int, list[tuple[float, bool]]] = {}
    for confidence, right in told:
        bins.setdefault(min(NUM_BINS - 1, int(confidence * NUM_BINS)), []).append((confidence, right))
    return sum(abs(sum(c for c, _ in held) - sum(r for _, r in held)) for held in bins.values()) / len(told)


def by_set(verdicts: Iterable[Verdict]) -> dict[str, dict[str, Any]]:
    """`summary` of each set."""
    verdicts = list(verdicts)
    groups = {name: [v for v in verdicts if v.set == name] for name in SETS}
    return {name: summary(group) for name, group in groups.items() if group}


def false_alarms(verdicts: Iterable[Verdict]) -> dict[str, list[str]]:
    """The sound runs that each rule spoke in."""
    runs: dict[str, list[str]] = {}
    for v in verdicts:
        if v.found is None:
            for rule in v.alarms:
                runs.setdefault(rule, []).append(v.case)
    return dict(sorted(runs.items(), key=lambda item: -len(item[1])))


def misses(verdicts: Iterable[Verdict]) -> Iterator[dict[str, Any]]:
    """The faulty runs that were not found, or of which the wrong thing or nothing was said."""
    for v in verdicts:
        if v.found is not None and (not v.found or v.cause_right is False or v.layer_right is False):
            yield {
                "case": v.case,
                "found": v.found,
                "cause": v.cause,
                "layer_right": v.layer_right,
                "alarms": list(v.alarms),
            }


def _share(flags: Iterable[bool | None]) -> float | None:
    found = [bool(flag) for flag in flags]
    return sum(found) / len(found) if found else None
