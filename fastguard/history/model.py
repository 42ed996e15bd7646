"""What the guard knows of the model beside its gradients: facts that no record shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from ..stats import strict_json, values
from .bad_ranks import bad_ranks_of
from .odd_ranks import odd_ranks_of
from .recoveries import recoveries_of
from .replicas import differences_of

OBJECTIVES = ("minimise", "game", "reward")


@dataclass(slots=True)
class ModelNotes:
    """Facts about model and optimizer, told once (`TrainingHistory.note_model`); empty where nobody told.

    Attributes:
        names: every parameter of the model, in the model's order.
        not_in_optimizer: trainable parameters that no optimizer under a guard holds.
        without_gradient: parameters with `requires_grad=False`.
        zero_lr: parameters in a group whose learning rate is 0.
        initialization: for each weight matrix or kernel, its standard deviation before the first step, and the one
            expected from its fan-in. A pair that says nothing is left out.
        dropout: share that each dropout module leaves out, by name.
        decay_per_step: the largest share so far by which one step shrinks a parameter for its size alone, learning rate
            included where the decay is decoupled from the gradient (AdamW) or plain (SGD); None if not known.
        backward_per_step: backward passes whose gradients one step takes; None if not known.
        has_scheduler: whether a learning rate scheduler was made for the optimizer; None if not known.
        initial_lr: the learning rate that the scheduler started from, if there is one.
        steps_per_epoch: steps from one pass over the data to the next, if known.
        module_kinds: class names of the modules without children, each with how many there are.
        last_modules: class names of the last three modules without children that the first forward pass called, the
            last one first. Empty where that pass was compiled or scripted.
        last_operations: what autograd recorded last of that pass, the last one first ("Softmax", "Addmm", "Relu"):
            functions too, which are no modules.
        dtypes: of the parameters, such as "float32", in the order in which they were met.
        autocast: the dtype of autocast in that pass; empty without one.
        has_scaler: whether a GradScaler unscales the gradients; None before the first step.
        clip_limit: the norm that clipping lets through; None without one that is fixed.
        clip_policy: the clip policy, as it shows itself; empty without one.
        optimizer_settings: a dict for each param group, 64 at most: `kind` (the class), `num_parameters` (elements),
            and those of `lr`, `betas`, `eps`, `momentum`, `alpha`, `rho`, `dampening`, `weight_decay`, `nesterov`,
            `amsgrad` and `maximize` that the group has; `lr` as it was when one of the others was last set.
        num_left_gradients: of the `num_watched_backwards` first steps that were watched, twenty at most, how many took
            gradients to which those of the step before had been added: nothing had cleared them in between.
        num_cleared_gradients: at how many of these first steps nothing was left of what backward passes had added.
        num_seen: parameters of the optimizers that had a gradient at any step; None if not known.
        never_seen: trainable ones that never had; `unseen_lately`: those that had one, but not in the newest hundred
            steps or more of which this is known.
        moved_in_step, moved_between: of those that never had one, and of the model's trainable ones that no guarded
            optimizer holds, those that changed within a step of a guarded optimizer, or between two; of sixteen that
            are looked at.
        num_reached_unseen: at how many steps a backward pass reached the former, and their gradient was gone when the
            step was taken; of the first twenty looked at; None if nobody looked.
        gradients_elsewhere: an attribute of such a parameter under which others keep its gradient ("main_grad"); empty
            if there is none.
        overwritten: parameters that changed between two steps while nothing under a guard stepped; of sixteen that are
            looked at, a few elements each, at one step in twenty or fewer. Not what was put back before the next step.
        num_overwritten: at how many of the `num_compared` steps that were looked at some had changed.
        loss_ops: what autograd recorded from the first observed loss down, outermost first, sixteen at most: such as
            ("NllLossBackward0", "LogSoftmaxBackward0", "AddmmBackward0"). Empty where the loss came without its graph.
        is_smooth: whether every operation of that graph has a finite derivative everywhere, as matrix products, usual
            activations and usual losses have; None: not known.
        num_foreign_parameters: parameters in that graph that are neither the model's nor under guard: those of another
            network, as in a game; or the model's own in the loss that another guard observed; None if not known.
        loss_kind: what loss the gradient of the model's output belongs to: "cross-entropy" (with a softmax of its own),
            "cross-entropy with smoothed labels", "negative log-likelihood", "log of the output", "binary cross-entropy
            with logits", "binary cross-entropy", "squared error", "absolute error", "zero"; empty where it is none of
            them, or not known. A squared error is one where a loss is among `squared_losses`.
        squared_losses: what a mean squared error would have been in the first passes that were looked at.
        target_top_share, num_target_classes, num_targets: of a loss over classes, the share of the most frequent
            class, how many there are, and in how many targets.
        target_entropy: of these classes, in nats: the loss of one who knows how frequent they are, and nothing else.
        target_batch_top_share: the share of the most frequent class within a batch, on average.
        target_range, target_mean, target_std, target_binary_share: of a squared error's targets; the last is the share
            that is 0 or 1.
        target_in_inputs: how closely one place of the inputs follows the targets in all passes looked at, three at
            least: the correlation with it, or of sequences of classes the share that is equal; None if not known.
        target_dependence: how surely near inputs have near targets, in standard deviations of what chance makes of it;
            None if not known.
        recoveries: what was done to bring the run through, a dict each (`fastguard.history.recoveries`).
        num_left_out: steps that recovery had left out, whatever their gradients were.
        replica_differences: what replicas were found to differ in, a dict each (`fastguard.history.replicas`).
        norm_statistics: of BatchNorm modules, eight at most, how the running statistics stood to those of the newest
            training batch that was looked at: how many of its standard deviations their means lie apart, root mean
            square over the channels, and the running variance over the batch's, geometric mean. Both are Inf where the
            running statistics are not finite.
        objective: "minimise", "game" or "reward", as told to `wrap`; empty: not told.
        num_ranks: over which the gradients lie, or the model's stages, or that are watched; None where all are here.
        bad_ranks: those whose own gradients were not finite, the sixteen first, a dict each: `rank` and of how many
            (`num_ranks`), the `step` at which it was so first, `name` of the tensor there, its `num_nans` and
            `num_infs`, and at how many steps (`num_steps`). The same on all ranks.
        odd_ranks: those whose own gradients were of another size than the others' (`wrap(..., watch_ranks=True)`), a
            dict each (`fastguard.history.odd_ranks`).
        noise_scale: the gradient noise scale, in batches of one rank; None if not known.
        num_restarts: how often torchrun had started the processes anew before the newest steps; None for never.
        num_changes: how often a fact became another; not saved.
    """

    names: tuple[str, ...] = ()
    not_in_optimizer: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    zero_lr: tuple[str, ...] = ()
    initialization: dict[str, tuple[float, float]] = field(default_factory=dict)
    dropout: dict[str, float] = field(default_factory=dict)
    decay_per_step: float | None = None
    backward_per_step: int | None = None
    has_scheduler: bool | None = None
    initial_lr: float | None = None
    steps_per_epoch: int | None = None
    module_kinds: dict[str, int] = field(default_factory=dict)
    last_modules: tuple[str, ...] = ()
    last_operations: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    autocast: str = ""
    has_scaler: bool | None = None
    clip_limit: float | None = None
    clip_policy: str = ""
    optimizer_settings: tuple[dict[str, Any], ...] = ()
    num_left_gradients: int | None = None
    num_watched_backwards: int | None = None
    num_cleared_gradients: int | None = None
    num_seen: int | None = None
    never_seen: tuple[str, ...] = ()
    unseen_lately: tuple[str, ...] = ()
    moved_in_step: tuple[str, ...] = ()
    moved_between: tuple[str, ...] = ()
    num_reached_unseen: int | None = None
    gradients_elsewhere: str = ""
    overwritten: tuple[str, ...] = ()
    num_overwritten: int | None = None
    num_compared: int | None = None
    loss_ops: tuple[str, ...] = ()
    is_smooth: bool | None = None
    num_foreign_parameters: int | None = None
    loss_kind: str = ""
    squared_losses: tuple[float, ...] = ()
    target_top_share: float | None = None
    target_batch_top_share: float | None = None
    target_entropy: float | None = None
    num_target_classes: int | None = None
    num_targets: int | None = None
    target_range: tuple[float, ...] = ()
    target_mean: float | None = None
    target_std: float | None = None
    target_binary_share: float | None = None
    target_in_inputs: float | None = None
    target_dependence: float | None = None
    recoveries: tuple[dict[str, Any], ...] = ()
    num_left_out: int = 0
    replica_differences: tuple[dict[str, Any], ...] = ()
    norm_statistics: dict[str, tuple[float, float]] = field(default_factory=dict)
    objective: str = ""
    num_ranks: int | None = None
    bad_ranks: tuple[dict[str, Any], ...] = ()
    odd_ranks: tuple[dict[str, Any], ...] = ()
    noise_scale: float | None = None
    num_restarts: int | None = None
    num_changes: int = field(default=0, compare=False)

    @property
    def judged_weights(self) -> set[str] | None:
        """Weight matrices whose updates say something: not begun so small that any update is large. None: not known."""
        if not self.initialization:
            return None
        return {name for name, (actual, expected) in self.initialization.items() if actual >= 0.1 * expected}

    def update(self, **facts: Any) -> None:
        """Takes facts under the names of the fields; None leaves what was known.

        Raises:
            TypeError: for a fact that there is not.
            ValueError: for a value that the fact cannot have; nothing is taken then.
        """
        taken = {}
        for given, value in facts.items():
            name = _LONG_NAMES.get(given, given)
            if name not in _FACTS:
                raise TypeError(
                    f"`{given}` must be a fact of the model - at `note_model`. They are: {', '.join(_FACTS)}"
                )
            if value is not None:
                try:
                    taken[name] = _CONVERTERS[name](value)
                except values.MisfitError as error:
                    raise values.MisfitError(f"{error.problem} - at `note_model`", error.path, given) from None
        for name, value in taken.items():
            if name == "decay_per_step":  # a schedule brings it down with the learning rate
                value = max(value, self.decay_per_step or 0.0)
            if value != getattr(self, name):
                setattr(self, name, value)
                self.num_changes += 1

    def state(self) -> dict[str, Any]:
        """Everything but `num_changes`, as plain types that strict JSON can hold."""
        return {name: strict_json.encode(getattr(self, name)) for name in _FACTS}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ModelNotes:
        """The notes that gave `state`; a fact from a later version is left out, one that an earlier lacked is empty."""
        notes = cls()
        known = {name: value for name, value in values.mapping(state).items() if name in _FACTS and value is not None}
        notes.update(**{name: values.at(name, _CONVERTERS[name], value) for name, value in known.items()})
        notes.num_changes = 0
        return notes


def _pair(plain: Any) -> tuple[float, float]:
    if len(values.row(plain)) != 2:
        raise values.MisfitError(f"must be a pair of numbers, got {len(plain)} of them")
    actual, expected = values.each(_number, plain)
    return actual, expected


def _usable(initialization: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    pairs = values.by_name(_pair, initialization).items()
    return {name: pair for name, pair in pairs if math.isfinite(pair[0]) and 0.0 < pair[1] < math.inf}


def _statistics(pairs: Any) -> dict[str, tuple[float, float]]:
    found = values.by_name(_pair, pairs).items()
    return {**_usable(pairs), **{name: pair for name, pair in found if pair == (math.inf, math.inf)}}


def _number(value: Any) -> float:
    return float(values.number(value))


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise values.MisfitError(f"must be names, got a single text {value[:40]!r}")
    return tuple(values.each(values.text, list(value) if isinstance(value, Iterable) else value))


def _setting(value: Any) -> Any:
    if isinstance(value, (bool, str)) and value not in ("NaN", "Infinity", "-Infinity"):
        return value
    return values.each(_number, value) if isinstance(value, (list, tuple)) else values.number(value)


def _settings(value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(values.each(partial(values.by_name, _setting), value))


def _objective(value: Any) -> str:
    if value not in ("", *OBJECTIVES):
        raise values.MisfitError(f"must be one of {list(OBJECTIVES)}, got {value!r}")
    return values.text(value)


_FACTS = tuple(fact.name for fact in fields(ModelNotes) if fact.compare)
_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("names", "not_in_optimizer", "without_gradient", "zero_lr"), _texts),
    **dict.fromkeys(("never_seen", "unseen_lately", "moved_in_step", "moved_between"), _texts),
    **dict.fromkeys(("num_cleared_gradients", "num_seen", "num_reached_unseen"), values.count),
    **dict.fromkeys(("last_modules", "last_operations", "loss_ops", "dtypes", "overwritten"), _texts),
    "initialization": _usable,
    "norm_statistics": _statistics,
    "dropout": partial(values.by_name, _number),
    "module_kinds": values.counts,
    **dict.fromkeys(("decay_per_step", "initial_lr", "clip_limit", "noise_scale"), _number),
    **dict.fromkeys(("num_left_gradients", "num_watched_backwards", "num_overwritten"), values.count),
    **dict.fromkeys(("num_compared", "num_foreign_parameters", "num_target_classes", "num_targets"), values.count),
    **dict.fromkeys(("target_top_share", "target_batch_top_share", "target_entropy", "target_mean"), _number),
    **dict.fromkeys(("target_std", "target_binary_share", "target_in_inputs", "target_dependence"), _number),
    **dict.fromkeys(("target_range", "squared_losses"), lambda value: tuple(values.each(_number, value))),
    **dict.fromkeys(("backward_per_step", "num_left_out"), values.count),
    **dict.fromkeys(("has_scheduler", "has_scaler", "is_smooth"), values.truth),
    **dict.fromkeys(("autocast", "loss_kind", "clip_policy", "gradients_elsewhere"), values.text),
    "optimizer_settings": _settings,
    "objective": _objective,
    "recoveries": recoveries_of,
    "bad_ranks": bad_ranks_of,
    "odd_ranks": odd_ranks_of,
    **dict.fromkeys(("steps_per_epoch", "num_ranks", "num_restarts"), values.length),
    "replica_differences": differences_of,
}
_LONG_NAMES = {  # as callers may also spell them
    "names_not_in_optimizer": "not_in_optimizer",
    "names_without_gradient": "without_gradient",
    "names_with_zero_lr": "zero_lr",
}
