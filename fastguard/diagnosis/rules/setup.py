"""Rules on how model, optimizer and loop were put together: what is wrong from the first step on."""

from __future__ import annotations

import math
from itertools import pairwise, takewhile
from typing import Any

from ...records import TrainingHistory
from ...records.sampled import is_bias
from ..finding import Seen
from ..harm import is_harmed
from ..needs import (
    OF_CLASSES,
    batch_statistics,
    computing,
    dropout,
    game,
    of_chosen_outputs,
    reinforces,
)
from ..registry import rule
from ..signals import has_had_time, has_run_away, is_stuck, signals_of

TITLE = "Set-up"
_SOON = 2  # steps between two series: with so few, the script asks the model at each step


@rule(
    "gradients-not-cleared",
    severity="critical",
    see="In {num_left} of the first {num_watched} steps the gradients of the step before were still there when "
    "backward() began, and were added to.",
    sure=0.97,
    remedy="Call optimizer.zero_grad() before each backward(), or after each step.",
    cause=("missing-zero-grad", "Gradients are never cleared: each step uses the sum of all gradients so far."),
    weight=0.98,
    explains="overfitting unsteady nonfinite standstill",
)
def gradients_not_cleared(history: TrainingHistory, *, share: float = 0.9, watched: int = 4) -> Seen | None:
    """In a share `share` of at least `watched` backward passes after a step, the gradients of that step were still
    there.

    Critical if the loss tripled, or is no longer finite.
    """
    left, total = history.model.num_left_gradients or 0, history.model.num_watched_backwards or 0
    if total < watched or left <= share * total:
        return None
    is_lost = has_run_away(history)
    return Seen(warn=None if is_lost else True, num_left=left, num_watched=total)


def odd_settings(settings: dict[str, Any], eps: float, momentum: float) -> list[str]:
    """Those of an optimizer's settings that are far from usual, as text."""
    kind, odd = str(settings.get("kind", "")), []
    value = settings.get("eps")
    if isinstance(value, (int, float)) and value >= eps and kind != "Adafactor":
        odd.append(f"eps={value:g}")
    betas = settings.get("betas")
    if isinstance(betas, (list, tuple)) and len(betas) >= 2 and all(isinstance(b, (int, float)) for b in betas):
        first, second = float(betas[0]), float(betas[1])
        if first > momentum or second < 0.5 or second >= 0.99999:
            odd.append(f"betas=({first:g}, {second:g})")
    value = settings.get("momentum")
    if isinstance(value, (int, float)) and not 0.0 <= value <= momentum:
        odd.append(f"momentum={value:g}")
    return odd


@rule(
    "odd-optimizer-settings",
    source="the defaults of torch.optim and of the papers, and two orders of magnitude around them",
    see="{_kinds} runs with unusual settings: {settings}.",
    remedy="Go back to the optimizer's defaults, and change one setting at a time.",
    cause=("wrong-optimizer-settings", "The optimizer's eps, betas or momentum are far from the usual values."),
    weight=(0.9, 0.75),
    explains="update-ratio-low update-ratio-high loss-divergence growing-norm standstill",
)
def odd_optimizer_settings(history: TrainingHistory, *, eps: float = 1e-3, momentum: float = 0.98) -> Seen | None:
    """eps is `eps` or more, momentum or beta1 is above `momentum`, or beta2 is below 0.5 or nearly 1.

    Info; a warning if 150 losses, or all at the end, gained less than a share 0.5 of the first, or lost it again; or
    whatever they gained if eps is 1 or more, momentum or beta1 above 0.995, or beta2 out of these bounds.
    """
    groups, gained, harm = history.model.optimizer_settings, signals_of(history).progress, is_harmed(history)
    odd = list(dict.fromkeys(text for settings in groups for text in odd_settings(settings, eps, momentum)))
    if not odd or not history.num_clean:
        return None
    is_far = any(odd_settings(settings, 1.0, 0.995) for settings in groups)
    is_lost = harm is True and not history.num_nonfinite and history.first_bad_loss_step < 0
    is_slow = gained < 0.5 and harm is not False
    return Seen(
        warn=has_had_time(history, 150) and (is_far or is_lost or is_slow),
        settings=odd,
        _kinds=sorted({str(settings.get("kind")) for settings in groups}),
    )


