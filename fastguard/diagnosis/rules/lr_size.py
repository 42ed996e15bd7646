"""Rules on the size of steps where no weights are sampled: what learning rate, optimizer and gradients make of them."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import descent, is_squared_error
from ..registry import rule
from ..signals import ends, has_had_time, median, signals_of

TITLE = "Learning rate"

# Optimizers whose first steps move an element by about the learning rate, whatever the gradient.
_NORMALISING = frozenset(["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Lion", "SignSGD"])
_LEAST_STD = 1e-3
_ERRORS = ("Mse", "L1", "SmoothL1", "Huber")


def estimated_update_ratio(history: TrainingHistory, *, at_first: bool = False) -> float | None:
    """By which share of itself the median weight matrix is changed a step, lately or `at_first`; None if not known.

    Weights are taken as large as they began. Of optimizers that divide by the size of the gradient an element moves by
    the learning rate (of Adagrad by ever less); of SGD by that times the gradient, over one minus the momentum.
    """
    s, notes = signals_of(history), history.model
    kinds = {str(settings.get("kind", "")) for settings in notes.optimizer_settings}
    if len(kinds) != 1 or not s.lrs:
        return None
    lr = s.lrs[0] if at_first else max(s.lrs[-64:])
    spreads = {name: std for name, (std, usual) in notes.initialization.items() if std > max(_LEAST_STD, 0.2 * usual)}
    if kinds <= _NORMALISING:
        slowed = math.sqrt(max(history.num_clean, 1)) if kinds == {"Adagrad"} else 1.0
        ratios = [lr / slowed / std for std in spreads.values()]
    elif kinds == {"SGD"}:
        coefficient = median([entry.clip_coef for entry in s.clean[-64:]]) if s.clean else 1.0
        momentum = max((float(group.get("momentum") or 0.0) for group in notes.optimizer_settings), default=0.0)
        gain = lr * coefficient / max(1.0 - momentum, 1e-3)
        tracks = {name: history.tensors[name] for name in spreads if name in history.tensors}
        sizes = {name: track.first_log_rms if at_first else track.log_rms for name, track in tracks.items()}
        known = {name: log_rms for name, log_rms in sizes.items() if not math.isnan(log_rms)}
        ratios = [gain * math.exp(min(log_rms, 300.0)) / spreads[name] for name, log_rms in known.items()]
    else:
        return None
    return median(ratios) if ratios else None


@rule(
    "steps-too-large",
    of="update-ratio-high",
    remedy="Divide the learning rate by 10 to 100; fastguard.LearningRateFinder finds one.",
    needs_descent=True,
)
def steps_too_large(
    history: TrainingHistory, *, ratio: float = 0.3, progress: float = 0.1, min_steps: int = 80
) -> Finding | None:
    """A step changes the median weight by an estimated share `ratio` or more, and little has been learnt.

    Little: from `min_steps` losses on, less than a share `progress` of the first has been gained; three times that
    where a step is as large as the weight.
    """
    value, s = estimated_update_ratio(history), signals_of(history)
    least = progress * (3.0 if (value or 0.0) >= 1.0 else 1.0)
    if value is None or value < ratio or len(s.losses) < min_steps or s.progress >= least:
        return None
    return Finding(
        f"At a learning rate of {max(s.lrs[-64:]):.3g} a step changes the median weight by an estimated {value:.2g} "
        "times its first size.",
        *ends(history.clean),
        evidence={"update_ratio": value, "threshold": ratio},
        confidence=0.9 if value > 3 * ratio else 0.75,
    )


@rule(
    "steps-too-small",
    of="update-ratio-low",
    remedy="Raise the learning rate by 10 to 100 times; fastguard.LearningRateFinder finds one. Look for a scheduler, "
    "a clip limit or a loss scale that holds the steps down.",
    needs_descent=True,
)
def steps_too_small(
    history: TrainingHistory,
    *,
    ratio: float = 5e-4,
    progress: float = 0.1,
    still: float = 0.02,
    min_steps: int = 40,
    patience: int = 100,
) -> Finding | None:
    """A step changes the median weight by an estimated share of less than `ratio`, and little has been learnt.

    Little: from `min_steps` losses at half of the largest learning rate on, less than a share `progress` of the first;
    or weights that moved by less than `still` of themselves in all. Asked from `patience` losses on, and at the end.
    Or, asked from twice as many on, less than twice `ratio`, and a loss that falls steadily with half of it left.
    """
    value, s = estimated_update_ratio(history), signals_of(history)
    if value is None or value >= 2.0 * ratio or s.num_full_lr < min_steps or (s.is_lr_rising and not history.has_ended):
        return None
    moved = value * history.num_clean
    is_slow = value < ratio and (s.progress < progress or (moved < still and s.progress < 0.5))
    is_slow = is_slow or (s.progress < 0.5 and history.losses.count >= 2 * patience and s.falls_steadily)
    if history.loss_trend.count < min_steps or not is_slow or not has_had_time(history, patience):
        return None
    return Finding(
        f"A step changes the median weight by an estimated {value:.2g} of its first size, {moved:.2g} over the "
        f"{history.num_clean} steps of the run if all went one way.",
        *ends(history.clean),
        evidence={"update_ratio": value, "threshold": ratio, "progress": s.progress},
        confidence=0.9 if moved < 0.1 else 0.6,
    )


_USUAL = {  # from the least to the largest learning rate that people use
    "SGD": (1e-5, 3.0),
    "Adadelta": (0.03, 30.0),
    "Adagrad": (1e-4, 1.0),
    "Lion": (1e-7, 3e-3),
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"), (1e-6, 0.05)),
}


def _target_size(history: TrainingHistory) -> float:
    """Root of mean square of targets that are numbers, which is how far weights have to go; 0.0 where not known."""
    notes = history.model
    is_of_numbers = is_squared_error(history) or notes.loss_ops[:1] in [(f"{name}LossBackward0",) for name in _ERRORS]
    return math.hypot(notes.target_mean or 0.0, notes.target_std or 0.0) if is_of_numbers else 0.0


@rule(
    "learning-rate-unusual",
    reads="learning rates of the whole run, and the optimizer's kind",
    source="our own: the defaults of torch.optim, and what is used in practice around them, with room to spare",
    remedy="Begin with what is usual: Adam 1e-5 to 1e-2, SGD 1e-3 to 1, Adadelta about 1, Adagrad 1e-2.",
    needs_harm=True,
)
def learning_rate_unusual(
    history: TrainingHistory, *, progress: float = 0.1, min_steps: int = 80, far: float = 4.0, moved: float = 2e-3
) -> Finding | None:
    """The largest learning rate so far lies outside of what optimizers of this kind are used with.

    From `min_steps` steps on, once it rises no longer. Info; a warning if after as many losses less than a share
    `progress` of the first has been gained, or the loss is three times the first two; or if the rate is high, moves the
    median weight by a third of itself a step, and half of the loss is left after 200; certain, if at a low rate it
    falls steadily after 200, with half of it left; or if the rate is above `far` times the largest usual one, and of
    the size of the targets that are numbers, and moves the median weight by a third of itself a step: that is certain,
    too, whatever the loss does, where steps do not depend on the size of gradients. So it is where 200 steps, or all of
    a run that has ended, can have changed the median weight by a share `moved` of itself at most. Of games and rewards
    only what is certain warns. Silent of several kinds of optimizers, and of kinds that are not known.
    """
    kinds = {str(settings.get("kind", "")) for settings in history.model.optimizer_settings}
    kind = kinds.pop() if len(kinds) == 1 else ""
    if kind not in _USUAL or history.lrs.count < min_steps or signals_of(history).is_lr_rising:
        return None
    low, high = _USUAL[kind]
    largest = history.lrs.max
    if low <= largest <= high:
        return None
    s, begin = signals_of(history), max(history.loss_trend.firsts[:2], default=0.0)
    descends, ratio = descent(history) is not False, estimated_update_ratio(history)
    is_slow = history.losses.count >= min_steps and (not s.fall >= progress or s.loss_level > 3.0 * begin > 0.0)
    is_large = largest > high and (ratio or 0.0) > 0.3 and history.losses.count >= 200 and s.progress < 0.5
    is_long = largest < low and s.progress < 0.5 and history.losses.count >= 200 and s.falls_steadily
    is_far = largest > far * high * max(1.0, _target_size(history)) and (ratio or 0.0) > 0.3
    is_still = largest < low and ratio is not None and ratio * history.num_clean < moved and has_had_time(history, 200)
    evidence = {"lr": largest, "is_high": largest > high, "threshold_low": low, "threshold_high": high}
    return Finding(
        f"{kind} runs with a learning rate of {largest:.3g}, outside of the usual {low:g} to {high:g}.",
        severity="warning" if (descends and (is_slow or is_large or is_long)) or is_far or is_still else "info",
        evidence={**evidence, "is_certain": is_long or is_still or (is_far and kind in _NORMALISING)},
        confidence=0.9,
    )
