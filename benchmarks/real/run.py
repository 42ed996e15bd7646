"""Runs real programs as they are and under `fastguard run`, and compares; or asks once what is wrong with each.

    python -m benchmarks.real.run --repos FOLDER [--only PART]                    # as it is and under `fastguard run`
    python -m benchmarks.real.run --repos FOLDER --ask benchmarks/results/real.json    # and with faults, once each
    python -m benchmarks.real.score benchmarks/results/real.json

FOLDER has, or gets, a clone of each repository as `owner+name`. The first says whether the exit code, and the random
state and parameters at the end, are the same, and how long both took. The second runs what is not yet in its file.
Nothing is downloaded but the repositories. The programs need matplotlib, SciPy, scikit-learn and networkx.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastguard.diagnosis import by_sign
from fastguard.records import TrainingHistory
from fastguard.report import build_report

from .programs import SETS, Program, read

ROOT = Path(__file__).parents[2]
OURS = ["-m", "fastguard", "run", "--no-page"]
NUM_LOOKS = 10  # how often a run's log is read as if it were still going on
SEED = "import random as _r, numpy as _n, torch as _t; _r.seed(0), _n.random.seed(0), _t.manual_seed(0)"
# At exit, a digest of what a training leaves behind.
AT_EXIT = """
import atexit, gc, hashlib, os, sys
def digest():
    torch = sys.modules.get("torch")
    if torch is None or os.getpid() != pid:
        return
    found = [torch.get_rng_state()]
    found += [p.detach() for p in gc.get_objects() if type(p) is torch.nn.Parameter]
    parts = sorted(hashlib.sha256(t.cpu().contiguous().view(-1).numpy().tobytes()).hexdigest() for t in found)
    open(os.environ["DIGEST"], "w").write("".join(parts))
pid = os.getpid()
atexit.register(digest)
"""


def clone(program: Program, repos: Path, to: Path) -> None:
    """The patched repository in `to`."""
    mirror = repos / program.source.replace("/", "+")
    if not mirror.exists():
        subprocess.run(["git", "clone", "-q", f"https://github.com/{program.source}", mirror], check=True)
    source = mirror / "repo" if (mirror / "repo").exists() else mirror
    subprocess.run(["git", "clone", "-qn", source, to], check=True)
    # A mirror may lack large files, which no program here needs.
    subprocess.run(["git", "-C", to, "checkout", "-q", program.commit, "--", "."], check=False, capture_output=True)
    words = program.script.split()
    path = to / program.folder / (words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0])
    lines = path.read_text(encoding="utf-8").splitlines()
    first = 1 + max([i for i, line in enumerate(lines) if line.startswith("from __future__")], default=-1)
    path.write_text("\n".join([*lines[:first], SEED, *lines[first:]]), encoding="utf-8")
    for given, new in program.patches.items():
        beside, _, old = given.rpartition("::")
        changed = to / program.folder / beside if beside else path
        text = changed.read_text(encoding="utf-8")
        if old not in text:
            raise ValueError(f"{program.name} has no {old!r}")
        changed.write_text(text.replace(old, new), encoding="utf-8")


def run(program: Program, repos: Path, command: list[str], timeout: float, modules: dict[str, str]) -> dict[str, Any]:
    """One run of a program by `command`."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        clone(program, repos, work / "repo")
        (work / "site").mkdir()
        for name, text in {"sitecustomize.py": AT_EXIT, **modules}.items():
            (work / "site" / name).write_text(text)
        known = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "DIGEST": str(work / "digest")}
        known["PYTHONPATH"] = os.pathsep.join([str(work / "site"), str(ROOT), str(work / "repo")])
        words = [sys.executable, *command, *shlex.split(program.script)]
        started = time.perf_counter()
        try:
            ended = subprocess.run(
                words, cwd=work / "repo" / program.folder, env={**os.environ, **known}, capture_output=True,
                text=True, timeout=timeout,
            )  # fmt: skip
            code, said, printed = ended.returncode, ended.stderr, ended.stdout
        except subprocess.TimeoutExpired:
            code, said, printed = None, "timed out", ""
        digest = (work / "digest").read_text() if (work / "digest").exists() else ""
        seconds, report = round(time.perf_counter() - started, 1), said.partition("\nfastguard run\n")[2]
        found: dict[str, Any] = {"code": code, "digest": digest, "seconds": seconds, "said": said[-1500:]}
        found["printed"] = printed
        found["not_watched"] = [line for line in report.splitlines() if line.startswith("not watched")]
        found["guards"] = [_verdict(log) for log in sorted((work / "repo" / program.folder).glob("runs/*/*.jsonl"))]
        return found


def _verdict(log: Path) -> dict[str, Any]:
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    earlier = set()
    part = log.with_name("part.txt")
    for look in range(1, NUM_LOOKS):
        part.write_text("".join(lines[: len(lines) * look // NUM_LOOKS]), encoding="utf-8")
        earlier |= set(_warnings(TrainingHistory.from_jsonl(part)))
    history = TrainingHistory.from_jsonl(log)
    report = build_report(history)
    return {
        "status": report.status,
        "steps": history.num_steps,
        "losses": history.losses.count,
        "val_losses": len(history.validations),
        "causes": [(one.rule, round(one.confidence, 3)) for one in report.causes[:3]],
        "findings": _warnings(history),
        "earlier": sorted(earlier),
    }


def _warnings(history: TrainingHistory) -> dict[str, str]:
    found = by_sign(build_report(history).findings)
    return {name: finding.severity for name, finding in found.items() if finding.severity != "info"}


def ask(given: argparse.Namespace) -> None:
    """Runs each program and fault that the file lacks under `fastguard run`, and adds a line for it."""
    lines = given.ask.read_text(encoding="utf-8").splitlines() if given.ask.exists() else []
    asked = {(known["program"], known["fault"]) for known in map(json.loads, lines)}
    programs, faults, modules = read(given.set)

    def add(program: Program) -> None:
        told = run(program, given.repos, [*OURS, *shlex.split(given.options)], given.timeout, modules)
        kept = {name: told[name] for name in ("code", "seconds", "not_watched", "guards")}
        kept["said"] = told["said"][-300:] if told["code"] else ""
        with given.ask.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"program": program.name, "fault": program.fault, **kept}) + "\n")

    with ThreadPoolExecutor(given.jobs) as pool:
        left = [one for one in [*programs, *faults] if given.only in one.name and (one.name, one.fault) not in asked]
        list(pool.map(add, left))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repos", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--ask", type=Path)
    parser.add_argument("--set", default="", choices=SETS)
    parser.add_argument("--options", default="", help="more options of fastguard run, such as --options=--experiments")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.ask:
        ask(arguments)
        return
    programs, _, modules = read(arguments.set)
    for program in programs:
        if arguments.only in program.name:
            plain = run(program, arguments.repos, [], arguments.timeout, modules)
            ours = run(program, arguments.repos, OURS, arguments.timeout, modules)
            is_same = all(plain[name] == ours[name] for name in ("code", "digest"))
            guards = ["{status} {steps}/{losses}/{val_losses} {causes}".format(**guard) for guard in ours["guards"]]
            print("same" if is_same else "DIFFERS", program.name, plain["code"], ours["code"], plain["seconds"],
                  ours["seconds"], guards, ours["not_watched"], flush=True)  # fmt: skip
            if not is_same or ours["code"]:
                print(ours["said"])


if __name__ == "__main__":
    main()
