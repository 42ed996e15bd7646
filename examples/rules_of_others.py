"""Rules of your own: other tools' definitions of a run in trouble, followed to the letter.

Pass a tuple of them to `fastguard.diagnosis.diagnose` in place of its own rules. `main` runs every set over one short
history whose loss explodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from fastguard.diagnosis import Finding, Rule, diagnose
from fastguard.diagnosis.finding import count
from fastguard.diagnosis.registry import make_rule
from fastguard.records import TrainingHistory

_Steps = list[tuple[int, float]]


def _losses(history: TrainingHistory) -> _Steps:
    """Steps and finite losses of the window, also of skipped steps."""
    known = [(e.step, e.loss) for e in history.recent if e.loss is not None]
    return [(step, loss) for step, loss in known if math.isfinite(loss)]


def _found(summary: str, steps: list[int], **evidence: float) -> Finding | None:
    if not steps:
        return None
    evidence["num_steps"] = len(steps)
    return Finding(f"{summary} at {count(len(steps), 'step')}.", steps[0], steps[-1], evidence=evidence)


def lightning_spike(history: TrainingHistory, *, window: int = 10, ratio: float = 2.0) -> Finding | None:
    """|loss - mean| >= `ratio` * mean, the mean of the `window` losses before it."""
    steps, before = [], deque[float](maxlen=window)
    for step, loss in _losses(history):
        if len(before) == window:
            mean = sum(before) / window
            if abs(loss - mean) >= ratio * mean:
                steps.append(step)
        before.append(loss)
    return _found("The loss was out of Lightning's bounds", steps, ratio=ratio)


def kill_loss_spike(
    history: TrainingHistory, *, ratio: float = 2.0, run: int = 5, window: int = 100, cap: float = 10.0
) -> Finding | None:
    """Loss >= `ratio` times the mean of the `window` before it, `run` times in a row; or half of the window too high.

    Too high: above the largest loss of the first window, or above `cap` if that is less. The original's window is 5 %
    of the run's steps where that is more; how long a run shall be is not known here.
    """
    losses, steps, in_a_row = _losses(history), [], 0
    before: deque[float] = deque(maxlen=window)
    limit = math.inf
    for step, loss in losses:
        if len(before) == window:
            if limit == math.inf:
                limit = min(max(before), cap)
            in_a_row = in_a_row + 1 if loss >= ratio * (sum(before) / window) else 0
            if in_a_row >= run or 2 * sum(value > limit for value in before) > window:
                steps.append(step)
        before.append(loss)
    return _found("KillLossSpike would have stopped the run", steps, ratio=ratio)


def skip_step(history: TrainingHistory, *, window: int = 128, z: float = 6.0) -> Finding | None:
    """Loss or norm above mean + `z` standard deviations of the `window` before it, from half a window on."""
    steps = set()
    norms = [(e.step, e.norm) for e in history.recent if math.isfinite(e.norm)]
    for series in (_losses(history), norms):
        before: deque[float] = deque(maxlen=window)
        for step, value in series:
            if len(before) >= window // 2:
                mean = sum(before) / len(before)
                variance = sum((other - mean) * (other - mean) for other in before) / max(len(before) - 1, 1)
                if value > mean + z * math.sqrt(variance):
                    steps.add(step)
            before.append(value)
    return _found("SkipStep would have skipped", sorted(steps), z=z)


def sagemaker_vanishing(history: TrainingHistory, *, threshold: float = 1e-7) -> Finding | None:
    """Mean |g| of a tensor below `threshold`; from the norms, so at most that: norm / sqrt(numel) bounds it above."""
    small = [name for name, t in history.tensors.items() if t.numel and t.norm / math.sqrt(t.numel) < threshold]
    if not small:
        return None
    return Finding(
        f"{len(small)} tensors have a mean |gradient| below {threshold:g}.",
        history.tensors.last_step,
        history.tensors.last_step,
        layers=tuple(small[:8]),
        evidence={"num_tensors": len(small), "threshold": threshold},
    )


def sagemaker_exploding(history: TrainingHistory) -> Finding | None:
    """Any NaN or Inf in a gradient."""
    if not history.num_nonfinite:
        return None
    first, last = history.first_events[0], history.last_events[-1]
    return Finding("NaN or Inf in a gradient.", first.step, last.step, severity="critical", layers=first.names)


def sagemaker_loss_not_decreasing(history: TrainingHistory, *, steps: int = 10) -> Finding | None:
    """A loss that is not below the one `steps` steps before it."""
    losses = _losses(history)
    bad = [later[0] for earlier, later in zip(losses[::steps], losses[steps::steps]) if later[1] >= earlier[1]]
    return _found(f"The loss was not below that of {steps} steps before", bad, back=steps)


def sagemaker_overfit(history: TrainingHistory, *, ratio: float = 0.1, patience: int = 1) -> Finding | None:
    """(validation - training loss) / training loss above `ratio`, `patience` times in a row."""
    bad, in_a_row = [], 0
    for v in history.validations:
        in_a_row = in_a_row + 1 if v.train_loss > 0 and (v.val_loss - v.train_loss) / v.train_loss > ratio else 0
        if in_a_row >= patience:
            bad.append(v.step)
    return _found("The validation loss was too far above the training loss", bad, ratio=ratio)


def sagemaker_update_ratio(history: TrainingHistory, *, low: float = 1e-8, high: float = 10.0) -> Finding | None:
    """Norm of an update over norm of its weights outside [`low`, `high`]."""
    return _update_ratio(history, low, high)


def torchmortem_update_ratio(history: TrainingHistory, *, low: float = 1e-5, high: float = 0.1) -> Finding | None:
    """Norm of an update over norm of its weights outside [`low`, `high`]."""
    return _update_ratio(history, low, high)


def _update_ratio(history: TrainingHistory, low: float, high: float) -> Finding | None:
    out, steps = [], set()
    for name, window in history.weights.items():
        ratios = [(s.step, s.value.update_ratio) for s in window.recent]
        bad = [step for step, ratio in ratios if ratio is not None and not low <= ratio <= high]
        if bad:
            out.append(name)
            steps.update(bad)
    found = _found(f"The update ratio was outside [{low:g}, {high:g}]", sorted(steps), low=low, high=high)
    return found and Finding(found.summary, found.first_step, found.last_step, layers=tuple(out[:8]))


def sagemaker_dead_relu(history: TrainingHistory, *, share: float = 0.5) -> Finding | None:
    """A ReLU of which a `share` of the units is dead."""
    dead = [(n, w) for n, w in history.activations.items() if w.last.value.family == "relu"]
    names = [name for name, window in dead if window.last.value.dead_unit_ratio > share]
    return _modules(history, "dead", names)


def sagemaker_saturated(history: TrainingHistory, *, share: float = 0.5) -> Finding | None:
    """A tanh or sigmoid of which a `share` of the units is saturated."""
    kinds = ("tanh", "sigmoid")
    windows = [(n, w) for n, w in history.activations.items() if w.last.value.family in kinds]
    return _modules(history, "saturated", [n for n, w in windows if w.last.value.saturated_unit_ratio > share])


def _modules(history: TrainingHistory, what: str, names: list[str]) -> Finding | None:
    if not names:
        return None
    step = history.activations.last_step
    return Finding(f"{len(names)} modules are {what}.", step, step, layers=tuple(names[:8]))


def torchmortem_layer_ratio(history: TrainingHistory, *, ratio: float = 100.0) -> Finding | None:
    """Largest over smallest norm of a tensor's gradient above `ratio`."""
    norms = [(t.norm, name) for name, t in history.tensors.items() if t.norm > 0.0]
    if not norms or max(norms)[0] <= ratio * min(norms)[0]:
        return None
    step = history.tensors.last_step
    layers = (max(norms)[1], min(norms)[1])
    return Finding(f"Gradients of layers differ by {max(norms)[0] / min(norms)[0]:.3g}.", step, step, layers=layers)


