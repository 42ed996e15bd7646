"""Rules on how fast the loss falls: too fast to be learning, and still falling when the run ends."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import floor_at_zero, is_lbfgs, margin
from ..registry import rule
from ..signals import ends, median, signals_of

TITLE = "Loss"


@rule(
    "loss-gone",
    reads="how soon the loss was down to nearly nothing",
    source="our own: what is learnt at once was there to be read",
    remedy="A loss of nearly nothing after a few steps is too good: are the targets constant, among the inputs, or "
    "computed from the output itself? Is the loss what it is meant to be?",
    needs_descent=True,
    needs_harm=True,
)
def loss_gone(
    history: TrainingHistory, *, ratio: float = 1e-3, steps: int = 40, min_first: float = 1e-6
) -> Finding | None:
    """Ten or more losses of the first `steps` steps are below `ratio` of the first.

    The first: the median of ten. Silent where it is not above `min_first`. Info where the loss has a margin, which
    is met at once where the task is easy.
    """
    first = history.loss_trend.first
    if history.loss_trend.count < 20 or not first > min_first or is_lbfgs(history):
        return None
    buckets = [b for b in history.overview.buckets if b.loss.num and b.last_step < steps]
    small = [b for b in buckets if b.loss.max < ratio * first]
    num_small = sum(b.loss.num for b in small)
    since = sum(b.loss.num for b in buckets if small and b.first_step >= small[0].first_step)
    if num_small < 10 or not small or since > 2 * num_small:  # batches with nothing to learn among others
        return None
    return Finding(
        f"The loss fell from {first:.4g} to {small[0].loss.mean:.2g} by step {small[0].first_step}.",
        small[0].first_step,
        small[-1].last_step,
        severity="info" if margin(history) else "warning",
        evidence={"first": first, "level": small[0].loss.mean, "threshold_ratio": ratio, "threshold_steps": steps},
        confidence=0.75,
    )


@rule(
    "loss-still-falling",
    reads="the newest losses of a run that has ended, early and late in the window",
    source="our own; early stopping asks for a patience, and this is its reverse",
    remedy="If you meant to stop here, ignore this. Otherwise train for more steps, or raise the learning rate.",
    needs_descent=True,
    cause=("stopped-too-early", "The run ended before its loss had settled."),
    weight=0.6,
)
def loss_still_falling(
    history: TrainingHistory,
    *,
    fall: float = 0.2,
    share: float = 0.2,
    high: float = 0.2,
    much: float = 0.25,
    few: int = 100,
    very_few: int = 25,
    left: float = 0.6,
    left_of_chance: float = 0.85,
    some: int = 150,
    much_left: float = 0.35,
    min_steps: int = 10,
) -> Finding | None:
    """The loss fell by more than `fall` of itself over the newest `share` of a run that fits the window.

    Asked once a run has ended, from `min_steps` losses on, while the level is above `high` of the first losses. Info.
    A warning, at any level, after more than `very_few` steps: in fewer than `few`, where the second half of the run
    brought the loss down by a share `much` of the first losses and the newest part by a quarter of `fall`; in fewer
    than `some`, where a loss that ends at zero falls steadily and a share `much_left` is left. A run of at most
    `very_few` steps that keeps a share `left` of its first losses, or one of fewer than `few` that keeps a share
    `left_of_chance` of the chance level, is info as well. Silent where the loss has not fallen.
    """
    s = signals_of(history)
    if not history.has_ended or len(s.losses) < 4 or history.num_clean > history.window:
        return None
    part = max(3, int(share * len(s.losses)))
    late, before = median(s.losses[-part:]), median(s.losses[-2 * part : -part])
    initial = median(s.losses[: part if len(s.losses) >= 2 * part else 1])
    if not late < initial:
        return None
    begin = min(initial, s.chance or math.inf)
    is_run = not is_lbfgs(history) and any(norm > 0.0 for norm in s.norms)
    least = left * begin if history.num_steps <= very_few else left_of_chance * s.chance
    if is_run and history.num_steps < few and 0.0 < least < late < begin:
        return Finding(
            f"The run ended after {history.num_steps} steps. The loss is {late:.4g}, {late / begin:.0%} of its initial "
            "or chance level.",
            *ends(s.loss_entries),
            severity="info",
            evidence={"level": late, "first": begin, "num_steps": history.num_steps, "threshold_steps": very_few},
            confidence=0.85,
        )
    if len(s.losses) < min_steps:
        return None
    first, tenth = median(s.losses[:part]), max(1, len(s.losses) // 10)
    middle = median(s.losses[len(s.losses) // 2 - tenth // 2 :][:tenth])
    gained = middle - median(s.losses[-tenth:])
    is_early = late > 0.0 and gained > much * first > 0.0 and middle < first and late < (1.0 - fall / 4.0) * before
    is_steady = len(s.losses) < some and much_left * begin < late < 2.0 * begin
    is_steady = is_steady and s.falls_steadily and floor_at_zero(history) is True
    warns = history.num_steps > very_few and (is_steady or (is_early and len(s.losses) < few))
    if not is_early and not warns and (not 0.0 < late < (1.0 - fall) * before or not late > high * first):
        return None
    return Finding(
        f"The loss was still falling when the run ended: from {before:.4g} to {late:.4g} over the last {part} steps"
        + (f", and by {gained / first:.0%} of its initial value in the second half." if is_early or warns else "."),
        *ends(s.loss_entries[-2 * part :]),
        severity="warning" if warns else "info",
        evidence={"level": late, "before": before, "gained_in_second_half": gained / first, "threshold_fall": fall},
        confidence=0.85 if is_early or warns else 0.8,
    )
