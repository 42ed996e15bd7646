"""Rules on NaN and Inf, and on single elements far out of range, as a flipped bit leaves them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Any

from ...records import TrainingHistory
from ...records.events import MAX_RANKS, BadRank
from ..finding import Finding, Severity, count, listed
from ..needs import is_lbfgs
from ..registry import rule
from ..signals import median, signals_of

TITLE = "NaN and Inf"

_UNSKIPPABLE = 'take line_search_fn="strong_wolfe" or a lower learning rate: LBFGS has no step that could be skipped.'
_SCALER_CALIBRATION = "GradScaler finds its scale by such skips; this is normal."


def _longest_run(flags: list[bool]) -> int:
    return max((len([*run]) for flag, run in groupby(flags) if flag), default=0)


@rule(
    "non-finite-gradients",
    severity="critical",
    reads="non-finite steps: in the window, the first 16 and last 64, and which tensor was first in backward order; "
    "of sharded runs, which ranks",
    source="SageMaker Debugger ExplodingTensor (any NaN or Inf); shares and runs are our own",
    remedy="Look at the data of these steps and at the layer named first; lower the learning rate or add warm-up if "
    "the norm grew before. float16 without a GradScaler overflows: use bfloat16 or a scaler.",
)
def non_finite_gradients(
    history: TrainingHistory, *, run: int = 3, share: float = 0.05, scaled_run: int = 10
) -> Finding | None:
    """NaN or Inf in the gradients of any step.

    A warning; critical if the last step was so, if such a step was not skipped, if there were `run` in a row, or at
    least `run` and more than `share` of the window. Under a GradScaler, which finds its scale by such skips: info,
    unless they are more than `share` of a full window (warning), or more than `scaled_run` in a row (critical).
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
        recommendation = "The parameters may hold NaN since: go back to a checkpoint from before these steps, and "
        recommendation += _UNSKIPPABLE if is_lbfgs(history) else "let the guard skip such steps (skip_nonfinite=True)."
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
    whose, bad_ranks = "", history.model.bad_ranks
    if bad_ranks:
        told = describe_bad_ranks(bad_ranks)
        whose = f" {told[0].upper()}{told[1:]}."
        evidence["bad_ranks"] = [one["rank"] for one in bad_ranks]
    num_averaged = history.model.num_averaged or 1
    num_at_first = sum(one["step"] == bad_ranks[0]["step"] for one in bad_ranks)
    if num_averaged > 1 and severity != "info" and num_at_first in (0, min(num_averaged, MAX_RANKS)):
        whose += f" Averaging over {num_averaged} ranks hides which of them brought it: wrap(..., watch_ranks=True) "
        whose += "with the wrapped model names it."
    return Finding(
        f"NaN or Inf in the gradients of {count(history.num_nonfinite, 'step')} of {history.num_steps} "
        f"({fate}); {where}.{whose}",
        first.step,
        last.step,
        severity=severity,
        layers=tuple(layers),
        evidence=evidence,
        recommendation=recommendation,
    )


