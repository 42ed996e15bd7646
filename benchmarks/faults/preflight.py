"""What `fastguard.preflight` finds in the external trainings: `python -m benchmarks.faults.preflight`.

Without trainings that have their own loop (games), faults that only come in training. Halves are those of the
trainings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fastguard

from .external.case import HALVES
from .external.cases import CASES
from .external.loop import epochs
from .external.operators import plain

_LATER = {"stopped-too-early", "missing-zero-grad"}  # what no preflight can see


@dataclass(frozen=True)
class Asked:
    """What preflight says of one set-up.

    Attributes:
        name, half: which, "tune" or "report".
        right: causes that are right; none of a sound one.
        causes: those that the report names, the first one first.
        findings: checks at warning or above.
        seconds: for all of it.
    """

    name: str
    half: str
    right: tuple[str, ...]
    causes: tuple[str, ...]
    findings: tuple[str, ...]
    seconds: float

    @property
    def is_found(self) -> bool:
        """Whether the first cause is right."""
        return bool(self.causes) and self.causes[0] in self.right


def ask(half: str, only: str = "") -> Iterator[Asked]:
    """Asks about all trainings of a half whose names begin with `only`."""
    for case in CASES.values():
        right = () if case.truth is None else case.truth.causes
        is_later = case.truth is not None and set(right) <= _LATER
        if case.half != half or not case.name.startswith(only) or is_later:
            continue
        plan = case.make(case.seed)
        if plan.play not in (epochs, plain):
            continue
        plan.model.train(plan.train_mode)
        batches = list(itertools.islice(plan.batches(0), 3))
        started = time.perf_counter()
        report = fastguard.preflight(plan.model, plan.optimizer(plan.model, plan.lr), plan.loss, batches)
        seconds = time.perf_counter() - started
        findings = tuple(finding.rule for finding in report.findings if finding.severity != "info")
        yield Asked(case.name, half, right, tuple(cause.rule for cause in report.causes), findings, seconds)


def measures(asked: Iterable[Asked]) -> dict[str, Any]:
    """Shares over set-ups; None where nothing was asked."""
    every = list(asked)
    sound, faulty = [a for a in every if not a.right], [a for a in every if a.right]

    def share(flags: list[bool]) -> float | None:
        return sum(flags) / len(flags) if flags else None

    return {
        "num_sound": len(sound),
        "num_faulty": len(faulty),
        "false_alarms": share([bool(a.findings) for a in sound]),
        "alarmed": share([bool(a.findings) for a in faulty]),
        "first_cause_right": share([a.is_found for a in faulty]),
        "cause_among_those_named": share([bool(set(a.causes) & set(a.right)) for a in faulty]),
        "wrong_cause_first": share([not a.is_found for a in faulty if a.causes]),
        "seconds_median": statistics.median(a.seconds for a in every) if every else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Asks, and prints what is not right and the shares."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.faults.preflight", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--half", choices=HALVES, default="tune", help="whose trainings (default: tune)")
    parser.add_argument("--only", default="", metavar="NAME", help="trainings whose names begin so")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    asked = list(ask(arguments.half, arguments.only))
    for one in asked:
        if not (one.is_found if one.right else not one.findings):
            print(f"{one.name}: {one.causes} for {one.right}; {one.findings}")
    print(json.dumps(measures(asked), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
