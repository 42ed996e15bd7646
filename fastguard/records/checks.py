"""The toolkit's three checks of a `TrainingHistory`, by its own definitions."""

from __future__ import annotations

import math
from typing import Any

from .series import Series

NUM_NEWEST = 5
NUM_PLATEAU = 50
MIN_PLATEAU_STEPS = 100
PLATEAU_SPREAD = 0.001
MIN_VALIDATIONS = 20


def diagnose_losses(history: Series) -> dict[str, Any]:
    """`{"status", "issues", "recommendations"}` as in `TrainingHistory.diagnose`; each issue begins with its name."""
    losses = history.loss
    status = "healthy" if history.num_steps else "no-evidence"
    issues: list[str] = []
    recommendations: list[str] = []

    def report(severity: str, issue: str, recommendation: str) -> None:
        nonlocal status
        status = "critical" if "critical" in (status, severity) else "warning"
        issues.append(issue)
        recommendations.append(recommendation)

    bad = sum(not math.isfinite(loss) for loss in losses[-NUM_NEWEST:])
    if bad:
        report(
            "critical",
            f"LOSS_EXPLOSION: {bad} of the last {len(losses[-NUM_NEWEST:])} losses are NaN or Inf",
            "Divide the learning rate by 10, and clip the gradients (max_norm=1.0)",
        )
    newest = [loss for loss in losses[-NUM_PLATEAU:] if math.isfinite(loss)]
    if len(losses) >= min(MIN_PLATEAU_STEPS, history.window) and len(newest) == NUM_PLATEAU:
        mean = sum(newest) / len(newest)
        spread = (max(newest) - min(newest)) / abs(mean) if mean else math.inf
        if spread < PLATEAU_SPREAD:
            report(
                "warning",
                f"LOSS_PLATEAU: the last {NUM_PLATEAU} losses are within {100 * spread:.2g} % of their mean {mean:.4g}",
                "Raise the learning rate, or change its schedule",
            )
    pairs = [v for v in history.validations if math.isfinite(v.train_loss)]
    if len(pairs) >= MIN_VALIDATIONS:
        quarter = len(pairs) // 4
        first, last = pairs[:quarter], pairs[-quarter:]
        train = [sum(v.train_loss for v in part) / quarter for part in (first, last)]
        validation = [sum(v.val_loss for v in part) / quarter for part in (first, last)]
        if train[1] < train[0] and validation[1] > validation[0]:
            report(
                "warning",
                f"OVERFITTING: training loss fell from {train[0]:.4g} to {train[1]:.4g}, validation loss rose from "
                f"{validation[0]:.4g} to {validation[1]:.4g}",
                "Add dropout or weight decay, get more data, or stop earlier",
            )
    return {"status": status, "issues": issues, "recommendations": recommendations}
