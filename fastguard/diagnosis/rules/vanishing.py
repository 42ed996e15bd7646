"""Rules on gradients that are too small: in the first layers, or exactly zero."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import compress

from ...records import TrainingHistory
from ...records.sampled import is_bias
from ...records.table import all_zero
from ..finding import Seen
from ..registry import rule
from ..signals import BLOCK, has_had_time, is_felt_by_the_loss, median, signals_of

TITLE = "Gradients too small"

_HALF_STEP = 2.0**-24  # the smallest positive float16


@rule(
    "zero-gradients",
    source="SageMaker Debugger AllZero (100% zeros)",
    see="At step {_step} the gradients of {num_zero_tensors} of {num_tensors} tensors were nothing but zeros.",
    sure=0.7,
    remedy="Check that the parameter is used in the forward pass, and that its output reaches the loss. Dead ReLUs, a "
    "detach(), a zero-initialised layer after it, or an expert or embedding that this batch did not use leave zeros.",
    needs_harm=True,
)
def zero_gradients(history: TrainingHistory, *, share: float = 0.5, kept: float = 0.5) -> Seen | None:
    """A tensor's gradient was all zeros at the last step.

    Info; a warning from a share `share` of all tensors on, unless the loss has gained a share `kept` and keeps it.
    Info, too, if all are zero, but were not within twenty steps: the loss of this batch was met.
    """
    record = history.last
    if record is None or not record.is_finite or record.loss == 0.0:  # nothing is left to learn from this batch
        return None
    names = record.tensors.names
    found = [names[i] for i in all_zero(record.tensors)]
    zero = [name for name in found if not _may_cancel(name, {*found}, names)]
    if not zero:
        return None
    has_just_moved = len(zero) == len(names) and any(e.norm > 0.0 for e in list(history.clean)[-20:])
    return Seen(
        at=(record, record),
        layers=zero,
        warn=len(zero) >= share * len(names) and not has_just_moved and not _learns(history, kept),
        num_zero_tensors=len(zero),
        num_tensors=len(names),
        _step=record.step,
    )


@rule(
    "zero-gradient-tensors",
    of="zero-gradients",
    see="{num_zero_tensors:tensor} of {num_tensors} had a gradient of zeros since step {_since}: {_names}.",
    remedy="Look for dead units, a detach() or no_grad(), and a factor of zero on what these parameters give.",
)
def zero_gradient_tensors(history: TrainingHistory, *, samples: int = 3, min_steps: int = 20) -> Seen | None:
    """A tensor's gradient was all zeros in `samples` samples in a row, over at least `min_steps` steps.

    Info if the loss has gained a share 0.5 and keeps it, and others before it have one, as beside an expert that is not
    chosen, or the loss still falls. Silent if the loss is nearly zero: a hinge loss that is met has no gradient.
    """
    tensors = history.tensors
    if tensors.all_are("zero_since", -1.0) or signals_of(history).loss_level <= 1e-3 * history.loss_trend.first:
        return None
    since = {
        name: track.zero_since
        for name, track in tensors.items()
        if track.zero_since is not None
        and track.last_step == tensors.last_step
        and track.num_zero >= samples
        and track.last_step - track.zero_since >= min_steps
    }
    names = [name for name in since if not _may_cancel(name, since.keys(), tensors)]
    began = min((since[name] for name in names), default=0)
    if not names or (len(names) == len(tensors) and any(e.norm > 0.0 for e in history.clean if e.step >= began)):
        return None  # of all tensors: a loss that many batches meet
    from_the_first = next(iter(tensors)) in names
    return Seen(
        at=(began, tensors.last_step),
        layers=_to_blame(list(tensors), names),
        warn=not _learns(history, 0.5) or (from_the_first and not signals_of(history).still_falls),
        num_zero_tensors=len(names),
        num_tensors=len(tensors),
        from_the_first=from_the_first,
        _since=began,
        _names=names,
    )


def _learns(history: TrainingHistory, kept: float, patience: int = 100) -> bool:
    """Whether the loss shows that the run gets on in spite of it, or has had no time to show anything."""
    if history.losses.count and not has_had_time(history, patience):
        return not history.loss_trend.mean > history.loss_trend.first
    return signals_of(history).progress >= kept and not is_felt_by_the_loss(history)


def _may_cancel(name: str, zero: Collection[str], names: Iterable[str]) -> bool:
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
    "vanishing-layers",
    of="vanishing-gradients",
    leads=True,
    was="vanishing-norm",
    see="Per element, gradients of the first {_size:tensor} {_are} {_share:.2g} times those of the last {_size}; "
    "{_least} {_get} the least.{_stood}",
    remedy="Use ReLU-like activations, normalisation, residual connections, or a variance-keeping initialisation.",
)
def vanishing_layers(history: TrainingHistory, *, ratio: float = 1e-3, ratio_stuck: float = 0.02) -> Seen | None:
    """The first quarter of the tensors has a median gradient below `ratio` of the last quarter's, element for element.

    The limit is `ratio_stuck` if it falls off evenly from layer to layer, and 100 losses gained less than 0.2 of the
    first, now or in the beginning. A warning if the loss has not come down by 0.6; else info. Needs four samples of
    eight tensors (four if stuck); biases and zeros do not count.
    """
    tensors, gained, had_time = history.tensors, signals_of(history).progress, has_had_time(history, 100)
    num_stood = _num_stood(history, 0.2) if had_time else 0
    stands = had_time and gained < 0.2
    has_stood = num_stood >= max((0.6 if history.has_ended else 1.0) * 100, 0.1 * history.num_steps)
    if tensors.num_samples < 4:
        return None
    is_known = [norm == norm and not is_bias(name) for name, norm in zip(tensors, tensors.column("log_rms"))]
    lately, early = (array("d", compress(tensors.column(name), is_known)) for name in ("log_rms", "first_log_rms"))
    if len(lately) < (4 if stands or has_stood else 8):
        return None
    size = max(min(2, len(lately) // 3), len(lately) // 4)
    first, last, at_first, at_last = map(median, (lately[:size], lately[-size:], early[:size], early[-size:]))
    share, then = (math.exp(max(min(gap, 700.0), -700.0)) for gap in (min(first - last, 0.0), at_first - at_last))
    is_now = share < ratio or (stands and share < ratio_stuck and _evenness(lately) >= 0.8)
    was_so = has_stood and then < ratio_stuck and _evenness(early) >= 0.8
    if not is_now and not was_so:
        return None
    limit = ratio_stuck if stands or has_stood else ratio
    least = math.log(limit) + (last if is_now else at_last)
    known = [*compress(tensors, is_known)]
    names = [name for name, norm in zip(known, lately if is_now else early) if norm < least]
    is_stuck = not gained >= 0.6
    return Seen(
        at=(min(tensors[name].first_step for name in known), tensors.last_step),
        layers=names,
        warn=is_stuck,
        num_stood=num_stood,
        _size=size,
        _are="are" if is_now else "were at first",
        _get="get" if is_now else "got",
        _share=share if is_now else then,
        _least=names,
        _stood=f" The loss was stuck for the first {num_stood} steps." if was_so else "",
    )


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
    see="The gradients of {num_tensors:tensor} of {_of} end at the smallest float16, and most of their elements are "
    "zero: {layers}.",
    remedy="Use a GradScaler, or bfloat16: small gradients become zero in float16.",
)
def half_precision_underflow(history: TrainingHistory, *, zeros: float = 0.5, share: float = 0.25) -> Seen | None:
    """A share `share` of all tensors has a smallest non-zero gradient of one to four times 2**-24, and more than a
    share `zeros` of zeros.

    With a loss scale the scaled gradients count.
    """
    tensors, scale = history.tensors, 1.0
    if history.num_scaled:
        scale = next((e.loss_scale for e in reversed(history.recent) if e.loss_scale is not None), 1.0) or 1.0
    if tensors.num_samples < 3 or min(tensors.column("min_nonzero"), default=math.inf) * scale > 4.0 * _HALF_STEP:
        return None
    ends = {k * _HALF_STEP for k in (1.0, 2.0, 3.0, 4.0)}
    lost = [n for n, track in tensors.items() if track.min_nonzero * scale in ends and track.zero_share > zeros]
    if not lost or len(lost) < share * len(tensors):
        return None
    return Seen(
        at=(min(tensors[name].first_step for name in lost), tensors.last_step),
        layers=lost,
        num_tensors=len(lost),
        _of=len(tensors),
    )
