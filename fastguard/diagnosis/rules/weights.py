"""Rules on the weights: updates too large or too small for them, parameters that never learn, initialisation, decay."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from ...records import TrainingHistory, UpdateRatio
from ...records.model import as_in_gpt2
from ...records.updates import is_bias
from ..finding import Finding, Severity, count, listed
from ..needs import descent, may_rise
from ..registry import rule
from ..signals import has_had_time, is_felt_by_the_loss, median, signals_of
from .output import last_layer
from .output_targets import stands
from .units_experts import idle_branches

TITLE = "Weights and updates"

_FELT = 0.04  # of the first losses: noise below that is none of large steps
_FRESH = (6.0**-0.5, 0.5**0.5, 1.0)  # of He's spread: torch's own for linear layers, LeCun's and Xavier's, He's


@rule(
    "update-ratio-high",
    reads="sampled weights: norm of the update over norm of the weights",
    source="torchmortem's bound of 0.1; the usual 1e-3 is Karpathy's. First steps are larger, so the bound is too",
    remedy="Each step changes the weights by a large part of themselves: divide the learning rate by 10, or warm it "
    "up.",
    needs_harm=True,
)
def update_ratio_high(
    history: TrainingHistory,
    *,
    first: float = 0.5,
    grown: float = 0.06,
    growth: float = 2.0,
    later: float = 0.048,
    min_steps: int = 15,
    kept: float = 0.3,
    patience: int = 80,
    restless: float = 0.5,
) -> Finding | None:
    """The median weight's update is above `first` of it at the first sample, or above `later` from 20 steps later on.

    Or, in between, above `grown` and `growth` times the first, at the learning rate of the first: steps shrink against
    the weights as those grow, unless steps overshoot. Asked `min_steps` steps after the first sample; silent if the
    learning rate has come down by then, or still rises. A warning where the loss rises, or where of `patience` losses
    less than a share `kept` of the first has been gained and no more is being gained, or it is not kept, or they change
    from step to step by more than a share `restless` of their level far from its end, or, certain whatever became of
    the loss, where more than half of the units of a module are dead; else info.
    """
    updates = history.updates
    first_sample, early, peak = updates.first, updates.early, updates.peak
    if first_sample is None or not history.clean or history.clean[-1].step - first_sample.step < min_steps:
        return None
    has_grown = early is not None and early.ratio > grown and early.ratio > growth * first_sample.ratio
    if first_sample.ratio > first and not _has_come_down(history):
        sample, limit = first_sample, first
    elif early is not None and has_grown and _is_at_lr_of(first_sample, early) and not _has_come_down(history):
        sample, limit = early, grown
    elif peak is not None and peak.ratio > later and _is_at_full_lr(history, peak):
        sample, limit = peak, later
    else:
        return None
    have_died = any(window.last.value.dead_unit_ratio > 0.5 for _, window in history.activations.items())
    is_hurt = have_died or _is_hurt(history, kept, patience, restless)
    return Finding(
        f"Step {sample.step} changed the median weight by {sample.ratio:.2g} times its norm.",
        sample.step,
        history.weights.last_step,
        severity="warning" if is_hurt else "info",
        evidence={
            "update_ratio": sample.ratio,
            "threshold": limit,
            "num_samples": updates.count,
            "is_certain": have_died,
        },
        confidence=0.9 if sample.ratio > 2 * limit else 0.75,
    )


def _is_hurt(history: TrainingHistory, kept: float, patience: int, restless: float) -> bool:
    """Whether the loss says that steps are too large: it rises, or has not gained and kept much in `patience` steps."""
    trend = history.loss_trend
    if not trend.count or (trend.count >= 10 and trend.mean > 1.2 * trend.first > 0.0):
        return True
    if trend.count < patience and not history.has_ended:
        return False
    s = signals_of(history)
    is_near_zero = s.loss_noise <= _FELT * trend.first or s.progress >= 0.85  # where any loss is restless
    if s.loss_noise > restless * s.loss_level and not is_near_zero:
        return True
    goes_on = len(s.loss_levels) >= 3 and s.loss_levels[-1] < 0.95 * s.loss_levels[-3] - 0.5 * s.loss_noise
    return not (s.progress >= kept or goes_on) or is_felt_by_the_loss(history)


def _is_at_lr_of(first: UpdateRatio, sample: UpdateRatio) -> bool:
    """Whether both learning rates are known, and that of `sample` is not the higher one."""
    return first.lr is not None and sample.lr is not None and sample.lr <= 1.02 * first.lr


def _is_at_full_lr(history: TrainingHistory, sample: UpdateRatio) -> bool:
    """Whether the sample is of a step at half of the largest learning rate or more, and that is no longer rising."""
    if sample.lr is None:
        return True
    return 2.0 * sample.lr >= history.lrs.max and not signals_of(history).is_lr_rising


def _has_come_down(history: TrainingHistory) -> bool:
    lrs = signals_of(history).lrs
    return bool(lrs) and lrs[-1] < 0.7 * lrs[0] and len(lrs) == history.num_clean


@rule(
    "update-ratio-low",
    reads="sampled weights: norm of the update over norm of the weights; and the loss",
    source="torchmortem's bound of 1e-5, asked with a loss that stands still, and so less strict",
    remedy="The steps are too small to learn from: raise the learning rate by 10 to 100 times; look for a scheduler "
    "that holds it down, and for gradients that are divided twice.",
)
def update_ratio_low(
    history: TrainingHistory,
    *,
    ratio: float = 5e-4,
    ratio_alone: float = 1e-7,
    progress: float = 0.03,
    min_steps: int = 30,
) -> Finding | None:
    """The median weight changes by less than `ratio` of itself a step, and the loss has fallen by less than `progress`.

    Without losses, by less than `ratio_alone`. In all samples (two at least), once there were `min_steps` steps at half
    of the largest learning rate or more and it rises no longer.
    """
    s = signals_of(history)
    updates = history.updates
    if updates.count < 2 or s.num_full_lr < min_steps or s.is_lr_rising or history.num_clean < min_steps:
        return None
    known = history.loss_trend.count >= min_steps
    if known and not s.fall < progress:
        return None
    value = max(sample.ratio for sample in (updates.first, updates.peak) if sample is not None)
    if value >= (ratio if known else ratio_alone) or value == 0.0:
        return None
    return Finding(
        f"The median weight changes by no more than {value:.2g} of itself a step"
        + (f", and the loss has come down by {max(s.fall, 0.0):.1%} only." if known else "."),
        history.clean[0].step,
        history.weights.last_step,
        evidence={"update_ratio": value, "threshold": ratio, **({"progress": s.fall} if known else {})},
        confidence=0.9,
    )


@rule(
    "unchanged-weights",
    of="untrained-parameters",
    source="SageMaker Debugger UnchangedTensor (3 steps)",
    remedy="These parameters never change: are they frozen by mistake, missing from the optimizer, in a group with a "
    "learning rate of 0, or cut off by detach() or no_grad()?",
)
def unchanged_weights(history: TrainingHistory, *, samples: int = 3, share: float = 0.5) -> Finding | None:
    """Weights that were the same in `samples` samples, while others changed, though they have a gradient.

    Not frozen ones. Info if they are more than a `share`, and where the gradient is zero or missing: other rules say
    what that means.
    """
    same, num_known = [], 0
    frozen = {*history.model.without_gradient}
    for name, window in history.weights.current():
        if len(window.recent) < samples or name in frozen:
            continue
        num_known += 1
        last = window.last.value
        if last.update_norm or last.norm != window.recent[0].value.norm:  # nearly all are let through here
            continue
        values = [s.value for s in window.recent]
        first = values[0]
        if all(v.norm == first.norm and v.std == first.std and not v.update_norm for v in values) and first.norm:
            same.append((name, window.first.step))
    if not same or len(same) == num_known:
        return None
    names = [name for name, _ in same]
    tracks = [history.tensors[name] for name in names if name in history.tensors]
    total = history.tensors.num_samples
    has_gradient = any(track.norm > 0.0 and not track.num_zero and track.num_samples == total for track in tracks)
    return Finding(
        f"{count(len(same), 'parameter')} of {num_known} did not change at all: {listed(names)}.",
        min(step for _, step in same),
        history.weights.last_step,
        severity="info" if len(same) > share * num_known or not has_gradient else "warning",
        layers=tuple(names[:8]),
        evidence={"num_unchanged": len(same), "num_parameters": num_known, "threshold_samples": samples},
        confidence=0.9,
    )


def _severity_of_share(num: int, total: int, share: float) -> Severity:
    return "info" if total and num > share * total else "warning"


def _learns_nothing(history: TrainingHistory) -> bool:
    """Whether after a hundred losses less than 0.15 of the first was gained."""
    return history.losses.count >= 100 and signals_of(history).progress < 0.15


@rule(
    "parameters-not-in-optimizer",
    of="untrained-parameters",
    leads=True,
    reads="parameters of the model against those of the optimizer",
    source="our own: what no optimizer holds never changes",
    remedy="Make the optimizer after the model is complete and on its device, or add them with add_param_group. If "
    "another optimizer trains them, guard both together: wrap([a, b], model).",
)
def parameters_not_in_optimizer(history: TrainingHistory, *, share: float = 0.75) -> Finding | None:
    """Trainable parameters that the optimizer does not have; info if they are more than a `share` of the model's.

    Unless after a hundred losses hardly anything was learnt. Critical if it has none of them.
    """
    names = history.model.not_in_optimizer
    if not names or not history.num_steps:
        return None
    total = len(history.model.names)
    share = 1.0 if _learns_nothing(history) else share
    return Finding(
        f"{count(len(names), 'trainable parameter')} of the model "
        f"{'is' if len(names) == 1 else 'are'} not in the optimizer: {listed(names)}.",
        severity="critical" if len(names) == total > 1 else _severity_of_share(len(names), total, share),
        layers=tuple(names[:8]),
        evidence={"num_missing": len(names), "num_parameters": total, "threshold_share": share},
        confidence=0.95,
    )


@rule(
    "frozen-parameters",
    of="untrained-parameters",
    remedy="If that is intended, remove them from the optimizer to silence this. Otherwise set requires_grad_(True) "
    "before the optimizer is made.",
)
def frozen_parameters(history: TrainingHistory, *, share: float = 0.5, near: float = 0.1) -> Finding | None:
    """Parameters that cannot learn; a warning unless they are more than a `share` of the model, or its first layers.

    First layers are a run of at least four parameters from the beginning of the model on; fewer will do where
    their weights look trained: their spread differs by more than a share `near` from those that layers begin with.
    Info, too, where the optimizer was given none of them, for the first 100 losses, since blocks may be trained in
    turns, and where eight tenths of the first loss were gained though they are not the first layers, unless the
    optimizer has them, their weights are as layers begin with, and none ever had a gradient. Of such weights no purpose
    counts where a run ends with less than half of the first loss gained. A warning where the last layer is frozen while
    earlier ones are not, and less than half of the first loss was gained in 100 losses.
    """
    notes = history.model
    newest = () if history.last is None else history.last.tensors.names  # some may have joined since that was noted
    names = [*(name for name in notes.without_gradient if name not in newest), *notes.zero_lr]
    if not names or not history.num_steps:
        return None
    total, frozen = len(notes.names), set(names)
    leading = 0
    while leading < total and notes.names[leading] in frozen:
        leading += 1
    are_fresh = _are_fresh(history, frozen, near)
    on_purpose = leading == len(frozen) and (leading >= 4 or (bool(are_fresh) and not any(are_fresh)))
    num_held = _num_held(history)
    progress, num_losses = signals_of(history).progress, history.losses.count
    is_stuck = has_had_time(history, 100) and not progress >= 0.5
    on_purpose = (on_purpose or num_held == 0) and not (is_stuck and history.has_ended and {*are_fresh} == {True})
    is_early = num_losses > 0 and not has_had_time(history, 100)
    are_forgotten = (num_held or 0) > 0 and {*are_fresh} == {True} and frozen.isdisjoint(history.tensors)
    is_learnt = progress >= 0.8 and leading < len(frozen) and not are_forgotten  # first layers need not learn for that
    usual = "info" if is_early or is_learnt else _severity_of_share(len(names), total, share)
    ends_frozen = total > 0 and notes.names[-1] in frozen and len(frozen) < total and is_stuck
    return Finding(
        f"{count(len(names), 'parameter')} of {total} cannot learn (frozen, or with a learning rate of 0): "
        f"{listed(names)}.",
        severity="info" if on_purpose else "warning" if ends_frozen else usual,
        layers=tuple(names[:8]),
        evidence={"num_frozen": len(names), "num_parameters": total, "threshold_share": share},
        confidence=0.8,
        recommendation=""
        if num_held != 0
        else "If that is intended, there is nothing to do: the optimizer does not have them.",
    )


def _num_held(history: TrainingHistory) -> int | None:
    """How many elements the optimizer holds that have no gradient: 0 where it was not given what is frozen."""
    settings, last = history.model.optimizer_settings, history.last
    held = [group.get("num_parameters") for group in settings]
    if last is None or history.model.zero_lr or not held or not all(isinstance(n, (int, float)) for n in held):
        return None
    return sum(int(n) for n in held if isinstance(n, (int, float))) - int(last.tensors.total_row()[0])


def _are_fresh(history: TrainingHistory, names: Iterable[str], near: float) -> list[bool]:
    """Of the weight matrices among `names`: whether their spread is one that a usual initialisation gives."""
    known = history.model.initialization
    ratios = [actual / expected for actual, expected in (known[name] for name in names if name in known)]
    return [any(abs(ratio - usual) <= near * usual for usual in _FRESH) for ratio in ratios]


@rule(
    "missing-gradients",
    of="untrained-parameters",
    remedy="These parameters are trainable and in the optimizer, but the loss does not depend on them: are they used "
    "in the forward pass, and is nothing between them and the loss detached?",
)
def missing_gradients(
    history: TrainingHistory, *, samples: int = 4, share: float = 0.5, progress: float = 0.3, min_steps: int = 40
) -> Finding | None:
    """Parameters without a gradient, from `samples` samples on: info, as a head that a task does not use has none.

    Not experts and other branches side by side, of which some have one: of these idle-experts tells.
    A warning where they are the first of the model, weights among them, as where something detaches the way to them;
    or where after `min_steps` losses less than a share `progress` of the first has been gained. Info if they are more
    than a `share` of the model's, unless hardly anything was gained in a hundred losses; of the
    first ones, than seven tenths.
    """
    notes, tensors = history.model, history.tensors
    if not notes.names or tensors.num_samples < samples or not len(tensors):
        return None
    newest = () if history.last is None else history.last.tensors.names  # some may have joined since the last sample
    if newest == notes.names or tensors.hold(notes.names):
        return None
    explained = {*notes.not_in_optimizer, *notes.without_gradient, *notes.zero_lr}
    explained.update(notes.moved_in_step, notes.moved_between)  # of these unseen-updates tells
    absent = {*notes.names}.difference(tensors, explained, newest)
    if notes.num_seen is not None:
        absent &= {*notes.never_seen}
    if not absent or absent == {*notes.names}:
        return None
    absent -= idle_branches(notes.names, absent)
    names = [name for name in notes.names if name in absent]
    if not names:
        return None
    first = set(takewhile(set(names).__contains__, notes.names))
    is_lost = not first.isdisjoint(notes.initialization) or not history.losses.count
    is_lost = is_lost or (history.losses.count >= min_steps and not signals_of(history).progress >= progress)
    if _learns_nothing(history) or not first.isdisjoint(notes.initialization):
        share = max(share, 1.0 if _learns_nothing(history) else 0.7)
    return Finding(
        f"{count(len(names), 'parameter')} never had a gradient: {listed(names)}.",
        history.recent[0].step,
        tensors.last_step,
        severity=_severity_of_share(len(names), len(notes.names), share) if is_lost else "info",
        layers=tuple(names[:8]),
        evidence={"num_missing": len(names), "num_parameters": len(notes.names), "threshold_samples": samples},
        confidence=0.85,
    )


@rule(
    "poor-initialisation",
    reads="standard deviation of each weight matrix before the first step, against the one its fan-in asks for",
    source="the toolkit's check_initialization (0.1 and 10 times sqrt(2 / fan_in), He et al. 2015)",
    remedy="Initialise these layers by their fan-in (torch.nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh), "
    "or look for what overwrote or rescaled their weights.",
)
def poor_initialisation(
    history: TrainingHistory,
    *,
    small: float = 0.1,
    large: float = 8.0,
    tiny: float = 0.02,
    large_all: float = 2.0,
    recurrent: float = 1.1,
    share: float = 0.5,
) -> Finding | None:
    """Weights that began above `large` times the expected spread, or below `small` times it in a `share` of the layers.

    A single layer counts as too small below `tiny`, unless it is the last: residual branches and heads begin small on
    purpose. Fewer than a `share` grow: they are info unless less than three tenths of the loss came off in 50 losses.
    Above `large_all` a `share` of the layers is needed. Recurrent weights (weight_hh) count as too large above
    `recurrent`, where their spectral radius is about 1.5. A spread of exactly zero counts where more than a `share` of
    the layers has it, and less than eight tenths of the first loss have been gained. GPT-2's spreads, which know no
    fan-in, are not too small.
    """
    if not history.num_steps:
        return None
    known = history.model.initialization
    ratios_of_all = [actual and actual / expected for actual, expected in known.values()]
    if not ratios_of_all or (small <= min(ratios_of_all) and max(ratios_of_all) <= min(recurrent, large_all, large)):
        return None  # as most are
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
    all_large = sum(r > large_all for r in ratios.values()) >= share * max(len(ratios), 1)
    limits = {n: recurrent if "weight_hh" in n else large_all if all_large else large for n in ratios}
    too_large = sorted((n for n, r in ratios.items() if r > limits[n]), key=lambda n: -ratios[n])
    usual = as_in_gpt2({n: actual for n, (actual, _) in known.items()}, history.model.module_kinds)
    too_small = sorted((n for n, r in ratios.items() if r < small and n not in usual), key=ratios.__getitem__)
    if len(too_small) < share * len(ratios):
        too_small = [n for n in too_small if ratios[n] < tiny and n not in last_layer(history)]
    names = too_large or too_small
    if not names:
        return None
    worst = ratios[names[0]]
    is_felt = descent(history) is not False and not may_rise(history) and stands(history, 0.3, 50)
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
