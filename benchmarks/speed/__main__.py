"""Takes the figures that the documentation quotes: 7 to 8 minutes on two cores that do nothing else.

python -m benchmarks.speed                         # results/cpu.json, and from it the tables of both READMEs
python -m benchmarks.speed --only step-mlp         # one part again, put into what is saved; may be given several times
python -m benchmarks.speed --dry                   # the table in the terminal, nothing saved
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import machine, readme
from . import table
from .busy import one_busy_core
from .parts import PARTS, Part
from .readme import TABLES
from .timing import QUICK, Settings

FORMAT = 2
FOLDER = Path(__file__).resolve().parents[1]
RESULTS = FOLDER / "results" / "cpu.json"
DOCUMENTS = (FOLDER.parent / "README.md", FOLDER / "README.md")
Say = Callable[[str], None]
_tell: Say = functools.partial(print, flush=True)  # where it is redirected too


def available_bytes() -> float:
    """Memory that can be had; infinite where the system does not say."""
    known = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+)", known.read_text() if known.exists() else "")
    return 1024.0 * int(found[1]) if found else float("inf")


def measure_part(part: Part, settings: Settings) -> dict[str, Any]:
    """One part, alone and beside a busy core, with what others took of the machine meanwhile."""
    here = machine.Machine()
    measure = part.prepare()
    found = {table.ALONE: measure(settings)}
    if part.beside:
        with one_busy_core():
            found[table.BESIDE] = measure(settings)
    about = here.to_dict()
    return {**{key: about[key] for key in ("date", "seconds", "others_ratio")}, **found}


def collect(names: Iterable[str], *, quick: bool = False, into: dict[str, Any] | None = None, say: Say = _tell) -> Any:
    """Measures parts, and returns the results as JSON has them.

    Args:
        into: earlier results that the parts are put into.
        say: is told what was found, as it is found.

    A part whose results are wrong, or that cannot be measured, has no figures and is named in `failed`.
    """
    here = machine.Machine()
    say(machine.line(here.to_dict()) + "\n")
    results: dict[str, Any] = into or {"format": FORMAT, "quick": quick, "parts": {}}
    results["quick"] = results["quick"] or quick
    results["failed"] = []
    started = time.time()
    for name in names:
        if PARTS[name].memory_bytes > available_bytes():
            say(f"{name}: left out, needs {PARTS[name].memory_bytes / 1e9:.1f} GB of memory")
            continue
        results["parts"].pop(name, None)
        try:
            results["parts"][name] = measure_part(PARTS[name], QUICK if quick else Settings())
        except RuntimeError as error:  # WrongResultError is one
            results["failed"].append(name)
            say(f"{name}: FAILED, {type(error).__name__}: {error}\n")
            continue
        measured = table.text(results, lambda measure, name=name: measure.path[0] == name)  # type: ignore[misc]
        say(f"[{time.time() - started:3.0f} s] {name}\n{measured}\n")
    results["machine"] = here.to_dict()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description="Measure fastguard against torch.")
    parser.add_argument(
        "--only", nargs="+", action="extend", metavar="PART", choices=list(PARTS), help=", ".join(PARTS)
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it works; saved only with --json")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="save there, and leave the documents alone")
    arguments = parser.parse_args(argv)
    path: Path | None = arguments.json or RESULTS
    if arguments.dry or (arguments.quick and arguments.json is None):
        path = None
    puts_into = path is not None and arguments.only and path.exists()
    earlier = json.loads(path.read_text(encoding="utf-8")) if puts_into else None
    results = collect(arguments.only or PARTS, quick=arguments.quick, into=earlier)
    print(table.text(results))
    code = 1 if results["failed"] else 0
    if code:
        print("\nFAILED:", *results["failed"])
    if path is None:
        return code
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    written = [path]
    if path == RESULTS and not code:
        written += [document for document in DOCUMENTS if readme.update(document, results, TABLES)]
    print("\nwritten:", *written)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