def large_norm(history: TrainingHistory, *, norm: float = 1000.0) -> Finding | None:
    """A gradient norm above `norm`."""
    return _found(f"The norm was above {norm:g}", [e.step for e in history.recent if e.norm > norm], norm=norm)


def megatron_large(history: TrainingHistory, *, factor: float = 10.0, first: int = 100) -> Finding | None:
    """A norm of at least `factor` times the largest of the `first` steps before it was looked at."""
    entries = [e for e in history.recent if math.isfinite(e.norm)]
    if len(entries) <= first:
        return None
    largest, steps = max(e.norm for e in entries[:first]), []
    for entry in entries[first:]:
        if entry.norm >= factor * largest:
            steps.append(entry.step)
        largest = max(largest, entry.norm)
    return _found("The norm was unexpectedly large", steps, factor=factor)


def _preset(prefix: str, source: str, *checks: Callable[..., Finding | None]) -> tuple[Rule, ...]:
    names = [f"{prefix}/{check.__name__.replace('_', '-').removeprefix(prefix + '-')}" for check in checks]
    return tuple(make_rule(check, name, source=source) for check, name in zip(checks, names, strict=True))


PRESETS: dict[str, tuple[Rule, ...]] = {
    "lightning": _preset("lightning", "Lightning SpikeDetection", lightning_spike),
    "kill-loss-spike": _preset("kill-loss-spike", "KillLossSpike of MosaicML Composer", kill_loss_spike),
    "skip-step": _preset("skip-step", "SkipStep optimizers of OLMo", skip_step),
    "megatron": _preset("megatron", "Megatron-LM's unexpectedly large gradient norm", megatron_large),
    "sagemaker": _preset("sagemaker", "built-in rules of SageMaker Debugger",
                         sagemaker_vanishing, sagemaker_exploding, sagemaker_loss_not_decreasing, sagemaker_overfit,
                         sagemaker_update_ratio, sagemaker_dead_relu, sagemaker_saturated),
    "torchmortem": _preset("torchmortem", "torchmortem", torchmortem_layer_ratio, torchmortem_update_ratio, large_norm),
}  # fmt: skip


def main() -> dict[str, list[str]]:
    """The names of the rules of each set that find something in a run whose loss explodes at step 300."""
    history = TrainingHistory()
    for step in range(400):
        loss = 2.0 - step / 400 if step < 300 else 40.0
        history.record(step, loss=loss, grad_norm=1.0 if step < 300 else 5000.0, lr=1e-3)
    found = {}
    for name, rules in PRESETS.items():
        found[name] = [finding.rule for finding in diagnose(history, rules=rules)]
        print(f"{name}: {', '.join(found[name]) or 'nothing'}")
    return found


if __name__ == "__main__":
    main()
