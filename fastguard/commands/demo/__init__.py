"""`fastguard demo`: a real training run under guard, with one batch that goes wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..cli import Parser

DESCRIPTION = """\
Trains a small character-level transformer under guard, on the source text of Python's standard library. Half-way it
makes one element of a gradient Inf: the guard skips that step and names the first bad tensor, and training continues.
Prints the guard's report and a sample of the model's text, and writes a page of the run.

The same --seed and --steps give the same run on one machine, except for timings."""
EPILOG = """\
Exit code 0 only if the poisoned step was skipped and left parameters and optimizer state bit-identical."""


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    return number


def _folder(given: Path | None) -> Path:
    """Where the log goes: `given`, else `runs/demo` here, else a temporary folder if this one is read-only."""
    folder = given or Path("runs/demo")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.jsonl").open("a").close()
    except OSError:
        if given is not None:
            raise
        folder = Path(tempfile.mkdtemp(prefix="fastguard-demo-"))
    return folder


def main(argv: list[str]) -> int:
    """Runs the demo; 0 if the poisoned step was skipped and left everything as it was, else 1."""
    parser = Parser("fastguard demo", DESCRIPTION, EPILOG)
    parser.add_argument("--quick", action="store_true", help="twenty seconds: fewer steps, a smaller sample")
    parser.add_argument("--steps", type=_at_least(20), help="steps to train (default: 1000; with --quick 100)")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="of weights, batches and sample (default: 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for run.jsonl and run.html (default: runs/demo)")
    parser.add_argument("--open", action="store_true", help="open the page of the run in a browser")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto (default) takes a GPU if there is one"
    )
    arguments = parser.parse_args(argv)
    try:
        arguments.out = _folder(arguments.out)
    except OSError as error:
        parser.error(f"--out: cannot write there: {error}")
    arguments.steps = arguments.steps or (100 if arguments.quick else 1000)
    print("fastguard demo: loading torch ...", file=sys.stderr)

    from .training import run

    return run(arguments)
