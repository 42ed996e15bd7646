"""Rules on the weights: updates too large or too small for them, and parameters that never learn."""

from __future__ import annotations

from itertools import takewhile

from ...records import TrainingHistory
from ..finding import Seen
from ..registry import rule
from ..signals import has_had_time, is_felt_by_the_loss, is_stuck, signals_of
from .units import idle_branches

TITLE = "Weights and updates"


@rule(
    "update-ratio-high",
    source="torchmortem's bound of 0.1; the usual 1e-3 is Karpathy's. First steps are larger, so the bound is too",
    see="Step {_step} changed the median weight by {update_ratio:.2g} times its norm.",
    remedy="Divide the learning rate by 10, or warm it up: each step changes much of the weights.",
    needs_harm=True,
)
def update_ratio_high(history: TrainingHistory, *, first: float = 0.5, later: float = 0.048) -> Seen | None:
    """The median weight's update is above `first` of it at the first sample, or above `later` from 20 steps later on.

    Fires from 15 steps after the first sample on; silent if the learning rate has come down by then, or still rises.
    Info; a warning if the loss rises, if 80 losses gained less than 0.3 of the first or lost it again, or if they
    change by more than a share 0.5 of their level each step. Certain if more than half of a module's units are dead.
    """
    updates, s = history.updates, signals_of(history)
    start, peak = updates.first, updates.peak
    if start is None or not history.clean or history.clean[-1].step - start.step < 15:
        return None
    has_come_down = bool(s.lrs) and s.lrs[-1] < 0.7 * s.lrs[0] and len(s.lrs) == history.num_clean
    is_at_full = peak is not None and (peak.lr is None or (2.0 * peak.lr >= history.lrs.max and not s.is_lr_rising))
    if start.ratio > first and not has_come_down:
        sample = start
    elif peak is not None and peak.ratio > later and is_at_full:
        sample = peak
    else:
        return None
    have_died = any(window.last.value.dead_unit_ratio > 0.5 for _, window in history.activations.items())
    return Seen(
        at=(sample.step, history.weights.last_step),
        warn=have_died or _is_hurt(history, 0.5),
        update_ratio=sample.ratio,
        is_certain=have_died,
        _step=sample.step,
    )


def _is_hurt(history: TrainingHistory, restless: float) -> bool:
    """Whether the loss says that steps are too large: it rises, or has not gained and kept much in 80 steps."""
    trend, s = history.loss_trend, signals_of(history)
    if not trend.count or (trend.count >= 10 and trend.mean > 1.2 * trend.first > 0.0):
        return True
    if not has_had_time(history, 80):
        return False
    is_restless = s.loss_noise > restless * s.loss_level and s.progress < 0.85  # near zero any loss is
    goes_on = len(s.loss_levels) >= 3 and s.loss_levels[-1] < 0.95 * s.loss_levels[-3] - 0.5 * s.loss_noise
    return is_restless or not (s.progress >= 0.3 or goes_on) or is_felt_by_the_loss(history)


@rule(
    "update-ratio-low",
    source="torchmortem's bound of 1e-5, asked with a loss that stands still, and so less strict",
    see="The median weight changes by no more than {update_ratio:.2g} of itself a step{_loss}.",
    remedy="Raise the learning rate by 10 to 100 times, or look for a scheduler that holds it down.",
)
def update_ratio_low(history: TrainingHistory, *, ratio: float = 5e-4, ratio_alone: float = 1e-7) -> Seen | None:
    """Each step changes the median weight by less than a share `ratio`, and the loss falls by less than 3 %.

    Without losses the limit is `ratio_alone`. All samples count (two at least), after 30 steps at half of the largest
    learning rate or more, once it no longer rises.
    """
    s, updates, is_known = signals_of(history), history.updates, history.loss_trend.count >= 30
    value = max((sample.ratio for sample in (updates.first, updates.peak) if sample is not None), default=0.0)
    limit = ratio if is_known else ratio_alone
    if updates.count < 2 or s.num_full_lr < 30 or s.is_lr_rising or history.num_clean < 30 or not 0.0 < value < limit:
        return None
    if is_known and not s.fall < 0.03:
        return None
    return Seen(
        at=(history.clean[0].step, history.weights.last_step),
        update_ratio=value,
        _loss=f", and the loss has come down by {max(s.fall, 0.0):.1%} only" if is_known else "",
    )


def _is_a_part(num: int, total: int, share: float) -> bool:
    """Whether they are so few that they were rather forgotten than left out on purpose."""
    return not total or num <= share * total


_LEFT_OUT = "{num_missing:parameter} that the loss depends on never changed: they have gradients, but no optimizer."


