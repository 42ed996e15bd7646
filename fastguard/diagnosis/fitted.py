"""The weights of causes: what `python -m benchmarks.faults.fit` has written into `fitted.json` beside this file.

An entry that is not there has the usual weight, which makes a lone reason of strength 0.95 a share of 0.94, one of
0.6 0.71, and one of 0.3 0.35. A confidence is that share times `TRUST`.
"""

from __future__ import annotations

import json
from pathlib import Path

USUAL_WEIGHT = 5.2
USUAL_OFFSET = -2.2

_fitted = json.loads((Path(__file__).parent / "fitted.json").read_text(encoding="utf-8"))
WEIGHTS: dict[str, dict[str, float]] = _fitted["weights"]
OFFSETS: dict[str, float] = _fitted["offsets"]
TRUST: float = _fitted["trust"]
