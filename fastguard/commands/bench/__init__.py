"""`fastguard bench`: what fastguard costs, against torch's own functions, in turn with them as in training.

`cases` says what is measured, `clipping` and `steps` by which calls, `harness` for how long, `machine` where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..cli import Parser
from . import machine, steps
from .cases import CASES, STEP_MLP, Case
from .clipping import Clipping
from .harness import QUICK, TOO_NOISY, Settings, duration, number, overlap

Measuring = Callable[[Settings], dict[str, Any]]


class BenchPart(NamedTuple):
    """One thing that is measured, ours against theirs: `prepare` checks it and returns what times it."""

    title: str
    prepare: Callable[[], Measuring]


def _clip(case: Case, *, clips: bool = False) -> BenchPart:
    title = f"clip, {case.title}, " + ("clipping at every step" if clips else "limit not reached")
    return BenchPart(title, lambda: Clipping(case, clips=clips).measure)


def _step(ours: str = steps.GUARDED) -> BenchPart:
    title = f"added to a step, {STEP_MLP.title}" + (", loss and JSONL" if ours == steps.RECORDED else "")
    return BenchPart(title, lambda: lambda settings: steps.measure_steps(STEP_MLP, settings, ours))


PARTS = {
    "step-mlp": _step(),
    "step-mlp-jsonl": _step(steps.RECORDED),
    **{name: _clip(case) for name, case in CASES.items()},
    **{f"{name}-clipping": _clip(case, clips=True) for name, case in CASES.items()},
}


def save(results: dict[str, Any], path: Path) -> None:
    """Writes results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command `fastguard bench`; saves results only with `--json`.

    Raises:
        WrongResultError: a result is not what float64 says.

    Cost: 2 to 3 minutes on two idle cores, `--quick` about one; 2 GB of memory.
    """
    parser = Parser("fastguard bench", "Measures the cost of fastguard against torch's own functions, in turn.")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: about 30 seconds, minutes on a busy machine"
    )
    parser.add_argument("--only", action="append", metavar="PART", choices=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the results there")
    arguments = parser.parse_args(argv)
    settings = QUICK if arguments.quick else Settings()
    here = machine.Machine()
    results: dict[str, Any] = {"quick": arguments.quick, "parts": {}}
    print(f"{machine.line(here.to_dict())}\n\n{'median':71} {'torch':>8} {'ours':>8} {'ratio':>6}   min – max")
    for name in arguments.only or PARTS:
        found = results["parts"][name] = PARTS[name].prepare()(settings)
        theirs, ours = (duration(found[key]["median"]) for key in ("theirs_us", "ours_us"))
        ratio = found["ratio"] or dict.fromkeys(("median", "min", "max"))
        low, median, high = (number(ratio[key]) for key in ("min", "median", "max"))
        noisy = TOO_NOISY if overlap(found["ours_us"], found["theirs_us"]) else ""
        print(
            f"{PARTS[name].title:71} {theirs:>8} {ours:>8} {median:>6}   {low} – {high}   {noisy}".rstrip(), flush=True
        )
    results["machine"] = here.to_dict()
    if results["machine"]["is_busy"]:
        print("\n" + machine.line(results["machine"]))
    if arguments.json is not None:
        save(results, arguments.json)
        print(f"\nresults: {arguments.json}")
    return 0
