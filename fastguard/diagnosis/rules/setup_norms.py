"""A rule on the running statistics of BatchNorm, which evaluation uses instead of the batch's."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from .. import needs
from ..finding import Finding, count, listed
from ..registry import rule
from ..signals import median, signals_of

TITLE = "Set-up"


@rule(
    "running-statistics-apart",
    reads="running mean and variance of BatchNorm modules beside those of a training batch; validation losses",
    source="Ioffe and Szegedy 2015, section 3.1: evaluation takes the population's statistics for the batch's",
    remedy="Look at momentum (0.1 is usual, 0 never follows), at eval() or reset_running_stats() in the loop, at "
    "batches of a few samples, at statistics in half precision, and at whether training data come in another order or "
    "scale than in validation.",
    cause=(
        "normalisation-statistics",
        "In evaluation, BatchNorm normalises with statistics that differ from those of the batches.",
    ),
    weight=0.97,
    explains="overfitting label-noise validation-inputs-differ",
    cause_needs=(needs.batch_statistics,),
)
def running_statistics_apart(
    history: TrainingHistory, *, gap: float = 0.5, ratio: float = 2.0, worse: float = 1.1, min_steps: int = 30
) -> Finding | None:
    """A BatchNorm's running mean lies more than `gap` standard deviations from a batch's, or its variance a factor of
    more than `ratio`, over all channels, after `min_steps` clean steps.

    A warning where the newest validation loss is `worse` times the training loss, and was so from the first one on;
    info otherwise. Critical, and at any step, where the running statistics are not finite.
    """
    lost = [name for name, (away, _) in history.model.norm_statistics.items() if away == math.inf]
    if lost:
        return _lost(history, lost)
    if history.num_clean < min_steps:
        return None
    apart = {
        name: (away, times)
        for name, (away, times) in history.model.norm_statistics.items()
        if away > gap or not 1.0 / ratio <= times <= ratio
    }
    if not apart:
        return None
    worst = max(apart, key=lambda name: max(apart[name][0], abs(math.log(apart[name][1]))))
    away, times = apart[worst]
    known = [v for v in history.validations if math.isfinite(v.train_loss) and v.train_loss > 0.0]
    is_felt = len(known) > 1 and sum(v.val_loss > worse * v.train_loss for v in known) >= 0.8 * len(known)
    level = signals_of(history).loss_level
    return Finding(
        f"The running statistics of {count(len(apart), 'BatchNorm module')} of {len(history.model.norm_statistics)} "
        f"are not those of the batches ({listed(list(apart))}): of {worst} the means lie {away:.2g} standard "
        f"deviations apart, and the variance is {times:.2g} times the batch's.",
        severity="warning" if is_felt else "info",
        layers=tuple(apart)[:8],
        evidence={
            "gap": away,
            "variance_ratio": times,
            "val_loss": median([v.val_loss for v in known[-3:]]) if known else None,
            "train_loss": level,
            "threshold_gap": gap,
        },
        confidence=0.9 if is_felt else 0.6,
    )


def _lost(history: TrainingHistory, names: list[str]) -> Finding:
    newest = history.recent[-1].step if history.recent else None
    return Finding(
        f"The running statistics of {count(len(names), 'BatchNorm module')} of {len(history.model.norm_statistics)} "
        f"are not finite ({listed(names)}): in eval mode what comes out is NaN, or zero.",
        newest,
        newest,
        severity="critical",
        layers=tuple(names)[:8],
        evidence={"num_not_finite": len(names), "num_modules": len(history.model.norm_statistics)},
        confidence=1.0,
    )
