"""Others' checks, from their definitions, on the same records as our rules. None of them names a cause or a layer.

Where a definition leaves room we took what speaks for the baseline: each may stand for several families of symptoms,
and is silent until it has the data that it asks for.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from fastguard.records import StepStats

from .alarms import Alarm, Said
from .runs import Run

# One check: the records of a run, and what it clips at -> the steps at which it speaks.
Check = Callable[[Run], Iterator[int]]
_LOSS = ("loss", "explosion", "data", "lr")


def _std(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.sqrt(fmean([(value - mean) ** 2 for value in values]))


def _losses(run: Run) -> Iterator[tuple[StepStats, float]]:
    for record in run.records:
        if record.loss is not None:
            yield record, record.loss


# --- the toolkit's fixed thresholds ---


def loss_explosion(run: Run) -> Iterator[int]:
    """NaN or Inf among the last five losses."""
    return (record.step for record, loss in _losses(run) if not math.isfinite(loss))


def loss_plateau(run: Run) -> Iterator[int]:
    """(max - min) / mean of the last 50 losses below 0.001, from 100 losses on."""
    recent: deque[float] = deque(maxlen=50)
    for number, (record, loss) in enumerate(_losses(run)):
        recent.append(loss)
        if number >= 99 and all(map(math.isfinite, recent)) and max(recent) - min(recent) < 1e-3 * fmean(recent):
            yield record.step


def overfitting(run: Run) -> Iterator[int]:
    """From 20 validations on: the last quarter's mean below the first's in training, above it in validation."""
    losses: list[float] = []
    validations: list[float] = []
    for record, loss in _losses(run):
        losses.append(loss)
        if record.val_loss is None:
            continue
        validations.append(record.val_loss)
        if len(validations) >= 20 and _quarters(losses) < 0 < _quarters(validations):
            yield record.step


def _quarters(values: list[float]) -> float:
    quarter = len(values) // 4
    return fmean(values[-quarter:]) - fmean(values[:quarter])


def nan_or_inf_gradients(run: Run) -> Iterator[int]:
    """GradientStats.is_healthy: any NaN or Inf."""
    return (record.step for record in run.records if not record.is_finite)


def norm_above_1000(run: Run) -> Iterator[int]:
    """GradientStats.is_healthy: norm above 1000."""
    return (record.step for record in run.records if record.is_finite and record.norm > 1000)


def norm_below_1e_8(run: Run) -> Iterator[int]:
    """GradientStats.is_healthy: norm below 1e-8."""
    return (record.step for record in run.records if record.norm < 1e-8)


def norm_above_10_clips(run: Run) -> Iterator[int]:
    """The explosion detector: norm above ten times max_grad_norm (1.0 where none is set)."""
    limit = 10 * (run.max_norm or 1.0)
    return (record.step for record in run.records if record.is_finite and record.norm > limit)


def unstable_loss(run: Run) -> Iterator[int]:
    """Standard deviation of the last ten losses above 10."""
    recent: deque[float] = deque(maxlen=10)
    for record, loss in _losses(run):
        recent.append(loss)
        if len(recent) == 10 and all(map(math.isfinite, recent)) and _std(recent) > 10:
            yield record.step


def lr_bounds(run: Run) -> Iterator[int]:
    """Learning rate outside [1e-8, 1e-2]."""
    return (record.step for record in run.records if record.lr is not None and not 1e-8 <= record.lr <= 1e-2)


def zeros_above_half(run: Run) -> Iterator[int]:
    """ActivationMonitor: mean zero ratio of a layer's last ten records above 0.5."""
    return _activation_means(run, lambda activity: activity.stats.zero_ratio, 0.5)


def saturation_above_a_tenth(run: Run) -> Iterator[int]:
    """ActivationMonitor: mean saturation ratio (|x| > 0.99) of a layer's last ten records above 0.1."""
    return _activation_means(run, lambda activity: activity.stats.saturation_ratio, 0.1)


