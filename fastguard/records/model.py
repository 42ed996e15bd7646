"""Facts about the model, its optimizer and its data that no record shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from . import codec, values
from .codec import Count, Length
from .events import MAX_RANKS, BadRank, Experiment, OddRank, RecoveryEvent, ReplicaDifference

OBJECTIVES = ("minimise", "game", "reward")
_number_pair = codec.reader_of(tuple[float, float])


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise values.MisfitError(f"must be names, got a single text {value[:40]!r}")
    names = tuple(values.each(values.text, list(value) if isinstance(value, Iterable) else value))
    return value if names == value else names  # the same tuple, because there may be many names


def _usable_pairs(value: Any) -> dict[str, tuple[float, float]]:
    pairs = values.by_name(_number_pair, value).items()
    both = (math.inf, math.inf)
    return {name: (a, b) for name, (a, b) in pairs if (math.isfinite(a) and 0.0 < b < math.inf) or (a, b) == both}


def _setting(value: Any) -> Any:
    if isinstance(value, (bool, str)) and value not in ("NaN", "Infinity", "-Infinity"):
        return value
    if isinstance(value, (list, tuple)):
        return values.each(values.number, value)
    number = values.number(value)
    return value if isinstance(value, int) else number


def _objective(value: Any) -> str:
    if value not in ("", *OBJECTIVES):
        raise values.MisfitError(f"must be one of {list(OBJECTIVES)}, got {value!r}")
    return values.text(value)


def _odd_ranks(value: Any) -> tuple[OddRank, ...]:
    return tuple(values.each(codec.reader_of(OddRank), value))[:MAX_RANKS]


Names = Annotated[tuple[str, ...], _names]


@dataclass
class ModelNotes:
    """Facts about model and optimizer (`TrainingHistory.note_model`). Unknown facts are empty or None.

    Attributes:
        num_changes: how often a fact changed; not saved.
    """

    num_changes = 0  # not a field: equal notes may differ in it

    # The run.
    run_id: str = ""  # the id of the run in its logs; a resumed run keeps it. Empty without sinks.
    has_ended: bool = False  # whether the guard was closed, or its framework finished training
    # What was tried beside the training (`fastguard.wrap(..., experiments=True)`)
    experiments: tuple[Experiment, ...] = ()

    # Parameters and modules.
    names: Names = ()  # every parameter of the model, in the model's order
    not_in_optimizer: Names = ()  # trainable parameters that are in no guarded optimizer
    without_gradient: Names = ()  # parameters with `requires_grad=False`
    zero_lr: Names = ()  # parameters in a group whose learning rate is 0
    # For each weight matrix or kernel, its standard deviation before the first step, and the one expected from its fan-
    # in; only pairs of usable numbers
    initialization: Annotated[dict[str, tuple[float, float]], _usable_pairs] = field(default_factory=dict)
    dropout: dict[str, float] = field(default_factory=dict)  # the dropout probability of each dropout module, by name
    # Class names of the modules without children, each with their number
    module_kinds: dict[str, Count] = field(default_factory=dict)
    # Class names of the last three modules without children that the first forward pass called, the last one first;
    # empty if that pass was compiled or scripted
    last_modules: Names = ()
    # Modules with parameters of their own that the first pass called with autograd on, in order
    learning_modules: Names = ()
    # The last operations that autograd recorded in that pass, the last one first ("Softmax", "Addmm", "Relu"),
    # functions included
    last_operations: Names = ()
    dtypes: Names = ()  # of the parameters, such as "float32", in the order of first use
    autocast: str = ""  # the dtype of autocast in that pass; empty without autocast
    # For up to eight BatchNorm modules, running statistics compared with those of the newest sampled training batch:
    # the distance of the means in its standard deviations (root mean square over channels), and the ratio of variances
    # (geometric mean). Both are Inf if the running ones are not finite.
    norm_statistics: Annotated[dict[str, tuple[float, float]], _usable_pairs] = field(default_factory=dict)

    # The optimizer and the training loop.
    # The largest share so far by which weight decay shrinks a parameter in one step. It includes the learning rate if
    # the decay is decoupled (AdamW) or plain (SGD); None if not known.
    decay_per_step: float | None = None
    backward_per_step: Count | None = None  # most backward passes before one step; None if not known
    has_scheduler: bool | None = None  # whether the optimizer has a learning rate scheduler; None if not known
    initial_lr: float | None = None  # the learning rate that the scheduler started from, if there is one
    steps_per_epoch: Length | None = None  # steps in one pass over the data, if known
    has_scaler: bool | None = None  # whether a GradScaler unscales the gradients; None before the first step
    clip_limit: float | None = None  # the largest norm after clipping; None without a fixed limit
    clip_policy: str = ""  # `repr` of the clip policy; empty without one
    # A dict for each of up to 64 param groups: `kind` (the class), `num_parameters` (elements), and those of `lr`,
    # `betas`, `eps`, `momentum`, `alpha`, `rho`, `dampening`, `weight_decay`, `nesterov`, `amsgrad` and `maximize` that
    # the group has; `lr` is from when one of the others was last set
    optimizer_settings: tuple[dict[str, Annotated[Any, _setting]], ...] = ()
    # "minimise", "game" or "reward", as passed to `wrap`; empty if not passed
    objective: Annotated[str, _objective] = ""
    recoveries: tuple[RecoveryEvent, ...] = ()  # rollbacks and other events of the recovery
    num_left_out: Count = 0  # steps that recovery left out, whatever their gradients were

    # Which parameters receive gradients, and which change without one.
    # Of the first `num_watched_backwards` steps (at most 20), how many used gradients that were added to those of the
    # step before, because nothing had cleared them
    num_left_gradients: Count | None = None
    num_watched_backwards: Count | None = None
    # Before how many of these steps the gradients of the backward passes were cleared
    num_cleared_gradients: Count | None = None
    num_seen: Count | None = None  # parameters of the optimizers that ever had a gradient; None if not known
    never_seen: Names = ()  # trainable parameters that never had a gradient
    # Trainable parameters that once had a gradient, but not in the newest hundred steps or more
    unseen_lately: Names = ()
    # moved_in_step, moved_between: of up to 16 parameters that never had a gradient or that are in no guarded
    # optimizer, those that changed within a step of a guarded optimizer, or between two steps
    moved_in_step: Names = ()
    moved_between: Names = ()
    # Of the first 20 sampled steps, the number at which a backward pass reached a parameter of `never_seen` whose
    # gradient was gone at the step; None if not sampled
    num_reached_unseen: Count | None = None
    # Parameters that changed between two steps while no guarded optimizer stepped; a few elements of up to 16
    # parameters are compared, at one step in twenty or fewer
    overwritten: Names = ()

    # The loss and its targets.
    # Autograd's operations from the first observed loss down, outermost first, at most 16, such as ("NllLossBackward0",
    # "LogSoftmaxBackward0", "AddmmBackward0"); empty if the loss came without its graph
    loss_ops: Names = ()
    # Whether every operation of that graph has a finite derivative everywhere; None if not known
    is_smooth: bool | None = None
    softmax_over_batch: bool | None = None  # whether the softmax at the end is over the first of several dimensions
    # Parameters in that graph that are neither the model's nor guarded, such as those of another network in a game, or
    # the model's own in the loss of another guard; None if not known
    num_foreign_parameters: Count | None = None
    num_untrained: Count | None = None  # parameters in that graph, not the model's, that no step has changed
    # The loss that fits the gradient of the model's output: "cross-entropy" (with its own softmax), "cross-entropy with
    # smoothed labels", "negative log-likelihood", "log of the output", "binary cross-entropy with logits", "binary
    # cross-entropy", "squared error", "absolute error", "zero"; empty if none fits or if not known. It is a squared
    # error only if a loss is among `squared_losses`.
    loss_kind: str = ""
    # The mean squared errors that a squared loss would have had in the first sampled passes
    squared_losses: tuple[float, ...] = ()
    # target_top_share, num_target_classes, num_targets: for a loss over classes, the share of the most frequent class,
    # the number of classes, and the number of targets in which they were counted
    target_top_share: float | None = None
    target_batch_top_share: float | None = None  # the mean share of the most frequent class within a batch
    # Entropy of the classes in nats: the loss of a model that only knows their frequencies
    target_entropy: float | None = None
    num_target_classes: Count | None = None
    num_targets: Count | None = None
    # target_range, target_mean, target_std, target_binary_share: of the targets of a squared error; the last is the
    # share of zeros and ones
    target_range: tuple[float, ...] = ()
    target_mean: float | None = None
    target_std: float | None = None
    target_binary_share: float | None = None
    # How closely one place of the inputs follows the targets in all sampled passes, at least three: a correlation, or
    # for sequences of classes the share of equal ones; None if not known
    target_in_inputs: float | None = None
    # How much more similar the targets of similar inputs are than by chance, in standard deviations
    target_dependence: float | None = None

    # Ranks and replicas.
    # Ranks that share the gradients or the stages of the model, or that are watched; None for one
    num_ranks: Length | None = None
    bad_ranks: tuple[BadRank, ...] = ()  # the first 16 ranks whose own gradients were not finite; the same on all ranks
    # Ranks whose own gradients differed in size from the others' (`wrap(..., watch_ranks=True)`)
    odd_ranks: Annotated[tuple[OddRank, ...], _odd_ranks] = ()
    # Ranks over which the gradients were averaged before the guard read them; None for none
    num_averaged: Length | None = None
    # How often torchrun had restarted the processes before the newest steps; None for never
    num_restarts: Length | None = None
    # Use of the machine per step (`fastguard.observers.resources`); empty if not known
    resources: dict[str, float] = field(default_factory=dict)
    replica_differences: tuple[ReplicaDifference, ...] = ()  # differences between replicas

    @property
    def judged_weights(self) -> set[str] | None:
        """Weight matrices whose update ratios are meaningful: not initialised near zero. None if not known."""
        if not self.initialization:
            return None
        return {name for name, (actual, expected) in self.initialization.items() if actual >= 0.1 * expected}

    def update(self, **facts: Any) -> None:
        """Takes facts by the names of the fields; None leaves a fact as it is.

        Raises:
            TypeError: a fact is unknown.
            ValueError: a value does not fit its fact. Nothing changes then.
        """
        taken = {}
        for name, value in facts.items():
            if name not in FACTS:
                raise TypeError(f"`{name}` must be a fact of the model - at `note_model`. They are: {', '.join(FACTS)}")
            if value is not None:
                try:
                    taken[name] = FACTS[name](value)
                except values.MisfitError as error:
                    raise values.MisfitError(f"{error.problem} - at `note_model`", error.path, name) from None
        for name, value in taken.items():
            if name == "decay_per_step":  # a schedule lowers it together with the learning rate
                value = max(value, self.decay_per_step or 0.0)
            if value != getattr(self, name):
                setattr(self, name, value)
                self.num_changes += 1

    def state(self) -> dict[str, Any]:
        """Every fact as plain types that strict JSON can hold."""
        return codec.dump_fields(self, FACTS)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ModelNotes:
        """The notes that `state` was made from; facts of later versions are ignored."""
        given = values.mapping(state)
        known = {name: read for name, read in FACTS.items() if given.get(name) is not None}
        return cls(**{name: values.at(name, read, given[name]) for name, read in known.items()})


FACTS = codec.readers_of(ModelNotes)
