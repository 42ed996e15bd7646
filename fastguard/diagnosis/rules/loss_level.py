"""Rules on where the loss begins, where it gets stuck, and how it falls."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Seen
from ..needs import floor_at_zero, game, is_binary, is_squared_error
from ..registry import rule
from ..signals import has_had_time, median, signals_of, training_batches
from .output import last_layer

TITLE = "Loss"


@rule(
    "loss-begins-high",
    source="Karpathy 2019, A Recipe for Training Neural Networks: verify the loss at initialisation",
    see="The loss began at {first:.4g}, where guessing gives {chance:.4g}: the first outputs had a standard deviation "
    "of {size:.3g}. It is {level:.4g} now.",
    remedy="Look at the initialisation, the normalisation before the last layer, and the scale of the inputs.",
    needs_descent=True,
    needs_targets=True,
)
def loss_begins_high(history: TrainingHistory, *, times: float = 8.0, min_steps: int = 100) -> Seen | None:
    """The first cross-entropy was `times` the chance level, and the outputs' standard deviation was above `times`.

    Info until `min_steps` losses were seen, and if the newest are below the chance level.
    """
    samples, firsts = training_batches(history)[:1], history.loss_trend.firsts
    if not samples or not firsts or history.model.loss_kind != "cross-entropy" or samples[0].output_width < 2:
        return None
    x, first, losses = samples[0], firsts[0], signals_of(history).losses
    chance, level = math.log(x.output_width), median(losses[-64:])
    if not x.output_std > times or not times * chance < first < math.inf:
        return None
    return Seen(
        layers=last_layer(history),
        warn=len(losses) >= min_steps and level > chance,
        first=first,
        chance=chance,
        level=level,
        size=x.output_std,
    )


_OVER_CLASSES = ("", "cross-entropy", "negative log-likelihood", "log of the output")


@rule(
    "loss-at-chance",
    see="The loss is stuck at {level:.4g}; {_what} {chance:.4g}.",
    remedy="Look at single samples with their targets: are they shuffled, or do the inputs not arrive?",
    needs_descent=True,
)
def loss_at_chance(history: TrainingHistory, *, tolerance: float = 0.03, frequent: float = 0.05) -> Seen | None:
    """The median loss is within a share `tolerance` of ln C, and the best average is not far below.

    Fires from 100 losses on (more of small batches), unless it still falls by three standard errors.

    Or, if the loss no longer falls, from 200 on, within `tolerance` of ln 2 for a loss of yes or no; within a share
    `frequent` of the entropy of 512 targets or more; or, for a squared error, from 500 on at nine tenths of the
    targets' variance or above.
    """
    notes, s, samples = history.model, signals_of(history), training_batches(history)
    is_squared, is_of_two = is_squared_error(history), is_binary(history)
    is_early = len(s.losses) < 100 or not has_had_time(history, 100)
    if not (samples or is_of_two) or is_early or (s.still_falls and not is_squared):
        return None
    level, width = median(s.losses[-64:]), samples[-1].output_width if samples else 0
    levels: list[tuple[float, float, float, str]] = []  # a level, how far the loss may be below and above it
    if is_squared and s.is_flat and notes.target_std and has_had_time(history, 500):
        levels.append((notes.target_std**2, 0.1, 0.2, "always giving the mean of the targets gives about"))
    elif not is_squared and width >= 2 and notes.loss_kind in _OVER_CLASSES:
        levels.append((math.log(width), tolerance, tolerance, f"guessing among {width} classes gives"))
        is_settled = s.is_flat and has_had_time(history, 200)
        if notes.target_entropy is not None and (notes.num_targets or 0) >= 512 and is_settled:
            what = "knowing how frequent each class is gives about"
            levels.append((notes.target_entropy, frequent, frequent, what))
    if s.is_flat and has_had_time(history, 200) and is_of_two:
        levels.append((math.log(2.0), tolerance, tolerance, "guessing yes or no gives"))
    for chance, below, above, what in levels:
        is_near = (1.0 - below) * chance <= level <= (1.0 + above) * chance
        if is_near and history.loss_trend.best >= (1.0 - 2.0 * below) * chance:
            sure, num_classes = (0.75, None) if is_squared else (0.85, width)
            return Seen(sure=sure, level=level, chance=chance, num_classes=num_classes, _what=what)
    return None


@rule(
    "loss-still-falling",
    see="The loss was still falling when the run ended: from {before:.4g} to {level:.4g} over the last {_part} steps"
    "{_half}.",
    remedy="Train for more steps, or raise the learning rate; ignore this if you meant to stop here.",
    needs_descent=True,
    cause=("stopped-too-early", "The run ended before its loss had settled."),
    weight=0.6,
)
def loss_still_falling(
    history: TrainingHistory, *, fall: float = 0.2, share: float = 0.2, high: float = 0.2, very_few: int = 25
) -> Seen | None:
    """The loss fell by more than a share `fall` over the newest share `share` of a run that ended within the window.

    Info, while it is above `high` of the first losses. At any level, and a warning if the newest three validation
    losses fall, too, after more than `very_few` steps: in fewer than 100 if the second half gained a quarter of the
    first losses, in fewer than 150 if a loss that ends at zero falls steadily and 0.35 is left.
    """
    s = signals_of(history)
    if not history.has_ended or len(s.losses) < 10 or history.num_clean > history.window:
        return None
    part, tenth, half = max(3, int(share * len(s.losses))), max(1, len(s.losses) // 10), len(s.losses) // 2
    first, before, late = median(s.losses[:part]), median(s.losses[-2 * part : -part]), median(s.losses[-part:])
    middle = median(s.losses[half - tenth // 2 :][:tenth])
    gained = middle - median(s.losses[-tenth:])
    is_early = gained > 0.25 * first > 0.0 and middle < first and 0.0 < late < (1.0 - fall / 4.0) * before
    is_early = is_early and s.falls_steadily
    is_steady = s.falls_steadily and late > 0.35 * min(first, s.chance or math.inf) and floor_at_zero(history) is True
    limit = 150 if is_steady else 100 if is_early else 0
    is_short = very_few < history.num_steps and len(s.losses) < limit
    validations = [v.val_loss for v in history.validations][-3:]
    is_falling = is_early or is_short or max(0.0, high * first) < late < (1.0 - fall) * before
    if not late < first or not is_falling:
        return None
    return Seen(
        at=s.loss_entries[-2 * part :],
        warn=is_short and len(validations) == 3 and validations[0] > validations[1] > validations[2],
        sure=0.85 if is_early or is_short else 0.8,
        level=late,
        before=before,
        _part=part,
        _half=f", and by {gained / first:.0%} of its initial value in the second half" if is_early or is_short else "",
    )


_LOGISTIC = ("BinaryCrossEntropy", "Softplus", "LogSigmoid")
_PASSED = ("Mean", "Neg", "Add", "Sum", "Div", "Mul")


@rule(
    "one-side-wins",
    source="Goodfellow et al. 2014, section 3, on the generator that a discriminator which is always right teaches "
    "nothing; Arjovsky and Bottou 2017",
    see="For the last {_num} steps the loss of this side of the game has been {_where}.",
    remedy="Weaken the side that wins: fewer steps, a lower rate, noise on its inputs, smoothed labels.",
    cause=("adversary-wins", "One side of the game has won, and the other no longer learns."),
    weight=0.96,
    explains="vanishing-gradients zero-gradients growing-norm clip-rate-high",
)
def one_side_wins(history: TrainingHistory, *, lost: float = 4.6, won: float = 0.02, steps: int = 100) -> Seen | None:
    """A game's logistic loss was above `lost` or below `won` nats for the newest `steps` steps, and half of the window.

    Above `lost` the other side is right in 99 of 100 cases; below `won` this side is. Fires from 200 losses on; above,
    only if it has doubled.
    """
    s = signals_of(history)
    ops = [op for op in history.model.loss_ops if not op.startswith(_PASSED)]
    if game(history) is not True or len(s.losses) < min(200, history.window) or history.losses.min < 0.0:
        return None
    newest = sorted(s.losses[-max(steps, len(s.losses) // 2) :])
    low, high = newest[len(newest) // 10], newest[-1 - len(newest) // 10]
    is_lost = low > max(lost, 2.0 * s.initial_loss)
    if not "".join(ops[:1]).startswith(_LOGISTIC) or not (is_lost or high < won):
        return None
    above = f"above {low:.3g} nats: the other side is right about nearly all of its samples"
    below = f"below {high:.2g} nats: there is nothing left to learn from the other side"
    return Seen(at=s.loss_entries[-len(newest) :], _num=len(newest), _where=above if is_lost else below)
