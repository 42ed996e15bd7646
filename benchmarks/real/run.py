"""Runs real programs as they are and under `fastguard run`, and compares.

    python -m benchmarks.real.run --repos FOLDER [--only PART] [--out results.json]

FOLDER has, or gets, a clone of each repository as `owner+name`. For each program: whether the exit code, and the random
state and parameters at the end, are the same; how long both took; the verdict, and its first cause.
Nothing is downloaded but the repositories. The programs need matplotlib, SciPy, pandas and scikit-learn.
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
from pathlib import Path
from typing import Any

from fastguard.records import TrainingHistory
from fastguard.report import build_report

from .programs import PROGRAMS, Program

ROOT = Path(__file__).parents[2]
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
    repository, commit = program.source
    mirror = repos / repository.replace("/", "+")
    if not mirror.exists():
        subprocess.run(["git", "clone", "-q", f"https://github.com/{repository}", mirror], check=True)
    source = mirror / "repo" if (mirror / "repo").exists() else mirror
    subprocess.run(["git", "clone", "-qn", source, to], check=True)
    # A mirror may lack large files, which no program here needs.
    subprocess.run(["git", "-C", to, "checkout", "-q", commit, "--", "."], check=False, capture_output=True)
    words = program.script.split()
    path = to / program.folder / (words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0])
    lines = path.read_text(encoding="utf-8").splitlines()
    first = 1 + max([i for i, line in enumerate(lines) if line.startswith("from __future__")], default=-1)
    text = "\n".join([*lines[:first], SEED, *lines[first:]])
    for old, new in program.patches.items():
        if old not in text:
            raise ValueError(f"{program.name} has no {old!r}")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def run(program: Program, repos: Path, command: list[str], timeout: float) -> dict[str, Any]:
    """One run of a program by `command`."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        clone(program, repos, work / "repo")
        (work / "site").mkdir()
        (work / "site" / "sitecustomize.py").write_text(AT_EXIT)
        known = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "DIGEST": str(work / "digest")}
        known["PYTHONPATH"] = os.pathsep.join([str(work / "site"), str(ROOT), str(work / "repo")])
        words = [sys.executable, *command, *shlex.split(program.script)]
        started = time.perf_counter()
        try:
            ended = subprocess.run(
                words, cwd=work / "repo" / program.folder, env={**os.environ, **known}, capture_output=True,
                text=True, timeout=timeout,
            )  # fmt: skip
            code, said = ended.returncode, ended.stderr
        except subprocess.TimeoutExpired:
            code, said = None, "timed out"
        digest = (work / "digest").read_text() if (work / "digest").exists() else ""
        seconds = round(time.perf_counter() - started, 1)
        report = said.partition("\nfastguard run\n")[2]
        found: dict[str, Any] = {"code": code, "digest": digest, "seconds": seconds, "said": said[-1500:]}
        found["not_watched"] = [line for line in report.splitlines() if line.startswith("not watched")]
        found["guards"] = [_verdict(log) for log in sorted((work / "repo" / program.folder).glob("runs/*/*.jsonl"))]
        return found


def _verdict(log: Path) -> dict[str, Any]:
    history = TrainingHistory.from_jsonl(log)
    report = build_report(history)
    return {
        "status": report.status,
        "steps": history.num_steps,
        "losses": history.losses.count,
        "val_losses": len(history.validations),
        "cause": report.causes[0].rule if report.causes else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repos", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = {}
    for program in PROGRAMS:
        if arguments.only in program.name:
            plain = run(program, arguments.repos, [], arguments.timeout)
            ours = run(program, arguments.repos, ["-m", "fastguard", "run", "--no-page"], arguments.timeout)
            is_same = all(plain[name] == ours[name] for name in ("code", "digest"))
            results[program.name] = {"same": is_same, "plain_seconds": plain["seconds"], **ours}
            guards = ["{status} {steps}/{losses}/{val_losses} {cause}".format(**guard) for guard in ours["guards"]]
            print("same" if is_same else "DIFFERS", program.name, plain["code"], ours["code"], plain["seconds"],
                  ours["seconds"], guards, ours["not_watched"], flush=True)  # fmt: skip
            if not is_same or ours["code"]:
                print(ours["said"])
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
