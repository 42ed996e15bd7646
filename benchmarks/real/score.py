"""How right the answers that `run.py --ask` kept are: `python -m benchmarks.real.score FILE`, or `FILE fresh`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fastguard.diagnosis import RULES, UNKNOWN

from .. import readme
from ..faults.external.score import Verdict, summary
from ..faults.table import number
from .programs import FAMILIES, Program, read

_COLUMNS = ("num_faulty", "found", "cause_right", "top_right", "wrong_cause", "sure_right", "num_sure",
            "calibration_error", "num_sound", "false_alarms", "ever", "sound_alarmed")  # fmt: skip
_HEADER = ("repositories", "faulty", "found", "first cause right", "among three", "wrong first, of those named",
           "sure, right", "sure", "calibration error", "sound", "false alarms a run, at its end", "at any time",
           "sound runs accused")  # fmt: skip


def judge(program: Program, told: dict[str, Any]) -> tuple[Verdict, bool, int]:
    """What is true of a run's report; whether a right cause is among the first three; how many rules ever spoke.

    Of several optimizers' reports, the one that is surest of its first cause comes first.
    """
    guards = sorted(told["guards"], key=lambda one: -max((sure for _, sure in one["causes"]), default=0.0))
    end = dict.fromkeys(rule for one in guards for rule in one["findings"])
    ever = end | dict.fromkeys(rule for one in guards for rule in one["earlier"])
    named = [(name, sure) for one in guards for name, sure in one["causes"] if name != UNKNOWN]
    first = named[0][0] if named else None
    families = {family for name in program.causes for family in FAMILIES[name]}
    found = any(RULES[rule].family in families for rule in ever) if program.fault else None
    right = first in program.causes if program.fault else None
    pairs = tuple((sure, name in program.causes) for name, sure in named)
    name = f"{program.name}, {program.fault or 'sound'}"
    verdict = Verdict(name, program.half, "", found, tuple(end), first, right, None, pairs, 0.0)
    return verdict, any(is_right for _, is_right in pairs[:3]), len(ever)


def main(path: Path, which: str = "") -> None:
    programs, faults, _ = read(which)
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    told = {(line["program"], line["fault"]): line for line in lines}
    # A sound program counts if it ended well and a step was seen.
    judged = [
        judge(program, one)
        for program in [*programs, *faults]
        if (one := told.get((program.name, program.fault)))
        and (program.fault or (one["code"] == 0 and any(guard["steps"] for guard in one["guards"])))
    ]
    rows = []
    for half in [*sorted({one[0].set for one in judged}), ""]:
        part = [one for one in judged if half in ("", one[0].set)]
        figures = summary(one[0] for one in part)
        sound = [ever for verdict, _, ever in part if verdict.found is None]
        figures["ever"] = sum(sound) / len(sound)
        figures["top_right"] = sum(top for v, top, _ in part if v.found is not None) / figures["num_faulty"]
        rows.append([half or "all", *(number(figures[name]) for name in _COLUMNS)])
    print("\n".join(readme.markdown(_HEADER, rows)))
    for v, _, _ in judged:
        if v.alarms if v.found is None else not (v.found and v.cause_right):
            print(
                f"{v.set}: {v.case}: {'' if v.found is not False else 'NOT FOUND '}{v.told[:3]} {v.cause}; {v.alarms}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
