"""Writes the suite's tables into documents from saved results.

    python -m benchmarks.faults.readme benchmarks/results/faults.json benchmarks/README.md [--check]

`<!-- faults:begin -->` … `<!-- faults:end -->` gets the measures beside the baselines', `faults-each` a row a fault,
`faults-confusion` what was planted by what was named first.
"""

from __future__ import annotations

from .. import readme
from .table import markdown_confusion, markdown_faults, markdown_measures

TABLES: readme.Tables = {
    "faults": markdown_measures,
    "faults-each": markdown_faults,
    "faults-confusion": markdown_confusion,
}

if __name__ == "__main__":
    raise SystemExit(readme.main(tables=TABLES, prog="python -m benchmarks.faults.readme"))
