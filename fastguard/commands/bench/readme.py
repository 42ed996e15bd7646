"""Writes the tables of README.md and benchmarks/README.md from saved results.

    python -m fastguard.commands.bench.readme RESULTS.json README.md benchmarks/README.md [--check]

README.md has the cost table between `<!-- bench:begin -->` and `<!-- bench:end -->`; benchmarks/README.md the table of
measures between `<!-- measures:begin -->` and `<!-- measures:end -->`. `--check` writes nothing and fails if a table
is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import machine, table
from .harness import ratio
from .table import Results, duration, number


class ReadmeError(RuntimeError):
    """A document has no place for a table, or not the table that the results give."""


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    align = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (header, align, *rows)]


def _pair(results: Results, title: str, case: str, ours: str, theirs: str) -> list[str] | None:
    measured = results.get("cases", {}).get(case)
    quotient = None if measured is None else ratio(measured, ours, theirs)
    if measured is None or quotient is None:
        return None
    times = measured["timings"]
    return [
        title,
        duration(times[theirs]["median_us"]),
        duration(times[ours]["median_us"]),
        f"**{number(quotient.median, '')}**",
    ]


def _step(results: Results, title: str, case: str) -> list[str] | None:
    measured = results.get("steps", {}).get(case)
    if measured is None:
        return None
    plain = measured["plain_us"]["median"]
    cells = [
        f"+{duration(measured[key]['median'])} ({measured[key]['median'] / plain:+.0%})"
        for key in ("clip_adds_us", "guarded_adds_us")
    ]
    return [f"{title} ({duration(plain)})", *cells, f"**{number(measured['ratio']['median'], '')}**"]


def conditions(results: Results) -> str:
    """Under what conditions the figures were taken."""
    m = results["machine"]
    noisy = " The machine was busy with other work: the figures are noisy." if m["is_busy"] else ""
    return (
        f"{m['cpu']}, {m['num_cores']} cores, {m['num_threads']} threads, {m['isa'] or 'no extension'}; torch "
        f"{m['torch']}, Python {m['python']}, fastguard {m['fastguard']}, {m['date']}.{noisy}"
    )


def cost_table(results: Results) -> list[str]:
    """What things cost with torch and with fastguard, and the conditions."""
    gpt2 = "gpt2-float32"
    rows = [
        _pair(results, "clip, GPT-2 124M float32, limit not reached", gpt2, "clip", "torch-clip"),
        _pair(results, "the same, clipping at every step", gpt2, "clip-always", "torch-clip-always"),
        _pair(results, "clip, GPT-2 124M bfloat16, limit not reached", "gpt2-bfloat16", "clip", "torch-clip"),
        _pair(results, "clip, ResNet-50, limit not reached", "resnet50", "clip", "torch-clip"),
        _pair(results, "clip, 300 tensors × 1000, limit not reached", "300x1000", "clip", "torch-clip"),
        _pair(results, "clip, 3000 tensors × 64, limit not reached", "3000x64", "clip", "torch-clip"),
        _pair(results, "every statistic of every tensor, GPT-2 124M float32", gpt2, "stats-rows", "separate-ops"),
        _step(results, "added to a step, MLP of 101k parameters", "step-mlp"),
        _step(results, "added to a step, transformer of 4.8M parameters", "step-transformer"),
    ]
    header = ("CPU, medians", "torch", "fastguard", "ratio")
    return [
        *_markdown(header, [row for row in rows if row is not None]),
        "",
        f"Measured on {conditions(results)}",
        "Rivals ran in one process in alternating rounds, each checked against float64 first. `torch`: "
        "`torch.nn.utils.clip_grad_norm_`; for the statistics separate torch ops, with one `.item()` each; for whole "
        "steps what it adds to a step (AdamW, fused) that otherwise does not clip. `fastguard`: `clip_grad_norm_`, "
        "`tensor_stats`, and `wrap` with statistics, record and history at every step. The ratio is the median of the "
        "rounds' ratios. `benchmarks/README.md` says more.",
    ]


def measures_table(results: Results) -> list[str]:
    """The measures that fastguard holds itself to, and the conditions."""
    lines = table.measures(results)
    rows = [[m["title"], table.median(m), table.span(m), table.limit(m), m["verdict"]] for m in lines]
    return [
        *_markdown(("measure", "median", "min – max", "at most", ""), rows),
        "",
        f"Measured on {conditions(results)} {machine.line(results['machine'])}.",
    ]


Tables = Mapping[str, Callable[[Results], list[str]]]
_TABLES: Tables = {"bench": cost_table, "measures": measures_table}


def render(text: str, results: Results, tables: Tables = _TABLES) -> str:
    """`text` with every table between its markers made anew.

    Raises:
        ReadmeError: it has no markers.
    """
    found = 0
    for name, make in tables.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        body = "\n".join(["", *make(results), "", ""])
        text, count = pattern.subn(lambda match, body=body: match[1] + body + match[2], text)  # type: ignore[misc]
        found += count
    if not found:
        markers = " or ".join(f"<!-- {name}:begin -->" for name in tables)
        raise ReadmeError(f"no table can be put here: there is no {markers} with its end")
    return text


def update(path: Path, results: Results, *, check: bool = False, tables: Tables = _TABLES) -> bool:
    """Writes the tables into the document at `path`, with `check` nothing; returns whether they were out of date."""
    text = path.read_text(encoding="utf-8")
    try:
        new = render(text, results, tables)
    except ReadmeError as error:
        raise ReadmeError(f"{path}: {error}") from None
    if new != text and not check:
        path.write_text(new, encoding="utf-8")
    return new != text


def main(
    argv: Sequence[str] | None = None,
    *,
    tables: Tables = _TABLES,
    prog: str = "python -m fastguard.commands.bench.readme",
) -> int:
    """The command line; `tables` are what to put between the markers of their names."""
    parser = argparse.ArgumentParser(prog=prog, description="Write tables from results.")
    parser.add_argument("results", type=Path)
    parser.add_argument("documents", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    arguments = parser.parse_args(argv)
    results: dict[str, Any] = json.loads(arguments.results.read_text(encoding="utf-8"))
    stale = [str(path) for path in arguments.documents if update(path, results, check=arguments.check, tables=tables)]
    if arguments.check and stale:
        print(f"out of date: {', '.join(stale)}. Run the same command without --check.")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
