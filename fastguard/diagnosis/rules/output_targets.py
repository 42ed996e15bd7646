"""Rules on how loss, output and targets go with each other, as the gradient of the model's output shows them."""

from __future__ import annotations

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import computing, is_squared_error, rewarded, weighted
from ..registry import rule
from ..signals import is_stuck, training_batches
from .output import OF_SEQUENCES, RANGES, WITH_LOGITS, last_layer, loss_and_activation

TITLE = "Output"

_CLOSE = ("SmoothL1LossBackward0", "HuberLossBackward0")


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
    remedy="Leave the last activation out, or bring the targets into its range.",
    needs_targets=True,
)
def targets_beyond_output(history: TrainingHistory, *, margin: float = 0.02) -> Finding | None:
    """Targets beyond the range of the last activation by more than a `margin` of their own range."""
    last, reach = last_activation(history), history.model.target_range
    is_known = loss_kind(history) == "squared error" or _lie_beyond(history)
    if not last or len(reach) != 2 or not is_known:
        return None
    low, high = RANGES[last]
    room = margin * max(reach[1] - reach[0], 1e-12)
    if reach[0] >= low - room and reach[1] <= high + room:
        return None
    return Finding(
        f"The model ends in {last}, which gives {low:g} to {high:g}; the targets go from {reach[0]:.3g} to "
        f"{reach[1]:.3g}.",
        layers=last_layer(history),
        evidence={"last_layer": last, "low": reach[0], "high": reach[1]},
        confidence=0.95,
    )


def _lie_beyond(history: TrainingHistory) -> bool:
    """Whether the loss is a mean of Huber's, whose gradient, read as a squared error's, puts targets too near.

    At most half of the way, so that a squared error of what it says is at most half of the loss.
    """
    notes, firsts = history.model, history.loss_trend.firsts
    is_one = notes.loss_kind == "squared error" and notes.loss_ops[:1] in [(name,) for name in _CLOSE]
    return is_one and any(0.0 < found <= 0.51 * loss for found, loss in zip(notes.squared_losses[:1], firsts))


@rule(
    "output-not-as-the-loss-asks",
    of="output-loss-mismatch",
    source="torch's documentation of cross_entropy, nll_loss and binary_cross_entropy_with_logits",
    remedy="cross_entropy and losses with logits take the plain output of the last linear layer; nll_loss takes "
    "logarithms of probabilities (log_softmax).",
    needs_targets=True,
    needs_harm=True,
)
def output_not_as_the_loss_asks(history: TrainingHistory, *, samples: int = 2) -> Finding | None:
    """Probabilities where the loss makes its own, or no logarithms of probabilities where it needs them.

    In all of at least `samples` training batches.
    """
    known = training_batches(history)
    kind = history.model.loss_kind
    if len(known) < samples:
        return None
    if kind == "cross-entropy" and all(x.output_rows_sum_to_one for x in known):
        what = "The loss makes its own softmax, and the rows of what it is given sum to 1, as after a softmax."
    elif kind == WITH_LOGITS and all(x.output_is_unit for x in known):
        what = "The loss makes its own sigmoid, and all it is given is in [0, 1], as after a sigmoid."
    elif kind == "negative log-likelihood" and any(x.output_max > 1e-6 for x in known):
        what = "The loss takes logarithms of probabilities, and is given numbers above 0."
    else:
        return None
    return Finding(
        what,
        layers=last_layer(history),
        evidence={"loss": kind, "num_batches": len(known)},
        confidence=0.95,
    )


