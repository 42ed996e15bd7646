"""Rules on initialisation, weight decay, and the second moments of Adam and its kin."""

from __future__ import annotations

import math
from itertools import pairwise

from ...records import TrainingHistory
from ...records.model import as_in_gpt2
from ...records.updates import MIN_NUMEL, is_bias
from ..finding import Finding, count, listed
from ..needs import descent, may_rise, penalty
from ..registry import rule
from ..signals import has_had_time, is_felt_by_the_loss, is_stuck, median, signals_of, training_batches
from .output import last_layer

TITLE = "Weights and updates"

_COUPLED = frozenset(["SGD", "ASGD", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"])


@rule(
    "large-weight-decay",
    reads="weight decay of each parameter group, the first gradients and weights, samples of the output, and the loss",
    source="the usual 1e-4 to 1e-2 of SGD and Adam, 1e-2 to 0.3 of AdamW, and a decade beyond",
    remedy="Divide weight_decay by 100 or more, and leave biases and norms out of it.",
    needs_descent=True,
    needs_harm=True,
)
def large_weight_decay(
    history: TrainingHistory, *, coupled: float = 0.05, decoupled: float = 1.0, progress: float = 0.4
) -> Finding | None:
    """A decay of `coupled` or more that goes through the gradient, or of `decoupled` or more in AdamW.

    Info; a warning if 100 losses, or forty at the end of a run, gained less than a share `progress` of the first; where
    the decay goes through the gradient, 0.6 from twice `coupled` on. Or a warning where a term of the loss takes |w| or
    w² and is nearly all of the gradient, and all inputs of a batch come to have the same output.
    """
    largest, least = 0.0, progress
    for settings in history.model.optimizer_settings:
        value = settings.get("weight_decay")
        limit = coupled if settings.get("kind") in _COUPLED else decoupled
        if isinstance(value, (int, float)) and value >= limit:
            largest = max(largest, float(value))
            if limit == coupled:
                least = 0.6 if value >= 2.0 * coupled else 0.25 * progress
    flat = [x.output_spread <= 1e-4 * max(x.output_abs_max, 1e-12) for x in training_batches(history)]
    term = "" if largest or flat[-2:] != [True, True] or flat[0] else penalty(history)
    if not (largest or term) or not history.num_clean:
        return None
    is_bad = bool(term) or not signals_of(history).progress >= least
    is_slow = history.losses.count >= 40 and has_had_time(history, 100) and is_bad
    what = f"penalty of {term} in the loss left one output for all inputs" if term else f"weight decay is {largest:g}"
    return Finding(
        f"The {what}.",
        severity="warning" if is_slow else "info",
        evidence={"weight_decay": largest, "term": term, "threshold": coupled},
        confidence=0.85,
    )


@rule(
    "second-moment-collapse",
    of="second-moment-out-of-range",
    remedy="The optimizer has forgotten how large gradients can be, and steps too far when they come back: lower beta2 "
    "(0.95), clip the update (StableAdamW, or AdaGC), warm up again after a pause; in half precision keep its state in "
    "float32.",
    cause=(
        "second-moment-collapse",
        "Adam's second moment has decayed: ordinary gradients now make too large steps.",
    ),
    weight=0.9,
    explains="norm-spike loss-spike growing-norm update-ratio-high loss-divergence loss-oscillation",
)
def second_moment_collapse(
    history: TrainingHistory, *, times: float = 5.0, fallen: float = 0.1, share: float = 0.5
) -> Finding | None:
    """In a `share` of the weights the gradient is `times` what the moment remembers, after that fell below `fallen`.

    Of what it was at most, at an earlier sample. Or the moment of a weight is all zeros while its gradient is not, as
    where half precision rounds it away. A warning for zeros, and where the loss shows it; else info.
    """
    coefs: dict[int, float] = {}  # made when one is wanted
    num: dict[int, int] = {}
    met: dict[int, list[str]] = {}
    zero: dict[str, int] = {}
    for name, window in history.weights.current():
        if is_bias(name) or window.last.value.numel < MIN_NUMEL:
            continue
        peak = before = window.first.value.moment_rms or 0.0
        for point in window.recent:
            step, value = point.step, point.value
            rms, norm = value.moment_rms, value.grad_norm
            if rms is None or norm is None or not math.isfinite(rms) or not math.isfinite(norm):
                continue
            num[step] = num.get(step, 0) + 1
            if value.moment_max == 0.0 and norm > 0.0 and value.update_norm:
                zero[name] = step
            if before < fallen * peak:
                coefs = coefs or {entry.step: entry.clip_coef for entry in history.clean}
                if norm * coefs.get(step, 1.0) / math.sqrt(value.numel) > times * rms:
                    met.setdefault(step, []).append(name)
            peak, before = max(peak, rms), rms
    steps = [step for step, names in met.items() if len(names) >= share * num[step] and num[step] > 1]
    if not steps and not zero:
        return None
    names = list(zero) if zero else met[steps[-1]]
    text = (
        f"The second moment of {count(len(names), 'weight')} is all zeros, though the gradient is not: {listed(names)}."
        if zero
        else f"At step {steps[-1]} the gradients of {len(names)} of {num[steps[-1]]} weights were more than {times:g} "
        f"times what the second moment remembers, which had fallen to less than {fallen:g} of itself."
    )
    return Finding(
        text,
        max(zero.values()) if zero else steps[0],
        history.weights.last_step,
        severity="warning" if zero or is_felt_by_the_loss(history) else "info",
        layers=tuple(names[:8]),
        evidence={"num_weights": len(names), "threshold_times": times, "threshold_fallen": fallen},
        confidence=0.9 if zero else 0.7,
    )


@rule(
    "moment-out-of-bounds",
    of="second-moment-out-of-range",
    leads=True,
    severity="critical",
    reads="sampled weights: the largest second moment at two samples in a row, and the largest norm of all steps",
    source="He et al., ISCA 2023: faults that harm leave values in the optimizer's state that no training makes",
    remedy="An average of squares is larger than the largest square: something other than the optimizer has written "
    "to its state, or memory is faulty. Go back to a checkpoint from before; where it comes again on one machine, test "
    "its memory.",
)
def moment_out_of_bounds(history: TrainingHistory, *, margin: float = 1.1) -> Finding | None:
    """A second moment rose above `margin` times the square of the largest norm, to which weight decay is added.

    From one sample to the next, so that what was there before the guard does not count. Critical where one is not
    finite; silent after a step with NaN or Inf was taken, which explains that.
    """
    if history.num_nonfinite_applied or not history.norm_max > 0.0:
        return None
    decays = [group.get("weight_decay") for group in history.model.optimizer_settings]
    decay = max((abs(d) for d in decays if isinstance(d, (int, float))), default=0.0)
    worst: dict[str, tuple[int, float]] = {}
    for name, window in history.weights.current():
        for earlier, later in pairwise(window.recent):
            before, after = earlier.value.moment_max, later.value.moment_max
            if before is None or after is None or not math.isfinite(before):
                continue
            if after > margin * max(before, (history.norm_max + decay * later.value.abs_max) ** 2):
                worst[name] = later.step, after
                break
    if not worst:
        return None
    names = sorted(worst, key=lambda name: -worst[name][1])
    step, largest = worst[names[0]]
    return Finding(
        f"The second moment of {count(len(names), 'parameter')} came to {largest:.3g}, above the square of the largest "
        f"norm, {history.norm_max**2:.3g}: {listed(names)}.",
        step,
        history.weights.last_step,
        severity="critical" if largest == math.inf else "warning",
        layers=tuple(names[:8]),
        evidence={"moment_max": largest, "norm_max": history.norm_max, "threshold_margin": margin},
        confidence=0.9,
    )


@rule(
    "poor-initialisation",
    reads="standard deviation of each weight matrix before the first step, against the one its fan-in asks for",
    source="the toolkit's check_initialization (0.1 and 10 times sqrt(2 / fan_in), He et al. 2015)",
    remedy="Initialise these layers by their fan-in (torch.nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh), "
    "or look for what overwrote or rescaled their weights.",
)
def poor_initialisation(
    history: TrainingHistory, *, small: float = 0.1, large: float = 8.0, tiny: float = 0.02, share: float = 0.5
) -> Finding | None:
    """Weights that began above `large` times the expected spread, or below `small` times it in a `share` of the layers.

    A single layer counts as too small below `tiny`, unless it is the last. Fewer than a `share` are info unless 50
    losses gained less than 0.3 of the first. Above twice the spread a `share` of the layers is needed. Recurrent
    weights (weight_hh) count as too large above 1.1. A spread of zero counts where more than a `share` of the layers
    has it, and less than 0.8 of the first loss was gained. GPT-2's spreads are not too small.
    """
    if not history.num_steps:
        return None
    known = history.model.initialization
    begin = history.overview.buckets[0].first_step
    flat = [name for name, (actual, _) in known.items() if actual == 0.0]
    if len(flat) > share * len(known) and not signals_of(history).progress >= 0.8:
        return Finding(
            f"{count(len(flat), 'layer')} began with all weights equal: its units stay alike. {listed(flat)}.",
            begin,
            begin,
            layers=tuple(flat[:8]),
            evidence={"num_layers": len(flat), "ratio": 0.0, "threshold": share},
            confidence=0.95,
        )
    ratios = {n: actual / expected for n, (actual, expected) in known.items() if actual > 0.0}
    all_large = sum(r > 2.0 for r in ratios.values()) >= share * max(len(ratios), 1)
    limits = {n: 1.1 if "weight_hh" in n else 2.0 if all_large else large for n in ratios}
    too_large = sorted((n for n, r in ratios.items() if r > limits[n]), key=lambda n: -ratios[n])
    usual = as_in_gpt2({n: actual for n, (actual, _) in known.items()}, history.model.module_kinds)
    too_small = sorted((n for n, r in ratios.items() if r < small and n not in usual), key=ratios.__getitem__)
    if len(too_small) < share * len(ratios):
        too_small = [n for n in too_small if ratios[n] < tiny and n not in last_layer(history)]
    names = too_large or too_small
    if not names:
        return None
    worst = ratios[names[0]]
    is_felt = descent(history) is not False and not may_rise(history) and is_stuck(history, 0.3, 50)
    is_felt = is_felt or bool(too_large) or len(names) >= share * len(ratios) or not history.losses.count
    return Finding(
        f"{count(len(names), 'layer')} began with weights that are too {'large' if too_large else 'small'}: "
        f"{names[0]} with {worst:.2g} times the standard deviation that its fan-in asks for.",
        begin,
        begin,
        severity="warning" if is_felt else "info",
        layers=tuple(names[:8]),
        evidence={
            "ratio": worst,
            "num_layers": len(names),
            "share": len(names) / len(ratios),
            "threshold": limits[names[0]] if too_large else small,
        },
        confidence=0.85,
    )


@rule(
    "shrinking-weights",
    of="large-weight-decay",
    remedy="Weight decay outweighs what is learnt: divide it by 10 or more (0.01 to 0.1 is usual for AdamW, 1e-4 for "
    "SGD), and leave biases and norms out of it.",
)
def shrinking_weights(
    history: TrainingHistory, *, decay: float = 0.01, shrunk: float = 0.3, progress: float = 0.5
) -> Finding | None:
    """Decay takes more than a share `decay` of the weights each step, or the median weight's norm fell below `shrunk`.

    The latter, of what it was at the first sample, counts while the loss has not come down by a share `progress`.
    """
    taken = history.model.decay_per_step or 0.0
    learns = signals_of(history).progress >= progress
    left = 1.0
    if taken > decay or not learns:
        windows = [w for n, w in history.weights.current() if w.first.value.norm and not is_bias(n)]
        left = median([w.last.value.norm / w.first.value.norm for w in windows]) if windows else 1.0
    has_shrunk = left < shrunk and not learns
    if not history.num_clean or not (taken > decay or has_shrunk):
        return None
    said = [f"weight decay takes {taken:.1%} of the weights at each step"] if taken > decay else []
    said += [f"the median weight has shrunk to {left:.2g} of its first norm"] if has_shrunk else []
    text = " and ".join(said)
    return Finding(
        f"{text[0].upper()}{text[1:]}.",
        evidence={"decay_per_step": taken, "norm_left": left, "threshold": decay, "threshold_norm": shrunk},
        confidence=0.95 if taken > decay else 0.8,
    )
