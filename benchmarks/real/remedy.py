"""Whether the first remedy helps: `fastguard try` with the arms of the first cause, on each program with a fault.

    python -m benchmarks.real.remedy ANSWERS --repos FOLDER [--set fresh] [--jobs 2] --save FILE

ANSWERS is what `run.py --ask` kept. Each program runs with two seeds as it is, then with each arm, for as many steps as
it took, at most `--steps`. FILE gets a line for each; faults whose first cause has no arm are only counted.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastguard.experiments.arms import arms_for

from .programs import SETS, Program, read
from .run import run
from .score import judge


def remedy_of(program: Program, told: dict[str, Any], given: argparse.Namespace, modules: dict[str, str]) -> Any:
    """What `fastguard try` says of the arms of the first cause; None if it has no arm."""
    cause = judge(program, told)[0].cause
    arms = [arm.name for arm in arms_for([cause] if cause else []) if not arm.is_null]
    if not arms:
        return None
    steps = max(16, min(given.steps, max(guard["steps"] for guard in told["guards"])))
    words = ["-m", "fastguard", "try", "--json", "--steps", str(steps), "--arms", ",".join(arms)]
    printed = run(program, given.repos, words, given.timeout, modules)["printed"]
    found = json.loads(printed[printed.index("{") :]) if "{" in printed else {"arms": [], "verdict": printed[-200:]}
    kept = [{name: arm.get(name) for name in ("name", "verdict", "effect", "t", "why")} for arm in found["arms"]]
    return {"cause": cause, "is_right": cause in program.causes, "steps": steps, "arms": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--repos", type=Path, required=True)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--set", default="", choices=SETS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--timeout", type=float, default=600.0)
    given = parser.parse_args()
    _, faults, modules = read(given.set)
    lines = map(json.loads, given.answers.read_text(encoding="utf-8").splitlines())
    told = {(line["program"], line["fault"]): line for line in lines}
    asked = [program for program in faults if (program.name, program.fault) in told]

    def add(program: Program) -> Any:
        found = remedy_of(program, told[program.name, program.fault], given, modules)
        if found:
            with given.save.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"program": program.name, "fault": program.fault, **found}) + "\n")
        return found

    with ThreadPoolExecutor(given.jobs) as pool:
        tried = list(filter(None, pool.map(add, asked)))
    for what, part in (("all", tried), ("right causes", [one for one in tried if one["is_right"]])):
        helped = sum(any(arm["verdict"] == "helps" for arm in one["arms"]) for one in part)
        print(f"{what}: a remedy helps in {helped} of {len(part)}; {len(asked)} faults were asked")


if __name__ == "__main__":
    main()
