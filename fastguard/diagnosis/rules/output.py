"""Rules on what the model puts out, and on how the loss takes it."""

from __future__ import annotations

import math

from ...history import TrainingHistory
from ...stats import BatchSample
from ..finding import Finding
from ..needs import is_squared_error
from ..registry import rule
from ..signals import has_had_time, median, signals_of

TITLE = "Output"

_LAYERS = ("Softmax", "LogSoftmax", "Sigmoid", "ReLU", "Tanh", "Softsign", "Softplus", "ELU", "SELU", "LeakyReLU")
_ACTIVATIONS = {  # the name of a node in the graph of the loss, and what a user calls it
    "SoftmaxBackward0": "softmax",
    "SigmoidBackward0": "sigmoid",
    "TanhBackward0": "tanh",
    "ReluBackward0": "ReLU",
    "SoftplusBackward0": "softplus",
    "EluBackward0": "ELU",
    "LeakyReluBackward0": "LeakyReLU",
}
_PASSED = ("ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "SqueezeBackward0", "SqueezeBackward1",
           "UnsqueezeBackward0", "TransposeBackward0", "PermuteBackward0", "CloneBackward0", "ToCopyBackward0",
           "SelectBackward0", "SliceBackward0", "MeanBackward0", "DivBackward0", "AliasBackward0")  # fmt: skip
_CLASSES = "cross-entropy"
_WITH_LOGITS = "binary cross-entropy with logits"
_OF_PROBABILITIES = "binary cross-entropy"
_OVER_CLASSES = (_CLASSES, "negative log-likelihood", "log of the output")
_SQUARED = "squared error"


def loss_and_activation(ops: tuple[str, ...]) -> tuple[str, str]:
    """What kind of loss the nodes `ops` are, outermost first, and the activation that it takes; "" for what is neither.

    >>> loss_and_activation(("NllLossBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0", "AddmmBackward0"))
    ('cross-entropy', 'softmax')
    """
    rest = [op for op in ops if op not in _PASSED]
    if not rest:
        return "", ""
    kind, skipped = "", 1
    if rest[0] in ("NllLossBackward0", "NllLoss2DBackward0", "NllLossNdBackward0"):
        kind = _CLASSES
        if len(rest) > 1 and rest[1] == "LogSoftmaxBackward0":
            skipped = 2
        elif len(rest) > 1:  # the logarithm is the user's, or missing
            return "negative log-likelihood", "log" if rest[1] == "LogBackward0" else _ACTIVATIONS.get(rest[1], "none")
    elif rest[0] == "BinaryCrossEntropyWithLogitsBackward0":
        kind = _WITH_LOGITS
    elif rest[0] == "BinaryCrossEntropyBackward0":
        kind = _OF_PROBABILITIES
    elif rest[0] in ("MseLossBackward0", "L1LossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0"):
        kind = _SQUARED
    else:
        return "", ""
    return kind, _ACTIVATIONS.get(rest[skipped], "none") if len(rest) > skipped else ""


def _training(history: TrainingHistory) -> list[BatchSample]:
    return [sample for _, sample in history.batches if sample.training and sample.with_grad]


def last_layer(history: TrainingHistory) -> tuple[str, ...]:
    """Names of the parameters of the model's last layer."""
    names = history.model.names
    module = names[-1].rpartition(".")[0] if names else ""
    return tuple(name for name in names if name.rpartition(".")[0] == module)[:8]


def _begins(history: TrainingHistory) -> tuple[int | None, int | None]:
    return (history.recent[0].step, history.recent[-1].step) if history.recent else (None, None)


@rule(
    "output-against-loss",
    reads="the operations between the loss and the model's last layer",
    source="torch's documentation of cross_entropy, nll_loss, binary_cross_entropy and its form with logits",
    remedy="cross_entropy and binary_cross_entropy_with_logits take what the last linear layer gives: no softmax, no "
    "sigmoid, no ReLU before them. nll_loss takes log_softmax, binary_cross_entropy a sigmoid.",
)
def output_against_loss(history: TrainingHistory) -> Finding | None:
    """The loss has its own softmax or sigmoid and gets the output of another activation, or lacks the one it needs."""
    kind, activation = loss_and_activation(history.model.loss_ops)
    if not kind or not history.num_clean:
        return None
    bad = {
        _CLASSES: activation in ("softmax", "sigmoid", "ReLU", "tanh", "softplus", "ELU", "LeakyReLU"),
        _WITH_LOGITS: activation in ("softmax", "sigmoid", "ReLU", "tanh", "softplus", "ELU", "LeakyReLU"),
        "negative log-likelihood": activation not in ("log", ""),
        _OF_PROBABILITIES: activation in ("none", "ReLU", "tanh", "softplus", "ELU", "LeakyReLU"),
    }
    if not bad.get(kind):
        return None
    what = "nothing that ends in [0, 1]" if activation == "none" else f"the output of a {activation}"
    return Finding(
        f"The loss is a {kind}, and takes {what}.",
        *_begins(history),
        layers=last_layer(history),
        evidence={"loss": kind, "activation": activation},
        confidence=0.95,
    )