@rule(
    "parameters-not-in-optimizer",
    of="untrained-parameters",
    leads=True,
    was="unchanged-weights",
    severity="critical",
    see="{num_missing:trainable parameter} of the model {_are} not in the optimizer: {layers}.",
    sure=0.95,
    remedy="Make the optimizer after the model is complete and on its device, or add them with add_param_group. If "
    "another optimizer trains them, guard both together: wrap([a, b], model).",
)
def parameters_not_in_optimizer(history: TrainingHistory, *, share: float = 0.75) -> Seen | None:
    """The optimizer lacks trainable parameters of the model, or nothing changes parameters that the loss depends on.

    A warning; info if they are more than a share `share` of the model's, unless 100 losses gained hardly anything, or
    they began at random, with spreads that are alike, as no pretrained weights have. Critical if it has none of them.
    """
    names, total = history.model.not_in_optimizer, len(history.model.names)
    if not names and history.model.num_untrained:
        return Seen(
            see=_LEFT_OUT,
            severity="warning" if history.norm_max > 0.0 else "critical",
            num_missing=history.model.num_untrained,
            are_elsewhere=True,
        )
    if not names or not history.num_steps:
        return None
    known = history.model.initialization
    spreads = [(std, std / usual) for name, (std, usual) in known.items() if name in {*names}]
    are_random = len(spreads) > 1 and any(max(column) < 1.2 * min(column) for column in zip(*spreads))
    share = 1.0 if are_random or is_stuck(history, 0.15, 100) else share
    return Seen(
        layers=names,
        warn=_is_a_part(len(names), total, share),
        severity="critical" if len(names) == total > 1 else None,
        num_missing=len(names),
        _are="is" if len(names) == 1 else "are",
    )


@rule(
    "frozen-parameters",
    of="untrained-parameters",
    see="{num_frozen:parameter} of {num_parameters} cannot learn (frozen, or with a learning rate of 0): {layers}.",
    remedy="Set requires_grad_(True) before the optimizer is made, or remove them from it to silence this.",
)
def frozen_parameters(history: TrainingHistory, *, share: float = 0.5, backbone: int = 4) -> Seen | None:
    """Parameters cannot learn.

    A warning if they are at most a share `share` of the model, and weight matrices among them: masks and encodings are
    frozen on purpose. Info if they are the first `backbone` parameters or more, if the optimizer has none of them, for
    the first 100 losses, and if 0.8 of the first loss was gained. A warning of any share, and of the first, too, if 100
    losses gained less than 0.15 of the first.
    """
    notes, progress = history.model, signals_of(history).progress
    newest = () if history.last is None else history.last.tensors.names  # some may have joined since that was noted
    names = [*(name for name in notes.without_gradient if name not in newest), *notes.zero_lr]
    if not names or not history.num_steps:
        return None
    leading, num_held = len([*takewhile({*names}.__contains__, notes.names)]), _num_held(history)
    has_weights = not {*names}.isdisjoint(notes.initialization)
    on_purpose = num_held == 0 or not has_weights
    is_early = history.losses.count > 0 and not has_had_time(history, 100)
    is_learnt = progress >= 0.8 and leading < len({*names})  # first layers need not learn for that
    is_usual = is_learnt or backbone <= leading == len({*names}) or not _is_a_part(len(names), len(notes.names), share)
    return Seen(
        layers=names,
        warn=not (on_purpose or is_early) and (is_stuck(history, 0.15, 100) or not is_usual),
        do="" if num_held != 0 else "Do nothing if that is intended: the optimizer does not have them.",
        num_frozen=len(names),
        num_parameters=len(notes.names),
    )


def _num_held(history: TrainingHistory) -> int | None:
    """How many elements the optimizer holds that have no gradient: 0 where it was not given what is frozen."""
    last, held = history.last, [group.get("num_parameters") for group in history.model.optimizer_settings]
    numbers = [int(n) for n in held if isinstance(n, (int, float))]
    if last is None or history.model.zero_lr or not held or len(numbers) < len(held):
        return None
    return sum(numbers) - int(last.tensors.total_row()[0])


@rule(
    "missing-gradients",
    of="untrained-parameters",
    see="{num_missing:parameter} never had a gradient{_though}: {layers}.",
    remedy="Check that forward() uses these parameters, and that nothing detaches them from the loss.",
)
def missing_gradients(history: TrainingHistory, *, share: float = 0.7, progress: float = 0.3) -> Seen | None:
    """Parameters never had a gradient in 20 steps.

    A warning if the first pass called their modules before any that learns: what comes of these is detached. Of others,
    such as an output that is not used, a warning if 100 losses gained less than a share `progress` of the first, and
    half of that if they are more than a share `share` of the model's; else info, as for a single one that is no
    weight, but a factor, say. Experts that others stand beside do not count: a router may choose others.
    """
    notes, tensors = history.model, history.tensors
    if not notes.names or history.num_steps < 20 or not len(tensors):
        return None
    newest = () if history.last is None else history.last.tensors.names  # some may have joined since the last sample
    if newest == notes.names or tensors.hold(notes.names):
        return None
    explained = {*notes.not_in_optimizer, *notes.without_gradient, *notes.zero_lr}
    explained.update(notes.moved_in_step, notes.moved_between)  # unseen-updates reports these
    absent = {*notes.names}.difference(tensors, explained, newest)
    if notes.num_seen is not None:
        absent &= {*notes.never_seen}
    if not absent or absent == {*notes.names}:
        return None
    absent -= idle_branches(notes.names, absent)
    names = [name for name in notes.names if name in absent]
    without = {name.rpartition(".")[0] for name in names}
    called = {*takewhile(without.__contains__, notes.learning_modules)}
    cut = [name for name in names if name.rpartition(".")[0] in called]
    if not names:
        return None
    is_stuck_without = _is_a_part(len(names), len(notes.names), share) and is_stuck(history, progress, 100)
    has_weights = len(names) > 1 or "weight" in names[0].rpartition(".")[2]
    return Seen(
        at=(history.recent[0].step, tensors.last_step),
        layers=cut or names,
        warn=bool(cut) or (has_weights and (is_stuck_without or is_stuck(history, 0.5 * progress, 100))),
        num_missing=len(cut or names),
        _though=", though their modules are called first" if cut else "",
    )
