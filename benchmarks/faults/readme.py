"""Writes the table of first answers into documents from saved results.

    python -m benchmarks.faults.readme benchmarks/results/faults-asked-once.json README.md [--check]

`<!-- faults-external:begin -->` … `<!-- faults-external:end -->` gets a row a set: what the rules said the first time
they were asked, before any rule was changed for that set.
"""

from __future__ import annotations

from typing import Any

from .. import readme
from .table import number

_COLUMNS = ("num_faulty", "found", "cause_right", "wrong_cause", "num_sound", "false_alarms", "sure_right")
_HEADER = ("set", "asked on", "faulty", "found", "cause right", "wrong cause", "sound", "false alarms", "sure, right")
_PER = {  # which runs a share is of
    "found": lambda row: row["num_faulty"],
    "cause_right": lambda row: row["num_faulty"],
    "wrong_cause": lambda row: row["num_faulty"] * (row["names_a_cause"] or 0.0),
    "false_alarms": lambda row: row["num_sound"],
    "sure_right": lambda row: row["num_sure"],
}


def together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all sets, each share weighted by the number of its runs."""
    found: dict[str, Any] = {name: sum(row[name] for row in rows) for name in ("num_faulty", "num_sound")}
    for name, count in _PER.items():
        found[name] = sum((row[name] or 0.0) * count(row) for row in rows) / sum(map(count, rows))
    return found


def markdown(results: readme.Results) -> list[str]:
    """A row a set, one of all sets, and the conditions."""
    rows = results["sets"]
    named = [*((row["name"], row["date"], row) for row in rows), ("all", "", together(rows))]
    body = [[name, date, *(number(row[key]) for key in _COLUMNS)] for name, date, row in named]
    c = results["conditions"]
    where = (
        f"Rules asked every {c['check_every']} steps, default settings. {c['cpu']}, one thread a run; "
        f"torch {c['torch']}, scikit-learn {c['sklearn']}, Python {c['python']}, fastguard {c['fastguard']}."
    )
    return [*readme.markdown(_HEADER, body), "", where]


def markdown_sets(results: readme.Results) -> list[str]:
    """What each set holds, and the commit whose rules were asked."""
    return readme.markdown(
        ("set", "rules of", "what it holds"), [(row["name"], row["rules"], row["what"]) for row in results["sets"]], 2
    )


TABLES: readme.Tables = {"faults-external": markdown, "faults-external-sets": markdown_sets}

if __name__ == "__main__":
    raise SystemExit(readme.main(tables=TABLES, prog="python -m benchmarks.faults.readme"))
