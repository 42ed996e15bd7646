"""Writes the tables into documents from saved results.

    python -m benchmarks.protection.readme benchmarks/results/protection.json benchmarks/README.md [--check]

`<!-- protection:begin -->` … `<!-- protection:end -->` gets what was to be reached and what was, `protection-policies`
the rules on recorded norms, `protection-diverging` how runs in trouble ended, `protection-troubles` a row a trouble,
`protection-guide` and `protection-precision` explosions and final losses.
"""

from __future__ import annotations

import functools

from .. import readme
from . import table

TABLES: readme.Tables = {name: functools.partial(table.table_of, name) for name in table.ROWS}

if __name__ == "__main__":
    raise SystemExit(readme.main(tables=TABLES, prog="python -m benchmarks.protection.readme"))
