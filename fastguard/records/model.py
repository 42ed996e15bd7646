"""Facts about the model, its optimizer and its data that no record shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from . import codec, values
from .codec import Count, Length
from .events import BadRank, Experiment, RecoveryEvent

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
    experiments: tuple[Experiment, ...] = ()  # what was tried beside the training (`wrap(..., experiments=True)`)

    # Parameters and modules.
    names: Names = ()  # every parameter of the model, in the model's order
    not_in_optimizer: Names = ()  # trainable parameters that are in no guarded optimizer
    without_gradient: Names = ()  # parameters with `requires_grad=False`
    zero_lr: Names = ()  # parameters in a group whose learning rate is 0
    # Of weight matrices and kernels: the standard deviation before the first step, and that expected from their fan-in
    initialization: Annotated[dict[str, tuple[float, float]], _usable_pairs] = field(default_factory=dict)
    weight_growth: float | None = None  # the median weight matrix's norm, divided by that before the first step
    dropout: dict[str, float] = field(default_factory=dict)  # the dropout probability of each dropout module, by name
    module_kinds: dict[str, Count] = field(default_factory=dict)  # number of modules without children, by class name
    # Class names of the last three modules without children that the first forward pass called, the last one first;
    # empty if that pass was compiled or scripted
    last_modules: Names = ()
    learning_modules: Names = ()  # those with parameters that the first pass called with autograd on, in order
    last_operations: Names = ()  # that autograd recorded in that pass, the last one first ("Softmax", "Addmm", "Relu")
    dtypes: Names = ()  # of the parameters, such as "float32", in the order of first use
    autocast: str = ""  # the dtype of autocast in that pass; empty without autocast
    # Running statistics of up to eight BatchNorm modules against those of the newest sampled training batch: distance
    # of the means in standard deviations (root mean square over channels), and ratio of the variances (geometric mean);
    # both Inf if the running ones are not finite
    norm_statistics: Annotated[dict[str, tuple[float, float]], _usable_pairs] = field(default_factory=dict)

    # Series of passes without autograd, in training mode, between two steps, of a model with dropout or BatchNorm that
    # was not seen in eval mode: of up to eight, the step, the number of different inputs among the first eight passes,
    # how many of these were in an earlier series, too, and the steps to the next pass that does not train; 0 if unknown
    passes_in_training_mode: tuple[tuple[Count, Count, Count, Count], ...] = ()

    # The optimizer and the training loop.
    # The largest share so far by which weight decay shrinks a parameter in one step, learning rate included
    decay_per_step: float | None = None
    backward_per_step: Count | None = None  # most backward passes before one step; None if not known
    num_summed: Count | None = None  # losses whose gradients are summed for a step, none of them divided; if known
    has_scheduler: bool | None = None  # whether the optimizer has a learning rate scheduler; None if not known
    initial_lr: float | None = None  # the learning rate that the scheduler started from, if there is one
    steps_per_epoch: Length | None = None  # steps in one pass over the data, if known
    has_scaler: bool | None = None  # whether a GradScaler unscales the gradients; None before the first step
    clip_limit: float | None = None  # the largest norm after clipping; None without a fixed limit
    clip_policy: str = ""  # `repr` of the clip policy; empty without one
    # A dict for each of up to 64 param groups: `kind` (the class), `num_parameters` (elements), and the usual settings
    # that the group has (`observers.facts`); `lr` is from when one of the others was last set
    optimizer_settings: tuple[dict[str, Annotated[Any, _setting]], ...] = ()
    objective: Annotated[str, _objective] = ""  # "minimise", "game" or "reward", as passed to `wrap`
    recoveries: tuple[RecoveryEvent, ...] = ()  # rollbacks and other events of the recovery
    num_left_out: Count = 0  # steps that recovery left out, whatever their gradients were

    # Which parameters receive gradients, and which change without one.
    num_left_gradients: Count | None = None  # steps whose gradients were added to those of the step before, uncleared,
    num_watched_backwards: Count | None = None  # among the first so many, at most 20
    num_cleared_gradients: Count | None = None  # of these, steps before whose backward pass gradients were cleared
    num_seen: Count | None = None  # parameters of the optimizers that ever had a gradient; None if not known
    never_seen: Names = ()  # trainable parameters that never had a gradient
    # Of up to 16 parameters without a gradient or a guarded optimizer, those that changed within a step, or between two
    moved_in_step: Names = ()
    moved_between: Names = ()
    # Of the first 20 sampled steps, those at which the backward pass reached a parameter of `never_seen`
    num_reached_unseen: Count | None = None
    overwritten: Names = ()  # of up to 16 parameters, those that changed while no guarded optimizer stepped

    # The loss and its targets.
    # Autograd's operations from the first observed loss down, outermost first, at most 16 ("NllLossBackward0", ...)
    loss_ops: Names = ()
    is_smooth: bool | None = None  # whether every operation of that graph has a finite derivative everywhere
    softmax_over_batch: bool | None = None  # whether the softmax at the end is over the first of several dimensions
    has_loss_weights: bool | None = None  # whether the loss was given weights of classes or elements
    is_paired: bool | None = None  # whether [N] against [N, 1] makes [N, N] on the way to the loss
    loss_ops_beside: Names = ()  # operations of the losses of other guards in the process
    # Parameters in that graph that are neither the model's nor guarded, such as those of another network in a game
    num_foreign_parameters: Count | None = None
    num_untrained: Count | None = None  # parameters in that graph, not the model's, that no step has changed
    foreign_loss_ops: Names = ()  # the last operation of the loss that trains the others
    # The loss that fits the gradient of the model's output: "cross-entropy" (with its own softmax), "cross-entropy with
    # smoothed labels", "negative log-likelihood", "log of the output", "binary cross-entropy with logits", "binary
    # cross-entropy", "squared error", "absolute error", "zero"; empty if none fits or if not known. It is a squared
    # error only if a loss is among `squared_losses`.
    loss_kind: str = ""
    squared_losses: tuple[float, ...] = ()  # mean squared errors of the first sampled passes
    # The next five are for a loss over classes
    target_top_share: float | None = None  # share of the most frequent class
    target_batch_top_share: float | None = None  # its mean within a batch
    target_entropy: float | None = None  # in nats: the loss of a model that only knows the frequencies of the classes
    num_target_classes: Count | None = None
    num_targets: Count | None = None  # in which they were counted
    # The next four are of the targets of a squared error
    target_range: tuple[float, ...] = ()
    target_mean: float | None = None
    target_std: float | None = None
    target_binary_share: float | None = None  # share of zeros and ones
    # How closely one place of the inputs follows the targets in all sampled passes, at least three: a correlation, or
    # for sequences of classes the share of equal ones
    target_in_inputs: float | None = None
    # How many places further on in a sequence that the model embeds the targets are. Then, if it is known, a place, and
    # the last place that outputs there depend on, -1 for none. Empty if no such sequence fits
    target_shift: tuple[int, ...] = ()
    # How much more similar the targets of similar inputs are than by chance, in standard deviations
    target_dependence: float | None = None

    # Ranks.
    num_ranks: Length | None = None  # that share the gradients or stages of the model; None for one
    bad_ranks: tuple[BadRank, ...] = ()  # the first 16 ranks whose part of the gradients was not finite
    num_restarts: Length | None = None  # restarts by torchrun before the newest steps; None for never
    resources: dict[str, float] = field(default_factory=dict)  # use of the machine per step (`observers.resources`)

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