@rule(
    "bounded-output",
    reads="the last layers, samples of the output, and the loss",
    source="our own: an activation at the end says which targets can be reached",
    remedy="Leave the activation after the last layer out, or choose it by the range of the targets: none for any "
    "number, sigmoid for [0, 1], and none before a loss with logits.",
    needs_descent=True,
)
def bounded_output(
    history: TrainingHistory, *, progress: float = 0.5, clear: float = 0.2, min_steps: int = 60
) -> Finding | None:
    """The model ends in an activation, and after `min_steps` losses less than a share `progress` has been gained.

    Info, unless the output stands at an end of its range, or after twice as many less than `clear` has been gained.
    """
    last = history.model.last_modules[:1]
    s = signals_of(history)
    if not last or last[0] not in _LAYERS or len(s.losses) < min_steps or not s.progress < progress:
        return None
    if last[0] == "LogSoftmax" or loss_and_activation(history.model.loss_ops)[0] == _OF_PROBABILITIES:
        return None
    samples = _training(history)
    stuck = [x for x in samples if _at_its_end(last[0], x)]
    is_stuck = len(samples) >= 2 and len(stuck) == len(samples)
    return Finding(
        f"The model ends in {last[0]}, and {s.progress:.0%} of the loss has been gained."
        + (" Its output stands at the end of its range." if is_stuck else ""),
        *_begins(history),
        severity="warning" if is_stuck or (len(s.losses) >= 2 * min_steps and s.progress < clear) else "info",
        layers=last_layer(history),
        evidence={"last_layer": last[0], "progress": s.progress, "is_at_its_end": is_stuck, "threshold": progress},
        confidence=0.9 if is_stuck else 0.6,
    )


def _at_its_end(layer: str, x: BatchSample) -> bool:
    if layer in ("ReLU", "Softplus"):
        return x.output_abs_max < 1e-6
    if layer == "Softmax":
        return x.output_width == 1
    low = 0.0 if layer == "Sigmoid" else -1.0
    return layer in ("Sigmoid", "Tanh", "Softsign") and (x.output_min > 0.98 or x.output_max < low + 0.02)


@rule(
    "softmax-floor",
    reads="samples of the output, the level of the loss and its least",
    source="our own: cross_entropy of probabilities cannot go below ln(1 + (C - 1) / e)",
    remedy="The output is a softmax already, and cross_entropy makes another: give it the logits.",
    needs_descent=True,
)
def softmax_floor(history: TrainingHistory, *, margin: float = 0.02, min_steps: int = 50) -> Finding | None:
    """The rows of the output sum to 1, and no loss in `min_steps` or more came below that floor, less a `margin`.

    The first losses must be those of cross_entropy on probabilities: within 0.1 of ln C, and C at least 2.
    """
    samples = _training(history)
    if len(samples) < 2 or not all(x.output_rows_sum_to_one and x.output_width > 1 for x in samples):
        return None
    classes = samples[0].output_width
    floor = math.log1p((classes - 1) / math.e)
    first = history.loss_trend.first
    if history.losses.count < min_steps or abs(first - math.log(classes)) > 0.1:
        return None
    if history.losses.min < floor * (1.0 - margin):
        return None
    return Finding(
        f"The output's rows sum to 1, and the loss, {history.loss_trend.mean:.4g}, has never been below {floor:.4g}, "
        f"the floor of a cross-entropy over {classes} classes that takes probabilities.",
        *_begins(history),
        layers=last_layer(history),
        evidence={"floor": floor, "least": history.losses.min, "num_classes": classes, "first": first},
        confidence=0.85,
    )