def _activation_means(run: Run, ratio: Callable[..., float], limit: float) -> Iterator[int]:
    recent: dict[str, deque[float]] = {}
    for record in run.records:
        for activity in record.activations:
            if activity.family in ("relu", "gelu", "silu", "tanh", "sigmoid", "hardtanh"):
                recent.setdefault(activity.name, deque(maxlen=10)).append(ratio(activity))
        if record.activations and any(fmean(values) > limit for values in recent.values()):
            yield record.step


# --- spikes of the loss ---


def lightning_spike(run: Run) -> Iterator[int]:
    """Lightning's SpikeDetection: |loss - mean of the last 10| at least twice that mean, or a loss not finite."""
    recent: deque[float] = deque(maxlen=10)
    for record, loss in _losses(run):
        if not math.isfinite(loss) or (len(recent) == 10 and abs(loss - fmean(recent)) >= 2 * abs(fmean(recent))):
            yield record.step
        elif math.isfinite(loss):
            recent.append(loss)


def kill_loss_spike(run: Run) -> Iterator[int]:
    """KillLossSpike: window max(100, 5 % of the steps); loss at least twice the window's mean five times in a row."""
    recent: deque[float] = deque(maxlen=_kill_window(run))
    in_a_row = 0
    for record, loss in _losses(run):
        if len(recent) == recent.maxlen:
            in_a_row = in_a_row + 1 if loss >= 2 * fmean(recent) else 0
            if in_a_row >= 5:
                yield record.step
        recent.append(loss)


def kill_high_loss(run: Run) -> Iterator[int]:
    """KillLossSpike: half of the window above min(max(first window), 10)."""
    size = _kill_window(run)
    losses = list(_losses(run))
    if len(losses) <= size:
        return
    limit = min(max(loss for _, loss in losses[:size]), 10.0)
    for end in range(size + 1, len(losses) + 1):
        if sum(loss > limit for _, loss in losses[end - size : end]) >= size / 2:
            yield losses[end - 1][0].step


