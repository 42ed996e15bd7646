"""Rules on gradients that are too small: everywhere, in the first layers, or exactly zero."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import compress

from ...records import TrainingHistory
from ...records.table import all_zero
from ...records.updates import is_bias
from ..finding import Finding, count, listed
from ..needs import may_rise
from ..registry import rule
from ..signals import BLOCK, ends, exp, has_had_time, is_felt_by_the_loss, median, signals_of

TITLE = "Gradients too small"

_HALF_STEP = 2.0**-24  # the smallest positive float16


@rule(
    "zero-gradients",
    reads="zeros of each tensor in the last record",
    source="SageMaker Debugger AllZero (100 % zeros)",
    remedy="Is the parameter used in the forward pass, and does its output reach the loss? Dead ReLUs, a detach(), "
    "a zero-initialised layer after it, or an expert or embedding that this batch did not use leave zeros.",
    needs_harm=True,
)
def zero_gradients(history: TrainingHistory, *, share: float = 0.5, kept: float = 0.5) -> Finding | None:
    """A tensor whose gradient was all zeros at the last step: info, a warning from `share` of all tensors on.

    Info, too, where the loss has gained a share `kept` and keeps it; and where all are zero, but were not within twenty
    steps: the loss of this batch was met.
    """
    record = history.last
    if record is None or not record.is_finite:
        return None
    if record.loss is not None and record.loss == 0.0:  # nothing is left to learn from this batch
        return None
    names, at = record.tensors.names, all_zero(record.tensors)
    zero = {names[i] for i in at}
    at = [i for i in at if not _may_cancel(names[i], zero, names)]
    num_zero = len(at)
    if not num_zero:
        return None
    has_just_moved = num_zero == len(names) and any(e.norm > 0.0 for e in list(history.clean)[-20:])
    layers = tuple(names[i] for i in at[:8])
    return Finding(
        f"At step {record.step} the gradients of {num_zero} of {len(names)} tensors were nothing but zeros.",
        record.step,
        record.step,
        severity="warning"
        if num_zero >= share * len(names) and not has_just_moved and not _learns(history, kept)
        else "info",
        layers=layers,
        evidence={"num_zero_tensors": num_zero, "num_tensors": len(names), "threshold": share},
        confidence=0.7,
    )


@rule(
    "zero-gradient-tensors",
    of="zero-gradients",
    source="SageMaker Debugger AllZero (100 % zeros), asked for a run of samples",
    remedy="These parameters do not learn. Units before or after them may be dead (a bias or a step that was too "
    "large), a detach() or no_grad() may cut them off, or their output is multiplied by zero.",
)
def zero_gradient_tensors(
    history: TrainingHistory, *, samples: int = 3, min_steps: int = 20, kept: float = 0.5
) -> Finding | None:
    """Tensors whose gradient was all zeros in `samples` samples in a row, over `min_steps` steps at least.

    Info where others before them have one, as beside an expert that is not chosen, and the loss has gained a share
    `kept` and keeps it. Silent where the loss has come down to nothing: a hinge loss that is met has no gradient.
    """
    tensors = history.tensors
    if tensors.all_are("zero_since", -1.0):
        return None
    if signals_of(history).loss_level <= 1e-3 * history.loss_trend.first:
        return None
    dead = []
    for name, track in tensors.items():
        since = track.zero_since
        if since is None or track.last_step != tensors.last_step or track.num_zero < samples:
            continue
        if track.last_step - since >= min_steps:
            dead.append((name, since))
    if not dead:
        return None
    zero = {name for name, _ in dead}
    dead = [(name, since) for name, since in dead if not _may_cancel(name, zero, tensors)]
    if not dead:
        return None
    if len(dead) == len(tensors):
        since = min(since for _, since in dead)
        if any(entry.norm > 0.0 for entry in history.clean if entry.step >= since):
            return None  # a loss that many batches meet, not tensors that never learn
    names = [name for name, _ in dead]
    from_the_first = next(iter(tensors)) in names
    return Finding(
        f"The gradient of {count(len(dead), 'tensor')} of {len(tensors)} has been nothing but zeros since step "
        f"{min(since for _, since in dead)}: {listed(names)}.",
        min(since for _, since in dead),
        tensors.last_step,
        severity="info" if not from_the_first and _learns(history, kept) else "warning",
        layers=_to_blame(list(tensors), names),
        evidence={
            "num_zero_tensors": len(dead),
            "num_tensors": len(tensors),
            "from_the_first": from_the_first,
            "threshold_samples": samples,
        },
        confidence=0.9,
    )


def _learns(history: TrainingHistory, kept: float, patience: int = 100) -> bool:
    """Whether the loss shows that the run gets on in spite of it, or has had no time to show anything."""
    if history.losses.count and not has_had_time(history, patience):
        return not history.loss_trend.mean > history.loss_trend.first
    return signals_of(history).progress >= kept and not is_felt_by_the_loss(history)


def _may_cancel(name: str, zero: set[str], names: Iterable[str]) -> bool:
    """Whether `name` is a bias whose weight is not all zeros: what pulls one way and the other adds up to nothing."""
    module = name.rpartition(".")[0]
    mine = [other for other in names if other.rpartition(".")[0] == module and other != name]
    return is_bias(name) and any(other not in zero for other in mine)


def _to_blame(names: list[str], zero: list[str]) -> tuple[str, ...]:
    """The layer whose output is dead, first.

    A weight of zero gradient beside a bias with some has a dead input: the layer before it is to blame. A layer that
    is zero altogether gets no gradient from what follows.
    """
    last = max(zero, key=names.index)
    module = last.rpartition(".")[0]
    mine = [name for name in names if name.rpartition(".")[0] == module]
    others = [name for name in zero if name not in mine]
    if others and not set(mine) <= set(zero):
        before = max(others, key=names.index).rpartition(".")[0]
        blamed = [name for name in others if name.rpartition(".")[0] == before]
        return tuple(dict.fromkeys([*blamed, last, *reversed(others)]))[:8]
    return tuple(reversed(zero[-8:]))


@rule(
    "vanishing-norm",
    of="vanishing-gradients",
    source="SageMaker Debugger VanishingGradient (mean |g| < 1e-7), taken relative to the run",
    remedy="The gradients died while the loss is still high: look for dead or saturated units, and for a step (a "
    "learning rate too high) after which they fell.",
    needs_descent=True,
)
def vanishing_norm(
    history: TrainingHistory, *, ratio: float = 1e-3, min_steps: int = 50, progress: float = 0.5
) -> Finding | None:
    """The average norm is below `ratio` of where it began, though the loss has not come down by a share `progress`.

    From `min_steps` clean steps on. A norm that falls with the loss is convergence. All zeros count as a fall.
    """
    trend, losses = history.norm_trend, history.loss_trend
    if trend.count < min(min_steps, 10) or losses.count < min_steps or losses.first <= 0.0:
        return None
    zeros = sum(norm == 0.0 for norm in signals_of(history).norms[-20:])
    fallen = exp(trend.mean - trend.first)
    if (fallen >= ratio and zeros < 10) or losses.mean < (1.0 - progress) * losses.first:
        return None
    return Finding(
        f"The gradient norm has fallen to {0.0 if zeros >= 10 else fallen:.3g} of where it began, while the loss is "
        f"still {losses.mean:.4g} of {losses.first:.4g}.",
        *ends(history.clean),
        evidence={"ratio": 0.0 if zeros >= 10 else fallen, "threshold": ratio, "loss": losses.mean},
        confidence=0.85,
    )


@rule(
    "vanishing-layers",
    of="vanishing-gradients",
    leads=True,
    reads="each tensor's usual gradient for its size, in the order of the model",
    source="our own, from the ratio of first to last layer that torchmortem (100) and others use",
    remedy="Hardly any gradient reaches the first layers: use ReLU-like activations instead of sigmoid or tanh, "
    "normalisation layers, residual connections, or an initialisation that keeps the variance.",
)
def vanishing_layers(
    history: TrainingHistory, *, ratio: float = 1e-3, ratio_alone: float = 1e-5, ratio_stuck: float = 0.02
) -> Finding | None:
    """The first quarter of the tensors has a median gradient below `ratio` of the last quarter's, element for element.

    Or below `ratio_stuck` where it falls off evenly from layer to layer, and 100 losses gained less than 0.2 of the
    first; or it was so in the beginning, for that many steps (at a run's end six tenths) and a tenth of the run. A
    warning if the loss has not come down by 0.6 (0.9 where it was so), or below `ratio_alone`; else info. Of at least
    eight tensors (four where it is stuck); biases and zeros do not count. From the fourth sample on.
    """
    tensors = history.tensors
    if tensors.num_samples < 4:
        return None
    gained = signals_of(history).progress
    stands = has_had_time(history, 100) and gained < 0.2
    now, at_first = (_spread(tensors.column(name)) for name in ("log_rms", "first_log_rms"))
    was_uneven = at_first >= -math.log(ratio_stuck) and has_had_time(history, 100) and not may_rise(history)
    num_stood = _num_stood(history, 0.2) if was_uneven else 0
    has_stood = num_stood >= max((0.6 if history.has_ended else 1.0) * 100, 0.1 * history.num_steps)
    limit = ratio_stuck if stands or has_stood else ratio
    if not has_stood and now < -math.log(limit):
        return None
    is_known = [not is_bias(name) and norm == norm for name, norm in zip(tensors, tensors.column("log_rms"))]
    lately, early = (array("d", compress(tensors.column(name), is_known)) for name in ("log_rms", "first_log_rms"))
    if len(lately) < (4 if stands or has_stood else 8):
        return None
    size = max(min(2, len(lately) // 3), len(lately) // 4)
    first, last, at_first, at_last = map(median, (lately[:size], lately[-size:], early[:size], early[-size:]))
    share, then = (math.exp(max(min(gap, 700.0), -700.0)) for gap in (min(first - last, 0.0), at_first - at_last))
    is_now = share < ratio or (stands and share < limit and _evenness(lately) >= 0.8)
    was_so = has_stood and then < limit and _evenness(early) >= 0.8
    if not is_now and not was_so:
        return None
    is_stuck = not gained >= 0.6 or (was_so and not gained >= 0.9)
    known = list(compress(tensors, is_known))
    least = math.log(limit) + (last if is_now else at_last)
    names = [name for name, norm in zip(known, lately if is_now else early) if norm < least]
    return Finding(
        f"Per element, gradients of the first {count(size, 'tensor')} {'are' if is_now else 'were at first'} "
        f"{share if is_now else then:.2g} times those of the last {size}; {listed(names)} {'get' if is_now else 'got'} "
        "the least." + (f" The loss was stuck for the first {num_stood} steps." if was_so else ""),
        min(tensors[name].first_step for name in known),
        tensors.last_step,
        severity="warning" if is_stuck or share < ratio_alone else "info",
        layers=tuple(names[:8]),
        evidence={"first_to_last": share, "at_the_beginning": then, "num_stood": num_stood, "threshold": limit},
        confidence=0.95 if is_stuck else 0.6,
    )


def _spread(values: Sequence[float]) -> float:
    highest = max((value for value in values if value == value), default=-math.inf)
    return highest - min((value for value in values if value == value), default=0.0)


def _num_stood(history: TrainingHistory, gained: float) -> int:
    """For how many steps, from the run's first on, less than a share `gained` of the first loss was gained."""
    s, buckets = signals_of(history), [b for b in history.overview.buckets if b.loss.num]
    first = s.chance if 0.0 < s.chance < s.initial_loss else s.initial_loss
    few = max(1, BLOCK // history.overview.steps_per_bucket)
    levels = (sum(b.loss.mean for b in buckets[i : i + few]) / few for i in range(len(buckets) - few + 1))
    end = next((i for i, level in enumerate(levels) if level < (1.0 - gained) * first), None)
    so_far = history.num_steps if history.has_ended else 0  # it may yet fall
    return so_far if end is None else buckets[end].first_step - buckets[0].first_step


def _evenness(values: Sequence[float]) -> float:
    """The share of the variance of `values` that a line through them explains."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    both = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    of_places, of_values = (sum((i - middle) ** 2 for i in range(len(values))), sum((v - mean) ** 2 for v in values))
    return both * both / (of_places * of_values) if of_values else 0.0


@rule(
    "half-precision-underflow",
    of="half-precision-range",
    source="IEEE 754 binary16: nothing positive is below 2**-24; loss scaling of Micikevicius et al. 2018, section 3.2",
    remedy="Small gradients become zero in float16: use a GradScaler, or bfloat16.",
)
def half_precision_underflow(history: TrainingHistory, *, zeros: float = 0.5, share: float = 0.25) -> Finding | None:
    """Tensors whose smallest non-zero gradient is one to four times 2**-24, more than `zeros` of it zeros.

    With a loss scale the scaled gradients are looked at. Fires when a `share` of all tensors is like that.
    """
    tensors = history.tensors
    if tensors.num_samples < 3:
        return None
    scale = 1.0
    if history.num_scaled:
        scale = next((e.loss_scale for e in reversed(history.recent) if e.loss_scale is not None), 1.0) or 1.0
    if min(tensors.column("min_nonzero"), default=math.inf) * scale > 4.0 * _HALF_STEP:
        return None
    ends = {k * _HALF_STEP for k in (1.0, 2.0, 3.0, 4.0)}
    lost = [n for n, track in tensors.items() if track.min_nonzero * scale in ends and track.zero_share > zeros]
    if not lost or len(lost) < share * len(tensors):
        return None
    return Finding(
        f"The gradients of {count(len(lost), 'tensor')} of {len(tensors)} end at the smallest float16, and most of "
        f"their elements are zero: {listed(lost)}.",
        min(tensors[name].first_step for name in lost),
        tensors.last_step,
        layers=tuple(lost[:8]),
        evidence={"num_tensors": len(lost), "loss_scale": scale, "threshold_zeros": zeros},
        confidence=0.8,
    )