_SCALES_INSTEAD = (
    "The norm has risen for good, or the policy's limit is too low: take one that scales spikes and lets a new level "
    "pass (Spikes), and look at the data and the learning rate around these steps."
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
    steps = [entry for entry in history.recent if end - longest < entry.step <= end]
    num_finite = sum(entry.skipped and math.isfinite(entry.norm) for entry in steps)
    by_recovery = bool(history.model.num_left_out) and not history.num_skipped_by_policy
    if by_recovery and longest - num_finite < least:  # `rolled-back` tells of these
        return None
    who = "recovery" if by_recovery else history.model.clip_policy or "the clip policy"
    by = f", {num_finite} of them by {who} with finite gradients" if num_finite else ""
    return Finding(
        f"{longest} steps in a row were skipped{by}" + (", and the run goes on." if is_running else "; it has ended."),
        end - longest + 1,
        end,
        severity="critical" if is_running else "warning",
        evidence={"longest_run": longest, "current_run": history.skip_run, "threshold": least},
        recommendation=_SCALES_INSTEAD if 2 * num_finite > longest and not by_recovery else "",
    )


@rule(
    "non-finite-loss",
    severity="critical",
    reads="losses of all steps, skipped ones too",
    source="the toolkit's LOSS_EXPLOSION (NaN or Inf among the last 5 losses)",
    remedy="Look at the batch of that step for NaN, Inf and empty inputs, and at logarithms, divisions and square "
    "roots in the loss. If the loss grew before, lower the learning rate.",
)
def non_finite_loss(history: TrainingHistory, *, newest: int = 5, run: int = 3) -> Finding | None:
    """A loss of NaN or Inf: a warning; critical if among the `newest` losses, or `run` in a row."""
    if not history.num_bad_losses:
        return None
    known = [e for e in history.recent if e.loss is not None]
    flags = [not math.isfinite(e.loss) for e in known if e.loss is not None]
    in_a_row = _longest_run(flags)
    is_critical = any(flags[-newest:]) or in_a_row >= run
    return Finding(
        f"The loss was NaN or Inf at {count(history.num_bad_losses, 'step')} of {history.num_steps}.",
        history.first_bad_loss_step,
        history.last_bad_loss_step,
        severity="critical" if is_critical else "warning",
        evidence={"num_bad_losses": history.num_bad_losses, "longest_run": in_a_row, "threshold_run": run},
        confidence=0.99,
    )


@rule(
    "non-finite-activations",
    severity="critical",
    reads="sampled activations",
    source="our own: the module whose output is not finite although its inputs are",
    remedy="Look at the module named first and at what comes right before it: its weights, divisions, logarithms and "
    "exponentials in it, and in half precision the size of its output.",
)
def non_finite_activations(history: TrainingHistory) -> Finding | None:
    """NaN or Inf in a sampled activation; a module whose inputs were finite is where it began."""
    bad = [
        sample
        for name in history.activations.bad
        for sample in history.activations[name].recent
        if not sample.value.stats.is_finite
    ]
    if not bad:
        return None
    first = min(sample.step for sample in bad)
    at_first = sorted((s.value for s in bad if s.step == first), key=lambda module: module.order)
    origins = [module for module in at_first if module.is_origin]
    blamed = origins or at_first[:1]
    if origins:
        what = f"it began in {blamed[0].name}, whose inputs were finite"
    elif blamed[0].inputs_finite is None:
        what = f"first seen in {blamed[0].name}"
    else:
        what = (
            f"first seen in {blamed[0].name}, whose input was bad already: from the batch, or from a module not sampled"
        )
    stats = blamed[0].stats
    return Finding(
        f"Activations of {count(len(at_first), 'module')} held NaN or Inf at step {first}: {what}.",
        first,
        max(sample.step for sample in bad),
        severity="critical",
        layers=tuple(module.name for module in blamed),
        evidence={
            "num_modules": len(at_first),
            "num_nans": stats.num_nans,
            "num_infs": stats.num_infs,
            "is_origin": bool(origins),
        },
        confidence=0.99 if origins else 0.8,
    )


@rule(
    "non-finite-weights",
    severity="critical",
    reads="sampled weights",
    source="our own: no step repairs a weight that is NaN or Inf",
    remedy="Go back to a checkpoint from before, with skip_nonfinite=True so that no such gradient is applied. If the "
    "gradients were finite before, look for what else writes to these weights.",
)
def non_finite_weights(history: TrainingHistory) -> Finding | None:
    """NaN or Inf in a parameter itself."""
    windows = [(name, history.weights[name]) for name in history.weights.bad]
    bad = [(name, w) for name, w in windows if w.last.value.num_nonfinite]
    if not bad:
        return None
    steps = [s.step for _, window in bad for s in window.recent if s.value.num_nonfinite]
    total = sum(window.last.value.num_nonfinite for _, window in bad)
    names = [name for name, _ in bad]
    return Finding(
        f"{count(total, 'element')} of {listed(names)} {'is' if total == 1 else 'are'} NaN or Inf.",
        min(steps),
        max(steps),
        severity="critical",
        layers=tuple(names[:8]),
        evidence={"num_nonfinite": total, "num_tensors": len(bad)},
        recommendation=f"Go back to a checkpoint from before, and {_UNSKIPPABLE}" if is_lbfgs(history) else "",
    )


@rule(
    "loss-scale-collapse",
    of="half-precision-range",
    leads=True,
    severity="critical",
    reads="the GradScaler's scale over the window",
    source="our own; GradScaler starts at 2**16 and halves at each overflow",
    remedy="Overflow comes from the activations or the loss, not from the scale: look for the layer whose output "
    "leaves float16's range (65504), use bfloat16, or keep that layer in float32.",
)
def loss_scale_collapse(history: TrainingHistory, *, factor: float = 256.0, low: float = 1.0) -> Finding | None:
    """The last step overflowed, and the scale is `factor` times below its largest in the window, or below `low`."""
    if not history.num_scaled:
        return None
    scaled = [e for e in history.recent if e.loss_scale is not None]
    if len(scaled) < 2 or not scaled[-1].skipped:
        return None
    now = scaled[-1].loss_scale or 0.0
    top = max(scaled, key=lambda e: e.loss_scale or 0.0)
    largest = top.loss_scale or 0.0
    if now >= low and now * factor > largest:
        return None
    is_start = history.num_steps <= len(history.recent) and not any(e.is_clean for e in scaled)
    if is_start and now >= low:  # a scale may begin far too high
        return None
    return Finding(
        f"The loss scale fell from {largest:.4g} to {now:.4g}, and steps still overflow.",
        top.step,
        scaled[-1].step,
        severity="critical",
        evidence={"loss_scale": now, "largest": largest, "threshold_factor": factor},
        confidence=0.9,
    )


def describe_bad_ranks(bad: Sequence[BadRank]) -> str:
    """Which ranks held NaN or Inf, as "rank 3 alone of 4 held NaN, first at step 12 in layers.7.w2"."""
    first = min(bad, key=lambda one: (one["step"], one["rank"]))
    num_ranks = max(one["num_ranks"] for one in bad)  # the run may have been resumed on more of them
    names = [name for name, key in (("NaN", "num_nans"), ("Inf", "num_infs")) if any(one[key] for one in bad)]  # type: ignore[literal-required]
    if len(bad) == 1:
        who, which = f"rank {first['rank']} alone of {num_ranks}", ""
    else:
        which = f"rank {first['rank']} "
        most = "or more " if len(bad) == MAX_RANKS < num_ranks else ""
        who = f"all {num_ranks} ranks" if len(bad) == num_ranks else f"{len(bad)} {most}of {num_ranks} ranks"
    return f"{who} held {' and '.join(names)}, {which}first at step {first['step']} in {first['name']}"


@rule(
    "lone-element",
    of="hardware-fault",
    severity="critical",
    source="the exponent signature of bit flips (He et al., ISCA 2023; Wang et al. 2025), as a lone element",
    remedy="Arithmetic spreads what is wrong with a batch or a weight over many elements; one element alone looks like "
    "a flipped bit. Take the step again from a checkpoint: if the element is fine then, test memory and device.",
)
def lone_element(
    history: TrainingHistory, *, times: float = 100.0, most: int = 3, numel: int = 64, loss_ratio: float = 3.0
) -> Finding | None:
    """At `most` steps or fewer one element of a gradient was at least `times` its tensor's usual norm, and all others
    together less than a tenth of it; or it was the only one that is not finite.

    In a tensor of at least `numel` elements, after 20 clean steps, at a loss below `loss_ratio` times the usual.
    Critical where several of the next ten steps were not finite, or had losses ten times as large.
    """
    lone = [(one.step, one.name, one.value) for one in history.lone_elements if 0.0 < times * one.usual <= one.value]
    # The first non-finite steps, as long as each had one bad element: later ones may come of these.
    single = takewhile(
        lambda e: e.num_tensors == e.num_nans + e.num_infs == len(e.names[:1]) == 1, history.first_events
    )
    lone += [(event.step, event.names[0], math.inf) for event in single]
    if len(history.lone_elements) > most or not 0 < len(lone) <= most:
        return None
    known = history.tensors
    lone = [one for one in lone if one[1] in known and known[one[1]].numel >= numel]
    lone = [one for one in lone if _is_amid_calm(history, one[0], loss_ratio, 20)]
    if not lone:
        return None
    step, name, value = max(lone, key=lambda one: one[2])
    usual = next((one.usual for one in history.lone_elements if one.step == step), known[name].norm)
    what = f"{value:.3g}, where the whole tensor's usual norm is {usual:.3g}" if value < math.inf else "not finite"
    return Finding(
        f"At {count(len(lone), 'step')} a single element of {known[name].numel} in the gradient of {name} was far out "
        f"of range, and no other: at step {step} it was {what}.",
        min(one[0] for one in lone),
        max(one[0] for one in lone),
        severity="critical" if any(_is_the_end(history, one[0]) for one in lone) else "warning",
        layers=tuple(dict.fromkeys(one[1] for one in lone)),
        evidence={"value": value, "usual": usual, "num_steps": len(lone), "threshold_times": times},
        confidence=0.9,
    )


def _is_amid_calm(history: TrainingHistory, step: int, ratio: float, min_steps: int) -> bool:
    """Whether enough steps came before, and the loss of `step` was as theirs; where losses are known."""
    if sum(e.step < step for e in history.clean) < min_steps:
        return False
    losses = [e.loss for e in history.recent if e.step == step and e.loss is not None]
    before = [abs(e.loss) for e in signals_of(history).loss_entries if e.step < step and e.loss is not None][-50:]
    return not losses or not before or abs(losses[0]) <= ratio * median(before)


def _is_the_end(history: TrainingHistory, step: int) -> bool:
    """Whether the steps after it are lost: several not finite, or losses ten times those before."""
    after = [e for e in history.recent if step < e.step <= step + 10]
    before = [abs(e.loss) for e in signals_of(history).loss_entries if e.step < step and e.loss is not None][-50:]
    if before and sum(e.loss is not None and abs(e.loss) > 10.0 * median(before) for e in after) > 2:
        return True
    return sum(e.skipped or not math.isfinite(e.norm) for e in after) > 2
