"""Rules on how model, optimizer and loop were put together: what is wrong from the first step on."""

from __future__ import annotations

import math
from itertools import pairwise, takewhile
from typing import Any

from ...records import TrainingHistory
from ...records.updates import is_bias
from ..finding import Finding, count, listed
from ..harm import is_harmed
from ..needs import batch_statistics, computing, dropout, is_of_numbers, is_squared_error
from ..registry import rule
from ..signals import ends, has_had_time, has_run_away, is_stuck, median, signals_of, training_batches

TITLE = "Set-up"


@rule(
    "gradients-not-cleared",
    reads="whether the gradients of a step were still there when the next backward pass began, in the first 20 steps",
    source="our own: what zero_grad() is for; the forgotten call is a classic of question boards",
    remedy="Call optimizer.zero_grad() before each backward(), or after each step: now every step takes the sum of all "
    "gradients since the run began.",
    cause=("missing-zero-grad", "Gradients are never cleared: each step uses the sum of all gradients so far."),
    weight=0.98,
    explains="growing-norm clip-rate-high loss-oscillation loss-divergence overfitting norm-spike loss-spike "
    "no-warm-up update-ratio-high non-finite-gradients non-finite-loss skip-run standstill",
)
def gradients_not_cleared(history: TrainingHistory, *, share: float = 0.9, watched: int = 4) -> Finding | None:
    """In more than a `share` of at least `watched` backward passes that followed a step, its gradients were there.

    Critical where the loss is three times what it was in the beginning, or no longer finite.
    """
    left, total = history.model.num_left_gradients, history.model.num_watched_backwards
    if not left or not total or total < watched or left <= share * total:
        return None
    return Finding(
        f"In {left} of the first {total} steps the gradients of the step before were still there when backward() "
        "began, and were added to.",
        severity="critical" if has_run_away(history) else "warning",
        evidence={"num_left": left, "num_watched": total, "threshold": share},
        confidence=0.97,
    )


def odd_settings(settings: dict[str, Any], eps: float, momentum: float) -> list[str]:
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
    reads="eps, betas and momentum of each parameter group",
    source="the defaults of torch.optim and of the papers, and two orders of magnitude around them",
    remedy="Go back to the optimizer's defaults (Adam: eps=1e-8, betas=(0.9, 0.999); SGD: momentum=0.9), and change "
    "one at a time.",
    cause=("wrong-optimizer-settings", "The optimizer's eps, betas or momentum are far from the usual values."),
    weight=(0.9, 0.75),
    explains="update-ratio-low update-ratio-high loss-oscillation loss-divergence growing-norm standstill",
)
def odd_optimizer_settings(
    history: TrainingHistory, *, eps: float = 1e-3, momentum: float = 0.98, progress: float = 0.5, min_steps: int = 150
) -> Finding | None:
    """eps from `eps` on, a momentum or beta1 above `momentum`, a beta2 below 0.5 or of nearly 1.

    Info; a warning if `min_steps` losses, or all at the end, gained less than a share `progress` of the first, or lost
    it again; less than 0.8 where a beta2 is below 0.5, or eps is 1 or more.
    """
    odd = [text for settings in history.model.optimizer_settings for text in odd_settings(settings, eps, momentum)]
    if not odd or not history.num_clean:
        return None
    gained = signals_of(history).progress
    values = [settings.get("eps") for settings in history.model.optimizer_settings]
    is_far = any("betas" in text and float(text[:-1].split()[-1]) < 0.5 for text in odd)
    is_far = is_far or any(isinstance(value, (int, float)) and value >= 1.0 for value in values)
    is_slow = has_had_time(history, min_steps) and gained < (max(progress, 0.8) if is_far else progress)
    harm, is_finite = is_harmed(history), not history.num_nonfinite and history.first_bad_loss_step < 0
    is_lost = harm is True and is_finite and has_had_time(history, min_steps)
    is_slow = is_lost or (is_slow and (is_far or harm is not False))
    kinds = {str(settings.get("kind")) for settings in history.model.optimizer_settings}
    return Finding(
        f"{listed(sorted(kinds))} runs with unusual settings: {listed(list(dict.fromkeys(odd)))}.",
        severity="warning" if is_slow else "info",
        evidence={"settings": list(dict.fromkeys(odd)), "threshold_eps": eps, "threshold_momentum": momentum},
        confidence=0.85 if is_slow else 0.6,
    )


