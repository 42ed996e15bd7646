"""Rules on what the model puts out, and on how the loss takes it."""

from __future__ import annotations

import math
from itertools import dropwhile, pairwise

from ...records import BatchSample, TrainingHistory
from ..finding import Finding
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
_BEFORE_LOGITS = ("softmax", "sigmoid", "clamp", "hardtanh", *_BENDING)
_LINEAR = "AddmmBackward0"
WITH_LOGITS = "binary cross-entropy with logits"
_OF_PROBABILITIES = "binary cross-entropy"
_LOG_LIKELIHOOD = "negative log-likelihood"
OF_SEQUENCES = "CTC loss"
_LOSSES = {
    **dict.fromkeys(("NllLoss", "NllLoss2D", "NllLossNd"), "cross-entropy"),
    **dict.fromkeys(("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss"), "squared error"),
    "BinaryCrossEntropyWithLogits": WITH_LOGITS,
    "BinaryCrossEntropy": _OF_PROBABILITIES,
    "CtcLoss": OF_SEQUENCES,
}
_ONCE = {"ExpBackward0": "an exponential", "SoftmaxBackward0": "a softmax", "SigmoidBackward0": "a sigmoid"}


def loss_and_activation(ops: tuple[str, ...]) -> tuple[str, str]:
    """What kind of loss the nodes `ops` are, outermost first, and the activation that it takes; "" for what is neither.

    >>> loss_and_activation(("NllLossBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0", "AddmmBackward0"))
    ('cross-entropy', 'softmax')
    """
    names = [op.partition("Backward")[0] for op in computing(ops)]
    loss, *rest = [*dropwhile(lambda name: name in ("Mean", "Sum", "Div", "Mul"), names), ""]
    if loss not in _LOSSES:
        return "", ""
    kind, given = _LOSSES[loss], [*dropwhile(lambda name: name in ("Mean", "Div"), rest[:-1])]
    if kind == "cross-entropy" and given[:1] == ["LogSoftmax"]:
        given = given[1:]
    elif kind == "cross-entropy" and given:  # the logarithm is the user's, or missing
        kind = _LOG_LIKELIHOOD
    logarithms = given[:1] if kind == _LOG_LIKELIHOOD else given if kind == OF_SEQUENCES else []
    if any(name.startswith("Log") for name in logarithms):
        return kind, "log"
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
    severity="critical",
    reads="the operations between the loss and the model's last layer",
    source="torch's documentation of cross_entropy, nll_loss, binary_cross_entropy and its form with logits",
    remedy="cross_entropy and binary_cross_entropy_with_logits take what the last linear layer gives: no softmax, no "
    "sigmoid, no ReLU before them. nll_loss and ctc_loss take log_softmax, binary_cross_entropy a sigmoid.",
)
def output_against_loss(history: TrainingHistory) -> Finding | None:
    """The loss has its own softmax or sigmoid and gets the output of another activation, or lacks the one it needs.

    Or an exponential, a softmax or a sigmoid is taken of itself: the loss, as `poisson_nll_loss` with `log_input`, has
    one already. Or cross_entropy, which has classes second, is given those of a linear layer, which are last, by a view
    and no transposition. Critical where `ctc_loss` was Inf at every step: no output is long enough for its targets.
    """
    kind, activation = loss_and_activation(history.model.loss_ops)
    misfit, is_short = _misfit(history, kind)
    if misfit:
        return Finding(
            misfit,
            severity="critical" if is_short else "warning",
            layers=last_layer(history),
            evidence={"loss": kind, "activation": activation},
            confidence=0.95,
        )
    if not kind or not history.num_clean:
        return None
    bad = {
        "cross-entropy": activation in _BEFORE_LOGITS,
        WITH_LOGITS: activation in _BEFORE_LOGITS,
        _LOG_LIKELIHOOD: activation not in ("log", ""),
        OF_SEQUENCES: activation not in ("log", ""),
        _OF_PROBABILITIES: activation in ("none", *_BENDING),
    }
    if not bad.get(kind):
        return None
    lacks = "no logarithm of probabilities" if kind == OF_SEQUENCES else "nothing that ends in [0, 1]"
    what = lacks if activation == "none" else f"the output of a {activation}"
    return Finding(
        f"The loss is a {kind}, and takes {what}.",
        layers=last_layer(history),
        evidence={"loss": kind, "activation": activation},
        confidence=0.95,
    )