@rule(
    "same-output-for-all",
    reads="samples of the output: its spread over the samples of a batch",
    source="our own, from collapse in self-supervised learning (Chen and He 2021, whose std of the output this is)",
    remedy="The model gives one answer to every input: look at the last layer's activation, at dead units before it, "
    "and at the scale of the inputs.",
)
def same_output_for_all(
    history: TrainingHistory, *, spread: float = 1e-4, samples: int = 2, patience: int = 200
) -> Finding | None:
    """In the `samples` newest samples the output's spread over a batch is below `spread` of its size; inputs differ.

    Info until `patience` losses were seen, or the run has ended: codes and gates may open late.
    """
    known = [x for x in _training(history) if x.num_samples > 1 and not math.isnan(x.output_spread)]
    newest = known[-samples:]
    if len(newest) < samples or history.num_steps < 20:
        return None
    if any(x.output_spread > spread * max(x.output_abs_max, 1e-12) or x.input_constant_share >= 1.0 for x in newest):
        return None
    began_so = known[0].output_spread <= spread * max(known[0].output_abs_max, 1e-12)
    then = ", from the first batch on" if began_so else f"; in the first its spread was {known[0].output_spread:.3g}"
    return Finding(
        f"The model gives the same output to every sample of a batch{then}.",
        *_begins(history),
        layers=last_layer(history),
        severity="warning" if has_had_time(history, patience) else "info",
        evidence={"spread": newest[-1].output_spread, "at_first": known[0].output_spread, "began_so": began_so},
        confidence=0.9,
    )


@rule(
    "loss-at-chance",
    reads="the level of the loss against that of guessing among as many classes as the output is wide",
    source="our own: a model that knows nothing of its inputs ends at the entropy of the targets",
    remedy="Nothing of the targets is found in the inputs: look at single samples with their targets, as the model "
    "gets them. Are they shuffled against each other, or do the inputs not arrive?",
    needs_descent=True,
)
def loss_at_chance(
    history: TrainingHistory,
    *,
    tolerance: float = 0.03,
    frequent: float = 0.05,
    num_targets: int = 512,
    min_steps: int = 100,
) -> Finding | None:
    """After `min_steps` losses their median is within a share `tolerance` of ln C, and they have not moved since.

    Or within a share `frequent` of the entropy of the targets, where `num_targets` or more of them are known.

    Not moved: the best average is no lower than twice that share below. Info where the loss is not known to be one over
    classes, nor began there. Or, of a squared error, the median is at least
    nine tenths of the targets' variance, and the best average eight.
    """
    samples = _training(history)
    s = signals_of(history)
    if not samples or len(s.losses) < min_steps:
        return None
    if samples[-1].output_width < 2 or is_squared_error(history):
        return _at_the_spread(history, median(s.losses[-64:]))
    kind = history.model.loss_kind or loss_and_activation(history.model.loss_ops)[0]
    if kind not in ("", *_OVER_CLASSES):
        return None
    width, level = samples[-1].output_width, median(s.losses[-64:])
    for chance, near, what in (
        (math.log(width), tolerance, f"guessing among {width} classes gives"),
        (_known_entropy(history, num_targets), frequent, "knowing how frequent each class is gives about"),
    ):
        if abs(level - chance) <= near * chance and history.loss_trend.best >= (1.0 - 2 * near) * chance:
            return Finding(
                f"The loss stands at {level:.4g}; {what} {chance:.4g}.",
                *_begins(history),
                severity="warning" if kind or _begins_at(history, chance, near) else "info",
                evidence={"level": level, "chance": chance, "num_classes": width, "threshold": near},
                confidence=0.85,
            )
    return None


def _begins_at(history: TrainingHistory, chance: float, near: float) -> bool:
    """Whether the first loss was that of guessing, as a cross-entropy's is before anything is learnt."""
    firsts = history.loss_trend.firsts
    return bool(firsts) and abs(firsts[0] - chance) <= 2.0 * near * chance


def _known_entropy(history: TrainingHistory, num_targets: int) -> float:
    """Of the targets, where enough of them are known; else no loss stands there."""
    entropy = history.model.target_entropy
    return -math.inf if entropy is None or (history.model.num_targets or 0) < num_targets else entropy


def _at_the_spread(history: TrainingHistory, level: float) -> Finding | None:
    notes = history.model
    if not is_squared_error(history) or not notes.target_std or notes.target_mean is None:
        return None
    variance = notes.target_std**2
    is_scaled = abs(notes.target_mean) > max(10.0, 3.0 * notes.target_std)  # which is target-scale's
    s = signals_of(history)
    is_falling = len(s.losses) > 64 and not s.stands  # on the way to the mean, and on from it
    if is_scaled or is_falling or not 0.9 * variance <= level <= 1.2 * variance:
        return None
    if history.loss_trend.best < 0.8 * variance:
        return None
    return Finding(
        f"The loss stands at {level:.4g}; always giving the mean of the targets gives about {variance:.4g}.",
        *_begins(history),
        evidence={"level": level, "chance": variance},
        confidence=0.75,
    )
