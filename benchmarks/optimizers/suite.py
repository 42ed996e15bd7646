"""The command: tries all classes, prints the table, writes the results and the page."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastguard
from fastguard.commands.bench import machine

from ..readme import update
from . import table
from .packages import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "optimizers.json"
PAGE = Path(__file__).with_name("README.md")
SECONDS = 1200.0  # for one package, on a machine that does nothing else


def lines_of(package: str, eager: bool, only: Sequence[str], seconds: float = SECONDS) -> list[dict[str, Any]]:
    """What a process of its own says of a package, in at most so many seconds: a line about it, and one a class."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1" if eager else "0"}
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "lines", Path(folder) / "log"
        command = [sys.executable, "-m", f"{__package__}.worker", package, str(path), *only]
        with log.open("wb") as output:
            try:
                code = subprocess.run(
                    command, env=environment, stdout=output, stderr=output, timeout=seconds, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = f"taking longer than {seconds:.0f} s"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if code:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
            raise RuntimeError(f"{package}: its process ended with {code}\n" + "\n".join(said))
    return [json.loads(line) for line in lines]


def collected(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of one package from the lines of its process."""
    about: dict[str, Any] = {}
    verdicts = []
    for line in lines:
        if "package" in line:
            about.update(line)
        else:
            verdicts.append(table.brief(line))
    return {**about, "verdicts": verdicts}


def commit() -> str:
    """The commit of the fastguard that is measured, with a plus where files were changed since; empty if unknown."""
    folder = Path(fastguard.__file__).parent
    told = subprocess.run(
        ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip()


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizers",
        description="Guards every optimizer class of the packages in requirements.txt that are installed, and asks "
        "whether training stays as it was, a skipped step has changed nothing, and clipping is torch's.",
    )
    parser.add_argument("--only", nargs="+", metavar="PACKAGE", help="these packages; or PACKAGE:CLASS for one class")
    parser.add_argument("--processes", type=int, default=2, help="packages at the same time (default: 2)")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="at most, for one package (default: %(default)g)"
    )
    parser.add_argument(
        "--json", type=Path, help="results (default: benchmarks/results/optimizers.json; nowhere with --only)"
    )
    parser.add_argument("--against", type=Path, help="earlier results: say what has changed since")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suite; 1 if not all packages are installed, 0 otherwise: what does not hold is a result, no error."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    wanted: dict[str, list[str]] = {}
    for item in arguments.only or []:
        package, _, name = item.partition(":")
        wanted.setdefault(package, []).extend([name] if name else [])
    known = {package.name: package for package in PACKAGES}
    if wanted.keys() - known.keys():
        parser.error(f"--only: no package {sorted(wanted.keys() - known.keys())}; there are {sorted(known)}")
    chosen = [known[name] for name in (wanted or known)]
    described, started = machine.Machine(), time.perf_counter()
    found: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:
        asked = {
            pool.submit(lines_of, p.name, p.eager, wanted.get(p.name, []), arguments.seconds): p.name for p in chosen
        }
        for done in concurrent.futures.as_completed(asked):
            name = asked[done]
            found[name] = collected(done.result())
            elapsed = time.perf_counter() - started
            print(f"[{elapsed:4.0f} s] {table.one_line(found[name])}", file=sys.stderr, flush=True)
    results = {
        "conditions": {**described.to_dict(), "commit": commit()},
        "packages": {package.name: found[package.name] for package in chosen},
    }
    print(table.text(results))
    if arguments.against is not None:
        print("\n".join(["", *table.changes(json.loads(arguments.against.read_text(encoding="utf-8")), results)]))
    path = arguments.json or (None if arguments.only else RESULTS)
    if path is not None:
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"results: {path}", file=sys.stderr)
    if path == RESULTS:
        update(PAGE, results, table.TABLES)
    return 1 if any("missing" in package for package in found.values()) else 0