@rule(
    "learning-rate-gone",
    of="learning-rate-schedule",
    leads=True,
    severity="critical",
    see="Since step {_since} the learning rate is below {_ratio:.0%} of its peak, {peak:.3g}; it is {lr:.3g} "
    "now, and the loss has {_come_down}.",
    remedy="Look at the schedule's length and at where scheduler.step() is called: each batch, or each epoch?",
    needs_descent=True,
)
def learning_rate_gone(history: TrainingHistory, *, ratio: float = 0.01, share: float = 0.4) -> Seen | None:
    """For the newest share `share` of all clean steps, and 40 at least, the learning rate was below `ratio` of the
    largest, whatever the loss did: no working program was seen to train for so long at so low a rate.
    """
    s, peak, num = signals_of(history), history.lrs.max, min(history.num_clean, history.window)
    entries = [e for e in history.clean if e.lr is not None] if history.lrs.count and peak < math.inf else []
    gone = sum(1 for _ in takewhile(lambda e: (e.lr or 0.0) < ratio * peak, reversed(entries)))
    if gone < max(40, share * num) or gone == history.num_clean:
        return None
    return Seen(
        at=entries[-gone:],
        severity="warning",
        lr=entries[-1].lr,
        peak=peak,
        num_steps=gone,
        _ratio=ratio,
        _since=entries[-gone].step,
        _come_down=s.progress_in_words,
    )


@rule(
    "weights-overwritten",
    of="unseen-updates",
    see="{num_overwritten:parameter} changed while no optimizer under guard stepped: {layers}.",
    remedy="Look for load_state_dict in the loop, averaged weights swapped in, and repeated initialisation.",
    cause=("weights-overwritten", "Something other than the optimizer writes to the weights."),
    weight=(0.9, 0.5),
    explains="untrained-parameters unsteady standstill",
)
def weights_overwritten(history: TrainingHistory, *, progress: float = 0.3, min_steps: int = 80) -> Seen | None:
    """Weights changed between two steps.

    Info; a warning if `min_steps` losses, or all at the end, gained less than a share `progress` of the first.
    """
    names = history.model.overwritten if history.num_clean else ()
    warns = is_stuck(history, progress, min_steps, at_end=True)
    return Seen(layers=names, warn=warns, num_overwritten=len(names)) if names else None


@rule(
    "validation-in-training-mode",
    of="wrong-mode",
    leads=True,
    source="torch's documentation of Module.eval: dropout and batch statistics act differently",
    see="The model was in training mode at each of {num_passes} sampled passes without gradients, with dropout or "
    "batch statistics in it: its validation losses are not those of the model.",
    sure=0.9,
    remedy="Call model.eval() before validation, and model.train() after it.",
    cause=("train-mode-in-validation", "Validation runs in training mode, with dropout or batch statistics active."),
    weight=0.95,
    explains="overfitting label-noise",
)
def validation_in_training_mode(history: TrainingHistory, *, samples: int = 2) -> Seen | None:
    """At least `samples` passes without gradients ran in training mode, none in eval mode, and there are validation
    losses.

    Or such passes of different batches follow each other between two steps, and the same batches again many steps
    later; of a classifier a single batch is enough. Not where the loss is that of a game or of actions.
    """
    passes = [sample for _, sample in history.batches if not sample.with_grad]
    if not all(sample.training for sample in passes):
        return None
    if min(len(passes), len(history.validations)) >= samples:
        return Seen(num_passes=len(passes)) if dropout(history) or batch_statistics(history) else None
    series = [x for x in history.model.passes_in_training_mode if x[1] > 1]
    is_rare = min((x[3] for x in series if x[3]), default=0) > _SOON
    is_repeated = any(again > 1 and (num > 2 or is_rare) for _, num, again, _ in series)
    if history.model.loss_kind in OF_CLASSES and not series:
        series = [*history.model.passes_in_training_mode]
        is_repeated = sum(again > 0 and (not gap or gap > _SOON) for _, _, again, gap in series) >= samples
    is_other = game(history) or of_chosen_outputs(history) or reinforces(history)
    if not is_repeated or is_other or not history.num_clean:
        return None
    return Seen(
        at=[x[0] for x in series],
        see="The model was called without autograd in training mode, with dropout or batch statistics active, "
        "{num_passes:time} or more after steps {_steps}; it was never seen in eval mode.",
        num_passes=min(x[1] for x in series),
        _steps=[x[0] for x in series],
    )