def _misfit(history: TrainingHistory, kind: str) -> tuple[str, bool]:
    """What is wrong, whatever activation there is, and whether no loss is finite; empty for nothing."""
    ops = history.model.loss_ops
    losses = [] if history.num_clean else [e.loss for e in history.recent if e.loss is not None]
    is_of_sequences = kind == OF_SEQUENCES and "LogSoftmaxBackward0" in ops
    if is_of_sequences and losses and all(loss == math.inf for loss in losses):
        return "The loss is Inf at every step: the model's output has fewer frames than its targets have labels.", True
    twice = next((_ONCE[a] for a, b in pairwise(ops) if a == b and a in _ONCE), "")
    if twice and history.num_clean:
        return f"Two operations in a row on the way to the loss are both {twice}.", False
    if ops[:1] not in (("NllLoss2DBackward0",), ("NllLossNdBackward0",)) or "LogSoftmaxBackward0" not in ops:
        return "", False
    below = [op for op in ops[ops.index("LogSoftmaxBackward0") + 1 :] if op != "AddBackward0"][:3]
    is_viewed = below[:2] == ["ViewBackward0", "UnsafeViewBackward0"] or below == [*["ViewBackward0"] * 2, _LINEAR]
    widths = [x.output_width for x in training_batches(history)[:1] if x.output_width > 1]
    first = history.loss_trend.firsts[0] if history.loss_trend.firsts else 0.0
    if is_viewed and widths and abs(first - math.log(widths[0])) <= 0.1 * math.log(widths[0]):
        return f"A view, which moves nothing, brings {widths[0]} classes from the last dimension to the second.", False
    return "", False


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

    Info, unless the output is at an end of its range, or twice as many losses gained less than `clear`.
    """
    last = history.model.last_modules[:1]
    s = signals_of(history)
    if not last or last[0] not in _LAYERS or len(s.losses) < min_steps or not s.progress < progress:
        return None
    if last[0] == "LogSoftmax" or loss_and_activation(history.model.loss_ops)[0] == _OF_PROBABILITIES:
        return None
    samples = training_batches(history)
    stuck = [x for x in samples if _at_its_end(last[0], x)]
    is_stuck = len(samples) >= 2 and len(stuck) == len(samples)
    return Finding(
        f"The model ends in {last[0]}, and the loss has {s.come_down}."
        + (" Its output is at the end of its range." if is_stuck else ""),
        severity="warning" if is_stuck or (len(s.losses) >= 2 * min_steps and s.progress < clear) else "info",
        layers=last_layer(history),
        evidence={"last_layer": last[0], "progress": s.progress, "is_at_its_end": is_stuck, "threshold": progress},
        confidence=0.9 if is_stuck else 0.6,
    )


def _at_its_end(layer: str, x: BatchSample) -> bool:
    if layer == "Softmax":
        return x.output_width == 1
    low, high = RANGES.get(layer, (-math.inf, math.inf))
    return x.output_min > high - 0.02 or x.output_max < low + (0.02 if high < math.inf else 1e-6)


@rule(
    "softmax-floor",
    of="bounded-output",
    remedy="The output is a softmax already, and cross_entropy makes another: give it the logits.",
    needs_descent=True,
)
def softmax_floor(history: TrainingHistory, *, margin: float = 0.02, min_steps: int = 50) -> Finding | None:
    """The rows of the output sum to 1, and no loss in `min_steps` or more came below that floor, less a `margin`.

    The first losses must be those of cross_entropy on probabilities: within 0.1 of ln C, and C at least 2.
    """
    samples = training_batches(history)
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
    history: TrainingHistory, *, spread: float = 1e-4, samples: int = 2, patience: int = 200, spread_then: float = 1e-3
) -> Finding | None:
    """In the `samples` newest samples the output's spread over a batch is below `spread` of its size; inputs differ.

    Or, of 16 samples in eval mode, below `spread_then` in the newest look; of a squared error, below that share of the
    spread of its targets. Info until `patience` losses were seen, or the run has ended: codes and gates may open late.
    """
    known = [x for x in training_batches(history) if x.num_samples > 1 and not math.isnan(x.output_spread)]
    newest = known[-samples:]
    if history.num_steps < 20 or not known:
        return None
    is_same = len(newest) >= samples and all(_is_same(x, spread) for x in newest)
    size = history.model.target_std if is_squared_error(history) else None
    late = [x for step, x in history.batches if 2 * step >= history.num_steps and not x.training]
    if not is_same:
        newest = [x for x in late if x.num_samples >= 16][-1:]
    if not is_same and not any(_is_same(x, spread_then, size) for x in newest):
        return None
    began_so = known[0].output_spread <= spread * max(known[0].output_abs_max, 1e-12)
    since = ", from the first batch on" if began_so else f"; in the first its spread was {known[0].output_spread:.3g}"
    mode = "" if is_same else " in eval mode"
    return Finding(
        f"The model gives the same output to every sample of a batch{mode}{since}.",
        layers=last_layer(history),
        severity="warning" if has_had_time(history, patience) else "info",
        evidence={
            "spread": newest[-1].output_spread,
            "at_first": known[0].output_spread,
            "began_so": began_so,
            "in_eval_mode": not is_same,
        },
        confidence=0.9,
    )


def _is_same(x: BatchSample, share: float, size: float | None = None) -> bool:
    """Whether outputs to inputs that differ are spread by no more than a `share` of `size`, or of the largest."""
    return x.output_spread <= share * (size or max(x.output_abs_max, 1e-12)) and not x.input_constant_share >= 1.0


@rule(
    "outputs-become-alike",
    of="same-output-for-all",
    source="collapse in self-supervised learning (Chen and He 2021), watched while it comes",
    remedy="The loss is met by giving much the same to all inputs: give it something that pushes apart (negatives, a "
    "stop-gradient, a term on the variance), and look at the sign of what does.",
    needs_descent=True,
    needs_targets=True,
)
def outputs_become_alike(
    history: TrainingHistory, *, left: float = 1.0 / 3.0, share: float = 1.0 / 3.0, fall: float = 0.5, samples: int = 6
) -> Finding | None:
    """The spread of the output over a batch came down to a share `left`, and to a `share` of the output's size.

    In the newest two of at least `samples` looks, against the largest of the first three; over the newest four it never
    rose, and the loss fell by `fall` or more. Silent for a loss over classes, and for a squared error that its targets
    explain.
    """
    s, notes = signals_of(history), history.model
    known = [x for x in training_batches(history) if x.num_samples > 1 and math.isfinite(x.output_spread)]
    spreads = [x.output_spread for x in known]
    if len(known) < samples or not s.fall >= fall or "entropy" in notes.loss_kind or "log" in notes.loss_kind:
        return None
    first, newest = max(spreads[:3]), known[-2:]
    if first <= 0.0 or any(a < b for a, b in pairwise(spreads[-4:])):
        return None
    if any(x.output_spread > min(left * first, share * math.hypot(x.output_mean, x.output_std)) for x in newest):
        return None
    apart = (notes.target_std or 0.0) - newest[-1].output_std
    if is_squared_error(history) and (apart < 0.0 or apart**2 < 2.0 * s.loss_level):
        return None
    return Finding(
        f"The spread of the output over a batch fell from {first:.3g} to {newest[-1].output_spread:.3g}, "
        f"{newest[-1].output_spread / math.hypot(newest[-1].output_mean, newest[-1].output_std):.0%} of the output's "
        f"size, while the loss came down by {s.fall:.0%}.",
        layers=last_layer(history),
        evidence={"spread": newest[-1].output_spread, "at_first": first, "fall": s.fall, "threshold": left},
        confidence=0.85,
    )
