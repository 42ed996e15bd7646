"""Writes what fastguard was found to withstand into docs/reliability.md, from saved results.

    python -m benchmarks.reliability.readme [--check]

Each part saves `benchmarks/results/reliability-<part>.json`, and `benchmarks.optimizers` its `optimizers.json`: a flat
object of figures, and of the conditions under which they were taken. `number` of cases and `num_wrong` come first where
they are there. A part without results is not measured, and the tables say so. `--check` writes nothing and fails if a
table is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import readme

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED = "*not measured*"
# What a result says of its making, not of fastguard.
CONDITIONS = ("fastguard", "torch", "python", "platform", "cpu", "compiler", "commit", "date", "machine", "conditions")


class Part(NamedTuple):
    """One thing that was tried: its results' name, what it is, what is to be reached, and how to try it again."""

    name: str
    title: str
    aim: str
    command: str


PARTS = [Part(*one) for one in json.loads((Path(__file__).parent / "parts.json").read_text(encoding="utf-8"))]


def optimizers(results: Mapping[str, Any]) -> str:
    """The totals of the table of optimizers."""
    from ..optimizers.table import counts

    verdicts = [v for package in results["packages"].values() for v in package.get("verdicts", ())]
    total = counts(verdicts)
    return f"{total['run']} classes run: idle bit-identical {total['idle']}, a skip bit-identical {total['skip']}"


def reader(results: Mapping[str, Any]) -> str:
    """How long each parser took, and in how much memory."""
    each = [
        f"{results[name]['cpu_s']:.3g} s of CPU and {results[name]['peak_rss_mb']:.3g} MB with {name}"
        for name in ("json", "orjson")
        if name in results
    ]
    return f"{results['log_mb']:.0f} MB: {', '.join(each)}"


def histories(results: Mapping[str, Any]) -> str:
    """What became of the cases."""
    return (
        f"{results['num_cases']:,} tried: {results['num_crashes']} crashes, {results['num_not_strict']} with JSON that "
        "is not strict"
    )


def kill(results: Mapping[str, Any]) -> str:
    """What became of the records after each way of ending."""
    behind = ", ".join(
        f"{results[key]['most_records_behind']} after {name}"
        for key, name in (("kill_9", "kill -9"), ("sigterm", "SIGTERM"), ("ctrl_c", "Ctrl-C"))
    )
    return (
        f"{results['num_moments']:,} moments, {results['num_wrong']} wrong: {results['num_unreadable_logs']} logs "
        f"unreadable, {results['num_records_lost_in_silence']} records lost in silence; "
        f"records behind at most: {behind}"
    )


def soak(results: Mapping[str, Any]) -> str:
    """How flat it stayed."""
    return (
        f"{results['num_steps']:,} steps: {results['growth_bytes'] / 1e6:.2g} MB more memory; the last tenth took "
        f"{results['slowdown_ratio']:.2f} of the first one's CPU time; {results['num_records_lost']} records lost"
    )


# Results with more in them than figures and their names.
_OWN_WORDS = {
    "reliability-histories": histories,
    "optimizers": optimizers,
    "reliability-reader": reader,
    "reliability-kill": kill,
    "reliability-soak": soak,
}


def measured(part: Part, results: Mapping[str, Any] | None) -> str:
    """What was found, in a line."""
    if results is None:
        return NOT_MEASURED
    if part.name in _OWN_WORDS:
        return _OWN_WORDS[part.name](results)
    if not {"number", "num_wrong"} <= results.keys():
        raise readme.ReadmeError(f"{part.name}.json holds no figures")
    return f"{results['number']:,} tried, {results['num_wrong']:,} wrong"


def _conditions(results: Mapping[str, Any] | None) -> str:
    if results is None:
        return ""
    known = {**results.get("conditions", {}), **results} if isinstance(results.get("conditions"), Mapping) else results
    found = (f"{key} {known[key]}" for key in CONDITIONS if isinstance(known.get(key), str))
    return ", ".join(found)


def long_table(results: readme.Results) -> list[str]:
    """A row a part, and under what conditions its figures were taken."""
    found = [(part, results.get(part.name)) for part in PARTS]
    rows = [[part.title, part.aim, measured(part, one), _conditions(one), f"`{part.command}`"] for part, one in found]
    header = ("tried", "to reach", "found", "with", "again")
    return readme.markdown(header, rows, num_texts_at_end=4)


TABLES: Mapping[Path, readme.Tables] = {ROOT / "docs" / "reliability.md": {"reliability": long_table}}


def saved(folder: Path = RESULTS) -> readme.Results:
    """The results of all parts that have any."""
    paths = {part.name: folder / f"{part.name}.json" for part in PARTS}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a table is out of date."""
    prog = "python -m benchmarks.reliability.readme"
    parser = argparse.ArgumentParser(prog, description="Write tables from results.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    check = parser.parse_args(argv).check
    results = saved()
    stale = [path.name for path, tables in TABLES.items() if readme.update(path, results, tables, check=check)]
    if check and stale:
        print(f"out of date: {', '.join(stale)}. Run `python -m benchmarks.reliability.readme`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
