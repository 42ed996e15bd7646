"""Rules on how loss, output and targets go with each other, as the gradient of the model's output shows them."""

from __future__ import annotations

from itertools import takewhile

from ...records import TrainingHistory
from ..finding import Seen
from ..needs import computing, is_squared_error, rewarded, weighted
from ..registry import rule
from ..signals import is_stuck, training_batches
from .output import RANGES, WITH_LOGITS, last_layer, loss_and_activation

TITLE = "Output"

_ERRORS = ("MseLossBackward0", "L1LossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")
_REDUCED, _BY_HAND = ("Mean", "Sum", "Div", "Mul"), ("PowBackward0", "AbsBackward0")


def loss_kind(history: TrainingHistory) -> str:
    """What loss it is, as the gradient of the output shows; empty if not known.

    A squared error has to be proved: one of the first three losses is what it would have been.
    """
    kind = history.model.loss_kind
    if is_squared_error(history):
        return "squared error"
    return kind if kind != "squared error" else ""


def last_activation(history: TrainingHistory) -> str:
    """The activation that the model ends in, module or function; empty if none is seen."""
    notes = history.model
    names = [*notes.last_modules[:1], *computing(notes.last_operations)[:1]]
    return next((name for name in names if name in RANGES), "")


@rule(
    "targets-beyond-output",
    of="bounded-output",
    see="The model ends in {last_layer}, which gives {_from:g} to {_to:g}; targets go from {low:.3g} to {high:.3g}.",
    sure=0.95,
    remedy="Remove the last activation, or bring the targets into its range.",
    needs_targets=True,
)
def targets_beyond_output(history: TrainingHistory, *, margin: float = 0.02) -> Seen | None:
    """The targets of a squared error are beyond the range of the last activation, by a `margin` of their own range."""
    last, reach = last_activation(history), history.model.target_range
    if not last or len(reach) != 2 or loss_kind(history) != "squared error":
        return None
    (low, high), room = RANGES[last], margin * max(reach[1] - reach[0], 1e-12)
    if reach[0] >= low - room and reach[1] <= high + room:
        return None
    return Seen(layers=last_layer(history), last_layer=last, low=reach[0], high=reach[1], _from=low, _to=high)


@rule(
    "output-not-as-the-loss-asks",
    of="output-loss-mismatch",
    see="{_what}",
    sure=0.95,
    remedy="Give losses with logits the plain output of the last linear layer, and nll_loss a log_softmax.",
    needs_targets=True,
    needs_harm=True,
)
def output_not_as_the_loss_asks(history: TrainingHistory, *, samples: int = 2) -> Seen | None:
    """At least `samples` training batches hold probabilities where the loss makes its own, or no log-probabilities
    where it needs them.
    """
    known, kind = training_batches(history), history.model.loss_kind
    if len(known) < samples:
        return None
    if kind == "cross-entropy" and all(x.output_rows_sum_to_one for x in known):
        what = "The loss applies softmax itself, and the rows of its input sum to 1, as after a softmax."
    elif kind == WITH_LOGITS and all(x.output_is_unit for x in known):
        what = "The loss applies sigmoid itself, and its whole input is in [0, 1], as after a sigmoid."
    elif kind == "negative log-likelihood" and any(x.output_max > 1e-6 for x in known):
        what = "The loss takes logarithms of probabilities, and gets numbers above 0."
    else:
        return None
    return Seen(layers=last_layer(history), loss=kind, num_batches=len(known), _what=what)


@rule(
    "loss-against-targets",
    see="The loss is a squared error, and all its targets are 0 or 1: they look like classes.",
    remedy="Use cross_entropy for classes, binary_cross_entropy_with_logits for yes or no, an error for numbers.",
    needs_targets=True,
)
def loss_against_targets(history: TrainingHistory, *, binary: float = 0.99, progress: float = 0.3) -> Seen | None:
    """A squared error has targets of 0 or 1 to a share `binary`, or a cross-entropy was below zero.

    Or a relative error began above 1e3. The first is info; a warning if 80 losses gained less than a share `progress`
    of the first.
    """
    notes, first = history.model, history.loss_trend.first
    kind = loss_kind(history) or loss_and_activation(notes.loss_ops)[0]
    least = history.losses.min if history.losses.count else 0.0
    if "cross-entropy" in kind and least < -1e-3 and not (weighted(history) or rewarded(history)):
        see = "The loss is a {loss}, and was {least:.4g}: below zero, which targets within [0, 1] do not allow."
        return Seen(sure=0.95, see=see, loss=kind, least=least)
    if {"AbsBackward0", "DivBackward0"} <= {*notes.loss_ops[:5]} and first > 1e3:
        see = "The loss is relative to the targets, and began at {first:.3g}: some are zero."
        return Seen(sure=0.9, see=see, first=first)
    is_one = notes.target_std is not None and notes.target_std < 1e-3  # all 0, as of a residual: read off to rounding
    is_beyond = any(not -0.01 <= end <= 1.01 for end in notes.target_range)  # of another batch than the share
    share = notes.target_binary_share or 0.0
    if kind != "squared error" or share < binary or is_one or is_beyond:
        return None
    return Seen(warn=is_stuck(history, progress, 80), loss=kind, binary_share=share)


@rule(
    "broadcast-targets",
    source="torch's warning of sizes that differ in mse_loss, which broadcasts [N] against [N, 1] to [N, N]",
    see="The output is broadcast against the targets: each sample is compared with the targets of all.",
    sure=0.95,
    remedy="Give output and targets the same shape: squeeze the output's last dimension, or unsqueeze the targets'.",
)
def broadcast_targets(history: TrainingHistory) -> Seen | None:
    """An error is taken of more pairs than the output has elements, and they are reduced all at once.

    Or, if the graph is unknown: the gradient is that of a squared error against one number, and the loss exceeds that
    error by the spread of the targets.
    """
    notes, firsts, ops = history.model, history.loss_trend.firsts[:1], history.model.loss_ops
    then, std = notes.squared_losses[:1], notes.target_std
    is_known = notes.loss_kind == "squared error" and then and firsts and std is not None and not ops
    if is_known and std <= 1e-4 * then[0] ** 0.5 and firsts[0] > 1.05 * then[0]:
        see = "The gradient pulls all outputs to one number, {_mean:.4g}, and the loss exceeds the distance from it."
        return Seen(see=see, _mean=notes.target_mean)
    reduced = [*takewhile(lambda op: op.startswith(_REDUCED), ops)]
    if any(op in ("SumBackward1", "MeanBackward1") for op in reduced):
        return None  # along a dimension: pairs are meant, as of quantiles
    first, *others = [*ops[len(reduced) :], ""]
    if first in _BY_HAND:
        first, *others = others
    is_so = notes.is_paired or (first in (*_ERRORS, "SubBackward0") and others[0] == "ExpandBackward0")
    return Seen(operation=first) if is_so else None
