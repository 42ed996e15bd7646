"""Rules on what the model puts out, and on how the loss takes it."""

from __future__ import annotations

import math
from itertools import dropwhile

from ...records import BatchSample, TrainingHistory
from ..finding import Seen
from ..needs import computing, is_squared_error
from ..registry import rule
from ..signals import has_had_time, signals_of, training_batches

TITLE = "Output"

_LAYERS = ("Softmax", "LogSoftmax", "Sigmoid", "ReLU", "Tanh", "Softsign", "Softplus", "ELU", "SELU", "LeakyReLU")
RANGES = {  # of activations that have one, by the name of the module or of the operation
    **dict.fromkeys(("Softmax", "Sigmoid", "Hardsigmoid"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Softsign", "Hardtanh"), (-1.0, 1.0)),
    **dict.fromkeys(("ReLU", "Softplus", "ReLU6", "Relu"), (0.0, math.inf)),
}
_ACTIVATIONS = {  # operations in the graph of the loss, and what a user calls them
    **{name: name.lower() for name in ("Softmax", "Sigmoid", "Tanh", "Softplus", "Hardtanh", "Clamp")},
    **{"Relu": "ReLU", "Elu": "ELU", "LeakyRelu": "LeakyReLU", "ClampMin": "clamp", "ClampMax": "clamp"},
}
_BENDING = ("ReLU", "tanh", "softplus", "ELU", "LeakyReLU")
_BEFORE_LOGITS = ("softmax", "sigmoid", "clamp", "hardtanh", "ReLU", "tanh", "softplus")
WITH_LOGITS = "binary cross-entropy with logits"
_OF_PROBABILITIES = "binary cross-entropy"
_LOG_LIKELIHOOD = "negative log-likelihood"
_TWICE = "sigmoid of a sigmoid"
_LOSSES = {
    **dict.fromkeys(("NllLoss", "NllLoss2D", "NllLossNd"), "cross-entropy"),
    **dict.fromkeys(("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss"), "squared error"),
    "BinaryCrossEntropyWithLogits": WITH_LOGITS,
    "BinaryCrossEntropy": _OF_PROBABILITIES,
    "CtcLoss": _LOG_LIKELIHOOD,
}


def loss_and_activation(ops: tuple[str, ...]) -> tuple[str, str]:
    """What kind of loss the nodes `ops` are, outermost first, and the activation that it takes; "" for what is neither.

    >>> loss_and_activation(("NllLossBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0", "AddmmBackward0"))
    ('cross-entropy', 'softmax')
    """
    names = [op.partition("Backward")[0] for op in computing(ops)]
    loss, *rest = [*dropwhile(lambda name: name in ("Mean", "Sum", "Div", "Mul", "Add", "Where"), names), ""]
    if loss not in _LOSSES:
        return "", ""
    kind, given = _LOSSES[loss], [*dropwhile(lambda name: name in ("Mean", "Div"), rest[:-1])]
    if kind == "cross-entropy" and given[:1] == ["LogSoftmax"]:
        given = given[1:]
    elif kind == "cross-entropy" and given:  # the logarithm is the user's, or missing
        kind = _LOG_LIKELIHOOD
    if kind == _LOG_LIKELIHOOD and given[0].startswith("Log"):
        return kind, "log"
    if kind == _OF_PROBABILITIES and given[:2] == ["Sigmoid", "Sigmoid"]:
        return kind, _TWICE
    if kind == _OF_PROBABILITIES and given[:2] in (["Clamp", "Addmm"], ["Clamp", "Mm"], ["Clamp", "Add"]):
        return kind, "none"  # numbers that were only cut off at 0 and 1
    return kind, _ACTIVATIONS.get(given[0], "none") if given else ""


def last_layer(history: TrainingHistory) -> tuple[str, ...]:
    """Names of the parameters of the model's last layer."""
    names = history.model.names
    module = names[-1].rpartition(".")[0] if names else ""
    return tuple(name for name in names if name.rpartition(".")[0] == module)[:8]


@rule(
    "output-against-loss",
    of="output-loss-mismatch",
    leads=True,
    source="torch's documentation of cross_entropy, nll_loss, binary_cross_entropy and its form with logits",
    see="The loss is a {loss}, and takes {_what}.",
    sure=0.95,
    remedy="Give cross_entropy and binary_cross_entropy_with_logits the output of the last linear layer: no softmax, "
    "no sigmoid, no ReLU before them. Give nll_loss a log_softmax, and binary_cross_entropy a sigmoid.",
)
def output_against_loss(history: TrainingHistory) -> Seen | None:
    """The loss applies its own softmax or sigmoid to an activated output, or lacks the activation that it needs; or a
    softmax before it is over the batch. An activation that only bends, such as ELU, does no harm.
    """
    kind, activation = loss_and_activation(history.model.loss_ops)
    bad = {
        "cross-entropy": activation in _BEFORE_LOGITS,
        WITH_LOGITS: activation in _BEFORE_LOGITS,
        _LOG_LIKELIHOOD: activation not in ("log", ""),
        _OF_PROBABILITIES: activation in ("none", _TWICE, *_BENDING),
    }
    if history.model.softmax_over_batch and kind and history.num_clean:
        see = "The softmax before the loss is over dimension 0, the samples of the batch, and not over the classes."
        return Seen(layers=last_layer(history), see=see, loss=kind, activation="softmax over the batch")
    if not bad.get(kind) or not history.num_clean:
        return None
    what = "an output without [0, 1] for a range" if activation == "none" else f"the output of a {activation}"
    return Seen(layers=last_layer(history), loss=kind, activation=activation, _what=what)


@rule(
    "bounded-output",
    was="softmax-floor",
    see="The model ends in {last_layer}, and the loss has {_come_down}.{_end}",
    remedy="Remove the last activation, or choose it by the targets: none for any number, sigmoid for [0, 1].",
    needs_descent=True,
)
def bounded_output(history: TrainingHistory, *, progress: float = 0.5, clear: float = 0.2) -> Seen | None:
    """The model ends in an activation, and 60 losses gained less than a share `progress`.

    Info, unless the output is at an end of its range, or twice as many losses gained less than `clear`.
    """
    s, last = signals_of(history), "".join(history.model.last_modules[:1])
    if last not in _LAYERS or len(s.losses) < 60 or not s.progress < progress:
        return None
    if last == "LogSoftmax" or loss_and_activation(history.model.loss_ops)[0] == _OF_PROBABILITIES:
        return None
    low, high = RANGES.get(last, (-math.inf, math.inf))
    room, samples = 0.02 if high < math.inf else 1e-6, training_batches(history)
    is_stuck = len(samples) >= 2 and all(x.output_min > high - 0.02 or x.output_max < low + room for x in samples)
    return Seen(
        layers=last_layer(history),
        warn=is_stuck or (len(s.losses) >= 120 and s.progress < clear),
        last_layer=last,
        is_at_its_end=is_stuck,
        _come_down=s.progress_in_words,
        _end=" Its output is at the end of its range." if is_stuck else "",
    )


@rule(
    "same-output-for-all",
    was="outputs-become-alike",
    source="our own, from collapse in self-supervised learning (Chen and He 2021, whose std of the output this is)",
    see="The model gives the same output to every sample of a batch{_mode}{_since}.",
    sure=0.9,
    remedy="Look at the last layer's activation, at dead units before it, and at the scale of the inputs.",
)
def same_output_for_all(history: TrainingHistory, *, spread: float = 1e-4, samples: int = 2) -> Seen | None:
    """In the newest `samples` samples the output's spread over a batch is below `spread` of its size; inputs differ.

    In eval mode, with 16 samples, the limit is 1e-3, taken of the targets' spread for a squared error. Info until 200
    losses were seen, or the run has ended: codes and gates may open late; and where it was so from the first batch on,
    but the loss falls: then the loss takes another output.
    """
    known = [x for x in training_batches(history) if x.num_samples > 1 and not math.isnan(x.output_spread)]
    if history.num_steps < 20 or not known:
        return None
    newest = known[-samples:]
    is_same = len(newest) >= samples and all(_is_same(x, spread) for x in newest)
    if not is_same:
        late = [x for step, x in history.batches if 2 * step >= history.num_steps and not x.training]
        newest = [x for x in late if x.num_samples >= 16][-1:]
        size = history.model.target_std if is_squared_error(history) else None
        if not any(_is_same(x, 1e-3, size) for x in newest):
            return None
    began_so = known[0].output_spread <= spread * max(known[0].output_abs_max, 1e-12)
    return Seen(
        layers=last_layer(history),
        warn=has_had_time(history, 200) and not (began_so and signals_of(history).progress > 0.2),
        began_so=began_so,
        in_eval_mode=not is_same,
        _mode="" if is_same else " in eval mode",
        _since=", from the first batch on" if began_so else f"; at first its spread was {known[0].output_spread:.3g}",
    )


def _is_same(x: BatchSample, share: float, size: float | None = None) -> bool:
    """Whether outputs to inputs that differ are spread by no more than a `share` of `size`, or of the largest."""
    return x.output_spread <= share * (size or max(x.output_abs_max, 1e-12)) and not x.input_constant_share >= 1.0
