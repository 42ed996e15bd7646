"""Asks `fastguard.preflight` about each loss: `python -m benchmarks.losses [--half report]`.

A wrong loss is found, and a sound one accused, where a check warns. All checks are made but for the trial steps, which
do not look at the loss. Kinds are in one half each: checks were mended on the half "tune" alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import fastguard
from fastguard.tools.preflight import CHECKS

from . import fresh, sound, wrong
from .case import CASES, TASKS, Case

MODULES = (wrong, sound, fresh)  # they fill CASES
EARLY = [name for name, check in CHECKS.items() if check.depth < 3]


def ask(case: Case) -> fastguard.Report:
    """What preflight says of one loss."""
    torch.manual_seed(zlib.crc32(case.name.encode()))
    model, batch = TASKS[case.task]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return fastguard.preflight(model, optimizer, case.loss, batch, checks=EARLY)


def rules(report: fastguard.Report) -> list[str]:
    """Checks that warn."""
    return [finding.rule for finding in report.findings if finding.severity != "info"]


def measures(asked: Iterable[tuple[Case, fastguard.Report]]) -> dict[str, Any]:
    """Numbers and shares of the losses that were found, accused, and not judged."""
    every = list(asked)
    wrong_ones, sound_ones = [[r for c, r in every if c.is_wrong is flag] for flag in (True, False)]

    def share(reports: list[fastguard.Report], flag: str) -> float:
        flags = [bool(rules(r)) if flag == "told" else not r.numbers.get("loss_was_asked", 0) for r in reports]
        return round(sum(flags) / max(len(flags), 1), 3)

    return {
        "num_wrong": len(wrong_ones),
        "num_sound": len(sound_ones),
        "found": share(wrong_ones, "told"),
        "accused": share(sound_ones, "told"),
        "abstained_of_wrong": share(wrong_ones, "abstained"),
        "abstained_of_sound": share(sound_ones, "abstained"),
        "seconds_median": statistics.median(r.numbers["seconds"] for _, r in every),
        "seconds_max": max(r.numbers["seconds"] for _, r in every),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Asks, prints what is not right and the shares."""
    parser = argparse.ArgumentParser("python -m benchmarks.losses", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--half", choices=("tune", "report", "fresh"), default="tune", help="which kinds (default: tune)"
    )
    parser.add_argument("--only", default="", metavar="NAME", help="losses whose names begin so")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    asked = [(c, ask(c)) for c in CASES if c.half == arguments.half and c.name.startswith(arguments.only)]
    for case, report in asked:
        if bool(rules(report)) is not case.is_wrong:
            was_asked = "asked" if report.numbers.get("loss_was_asked") else "abstained"
            print(f"{'missed' if case.is_wrong else 'ACCUSED'} {case.name}: {was_asked} {rules(report)}")
    print(time.strftime("%Y-%m-%d"), json.dumps(measures(asked), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
