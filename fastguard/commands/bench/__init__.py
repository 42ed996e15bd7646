"""`fastguard bench`: what fastguard costs, against torch's own functions, side by side.

The modules, in the order in which data flows: `cases` (what), `subject` (the tensors, and the truth about them),
`rivals` (who), `harness`, `steps`, `further`, `memory` and `sweep` (how long, how much), `table`, `readme` and `plot`
(what is told).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..cli import Parser

FORMAT = 1
_MEMORY_CASES = ("10000x1", "gpt2-float32")
_QUICK_LEFT_OUT = ("one-100m", "step-transformer")


def _part_names() -> list[str]:
    from .cases import CASES, STEP_CASES

    return [*CASES, *STEP_CASES, "further", "memory"]


def collect(
    only: Sequence[str] = (), *, quick: bool = False, sweep: bool = False, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measures, and returns the results as JSON has them.

    Args:
        only: parts to measure: names of cases, `further` (cost of further tensors), `memory`; default all.
        quick: few rounds, for a look; the figures are not to be quoted.
        sweep: also cost against elements and tensors.
        say: is told what was found, as it is found.

    Raises:
        WrongResultError: a rival's result is not what float64 says.

    Cost: 6 to 8 minutes on two cores; `quick` about one; 3 GB of memory, 6 GB with `sweep`.
    """
    from . import further, harness, machine, memory, steps, table
    from .cases import CASES, STEP_CASES
    from .sweep import measure_sweep

    settings = harness.QUICK if quick else harness.Settings()
    here = machine.Machine()
    say(machine.line(here.to_dict()) + "\n")
    chosen = list(only) or [name for name in _part_names() if not (quick and name in _QUICK_LEFT_OUT)]
    results: dict[str, Any] = {"format": FORMAT, "quick": quick, "cases": {}, "steps": {}}
    for name in (n for n in CASES if n in chosen):
        results["cases"][name] = harness.measure_case(CASES[name], settings)
        say(table.case_text(results["cases"][name]) + "\n")
    for name in (n for n in STEP_CASES if n in chosen):
        case = STEP_CASES[name]
        few = max(20, case.num_steps // 10)
        results["steps"][name] = steps.measure_steps(case, 2, few) if quick else steps.measure_steps(case)
        say(table.step_text(results["steps"][name]) + "\n")
    if "further" in chosen:
        results["further"] = further.measure_further(settings)
    if "memory" in chosen:
        results["memory"] = {name: memory.measure_memory(CASES[name]) for name in _MEMORY_CASES}
    if sweep:
        say("cost against elements and tensors:")
        results["sweep"] = measure_sweep(say)
        say("")
    results["machine"] = here.to_dict()
    results["measures"] = table.measures(results)
    say(table.measures_text(results["measures"]))
    if results["machine"]["is_busy"]:
        say("\n" + machine.line(results["machine"]))
    return results


def save(results: dict[str, Any], path: Path) -> None:
    """Writes results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command `fastguard bench`. Saves nothing unless told where."""
    from .plot import MissingExtraError, check_available, draw

    parser = Parser("fastguard bench", "Measure fastguard against torch's own functions, side by side.")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a look (about a minute)")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", choices=_part_names())
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the results there")
    parser.add_argument(
        "--plot",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FOLDER",
        help="also measure cost against elements and tensors, and draw it into this folder (default: the current one)",
    )
    arguments = parser.parse_args(argv)
    if arguments.plot is not None:
        try:
            check_available()
        except MissingExtraError as error:
            parser.error(str(error))
    results = collect(arguments.only, quick=arguments.quick, sweep=arguments.plot is not None)
    if arguments.json is not None:
        save(results, arguments.json)
        print(f"\nresults: {arguments.json}")
    if arguments.plot is not None:
        print("plots:", *draw(results, arguments.plot))
    return 0
