"""The experiment lies beside the package, in benchmarks/; where only the tests were copied, these are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if (ROOT / "benchmarks" / "protection").is_dir() and str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
