"""Rules that point at the data: spikes that come back with the epoch, and labels that cannot be learnt."""

from __future__ import annotations

import math
from itertools import pairwise

from ...records import Spike, TrainingHistory
from ..finding import Finding
from ..needs import descent
from ..registry import rule
from ..signals import ends, median, signals_of

TITLE = "Data"


@rule(
    "periodic-loss-spikes",
    of="loss-spike",
    remedy="The same batch hurts in every epoch: find the samples at this place of the data, look at their inputs, "
    "scale and labels, and repair or drop them. Shuffle the data anew each epoch.",
    needs_harm=True,
    cause=("recurring-bad-batch", "The same batch hurts in every epoch."),
    weight=0.95,
    explains="loss-spike norm-spike",
)
def periodic_loss_spikes(
    history: TrainingHistory, *, num_spikes: int = 3, tolerance: int = 1, min_period: int = 5, ratio: float = 1.5
) -> Finding | None:
    """At least `num_spikes` spikes above `ratio` times their average, a constant number of steps apart.

    To within `tolerance` steps, at least `min_period` apart; one in two may be missing. Where the steps of an epoch are
    known, two spikes exactly an epoch apart are enough. Info where they are not known and no spike
    rises above the run's first losses: copies that are renewed and restarts of a schedule keep a calendar too; and
    where the loss is not one that is to come down, as in a game.
    """
    spikes = [s for s in history.loss_trend.spikes if s.value > ratio * s.mean and s.last_step - s.first_step < 5]
    epoch = history.model.steps_per_epoch
    need = num_spikes
    if epoch is not None and len(spikes) == 2 and spikes[1].first_step - spikes[0].first_step == epoch:
        need = 2
    if len(spikes) < need:
        return None
    period = _period(spikes[-8:], tolerance, min_period)
    if period is None:
        return None
    worst = max(spikes, key=lambda spike: spike.value)
    hurts = (epoch is not None or worst.value > history.loss_trend.first) and descent(history) is not False
    where = f", place {worst.first_step % epoch} of each epoch of {epoch}" if epoch == period else ""
    return Finding(
        f"The loss spikes every {period} steps{where}: {len(spikes)} times so far, up to {worst.value:.4g}.",
        spikes[0].first_step,
        spikes[-1].last_step,
        severity="warning" if hurts else "info",
        evidence={"period": period, "num_spikes": len(spikes), "largest": worst.value, "threshold": num_spikes},
        confidence=0.95 if len(spikes) > num_spikes else 0.85,
    )


def _period(spikes: list[Spike], tolerance: int, least: int) -> int | None:
    gaps = [b.first_step - a.first_step for a, b in pairwise(spikes)]
    period = min(gaps)
    if period < least:
        return None
    for gap in gaps:
        times = round(gap / period)
        if times > 2 or abs(gap - times * period) > tolerance * times:
            return None
    return period


@rule(
    "label-noise",
    reads="validation losses, each with the training loss of its time",
    source="our own; networks fit random labels, and only validation shows it (Zhang et al. 2017)",
    remedy="Check whether labels are shuffled against inputs, wrong, or from another distribution than the validation "
    "set's: the model memorises the training targets and does not generalise.",
    needs_descent=True,
)
def label_noise(
    history: TrainingHistory, *, learnt: float = 0.3, carried: float = 0.1, validations: int = 4
) -> Finding | None:
    """The training loss fell by a share `learnt` of where it began, the best validation loss by less than `carried`.

    From `validations` validations on, the newest above the first. Only a hint: too few samples look alike. More than
    that where the best stands far above what knowing nothing gives: what is learnt is wrong for others. Silent where
    sixty steps were enough to learn everything by heart, which so few samples take whatever their labels.
    """
    known = [v for v in history.validations if math.isfinite(v.train_loss)]
    first = signals_of(history).initial_loss
    if len(known) < validations or not first > 0.0:
        return None
    best = min(v.val_loss for v in known)
    newest = median([v.val_loss for v in known[-3:]])
    if min(signals_of(history).loss_levels[:3], default=first) < 0.05 * first:
        return None
    if known[-1].train_loss > (1.0 - learnt) * first or best < (1.0 - carried) * first or newest <= known[0].val_loss:
        return None
    return Finding(
        f"The training loss fell from {first:.4g} to {known[-1].train_loss:.4g}, the validation loss never below "
        f"{best:.4g}.",
        *ends(known),
        evidence={"train_loss": known[-1].train_loss, "first": first, "best_val_loss": best, "threshold": carried},
        confidence=0.9 if best > 1.3 * max(first, signals_of(history).chance) else 0.6,
    )
