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

import torch

import fastguard

from .. import machine
from ..readme import update
from . import table
from .packages import PACKAGES
from .worker import PATIENCE, SECONDS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "optimizers.json"
PAGE = Path(__file__).with_name("README.md")
PARTIAL = ROOT / "build" / "optimizers.json"  # packages that are done, until all are


def _ended(ran: subprocess.Popen[bytes], path: Path) -> int | str:
    """The exit code of a process, which is killed where its file has not grown for longer than any class may take."""
    size, limit = -1, 2 * PATIENCE * SECONDS
    while path.stat().st_size != size:
        size = path.stat().st_size
        try:
            return ran.wait(limit)
        except subprocess.TimeoutExpired:
            continue
    ran.kill()
    return f"saying nothing for {limit:.0f} s"


def lines_of(package: str, eager: bool, only: Sequence[str]) -> list[dict[str, Any]]:
    """What a process of its own says of a package: a line about it, and one a class.

    Raises:
        RuntimeError: it crashed, or said nothing for longer than any class may take.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1" if eager else "0"}
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "lines", Path(folder) / "log"
        path.touch()
        command = [sys.executable, "-m", f"{__package__}.worker", package, str(path), *only]
        with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as ran:
            code = _ended(ran, path)
        lines = path.read_text(encoding="utf-8").splitlines()
        if code:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
            raise RuntimeError(f"{package}: its process ended with {code} after {len(lines)} lines\n" + "\n".join(said))
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
        "--resume", action="store_true", help="keep the packages that an earlier run of this commit was done with"
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
    described = machine.Machine()
    measured = {"commit": commit(), "torch": torch.__version__}
    found: dict[str, dict[str, Any]] = {}
    if arguments.resume and PARTIAL.exists():
        earlier = json.loads(PARTIAL.read_text(encoding="utf-8"))
        if {name: earlier[name] for name in measured} != measured:
            parser.error(f"--resume: {PARTIAL} is of another commit or torch than {measured}. Remove it")
        found = {p.name: earlier["packages"][p.name] for p in chosen if p.name in earlier["packages"]}
    failed = []
    with concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:
        asked = {
            pool.submit(lines_of, p.name, p.eager, wanted.get(p.name, [])): p.name
            for p in chosen
            if p.name not in found
        }
        for done in concurrent.futures.as_completed(asked):
            try:
                found[asked[done]] = collected(done.result())
            except RuntimeError as error:  # the others go on
                failed.append(str(error))
                continue
            print(f"[{time.strftime('%H:%M')}] {table.one_line(found[asked[done]])}", file=sys.stderr, flush=True)
            if not wanted:
                PARTIAL.parent.mkdir(exist_ok=True)
                PARTIAL.write_text(json.dumps({**measured, "packages": found}), encoding="utf-8")
    if failed:
        print("\n".join([*failed, "--resume tries these again"]), file=sys.stderr)
        return 1
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
    if not wanted:
        PARTIAL.unlink(missing_ok=True)
    return 1 if any("missing" in package for package in found.values()) else 0
