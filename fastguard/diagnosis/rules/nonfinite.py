"""Rules on NaN and Inf, and on single elements far out of range, as a flipped bit leaves them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, takewhile

from ...records import TrainingHistory
from ...records.events import MAX_RANKS, BadRank
from ..finding import Seen, Severity
from ..needs import is_lbfgs
from ..registry import rule
from ..signals import median, signals_of

TITLE = "NaN and Inf"

_UNSKIPPABLE = 'take line_search_fn="strong_wolfe" or a lower learning rate: LBFGS has no step that could be skipped.'


def _longest_run(flags: list[bool]) -> int:
    return max((len([*run]) for flag, run in groupby(flags) if flag), default=0)


@rule(
    "non-finite-gradients",
    severity="critical",
    source="SageMaker Debugger ExplodingTensor (any NaN or Inf); shares and runs are our own",
    see="NaN or Inf in the gradients of {num_nonfinite:step} of {_num_steps} ({_fate}); {_where}.{_ranks}",
    sure=1.0,
    remedy="Look at the data of these steps and at the layer named first; lower the learning rate or add warm-up if "
    "the norm grew before. float16 without a GradScaler overflows: use bfloat16 or a scaler.",
)
def non_finite_gradients(history: TrainingHistory, *, run: int = 3, share: float = 0.05) -> Seen | None:
    """NaN or Inf in the gradients of any step.

    A warning; critical if the last step had it, if such a step was not skipped, or if there were `run` in a row, or a
    share `share` of the window. Under a GradScaler, which finds its scale by such skips: info, a warning from a share
    `share` of a full window on, critical for more than 10 in a row.
    """
    if not history.num_nonfinite:
        return None
    bad = [not math.isfinite(entry.norm) for entry in history.recent]
    num_bad, in_a_row, num_applied = sum(bad), _longest_run(bad), history.num_nonfinite_applied
    is_frequent = num_bad > share * len(bad)
    events = [*history.first_events, *history.last_events]
    first, last, do = events[0], events[-1], ""
    severity: Severity = "warning"
    if all(event.loss_scale is not None and event.skipped for event in events):
        if in_a_row > 10:
            severity = "critical"
        elif not (is_frequent and len(bad) == history.window):
            severity = "info"
            do = "Do nothing while it stays rare: GradScaler finds its scale by such skips; this is normal."
    elif bad[-1] or num_applied or in_a_row >= run or (is_frequent and num_bad >= run):
        severity = "critical"
    if num_applied:
        do = "Go back to a checkpoint from before these steps, as the parameters may hold NaN since, and "
        do += _UNSKIPPABLE if is_lbfgs(history) else "let the guard skip such steps (skip_nonfinite=True)."
    counts = history.first_nonfinite
    # Of several tensors that have been first equally often, that of the first event is the likeliest origin.
    layers = sorted(counts, key=lambda name: (-counts[name], name not in first.names[:1]))[:3]
    ranks = history.model.bad_ranks
    told = describe_bad_ranks(ranks) if ranks else ""
    return Seen(
        at=(first, last),
        severity=severity,
        layers=layers,
        do=do,
        num_nonfinite=history.num_nonfinite,
        num_in_window=num_bad,
        window=len(bad),
        longest_run=in_a_row,
        last_num_nans=last.num_nans,
        last_num_infs=last.num_infs,
        last_num_tensors=last.num_tensors,
        _num_steps=history.num_steps,
        _fate=f"{num_applied} of them not skipped" if num_applied else "all skipped",
        _where=f"first in {layers[0]}" if layers else "no single tensor to blame: the norm itself was not finite",
        _ranks=f" {told[0].upper()}{told[1:]}." if told else "",
        last_loss_scale=last.loss_scale,
        bad_ranks=[one["rank"] for one in ranks] or None,
    )


_SCALES_INSTEAD = (
    "Take a policy that scales spikes and lets a new level pass (Spikes), and look at the data and the learning rate "
    "around these steps: the norm has risen for good, or the policy's limit is too low."
)


@rule(
    "skip-run",
    severity="critical",
    see="{longest_run} steps in a row were skipped{_by}{_until}.",
    sure=1.0,
    remedy="Look at the data around these steps, lower the learning rate, or go back to a checkpoint.",
)
def skip_run(history: TrainingHistory, *, run: int = 3, scaled_run: int = 10) -> Seen | None:
    """At least `run` skipped steps in a row (more than `scaled_run` under a GradScaler): critical while it lasts."""
    least = scaled_run + 1 if history.num_scaled else run
    longest, end = history.longest_skip_run, history.longest_skip_run_end
    if longest < least:
        return None
    is_running = history.skip_run >= least
    steps = [entry for entry in history.recent if end - longest < entry.step <= end]
    num_finite = sum(entry.skipped and math.isfinite(entry.norm) for entry in steps)
    by_recovery = bool(history.model.num_left_out) and not history.num_skipped_by_policy
    if by_recovery and longest - num_finite < least:  # `rolled-back` reports these
        return None
    who = "recovery" if by_recovery else history.model.clip_policy or "the clip policy"
    return Seen(
        at=(end - longest + 1, end),
        severity="critical" if is_running else "warning",
        do=_SCALES_INSTEAD if 2 * num_finite > longest and not by_recovery else "",
        longest_run=longest,
        _by=f", {num_finite} of them by {who} with finite gradients" if num_finite else "",
        _until=", and the run goes on" if is_running else "; it has ended",
    )


@rule(
    "non-finite-loss",
    severity="critical",
    source="the toolkit's LOSS_EXPLOSION (NaN or Inf among the last 5 losses)",
    see="The loss was NaN or Inf at {num_bad_losses:step} of {_num_steps}.",
    sure=0.99,
    remedy="Look at that batch, and at logarithms, divisions and roots in the loss; lower the learning rate.",
)
def non_finite_loss(history: TrainingHistory, *, newest: int = 5, run: int = 3) -> Seen | None:
    """A loss of NaN or Inf: a warning; critical if among the `newest` losses, or `run` in a row."""
    if not history.num_bad_losses:
        return None
    flags = [not math.isfinite(entry.loss) for entry in history.recent if entry.loss is not None]
    in_a_row = _longest_run(flags)
    return Seen(
        at=(history.first_bad_loss_step, history.last_bad_loss_step),
        severity="critical" if any(flags[-newest:]) or in_a_row >= run else "warning",
        num_bad_losses=history.num_bad_losses,
        _num_steps=history.num_steps,
    )


@rule(
    "non-finite-activations",
    severity="critical",
    see="Activations of {num_modules:module} contained NaN or Inf at step {_first}: {_began}.",
    remedy="Look at the module named first: weights, divisions, logarithms, exponentials, half precision.",
)
def non_finite_activations(history: TrainingHistory) -> Seen | None:
    """NaN or Inf in a sampled activation; a module whose inputs were finite is where it began."""
    samples = [sample for name in history.activations.bad for sample in history.activations[name].recent]
    bad = [sample for sample in samples if not sample.value.stats.is_finite]
    if not bad:
        return None
    first = min(sample.step for sample in bad)
    at_first = sorted((s.value for s in bad if s.step == first), key=lambda module: module.order)
    origins = [module for module in at_first if module.is_origin]
    blamed = origins or at_first[:1]
    name, stats = blamed[0].name, blamed[0].stats
    began = f"it began in {name}, whose inputs were finite" if origins else f"first seen in {name}"
    if not origins and blamed[0].inputs_finite is not None:
        began += ", whose input was bad already: from the batch, or from a module that is not sampled"
    return Seen(
        at=(first, max(sample.step for sample in bad)),
        layers=[module.name for module in blamed],
        num_modules=len(at_first),
        num_infs=stats.num_infs,
        is_origin=bool(origins),
        _first=first,
        _began=began,
    )


@rule(
    "non-finite-weights",
    severity="critical",
    see="{num_nonfinite:element} of {layers} {_are} NaN or Inf.",
    sure=1.0,
    remedy="Go back to a checkpoint from before, with skip_nonfinite=True so that no such gradient is applied. If the "
    "gradients were finite before, look for other code that writes to these weights.",
)
def non_finite_weights(history: TrainingHistory) -> Seen | None:
    """NaN or Inf in a parameter itself."""
    windows = [(name, history.weights[name]) for name in history.weights.bad]
    bad = [(name, w) for name, w in windows if w.last.value.num_nonfinite]
    if not bad:
        return None
    steps = [s.step for _, window in bad for s in window.recent if s.value.num_nonfinite]
    total = sum(window.last.value.num_nonfinite for _, window in bad)
    return Seen(
        at=(min(steps), max(steps)),
        layers=[name for name, _ in bad],
        do=f"Go back to a checkpoint from before, and {_UNSKIPPABLE}" if is_lbfgs(history) else "",
        num_nonfinite=total,
        num_tensors=len(bad),
        _are="is" if total == 1 else "are",
    )


@rule(
    "loss-scale-collapse",
    of="half-precision-range",
    leads=True,
    severity="critical",
    see="The loss scale fell from {largest:.4g} to {loss_scale:.4g}, and steps still overflow.",
    remedy="Use bfloat16, or keep the layer whose output leaves float16's range (65504) in float32.",
)
def loss_scale_collapse(history: TrainingHistory, *, factor: float = 256.0, low: float = 1.0) -> Seen | None:
    """The last step overflowed, and the scale is `factor` times below its largest in the window, or below `low`."""
    scaled = [e for e in history.recent if e.loss_scale is not None] if history.num_scaled else []
    if len(scaled) < 2 or not scaled[-1].skipped:
        return None
    now = scaled[-1].loss_scale or 0.0
    top = max(scaled, key=lambda e: e.loss_scale or 0.0)
    largest = top.loss_scale or 0.0
    is_start = history.num_steps <= len(history.recent) and not any(e.is_clean for e in scaled)
    if now >= low and (now * factor > largest or is_start):  # a scale may begin far too high
        return None
    return Seen(at=(top, scaled[-1]), loss_scale=now, largest=largest)


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
    leads=True,
    severity="critical",
    source="the exponent signature of bit flips (He et al., ISCA 2023; Wang et al. 2025), as a lone element",
    see="At {num_steps:step} a single element of {_numel} in the gradient of {_name} was far out of range, and no "
    "other: at step {_step} it was {_what}.",
    remedy="Take the step again from a checkpoint; if the element is fine then, test memory and device.",
)
def lone_element(history: TrainingHistory, *, times: float = 100.0, most: int = 3, numel: int = 64) -> Seen | None:
    """One element of a gradient was at least `times` its tensor's usual norm, and all others together below a tenth of
    it.

    Or it was the only one that is not finite. Counts at `most` steps, in tensors of at least `numel` elements, after 20
    clean steps, at a loss below 3 times the usual. Critical if several of the next ten steps were not finite, or had
    losses ten times as large.
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
    lone = [one for one in lone if _is_amid_calm(history, one[0], 3.0, 20)]
    if not lone:
        return None
    step, name, value = max(lone, key=lambda one: one[2])
    usual = next((one.usual for one in history.lone_elements if one.step == step), known[name].norm)
    return Seen(
        at=(min(one[0] for one in lone), max(one[0] for one in lone)),
        severity="critical" if any(_is_the_end(history, one[0]) for one in lone) else "warning",
        layers=dict.fromkeys(one[1] for one in lone),
        value=value,
        usual=usual,
        num_steps=len(lone),
        _numel=known[name].numel,
        _name=name,
        _step=step,
        _what=f"{value:.3g}, where the whole tensor's usual norm is {usual:.3g}" if value < math.inf else "not finite",
    )


def _losses_before(history: TrainingHistory, step: int) -> list[float]:
    return [abs(e.loss) for e in signals_of(history).loss_entries if e.step < step and e.loss is not None][-50:]


def _is_amid_calm(history: TrainingHistory, step: int, ratio: float, min_steps: int) -> bool:
    """Whether enough steps came before, and the loss of `step` was as theirs; where losses are known."""
    losses = [e.loss for e in history.recent if e.step == step and e.loss is not None]
    before = _losses_before(history, step)
    has_begun = sum(e.step < step for e in history.clean) >= min_steps
    is_calm = not before or max(before) <= 1e3 * abs(history.loss_trend.first)
    return has_begun and is_calm and (not losses or not before or abs(losses[0]) <= ratio * median(before))


def _is_the_end(history: TrainingHistory, step: int) -> bool:
    """Whether the steps after it are lost: several not finite, or losses ten times those before."""
    after = [e for e in history.recent if step < e.step <= step + 10]
    before = _losses_before(history, step)
    num_high = sum(e.loss is not None and abs(e.loss) > 10.0 * median(before) for e in after) if before else 0
    return num_high > 2 or sum(e.skipped or not math.isfinite(e.norm) for e in after) > 2
