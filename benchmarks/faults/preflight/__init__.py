"""`python -m benchmarks.faults.preflight`: what `fastguard.preflight` finds in set-ups with and without faults.

Half of the kinds (a fault in a task; a sound task) was for setting thresholds, half is for the report: which, decides a
checksum of the name. `--external` asks about the trainings of `benchmarks.faults.external`, with their halves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fastguard
from fastguard.tools.preflight import CHECKS

from .faults import FAULTS
from .tasks import TASKS, Planned

RESULTS = Path(__file__).resolve().parents[2] / "results" / "preflight.json"
SEEDS = (0,)


@dataclass(frozen=True)
class Asked:
    """What was said of one set-up.

    Attributes:
        name, seed: which.
        half: "tune" or "report".
        source: of the fault, "A" to "D"; "" of a sound one.
        right: causes that are right; none of a sound one.
        causes: those that were told, the first one first.
        findings: checks that fired at warning or above.
        seconds: for all of it.
    """

    name: str
    seed: int
    half: str
    source: str
    right: tuple[str, ...]
    causes: tuple[str, ...]
    findings: tuple[str, ...]
    seconds: float

    @property
    def is_found(self) -> bool:
        """Whether the first cause is right."""
        return bool(self.causes) and self.causes[0] in self.right

    @property
    def is_named(self) -> bool:
        """Whether a right cause is among those that were told."""
        return bool(set(self.causes) & set(self.right))


def half(name: str) -> str:
    """The half that a kind is in: by a checksum of its name."""
    return "tune" if zlib.crc32(name.encode()) % 2 else "report"


def ask(planned: Planned) -> tuple[tuple[str, ...], tuple[str, ...], float]:
    """Causes, findings and seconds of one set-up."""
    return say(*planned.arguments())


def say(*arguments: Any) -> tuple[tuple[str, ...], tuple[str, ...], float]:
    """What preflight says: causes, findings and seconds."""
    started = time.perf_counter()
    report = fastguard.preflight(*arguments)
    seconds = time.perf_counter() - started
    findings = tuple(finding.rule for finding in report.findings if finding.severity != "info")
    return tuple(cause.rule for cause in report.causes), findings, seconds


def run(which: str, only: str = "", seeds: Iterable[int] = SEEDS) -> list[Asked]:
    """Asks about all set-ups of a half ("tune", "report" or "all") whose names hold `only`."""
    found = []
    plans = [(name, "", (), make) for name, make in TASKS.items()]
    plans += [(one.name, one.source, one.causes, one.make) for one in FAULTS]  # type: ignore[misc]
    for name, source, right, make in plans:
        if which not in ("all", half(name)) or only not in name:
            continue
        for seed in seeds:
            torch.manual_seed(seed)
            found.append(Asked(name, seed, half(name), source, right, *ask(make())))
    return found


def external() -> Iterator[Asked]:
    """Asks about the trainings of `benchmarks.faults.external`, which others wrote and split.

    Without those with a loop of their own (games), with a fault that only comes in training, or of sets E and F.
    """
    from ..external.cases import CASES
    from ..external.loop import epochs

    for case in CASES.values():
        plan = case.make(case.seed)
        later = case.truth is not None and set(case.truth.causes) <= {"stopped-too-early", "missing-zero-grad"}
        if plan.play is not epochs or later or case.set in ("E", "F"):
            continue
        plan.model.train(plan.train_mode)
        batches = list(itertools.islice(plan.batches(0), 3))
        right = () if case.truth is None else case.truth.causes
        found = say(plan.model, plan.optimizer(plan.model, plan.lr), plan.loss, batches)
        yield Asked(case.name, case.seed, case.half, "" if case.truth is None else case.set, right, *found)


def measures(asked: Iterable[Asked]) -> dict[str, Any]:
    """Shares over set-ups and seeds; None where nothing was asked."""
    every = list(asked)
    sound, faulty = [a for a in every if not a.source], [a for a in every if a.source]
    published = [a for a in faulty if a.source in "ABC"]

    def share(flags: list[bool]) -> float | None:
        return sum(flags) / len(flags) if flags else None

    return {
        "num_sound": len({a.name for a in sound}),
        "num_faulty": len({a.name for a in faulty}),
        "num_published": len({a.name for a in published}),
        "false_alarms": share([bool(a.findings) for a in sound]),
        "alarmed": share([bool(a.findings) for a in faulty]),
        "first_cause_right": share([a.is_found for a in faulty]),
        "first_cause_right_published": share([a.is_found for a in published]),
        "cause_among_those_told": share([a.is_named for a in faulty]),
        "wrong_cause_first": share([not a.is_found for a in faulty if a.causes]),
        "by_set": {s: share([a.is_found for a in faulty if a.source == s]) for s in "ABCD"},
        "seconds_median": statistics.median(a.seconds for a in every) if every else None,
        "seconds_max": max((a.seconds for a in every), default=None),
        "seconds_million_parameters": max((a.seconds for a in every if a.name == "million-parameters"), default=None),
    }


def by_check(asked: Iterable[Asked]) -> dict[str, dict[str, int]]:
    """For each check: in how many faulty set-ups whose cause it speaks for, of how many; and in how many sound ones."""
    every = list(asked)
    table = {}
    for name, check in CHECKS.items():
        mine = [a for a in every if check.cause in a.right]
        fired = sum(name in a.findings for a in mine)
        false = sum(name in a.findings for a in every if not a.source)
        stray = sum(name in a.findings for a in every if a.source and check.cause not in a.right)
        table[name] = {"fired": fired, "of": len(mine), "in_sound": false, "beside_other_faults": stray}
    return table


def main() -> int:
    """Asks, prints what is not right, and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--half", choices=("tune", "report", "all"), default="all")
    parser.add_argument("--only", default="", help="set-ups whose names hold this; nothing is written")
    parser.add_argument("--external", action="store_true", help="the trainings of benchmarks.faults.external instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asked = list(external()) if arguments.external else run(arguments.half, arguments.only)
    for one in asked:
        if one.is_found if one.source else not one.findings:
            continue
        print(f"{one.half:6} {one.source or '-'} {one.name} ({one.seed}): {one.causes} for {one.right}; {one.findings}")
    halves = {which: measures(a for a in asked if a.half == which) for which in ("tune", "report")}
    print(json.dumps(halves, indent=1))
    if arguments.external or (arguments.half == "all" and not arguments.only):
        path = RESULTS.with_stem("preflight-external") if arguments.external else RESULTS
        facts = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "seeds": sorted({one.seed for one in asked}),
            **halves,
            "by_check": by_check(asked),
            "set_ups": [asdict(one) for one in asked],
        }
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}")
    return 0
