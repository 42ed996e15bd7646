"""How right a watcher was: per run, per fault, and over all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .alarms import Said
from .cases import CASES
from .runs import Run


@dataclass(frozen=True)
class Verdict:
    """One run and what was said of it.

    Attributes:
        case, seed: which run.
        fault, kind: what was planted; None in a healthy run.
        found: an alarm of a right family, not before the fault.
        alarmed: any alarm, not before the fault.
        delay: steps from the fault to the first alarm of a right family; None if there was none.
        cause: the cause that came first.
        cause_right: whether that was it; None in a healthy run.
        layer_right: whether the first layer blamed is the right one; None where no layer is to blame.
        false_alarms: rules that spoke without reason: all of a healthy run's, those before the fault of another.
    """

    case: str
    seed: int
    fault: str | None
    kind: str | None
    found: bool
    alarmed: bool
    delay: int | None
    cause: str | None
    cause_right: bool | None
    layer_right: bool | None
    false_alarms: tuple[str, ...]


def judge(run: Run, said: Said) -> Verdict:
    """Holds what was said of `run` against what was planted in it."""
    fault = CASES[run.case].fault
    if fault is None or run.planted is None:
        names = tuple(alarm.rule for alarm in said.alarms)
        return Verdict(run.case, run.seed, None, None, False, bool(names), None, said.cause, None, None, names)
    early = tuple(alarm.rule for alarm in said.alarms if alarm.step < run.planted.step)
    late = [alarm for alarm in said.alarms if alarm.step >= run.planted.step]
    right = [alarm for alarm in late if set(alarm.families) & set(fault.families)]
    delay = right[0].step - run.planted.step if right else None
    layer_right = None
    if run.planted.layers is not None:
        layer_right = bool(said.layers) and _is_within(said.layers[0], run.planted.layers)
    return Verdict(
        run.case,
        run.seed,
        fault.name,
        fault.kind,
        bool(right),
        bool(late),
        delay,
        said.cause,
        said.cause in fault.causes,
        layer_right,
        early,
    )


def _is_within(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def summary(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """The measures over `verdicts`: shares from 0 to 1, delays in steps; None where nothing was measured."""
    verdicts = list(verdicts)
    faulty = [v for v in verdicts if v.fault is not None]
    healthy = [v for v in verdicts if v.fault is None]
    return {
        "num_faulty": len(faulty),
        "num_healthy": len(healthy),
        "found": _share([v.found for v in faulty]),
        "alarmed": _share([v.alarmed for v in faulty]),
        "cause_right": _share([v.cause_right for v in faulty]),
        "layer_right": _share([v.layer_right for v in faulty if v.layer_right is not None]),
        "false_alarms": sum(len(v.false_alarms) for v in healthy) / len(healthy) if healthy else None,
        "healthy_alarmed": _share([v.alarmed for v in healthy]),
        "early_alarms": sum(len(v.false_alarms) for v in faulty) / len(faulty) if faulty else None,
        "delay": {
            kind: _median([v.delay for v in faulty if v.kind == kind and v.delay is not None])
            for kind in ("non-finite", "spike", "slow")
        },
    }


def by_fault(verdicts: Iterable[Verdict]) -> dict[str, dict[str, Any]]:
    """`summary`'s figures for each fault, in the order of first appearance."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.fault is not None:
            groups.setdefault(verdict.fault, []).append(verdict)
    return {
        name: {
            "num_runs": len(group),
            "found": _share([v.found for v in group]),
            "delay": _median([v.delay for v in group if v.delay is not None]),
            "cause_right": _share([v.cause_right for v in group]),
            "layer_right": _share([v.layer_right for v in group if v.layer_right is not None]),
            "causes": _counts(v.cause or "none" for v in group),
        }
        for name, group in groups.items()
    }


def false_alarms(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many healthy runs each rule spoke in."""
    return _counts(rule for v in verdicts if v.fault is None for rule in v.false_alarms)


def _counts(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _share(flags: Sequence[bool | None]) -> float | None:
    return sum(map(bool, flags)) / len(flags) if flags else None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
