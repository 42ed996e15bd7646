"""`fastguard demo`: a real training run under guard, with one batch that goes wrong."""

from __future__ import annotations

import sys
from pathlib import Path

from ..cli import Parser


def main(argv: list[str]) -> int:
    """Runs the demo; 0 if the poisoned step was skipped and left everything as it was, else 1."""
    parser = Parser(
        "fastguard demo",
        "Trains a small character-level transformer under guard, on the source text of Python's standard library. "
        "Half-way it makes one element of a gradient Inf: the guard skips that step and names the first bad tensor, "
        "and training continues. Prints the guard's report, and writes a page of the run.",
        "Exit code 0 only if the poisoned step was skipped and changed nothing.",
    )
    parser.add_argument("--quick", action="store_true", help="twenty seconds: fewer steps")
    parser.add_argument("--steps", type=int, help="steps to train (default: 1000; with --quick 100)")
    where = "for run.jsonl and run.html (default: runs/demo)"
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/demo"), help=where)
    arguments = parser.parse_args(argv)
    usual, folder = 100 if arguments.quick else 1000, arguments.out
    steps = usual if arguments.steps is None else arguments.steps
    if steps < 20:
        parser.error(f"`--steps` must be at least 20, got {steps}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.jsonl").open("a").close()
    except OSError as error:
        parser.error(f"--out: cannot write there: {error}")
    print("fastguard demo: loading torch ...", file=sys.stderr)

    from .training import run

    return run(steps, folder)
