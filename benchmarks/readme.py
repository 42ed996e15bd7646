"""Writes tables into documents from saved results: between `<!-- name:begin -->` and `<!-- name:end -->`.

`python -m benchmarks.speed.readme` and `python -m benchmarks.faults.readme` say which tables.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Results = dict[str, Any]


class ReadmeError(RuntimeError):
    """A document has no place for a table, or not the table that the results give."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], num_texts_at_end: int = 0) -> list[str]:
    """Lines of a table whose first column is text, as are the last ones if told; those between are figures."""
    align = ["---", *["---:"] * (len(header) - 1 - num_texts_at_end), *["---"] * num_texts_at_end]
    return ["| " + " | ".join(cells) + " |" for cells in (header, align, *rows)]


Tables = Mapping[str, Callable[[Results], list[str]]]


def render(text: str, results: Results, tables: Tables) -> str:
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


def update(path: Path, results: Results, tables: Tables, *, check: bool = False) -> bool:
    """Writes the tables into the document at `path`, with `check` nothing; returns whether they were out of date."""
    text = path.read_text(encoding="utf-8")
    try:
        new = render(text, results, tables)
    except ReadmeError as error:
        raise ReadmeError(f"{path}: {error}") from None
    if new != text and not check:
        path.write_text(new, encoding="utf-8")
    return new != text


def main(argv: Sequence[str] | None = None, *, tables: Tables, prog: str | None = None) -> int:
    """The command line `prog`; `tables` are what to put between the markers of their names."""
    parser = argparse.ArgumentParser(prog=prog, description="Write tables from results.")
    parser.add_argument("results", type=Path)
    parser.add_argument("documents", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    arguments = parser.parse_args(argv)
    results: dict[str, Any] = json.loads(arguments.results.read_text(encoding="utf-8"))
    stale = [str(path) for path in arguments.documents if update(path, results, tables, check=arguments.check)]
    if arguments.check and stale:
        print(f"out of date: {', '.join(stale)}. Run the same command without --check.")
        return 1
    return 0