def _kill_window(run: Run) -> int:
    return max(100, len(run.records) // 20)


def skip_step(run: Run) -> Iterator[int]:
    """OLMo's SkipStep: loss or norm above mean + 6 sigma of the last 128 steps, from 64 on."""
    for values in ([loss for _, loss in _losses(run)], [record.norm for record in run.records]):
        recent: deque[float] = deque(maxlen=128)  # kept free of NaN here, which SkipStep's own is not
        for record, value in zip(run.records, values):
            if len(recent) >= 64 and value > fmean(recent) + 6 * _std(recent):
                yield record.step
            if math.isfinite(value):
                recent.append(value)
            else:
                yield record.step


# --- SageMaker Debugger ---


def vanishing_gradient(run: Run) -> Iterator[int]:
    """A tensor's mean |g| below 1e-7; of the root mean square, which is never smaller, as records hold no mean |g|."""
    for record in run.records:
        if record.is_finite and any(row.numel and row.sum_sq < row.numel * 1e-14 for row in record.tensors):
            yield record.step


def all_zero(run: Run) -> Iterator[int]:
    """A tensor of zeros only."""
    for record in run.records:
        if any(row.num_zeros == row.numel > 0 for row in record.tensors):
            yield record.step


def loss_not_decreasing(run: Run) -> Iterator[int]:
    """The loss of every tenth step is not below that of the tenth step before it, by a tenth of a percent."""
    marks = [(record.step, loss) for record, loss in _losses(run)][::10]
    for (_, before), (step, loss) in itertools.pairwise(marks):
        if not loss < before * (1 - 1e-3):
            yield step


def overfit(run: Run) -> Iterator[int]:
    """(val - train) / train above 0.1."""
    for record, loss in _losses(run):
        if record.val_loss is not None and record.val_loss - loss > 0.1 * loss:
            yield record.step


def overtraining(run: Run) -> Iterator[int]:
    """No better validation loss for 10 validations."""
    best, since = math.inf, 0
    for record in run.records:
        if record.val_loss is not None:
            best, since = (record.val_loss, 0) if record.val_loss < best else (best, since + 1)
            if since >= 10:
                yield record.step


def dead_relu(run: Run) -> Iterator[int]:
    """Half of a ReLU layer's units are active less than 1 % of the time."""
    for record in run.records:
        if any(a.family == "relu" and a.dead_unit_ratio >= 0.5 for a in record.activations):
            yield record.step


def saturated_activation(run: Run) -> Iterator[int]:
    """Half of a tanh or sigmoid layer's units are saturated."""
    for record in run.records:
        if any(a.family in ("tanh", "sigmoid") and a.saturated_unit_ratio >= 0.5 for a in record.activations):
            yield record.step


def update_ratio(run: Run) -> Iterator[int]:
    """Norm of the update over norm of the weights outside [1e-8, 10]."""
    for record in run.records:
        ratios = [w.update_ratio for w in record.weights]
        if any(ratio is not None and not 1e-8 <= ratio <= 10 for ratio in ratios):
            yield record.step


def unchanged_tensor(run: Run) -> Iterator[int]:
    """A parameter that did not change at three sampled steps in a row."""
    still: dict[str, int] = {}
    for record in run.records:
        for weights in record.weights:
            still[weights.name] = still.get(weights.name, 0) + 1 if weights.update_norm == 0.0 else 0
        if record.weights and max(still.values()) >= 3:
            yield record.step


BASELINES: dict[str, tuple[tuple[str, Check, tuple[str, ...]], ...]] = {
    "toolkit": (
        ("LOSS_EXPLOSION", loss_explosion, ("nonfinite", "explosion", "loss")),
        ("LOSS_PLATEAU", loss_plateau, ("loss", "lr")),
        ("OVERFITTING", overfitting, ("loss",)),
        ("NaN or Inf gradients", nan_or_inf_gradients, ("nonfinite",)),
        ("norm > 1000", norm_above_1000, ("explosion",)),
        ("norm < 1e-8", norm_below_1e_8, ("vanishing",)),
        ("norm > 10 max_norm", norm_above_10_clips, ("explosion",)),
        ("unstable loss", unstable_loss, _LOSS),
        ("lr bounds", lr_bounds, ("lr",)),
        ("zeros > 0.5", zeros_above_half, ("units",)),
        ("saturation > 0.1", saturation_above_a_tenth, ("units",)),
    ),
    "Lightning SpikeDetection": (("spike", lightning_spike, ("nonfinite", *_LOSS)),),
    "KillLossSpike": (("spikes", kill_loss_spike, _LOSS), ("persistently high", kill_high_loss, _LOSS)),
    "SkipStep": (("skip", skip_step, ("nonfinite", *_LOSS)),),
    "SageMaker Debugger": (
        ("VanishingGradient", vanishing_gradient, ("vanishing",)),
        ("ExplodingTensor", nan_or_inf_gradients, ("nonfinite",)),
        ("AllZero", all_zero, ("vanishing", "units")),
        ("LossNotDecreasing", loss_not_decreasing, ("loss", "lr")),
        ("Overfit", overfit, ("loss",)),
        ("Overtraining", overtraining, ("loss",)),
        ("DeadRelu", dead_relu, ("units",)),
        ("SaturatedActivation", saturated_activation, ("units",)),
        ("WeightUpdateRatio", update_ratio, ("weights",)),
        ("UnchangedTensor", unchanged_tensor, ("weights",)),
    ),
}


def ask(name: str, run: Run) -> Said:
    """What the baseline `name` says of `run`: when each of its checks first speaks, and first from the fault on."""
    planted = 0 if run.planted is None else run.planted.step
    alarms = []
    for rule, check, families in BASELINES[name]:
        steps = sorted(check(run))
        firsts = {*steps[:1], *[step for step in steps if step >= planted][:1]}
        alarms += [Alarm(rule, families, step) for step in firsts]
    return Said(tuple(sorted(alarms, key=lambda alarm: alarm.step)))