@rule(
    "learning-rate-gone",
    of="learning-rate-schedule",
    leads=True,
    reads="learning rates of the window against the largest ever, and the loss",
    source="our own: after a decay to a hundredth hardly anything more is learnt",
    remedy="The schedule has ended, or is stepped too often (each batch where it counts epochs): look at its length "
    "and at where scheduler.step() is called.",
    needs_descent=True,
)
def learning_rate_gone(
    history: TrainingHistory, *, ratio: float = 0.01, share: float = 0.4, min_steps: int = 40, progress: float = 0.5
) -> Finding | None:
    """Of all clean steps a `share`, the newest, had a learning rate below `ratio` of the largest.

    From `min_steps` such steps on, while less than a share `progress` of the first loss was gained; or in any case
    where it is exactly zero, in all groups, for longer than it was anything else: no weight moves then.
    """
    peak, num, s = history.lrs.max, min(history.num_clean, history.window), signals_of(history)
    if len(s.lrs) < max(min_steps, 1) or not 0.0 < peak < math.inf or s.lrs[-1] >= ratio * peak:
        return None
    entries = [e for e in history.clean if e.lr is not None]
    gone = sum(1 for _ in takewhile(lambda e: (e.lr or 0.0) < ratio * peak, reversed(entries)))
    if not s.progress < progress and not _stands(history, max(min_steps, 0.5 * history.num_clean)):
        return None
    if gone < min_steps or gone < share * num or gone == history.num_clean:
        return None
    first = entries[-gone]
    return Finding(
        f"Since step {first.step} the learning rate is below {ratio:.0%} of its peak, {peak:.3g}; it is "
        f"{entries[-1].lr:.3g} now, and the loss has {s.come_down}.",
        first.step,
        entries[-1].step,
        evidence={"lr": entries[-1].lr, "peak": peak, "num_steps": gone, "threshold_ratio": ratio},
        confidence=0.85,
    )


def _stands(history: TrainingHistory, steps: float) -> bool:
    """Whether the learning rate was zero for so many steps, the newest; False where groups began with several."""
    rates = {settings.get("lr") for settings in history.model.optimizer_settings}
    if len(rates) > 1 or history.clean[-1].lr != 0.0:
        return False
    zero = takewhile(lambda bucket: bucket.lr.max == 0.0, reversed(history.overview.buckets))
    return sum(bucket.lr.num for bucket in zero) >= steps


@rule(
    "weights-overwritten",
    of="unseen-updates",
    remedy="Something other than the optimizer writes to these weights: a load_state_dict in the loop, an average that "
    "is swapped in and not back, initialisation called again. Clamping on purpose (a WGAN's) looks the same.",
    cause=("weights-overwritten", "Something other than the optimizer writes to the weights."),
    weight=(0.9, 0.5),
    explains="loss-oscillation loss-divergence untrained-parameters growing-norm no-warm-up norm-spike loss-spike "
    "standstill",
)
def weights_overwritten(history: TrainingHistory, *, progress: float = 0.3, min_steps: int = 80) -> Finding | None:
    """Weights changed between two steps.

    Info; a warning if after `min_steps` losses, or at the end, less than a share `progress` of the first has been
    gained.
    """
    names = history.model.overwritten
    if not names or not history.num_clean:
        return None
    at_a_stand = is_stuck(history, progress, min_steps, at_end=True)
    return Finding(
        f"{count(len(names), 'parameter')} changed while no optimizer under guard stepped: {listed(names)}.",
        severity="warning" if at_a_stand else "info",
        layers=tuple(names[:8]),
        evidence={"num_overwritten": len(names), "threshold": progress},
        confidence=0.85,
    )


@rule(
    "validation-in-training-mode",
    reads="passes without gradients: whether the model was in training mode, and has dropout or batch statistics",
    source="torch's documentation of Module.eval: dropout and batch statistics act differently",
    remedy="Call model.eval() before validation, and model.train() after it: dropout is active, and BatchNorm takes, "
    "and learns, the statistics of the validation batches.",
    cause=("train-mode-in-validation", "Validation runs in training mode, with dropout or batch statistics active."),
    weight=0.95,
    explains="overfitting label-noise",
)
def validation_in_training_mode(history: TrainingHistory, *, samples: int = 2) -> Finding | None:
    """At least `samples` passes without gradients in training mode, none in eval mode, and validation losses."""
    passes = [sample for _, sample in history.batches if not sample.with_grad]
    if len(passes) < samples or not all(sample.training for sample in passes) or len(history.validations) < samples:
        return None
    if not (dropout(history) or batch_statistics(history)):
        return None
    return Finding(
        f"The model was in training mode at each of {len(passes)} passes without gradients that "
        "was looked at, with dropout or batch statistics in it: its validation losses are not those of the model.",
        evidence={"num_passes": len(passes), "threshold": samples},
        confidence=0.9,
    )


