"""The weights of causes: what `python -m benchmarks.faults.fit` has written into `fitted.json` beside this file.

An entry that is not there has the usual weight, which makes a lone reason of strength 0.95 a confidence of 0.94, one of
0.6 0.71, and one of 0.3 0.35.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

USUAL_WEIGHT = 5.2
USUAL_OFFSET = -2.2

_fitted = json.loads((Path(__file__).parent / "fitted.json").read_text(encoding="utf-8"))
WEIGHTS: dict[str, dict[str, float]] = _fitted["weights"]
OFFSETS: dict[str, float] = _fitted["offsets"]
SLOPE: float = _fitted["calibration"]["slope"]
OFFSET: float = _fitted["calibration"]["offset"]


def calibrated(share: float) -> float:
    """How often a cause with this share was right in kinds of runs that the weights were not fitted on.

    sigmoid(SLOPE logit(share) + OFFSET), monotone: the order of causes stays.
    """
    share = min(max(share, 1e-6), 1.0 - 1e-6)
    return 1.0 / (1.0 + math.exp(-SLOPE * math.log(share / (1.0 - share)) - OFFSET))
