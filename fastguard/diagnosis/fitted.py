"""The weights of causes, which `python -m benchmarks.faults.fit` writes into `fitted.json`.

The usual weights make a lone reason of strength 0.95 a share of 0.94, one of 0.6 0.71, and one of 0.3 0.35.
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
TRUST: dict[str, float] = _fitted["trust"]  # from a share to a probability
OF_CAUSE: dict[str, float] = _fitted["trust_of_cause"]
_END = 0.02  # a share is not taken to be nearer to 0 or 1


def confidence(cause: str, share: float, num_families: int) -> float:
    """The probability that `cause` is right: a logistic regression on reports of new runs, whose slopes are at least 0.

    sigmoid(offset + of_cause + by_share · logit(share) + by_families, if symptoms are of several families of rules).
    """
    score = TRUST["offset"] + OF_CAUSE.get(cause, 0.0) + TRUST["by_share"] * log_odds(share)
    score += TRUST["by_families"] * (num_families > 1)
    return 1.0 / (1.0 + math.exp(-score))


def log_odds(share: float) -> float:
    """The logarithm of the odds of a share, which counts as at least 0.02 and at most 0.98."""
    share = min(max(share, _END), 1.0 - _END)
    return math.log(share / (1.0 - share))