@rule(
    "tiny-batches",
    reads="samples a batch, and the noise of the loss",
    source="our own; gradient noise goes with one over the square root of the batch (McCandlish et al. 2018)",
    remedy="Take larger batches, or accumulate gradients over several; or lower the learning rate by the same factor.",
    needs_descent=True,
    needs_harm=True,
    cause=("batch-size", "Batches are so small that noise outweighs the gradient."),
    weight=0.9,
    explains="loss-oscillation norm-spike loss-spike clip-rate-high standstill",
)
def tiny_batches(
    history: TrainingHistory, *, num_samples: int = 4, noise: float = 0.5, min_steps: int = 100
) -> Finding | None:
    """Training batches of at most `num_samples` samples, and a loss whose noise is above `noise` of its level.

    From `min_steps` losses on. Info, unless the loss no longer falls beyond its noise and is above 0.4 of where it
    began (above all of it for an error between numbers, whose targets may be noisy). Whatever the noise, where after
    twice as many losses it is at the chance level.
    """
    sizes = [sample.num_samples for sample in training_batches(history)]
    s = signals_of(history)
    if len(sizes) < 3 or max(sizes) > num_samples or len(s.losses) < min_steps:
        return None
    level = median(s.losses[-64:])
    is_at_chance = len(s.losses) >= 2 * min_steps and 0.0 < 0.9 * s.chance < level and not is_squared_error(history)
    if not s.loss_noise > noise * abs(level) and not is_at_chance:
        return None
    before = median(s.losses[-min_steps - 64 : -min_steps])
    of_medians = 0.22 * s.loss_noise  # the standard error of the difference of two of 64 losses
    least = 1.0 if is_of_numbers(history) else 0.4
    stands = len(s.losses) >= 2 * min_steps and level > before - 3.0 * of_medians
    return Finding(
        f"Batches have {max(sizes)} sample{'s' if max(sizes) > 1 else ''}, and the loss changes by {s.loss_noise:.3g} "
        f"from step to step, at a level of {level:.3g}.",
        severity="warning" if is_at_chance or (stands and level > least * history.loss_trend.first) else "info",
        evidence={"num_samples": max(sizes), "noise": s.loss_noise, "level": level, "threshold": num_samples},
        confidence=0.75,
    )


@rule(
    "layers-without-activation",
    reads="the operations between the loss and the first layers, and the loss",
    source="our own: a product of matrices is a matrix",
    remedy="Put an activation (ReLU, GELU, tanh) between these layers: without one they are no more than a single "
    "linear layer.",
    needs_descent=True,
)
def layers_without_activation(
    history: TrainingHistory, *, progress: float = 0.4, min_steps: int = 80
) -> Finding | None:
    """Two linear layers follow each other directly in the graph of the loss.

    Info; a warning if `min_steps` losses gained less than a share `progress` of the first, or if there are only linear
    layers, none narrower than both ends (as a code or a low rank would be).
    """
    ops = computing(history.model.loss_ops)
    if not any(a == b == "AddmmBackward0" for a, b in pairwise(ops)) or not history.num_clean:
        return None
    is_wrong = is_stuck(history, progress, min_steps)
    linear = [op for op in ops if not op.startswith(("Nll", "LogSoftmax", "Mse", "L1", "SmoothL1", "Huber", "Binary"))]
    is_all = {*linear} == {"AddmmBackward0"} and history.num_clean >= 20
    is_wrong = is_wrong or (is_all and _is_as_wide(history, len(linear)))
    return Finding(
        "Linear layers follow each other with nothing between them.",
        severity="warning" if is_wrong else "info",
        evidence={"operations": list(ops), "threshold": progress},
        confidence=0.85,
    )


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
    remedy="The learning rate only ever rises: look at the length of the warm-up, and at what multiplies the rate.",
)
def learning_rate_still_rising(
    history: TrainingHistory, *, ratio: float = 1.0, share: float = 0.9, min_steps: int = 200, few: int = 80
) -> Finding | None:
    """Over at least `min_steps` steps, or `few` of a run that has ended, the rate never fell, and rose after a `share`.

    It is above `ratio` times the middle's, while the loss is above half of the first, or above twice its best. Critical
    where the loss is three times the first, or not finite.
    """
    rates = signals_of(history).lrs
    if len(rates) < (few if history.has_ended else min_steps) or len(rates) != history.num_clean:
        return None
    last, late, middle = rates[-1], rates[int(share * len(rates))], rates[len(rates) // 2]
    if not last > late or not last > ratio * middle or not rates[0] > 0.0 or any(b < a for a, b in pairwise(rates)):
        return None
    trend = history.loss_trend
    if trend.count >= few and trend.mean <= 0.5 * trend.first and trend.mean <= 2.0 * trend.best:
        return None
    return Finding(
        f"The learning rate has risen from {rates[0]:.3g} to {last:.3g} over {len(rates)} steps, and still rises.",
        *ends(history.clean),
        severity="critical" if has_run_away(history) else "warning",
        evidence={"first": rates[0], "lr": last, "threshold_ratio": ratio},
        confidence=0.85,
    )