@rule(
    "training-in-eval-mode",
    of="wrong-mode",
    see="From step {_since} on, no pass of a training step that was sampled was in training mode.",
    remedy="Call model.train() before training, and again after each model.eval().",
    cause=("eval-mode-in-training", "Training runs in eval mode, without dropout and batch statistics."),
    weight=0.95,
    explains="overfitting label-noise",
)
def training_in_eval_mode(history: TrainingHistory, *, samples: int = 4, steps: int = 250) -> Seen | None:
    """A model with dropout or batch statistics was in eval mode in the newest `samples` passes with autograd.

    Or no pass was in training mode for `steps` steps and half of the run since it was last evaluated.
    """
    if not history.recent or not (dropout(history) or batch_statistics(history)):
        return None
    last = max((step for step, x in history.batches if x.training and x.with_grad), default=-1)
    since = [x.with_grad for step, x in history.batches if step > last and not x.training]
    num_since = sum(since)
    has_gone = bool(since) and last >= 0 and history.num_steps - last > max(steps, history.num_steps // 2)
    if num_since < samples and not has_gone:
        return None
    return Seen(at=(last + 1, history.recent[-1].step), num_samples=num_since, _since=last + 1)


@rule(
    "layers-without-activation",
    see="Linear layers follow each other with nothing between them.",
    remedy="Put an activation (ReLU, GELU, tanh) between these layers.",
    needs_descent=True,
)
def layers_without_activation(history: TrainingHistory, *, progress: float = 0.4, min_steps: int = 80) -> Seen | None:
    """Two linear layers have nothing between them but a change of shape.

    Info; a warning if `min_steps` losses gained less than a share `progress` of the first, but for layers that are used
    again and again, as in a recurrence; or if there are only linear layers, none narrower than both ends.
    """
    ops = computing(history.model.loss_ops)
    if not any(a == b == "AddmmBackward0" for a, b in pairwise(ops)) or not history.num_clean:
        return None
    linear = [op for op in ops if not op.startswith(("Nll", "LogSoftmax", "Mse", "L1", "SmoothL1", "Huber", "Binary"))]
    is_all = {*linear} == {"AddmmBackward0"} and history.num_clean >= 20 and _is_as_wide(history, len(linear))
    is_recurrence = ops.count("AddmmBackward0") > history.model.module_kinds.get("Linear", len(ops))
    warns = is_all or (is_stuck(history, progress, min_steps) and not is_recurrence)
    return Seen(warn=warns, operations=list(ops))


def _is_as_wide(history: TrainingHistory, num_layers: int) -> bool:
    """Whether the model is so many linear layers with biases, and each inside is as wide as its narrower end."""
    sizes = {name: track.numel for name, track in history.tensors.items()}
    widths = [size for name, size in sizes.items() if is_bias(name)]
    if len(widths) != num_layers or len(sizes) != 2 * num_layers:
        return False
    first = next(size for name, size in sizes.items() if not is_bias(name)) / widths[0]
    return min(widths[:-1]) >= min(first, widths[-1])


@rule(
    "learning-rate-still-rising",
    of="learning-rate-schedule",
    severity="critical",
    see="The learning rate has risen from {first:.3g} to {lr:.3g} over {_num} steps, and still rises.",
    remedy="Look at the length of the warm-up, and at what multiplies the rate: it only ever rises.",
)
def learning_rate_still_rising(history: TrainingHistory, *, ratio: float = 1.0, share: float = 0.9) -> Seen | None:
    """Over at least 200 steps, or 80 of a run that has ended, the rate never fell, and rose after a share `share`.

    It is above `ratio` times the rate at the middle, and the loss is above half of the first, or above twice its best.
    Critical if the loss tripled, or is not finite.
    """
    rates, trend = signals_of(history).lrs, history.loss_trend
    if len(rates) < (80 if history.has_ended else 200) or len(rates) != history.num_clean:
        return None
    last, late, middle = rates[-1], rates[int(share * len(rates))], rates[len(rates) // 2]
    has_learnt = trend.count >= 80 and trend.mean <= min(0.5 * trend.first, 2.0 * trend.best)
    if has_learnt or last <= max(late, ratio * middle) or not rates[0] > 0.0 or any(b < a for a, b in pairwise(rates)):
        return None
    return Seen(
        at=history.clean,
        severity="critical" if has_run_away(history) else "warning",
        first=rates[0],
        lr=last,
        _num=len(rates),
    )
