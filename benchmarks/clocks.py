"""The command line of benchmarks that take steps in turn: rounds, the clock, where figures are kept."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastguard


def make_parser(module: str, description: str | None, rounds: float, meaning: str) -> argparse.ArgumentParser:
    """The command line; `rounds` is the default of `--rounds`, an integer if that is one."""
    parser = argparse.ArgumentParser(
        f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=type(rounds), default=rounds, help=meaning)
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread instead of time passed")
    return parser


def make_clock(arguments: argparse.Namespace) -> Callable[[], float]:
    """The clock that was asked for; prints what is measured, on what."""
    if arguments.cpu_time:
        torch.set_num_threads(1)
    what = "CPU time" if arguments.cpu_time else "time passed"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fastguard {fastguard.__version__}, {what}")
    return time.process_time if arguments.cpu_time else time.perf_counter


def keep(arguments: argparse.Namespace, figures: Any) -> None:
    """Writes the figures to where `--json` says, if it says so."""
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
