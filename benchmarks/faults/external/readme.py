"""Writes the suite's tables into documents from saved results.

    python -m benchmarks.faults.external.readme benchmarks/results/faults-external.json README.md [--check]

`<!-- faults-external:begin -->` … `<!-- faults-external:end -->` gets the report half with default settings, a row a
set; `faults-external-all` the same with activations and weights watched; `faults-external-causes` what was named first
for each cause.
"""

from __future__ import annotations

import functools

from ... import readme
from .table import markdown, markdown_causes

TABLES: readme.Tables = {
    "faults-external": markdown,
    "faults-external-all": functools.partial(markdown, settings="all"),
    "faults-external-causes": markdown_causes,
}

if __name__ == "__main__":
    raise SystemExit(readme.main(tables=TABLES, prog="python -m benchmarks.faults.external.readme"))