@rule(
    "loss-against-targets",
    reads="what loss the gradient of the output belongs to, and its targets",
    source="our own: a squared error takes classes for numbers; a likelihood below zero has targets that are none",
    remedy="Use cross_entropy for classes (with the class's index), binary_cross_entropy_with_logits for yes or no, "
    "and a squared or absolute error for numbers.",
    needs_targets=True,
)
def loss_against_targets(
    history: TrainingHistory, *, binary: float = 0.99, progress: float = 0.3, min_steps: int = 80, huge: float = 1e3
) -> Finding | None:
    """A squared error whose targets are 0 or 1 to a share `binary`, or a cross-entropy that was below zero.

    Or a `ctc_loss` of logarithms that was, unless a term of the loss is to grow; or a relative error that began above
    `huge`. The first is info; a warning if `min_steps` losses gained less than a share `progress` of the first.
    """
    notes, (of_graph, activation) = history.model, loss_and_activation(history.model.loss_ops)
    kind = loss_kind(history) or of_graph
    least = history.losses.min if history.losses.count else 0.0
    is_of_sequences = (of_graph, activation) == (OF_SEQUENCES, "log")
    is_entropy = ("cross-entropy" in kind and not weighted(history)) or is_of_sequences
    if is_entropy and least < -1e-3 and not rewarded(history):
        sound = "targets without the blank's index" if is_of_sequences else "targets within [0, 1]"
        return Finding(
            f"The loss is a {of_graph if is_of_sequences else kind}, and was {least:.4g}: below zero, which {sound} "
            "do not allow.",
            evidence={"loss": kind, "least": least},
            confidence=0.95,
        )
    if (
        "AbsBackward0" in notes.loss_ops[:5]
        and "DivBackward0" in notes.loss_ops[:5]
        and history.loss_trend.first > huge
    ):
        return Finding(
            f"The loss is relative to the targets, and began at {history.loss_trend.first:.3g}: some are zero.",
            evidence={"first": history.loss_trend.first, "threshold": huge},
            confidence=0.9,
        )
    is_one = notes.target_std is not None and notes.target_std < 1e-3  # all 0, as of a residual: read off to rounding
    is_beyond = any(not -0.01 <= end <= 1.01 for end in notes.target_range)  # of another batch than the share
    if kind != "squared error" or (notes.target_binary_share or 0.0) < binary or is_one or is_beyond:
        return None
    return Finding(
        "The loss is a squared error, and all its targets are 0 or 1: they look like classes.",
        severity="warning" if is_stuck(history, progress, min_steps) else "info",
        evidence={"loss": kind, "binary_share": notes.target_binary_share, "threshold": binary},
        confidence=0.8,
    )


@rule(
    "broadcast-targets",
    reads="the operations between the loss and the output",
    source="torch's warning of sizes that differ in mse_loss, which broadcasts [N] against [N, 1] to [N, N]",
    remedy="Give output and targets the same shape: squeeze the output's last dimension, or unsqueeze the targets'.",
    needs_targets=True,
)
def broadcast_targets(history: TrainingHistory) -> Finding | None:
    """An error between output and targets is taken of more pairs than the output has elements.

    Or, where the graph is not known: the gradient is that of a squared error against one number, and the loss is larger
    than that error by the spread of the targets.
    """
    ops = history.model.loss_ops
    pulled = _pulled_to_one(history)
    if pulled is not None:
        return pulled
    errors = ("MseLossBackward0", "L1LossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "SubBackward0")
    at = next((i for i, op in enumerate(ops) if op in errors), None)
    if at is None or at + 1 >= len(ops) or ops[at + 1] != "ExpandBackward0":
        return None
    return Finding(
        "The output is broadcast against the targets: each sample is compared with the targets of all.",
        evidence={"operation": ops[at]},
        confidence=0.95,
    )


def _pulled_to_one(history: TrainingHistory) -> Finding | None:
    notes, firsts = history.model, history.loss_trend.firsts
    if notes.loss_kind != "squared error" or not notes.squared_losses or not firsts or notes.target_std is None:
        return None
    then = notes.squared_losses[0]
    if notes.target_std > 1e-4 * then**0.5 or firsts[0] <= 1.05 * then:
        return None
    return Finding(
        f"The gradient pulls all outputs to one number, {notes.target_mean:.4g}, and the loss is larger than the "
        "distance from it: each sample is compared with the targets of all.",
        evidence={"loss": firsts[0], "squared_distance": then},
        confidence=0.85,
    )
