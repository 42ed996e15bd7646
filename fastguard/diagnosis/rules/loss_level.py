"""Rules on where the loss begins, where it gets stuck, and how it falls."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from .. import needs
from ..finding import Finding
from ..needs import floor_at_zero, game, is_lbfgs, is_squared_error, margin
from ..registry import rule
from ..signals import ends, median, signals_of, training_batches
from .output import last_layer, loss_and_activation

TITLE = "Loss"


@rule(
    "loss-begins-high",
    reads="the first loss and the first output, against what knowing nothing of the inputs gives; the newest losses",
    source="Karpathy 2019, A Recipe for Training Neural Networks: verify the loss at initialisation",
    remedy="The first outputs are far larger than the targets ask for: look at the initialisation (embeddings and the "
    "last layer too), at normalisation before the last layer, and at the scale of the inputs.",
    needs_descent=True,
    needs_targets=True,
)
def loss_begins_high(history: TrainingHistory, *, times: float = 8.0, min_steps: int = 100) -> Finding | None:
    """The first loss was `times` the chance level, because the first outputs were as far too large.

    Of a cross-entropy: the outputs' standard deviation was above `times`, too. Of a squared error: their size was above
    the root of `times`, and of that times the targets'. Info until `min_steps` losses were seen, and where the newest
    are below the chance level.
    """
    notes, samples = history.model, training_batches(history)[:1]
    if not samples or not history.loss_trend.firsts or samples[0].output_width < 1:
        return None
    x, first = samples[0], history.loss_trend.firsts[0]
    size = math.hypot(x.output_mean, x.output_std)
    if is_squared_error(history):
        of_targets = math.hypot(notes.target_mean or 0.0, notes.target_std or 0.0)
        chance, is_large = (notes.target_std or 0.0) ** 2, size > math.sqrt(times) * max(of_targets, 1.0)
    elif notes.loss_kind == "cross-entropy" and x.output_width > 1:
        chance, is_large = math.log(x.output_width), x.output_std > times
    else:
        return None
    if not is_large or not times * chance < first < math.inf:
        return None
    inputs = 0.0 if x.input_is_integer else math.hypot(x.input_mean, x.input_std)
    losses = signals_of(history).losses
    level = median(losses[-64:])
    return Finding(
        f"The loss began at {first:.4g}, where knowing nothing gives {chance:.4g}: the first outputs had a size of "
        f"{size:.3g}. It is {level:.4g} now.",
        layers=last_layer(history),
        severity="warning" if len(losses) >= min_steps and level > chance else "info",
        evidence={"first": first, "chance": chance, "level": level, "size": size, "inputs": inputs},
        confidence=0.9,
    )


_OVER_CLASSES = ("cross-entropy", "negative log-likelihood", "log of the output")


@rule(
    "loss-at-chance",
    reads="the level of the loss against that of guessing among as many classes as the output is wide",
    source="our own: a model that knows nothing of its inputs ends at the entropy of the targets",
    remedy="Nothing of the targets is found in the inputs: look at single samples with their targets, as the model "
    "gets them. Are they shuffled against each other, or do the inputs not arrive?",
    needs_descent=True,
)
def loss_at_chance(
    history: TrainingHistory, *, tolerance: float = 0.03, frequent: float = 0.05, num_targets: int = 512
) -> Finding | None:
    """After 100 losses their median is within a share `tolerance` of ln C, and the best average is not far below.

    Or within a share `frequent` of the entropy of the targets, where `num_targets` or more of them are known. Or, of a
    squared error, at nine tenths of the targets' variance or above. Info where the loss is not known to be one over
    classes, nor began there.
    """
    notes, s, samples = history.model, signals_of(history), training_batches(history)
    if not samples or len(s.losses) < 100:
        return None
    level, width, is_squared = median(s.losses[-64:]), samples[-1].output_width, is_squared_error(history)
    kind = notes.loss_kind or loss_and_activation(notes.loss_ops)[0]
    is_falling = len(s.losses) > 64 and not s.stands
    levels: list[tuple[float, float, float, str]] = []  # a level, how far the loss may be below and above it
    if is_squared:
        mean, std = notes.target_mean or 0.0, notes.target_std or 0.0
        if std and abs(mean) <= max(10.0, 3.0 * std) and not is_falling:  # else target-scale tells
            levels.append((std**2, 0.1, 0.2, "always giving the mean of the targets gives about"))
    elif width >= 2 and kind in ("", *_OVER_CLASSES):
        levels.append((math.log(width), tolerance, tolerance, f"guessing among {width} classes gives"))
        if notes.target_entropy is not None and (notes.num_targets or 0) >= num_targets and not is_falling:
            what = "knowing how frequent each class is gives about"
            levels.append((notes.target_entropy, frequent, frequent, what))
    for chance, below, above, what in levels:
        is_near = (1.0 - below) * chance <= level <= (1.0 + above) * chance
        if is_near and history.loss_trend.best >= (1.0 - 2.0 * below) * chance:
            began_so = any(abs(loss - chance) <= 2.0 * below * chance for loss in history.loss_trend.firsts[:1])
            evidence = {} if is_squared else {"num_classes": width, "threshold": below}
            return Finding(
                f"The loss is stuck at {level:.4g}; {what} {chance:.4g}.",
                severity="warning" if kind or began_so else "info",
                evidence={"level": level, "chance": chance, **evidence},
                confidence=0.75 if is_squared else 0.85,
            )
    return None


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
    history: TrainingHistory, *, fall: float = 0.2, share: float = 0.2, high: float = 0.2, very_few: int = 25
) -> Finding | None:
    """The loss fell by more than `fall` of itself over the newest `share` of a run that has ended within the window.

    Info, while the level is above `high` of the first losses. A warning, at any level, after more than `very_few`
    steps: in fewer than 100 where the second half of the run gained a quarter of the first losses, and in fewer than
    150 where a loss that ends at zero falls steadily and 0.35 is left. Also info: a run of at most `very_few` steps
    that keeps 0.6 of its first losses, or of fewer than 100 that keeps 0.85 of the chance level.
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
    least = 0.6 * begin if history.num_steps <= very_few else 0.85 * s.chance
    if is_run and history.num_steps < 100 and 0.0 < least < late < begin:
        return Finding(
            f"The run ended after {history.num_steps} steps. The loss is {late:.4g}, {late / begin:.0%} of its initial "
            "or chance level.",
            *ends(s.loss_entries),
            severity="info",
            evidence={"level": late, "first": begin, "num_steps": history.num_steps, "threshold_steps": very_few},
            confidence=0.85,
        )
    if len(s.losses) < 10:
        return None
    first, tenth = median(s.losses[:part]), max(1, len(s.losses) // 10)
    middle = median(s.losses[len(s.losses) // 2 - tenth // 2 :][:tenth])
    gained = middle - median(s.losses[-tenth:])
    is_early = late > 0.0 and gained > 0.25 * first > 0.0 and middle < first and late < (1.0 - fall / 4.0) * before
    is_steady = len(s.losses) < 150 and 0.35 * begin < late < 2.0 * begin
    is_steady = is_steady and s.falls_steadily and floor_at_zero(history) is True
    warns = history.num_steps > very_few and (is_steady or (is_early and len(s.losses) < 100))
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


_LOGISTIC = ("BinaryCrossEntropy", "Softplus", "LogSigmoid")
_PASSED = ("Mean", "Neg", "Add", "Sum", "Div", "Mul")


@rule(
    "one-side-wins",
    reads="the loss of a game, against where it began and what a logistic loss of chance is",
    source="Goodfellow et al. 2014, section 3, on the generator that a discriminator which is always right teaches "
    "nothing; Arjovsky and Bottou 2017",
    remedy="Weaken the side that wins: fewer steps or a lower learning rate for the discriminator, noise on its "
    "inputs, smoothed labels, a gradient penalty; or a loss that does not saturate.",
    cause=("adversary-wins", "One side of the game has won, and the other no longer learns."),
    weight=0.96,
    explains="vanishing-gradients zero-gradients growing-norm clip-rate-high",
    cause_needs=(needs.game,),
)
def one_side_wins(
    history: TrainingHistory, *, lost: float = 4.6, won: float = 0.02, steps: int = 100, min_steps: int = 200
) -> Finding | None:
    """A logistic loss of one side of a game has stood above `lost` or below `won` nats for the newest `steps` steps.

    Above `lost` the other side is right in 99 of 100 cases; below `won` this side is. From `min_steps` losses on;
    above, only where it has risen to twice its first.
    """
    s = signals_of(history)
    if game(history) is not True or len(s.losses) < min(min_steps, history.window) or history.losses.min < 0.0:
        return None
    ops = [op for op in history.model.loss_ops if not op.startswith(_PASSED)]
    if not ops or not ops[0].startswith(_LOGISTIC):
        return None
    newest = sorted(s.losses[-steps:])
    low, high = newest[len(newest) // 10], newest[-1 - len(newest) // 10]
    if low > max(lost, 2.0 * s.initial_loss):
        said, wins = f"has stood above {low:.3g} nats: the other side tells nearly all of what it is shown", False
    elif high < won:
        said, wins = f"has stood below {high:.2g} nats: there is nothing left to learn from the other side", True
    else:
        return None
    return Finding(
        f"For the last {len(newest)} steps the loss of this side of the game {said}.",
        *ends(s.loss_entries[-len(newest) :]),
        evidence={"level": newest[len(newest) // 2], "first": s.initial_loss, "is_the_winner": wins},
        confidence=0.85,
    )
