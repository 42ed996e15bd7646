"""The rules that come with fastguard. Each looks at one symptom and knows nothing of the others."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from itertools import islice
from typing import Any

from ..history import Entry, TrainingHistory
from ..running import quantiles
from .finding import Finding, Severity
from .registry import rule

_SCALER_CALIBRATION = "GradScaler finds its scale by such skips; this is normal."


def _longest_run(flags: list[bool]) -> int:
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest


@rule(
    "non-finite-gradients",
    severity="critical",
    reads="non-finite steps: in the window, the first 16 and last 64, and which tensor was first in backward order",
    source="SageMaker Debugger ExplodingTensor (any NaN or Inf); shares and runs are our own",
    remedy="Look at the data of these steps and at the layer named first; lower the learning rate or add warm-up if "
    "the norm grew before. float16 without a GradScaler overflows: use bfloat16 or a scaler.",
)
def non_finite_gradients(
    history: TrainingHistory, *, run: int = 3, share: float = 0.05, scaled_run: int = 10
) -> Finding | None:
    """NaN or Inf in the gradients of any step.

    Warning; critical if the last step was so, if such a step was not skipped, if there were `run` in a row, or at
    least `run` and more than `share` of the window. Under a GradScaler, whose skips are how it finds its scale: info,
    unless they make up more than `share` of a full window (warning) or there are more than `scaled_run` in a row
    (critical).
    """
    if not history.num_nonfinite:
        return None
    bad = [not math.isfinite(entry.norm) for entry in history.recent]
    num_bad, in_a_row = sum(bad), _longest_run(bad)
    is_frequent = num_bad > share * len(bad)
    events = [*history.first_events, *history.last_events]
    is_scaled = all(event.loss_scale is not None and event.skipped for event in events)
    severity: Severity = "warning"
    recommendation = ""
    if is_scaled:
        if in_a_row > scaled_run:
            severity = "critical"
        elif not (is_frequent and len(bad) == history.window):
            severity, recommendation = "info", _SCALER_CALIBRATION + " Nothing to do while it stays rare."
    elif bad[-1] or history.num_nonfinite_applied or in_a_row >= run or (is_frequent and num_bad >= run):
        severity = "critical"
    if history.num_nonfinite_applied:
        recommendation = "The parameters may hold NaN since: go back to a checkpoint from before these steps, and let "
        recommendation += "the guard skip such steps (skip_nonfinite=True)."
    first, last = events[0], events[-1]
    layers = sorted(history.first_nonfinite, key=lambda name: -history.first_nonfinite[name])[:3]
    # Several tensors can each have been first once; then the first event's is the one with the best evidence.
    if first.names and layers and history.first_nonfinite[layers[0]] == history.first_nonfinite[first.names[0]]:
        layers = [first.names[0], *(name for name in layers if name != first.names[0])]
    fate = f"{history.num_nonfinite_applied} of them not skipped" if history.num_nonfinite_applied else "all skipped"
    where = f"first in {layers[0]}" if layers else "no single tensor to blame: the norm itself was not finite"
    evidence: dict[str, Any] = {
        "num_nonfinite": history.num_nonfinite,
        "num_in_window": num_bad,
        "window": len(bad),
        "longest_run": in_a_row,
        "last_num_nans": last.num_nans,
        "last_num_infs": last.num_infs,
        "last_num_tensors": last.num_tensors,
    }
    if last.loss_scale is not None:
        evidence["last_loss_scale"] = last.loss_scale
    return Finding(
        f"NaN or Inf in the gradients of {_count(history.num_nonfinite, 'step')} of {history.num_steps} "
        f"({fate}); {where}.",
        first.step,
        last.step,
        severity=severity,
        layers=tuple(layers),
        evidence=evidence,
        recommendation=recommendation,
    )


@rule(
    "skip-run",
    severity="critical",
    reads="skipped steps in a row, now and at most",
    source="our own; GradScaler starts at 2**16 and halves, so ten skips in a row leave it at 2**6",
    remedy="The model learns nothing while steps are skipped. Look at the data around these steps, lower the learning "
    "rate, and go back to a checkpoint if the run does not end by itself.",
)
def skip_run(history: TrainingHistory, *, run: int = 3, scaled_run: int = 10) -> Finding | None:
    """At least `run` skipped steps in a row (more than `scaled_run` under a GradScaler): critical while it lasts."""
    least = scaled_run + 1 if history.num_scaled else run
    longest = history.longest_skip_run
    if longest < least:
        return None
    is_running = history.skip_run >= least
    end = history.longest_skip_run_end
    return Finding(
        f"{longest} steps in a row were skipped" + (", and the run goes on." if is_running else "; it has ended."),
        end - longest + 1,
        end,
        severity="critical" if is_running else "warning",
        evidence={"longest_run": longest, "current_run": history.skip_run, "threshold": least},
    )


@rule(
    "clip-rate-high",
    reads="clip coefficients of the newest clean steps",
    source="our own; clipping is meant for the rare large step (Pascanu et al. 2013, section 3.2)",
    remedy="Clipping at nearly every step normalises the gradient and hides the learning rate's real size: raise "
    "max_norm towards the usual norm, or lower the learning rate.",
)
def clip_rate_high(
    history: TrainingHistory, *, rate: float = 0.9, min_steps: int = 50, max_steps: int = 200
) -> Finding | None:
    """More than `rate` of the newest `max_steps` (at least `min_steps`) clean steps were clipped by more than 0.1 %."""
    newest = _newest(history, max_steps)
    num_clipped = sum(entry.clip_coef < 0.999 for entry in newest)
    if len(newest) < min_steps or num_clipped <= rate * len(newest):
        return None
    coef, norm = (quantiles(values, (0.5,))[0] for values in zip(*((e.clip_coef, e.norm) for e in newest)))
    return Finding(
        f"{num_clipped} of the last {len(newest)} steps were clipped; the median norm is {norm:.3g} and the median "
        f"step was scaled by {coef:.3g}.",
        newest[0].step,
        newest[-1].step,
        evidence={"clip_rate": num_clipped / len(newest), "threshold": rate, "median_coef": coef, "median_norm": norm},
        confidence=0.9,
    )


@rule(
    "norm-spike",
    reads="gradient norms of the clean steps in the window",
    source="modified z-score (Iglewicz and Hoaglin 1993, section 3) of ln(norm), with the ratio of Megatron-LM's "
    "check for unexpectedly large gradients",
    remedy="Look at the data of that step. Clip at a small multiple of the usual norm; if spikes come back, lower the "
    "learning rate, or Adam's beta2 (0.95 instead of 0.999).",
)
def norm_spike(
    history: TrainingHistory, *, z: float = 8.0, ratio: float = 10.0, baseline: int = 128, min_steps: int = 20
) -> Finding | None:
    """A norm far above those before it: robust z of its logarithm above `z`, and `ratio` times their median.

    Each is compared with the `baseline` clean steps before it (at least `min_steps`): norms that fall as training
    begins are no spikes.
    """
    steps = [entry for entry in history.clean if entry.norm > 0.0]
    if len(steps) <= min_steps:
        return None
    norms = [entry.norm for entry in steps]
    spikes: list[tuple[float, float, float, Entry]] = []
    if max(norms) > ratio * min(norms):  # a calm window is let through without a look at each step
        before = sorted(norms[:min_steps])  # kept sorted while it slides: its median is then at hand
        for i in range(min_steps, len(norms)):
            norm, median = norms[i], before[len(before) // 2]
            if norm > ratio * median:
                spread = quantiles([abs(math.log(other / median)) for other in before], (0.5,))[0]
                score = 0.6745 * math.log(norm / median) / max(spread, 1e-3)
                if score > z:
                    spikes.append((norm / median, score, median, steps[i]))
            insort(before, norm)
            if len(before) > baseline:
                del before[bisect_left(before, norms[i - baseline])]
    if not spikes:
        return None
    times, score, median, worst = max(spikes, key=lambda spike: spike[0])
    return Finding(
        f"{_count(len(spikes), 'step')} of the last {len(steps)} had a gradient norm far above the usual: "
        f"{worst.norm:.3g} at step {worst.step}, {times:.0f} times the median before it.",
        spikes[0][3].step,
        spikes[-1][3].step,
        evidence={
            "norm": worst.norm,
            "median": median,
            "ratio": times,
            "robust_z": score,
            "num_spikes": len(spikes),
            "threshold_ratio": ratio,
            "threshold_z": z,
        },
        confidence=0.95,
    )


@rule(
    "zero-gradients",
    reads="zeros of each tensor in the last record",
    source="SageMaker Debugger AllZero (100 % zeros)",
    remedy="Is the parameter used in the forward pass, and does its output reach the loss? Dead ReLUs, a detach(), "
    "a zero-initialised layer after it, or an expert or embedding that this batch did not use leave zeros.",
)
def zero_gradients(history: TrainingHistory, *, share: float = 0.5) -> Finding | None:
    """A tensor whose gradient was all zeros at the last step: info, a warning from `share` of all tensors on."""
    record = history.last
    if record is None or not record.is_finite:
        return None
    tensors = record.tensors
    flags = [zeros == numel > 0 for zeros, numel in zip(tensors.num_zeros, tensors.numel)]
    num_zero = sum(flags)
    if not num_zero:
        return None
    layers = tuple(islice((name for name, flag in zip(tensors.names, flags) if flag), 8))
    return Finding(
        f"{num_zero} of {len(flags)} tensors had a gradient of zeros only at step {record.step}.",
        record.step,
        record.step,
        severity="warning" if num_zero >= share * len(flags) else "info",
        layers=layers,
        evidence={"num_zero_tensors": num_zero, "num_tensors": len(flags), "threshold": share},
        confidence=0.7,
    )


@rule(
    "already-clipped",
    severity="info",
    reads="norms of the newest clean steps",
    source="our own: a norm before clipping does not repeat to three digits by itself",
    remedy="Something seems to clip before the guard (a Trainer's max_grad_norm, Lightning's gradient_clip_val, a "
    "call of clip_grad_norm_): its norm is what is recorded. Turn it off, and give the guard max_norm.",
)
def already_clipped(history: TrainingHistory, *, run: int = 10) -> Finding | None:
    """The norms of the last `run` clean steps or more lie within 1e-3 of one another and of a round number.

    Round means at most two significant digits, as people choose a clip threshold.
    """
    norm = history.equal_norm
    if history.equal_run < run or not norm:
        return None
    threshold = float(f"{norm:.1e}")
    if abs(norm - threshold) > 1e-3 * threshold:
        return None
    last = history.clean[-1].step
    first = _newest(history, history.equal_run)[0].step
    return Finding(
        f"The gradient norm was {threshold:g} at each of the last {history.equal_run} steps, before the guard clipped.",
        first,
        last,
        severity="info",
        evidence={"norm": norm, "num_steps": history.equal_run, "threshold": run},
        confidence=0.8,
    )


def _newest(history: TrainingHistory, count: int) -> list[Entry]:
    return list(history.clean)[-count:]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
