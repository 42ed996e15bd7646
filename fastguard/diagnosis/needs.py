"""Facts that causes need: True, False, or None where they are not known.

What is no module was perhaps called as a function (`F.relu`), so that most are False only where another module shows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from ..records import TrainingHistory

_RELUS = frozenset(("ReLU", "ReLU6", "LeakyReLU", "PReLU", "RReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish",
                    "Softplus", "GLU", "Hardswish", "Hardtanh", "Threshold"))  # fmt: skip
_BOUNDED = frozenset(("Tanh", "Sigmoid", "Hardsigmoid", "Hardtanh", "Softsign", "LogSigmoid", "Softmax", "LSTM", "GRU",
                      "RNN", "LSTMCell", "GRUCell"))  # fmt: skip
_NORMS = frozenset(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LazyBatchNorm1d", "LazyBatchNorm2d"))
_DROPOUTS = frozenset(("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"))
_SCALE_FREE = frozenset(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Rprop", "Adadelta",
                         "Adafactor", "Lion", "Muon", "SignSGD", "SOAP", "LAMB"))  # fmt: skip
_SCALED = frozenset(("SGD", "ASGD"))
OF_CLASSES = ("cross-entropy", "negative log-likelihood")  # of `loss_kind`, what classifiers train with
ZERO_FLOORED = ("NllLoss", "Mse", "L1Loss", "SmoothL1", "Huber", "BinaryCrossEntropy", "Ctc")
_SUMS = ("Add", "Sub", "Neg", "Mul", "Div")  # what terms are put together with
_UNDEFINED = ("LogBackward", "Log1p", "Log2", "Log10", "Sqrt", "Rsqrt", "Pow", "Div", "Acos", "Asin", "Xlogy",
              "Lgamma")  # fmt: skip
_MARGINS = ("Margin", "Hinge", "ClampMin", "ReluBackward")
_LAYERS, _CHOSEN = ("Addmm", "Mm", "Linear", "Bmm", "Convolution"), ("Gather", "Select", "Index")
_RATIOS = frozenset(("MinimumBackward0", "ExpBackward0"))
_OF_A_STATE = 8  # samples at most in a batch of states
_FEW = 3  # parameters, which a loss may have of its own
_HALF = ("float16", "bfloat16", "float8")
_MOVED = """
    Alias AsStrided Cat Clone CopySlices Expand Flip Gather Index IndexSelect MaskedSelect Permute Repeat ReshapeAlias
    Roll Select Slice Split SplitWithSizes Squeeze Stack T Take ToCopy Transpose Unbind Unfold UnsafeSplit UnsafeView
    Unsqueeze View
"""
_MOVING = frozenset(_MOVED.split())


def computing(ops: Iterable[str]) -> list[str]:
    """The autograd nodes `ops` without those that only move, select or copy elements."""
    return [op for op in ops if op.partition("Backward")[0].rstrip("0123456789") not in _MOVING]


def _any_of(history: TrainingHistory, kinds: frozenset[str]) -> bool | None:
    known = history.model.module_kinds
    return None if not known else any(kind in kinds for kind in known)


def half_precision(history: TrainingHistory) -> bool | None:
    """A float16 or bfloat16 parameter, autocast, or a loss scale."""
    notes = history.model
    if history.num_scaled or notes.has_scaler or notes.autocast.startswith(_HALF):
        return True
    if not notes.dtypes:
        return None
    return any(dtype.startswith(_HALF) for dtype in notes.dtypes)


def float16(history: TrainingHistory) -> bool:
    """A float16 parameter, or autocast to it: what ends at 65504 and at 6e-8."""
    return history.model.autocast == "float16" or "float16" in history.model.dtypes


def rectifiers(history: TrainingHistory) -> bool | None:
    """Units that can die: ReLUs and their kin; False where there are activations of other kinds only."""
    found = _any_of(history, _RELUS)
    if found is False and not _any_of(history, _BOUNDED):  # then functions, of which the loss's graph tells
        kinds = {op.partition("Backward")[0].lower() for op in history.model.loss_ops}
        is_bounded = bool(kinds & {"tanh", "sigmoid"})
        return False if is_bounded and not any("lu" in kind or "hard" in kind for kind in kinds) else None
    return found


def dropout(history: TrainingHistory) -> bool | None:
    """A dropout module that drops something."""
    if history.model.dropout:
        return any(share > 0.0 for share in history.model.dropout.values())
    return _any_of(history, _DROPOUTS) or (None if not history.model.names else False)


def batch_statistics(history: TrainingHistory) -> bool | None:
    """A BatchNorm."""
    return _any_of(history, _NORMS)


def steps_of_the_gradients_size(history: TrainingHistory) -> bool | None:
    """An optimizer whose step is as large as the gradient (SGD), so that clipping sets the size of the step."""
    kinds = {str(settings.get("kind", "")) for settings in history.model.optimizer_settings}
    if kinds & _SCALED:
        return True
    return False if kinds and kinds <= _SCALE_FREE else None


def is_lbfgs(history: TrainingHistory) -> bool:
    """LBFGS: a step of it is many, its line search looks far out, and it has none without gradients."""
    return any(settings.get("kind") == "LBFGS" for settings in history.model.optimizer_settings)


def descent(history: TrainingHistory) -> bool | None:
    """The loss is to come down: told so, or neither told otherwise nor ever below zero.

    Below zero it may be that of an actor or a critic, but not where it began above, its batches are not of a few
    states, its graph has no other network's parameters, and the process has no other guard: then it is a density's.
    """
    if history.model.objective in ("game", "reward"):
        return False
    if history.model.objective == "minimise":
        return True
    if (history.model.num_foreign_parameters or 0) >= _FEW:  # those of another network are in the loss, as in a game
        return False
    if takes_turns(history) or of_chosen_outputs(history) or reinforces(history):
        return False
    is_alone = history.model.num_foreign_parameters == 0 and not history.model.loss_ops_beside
    has_batches = any(x.num_samples > _OF_A_STATE for _, x in history.batches if x.training and x.with_grad)
    is_density = is_alone and has_batches and history.loss_trend.first > 0.0 and not may_rise(history)
    return None if not history.losses.count or history.losses.min >= 0.0 or is_density else False


def game(history: TrainingHistory) -> bool | None:
    """One side of a game: told so, or the loss hangs on another network's parameters."""
    if history.model.objective:
        return history.model.objective == "game"
    if history.model.num_foreign_parameters is None:
        return None
    return history.model.num_foreign_parameters >= _FEW


def takes_turns(history: TrainingHistory) -> bool:
    """Whether of the first ten losses the even and the odd lie apart by three times their spans, as of two in turns."""
    firsts = history.loss_trend.firsts
    if len(firsts) < 10:
        return False
    low, high = sorted((firsts[0:10:2], firsts[1:10:2]))
    spans = max(low) - min(low), max(high) - min(high)
    return min(high) - max(low) > 3.0 * max(spans)


def rewarded(history: TrainingHistory) -> bool:
    """Whether a term of the loss, whose height says little, is to grow: it is subtracted, or negated within a sum."""
    if history.model.objective:
        return history.model.objective == "reward"
    ops = history.model.loss_ops
    outer = {*itertools.takewhile(lambda op: op.startswith(_SUMS), ops)}
    negated = [op for op in computing(ops[len(outer) :]) if not op.startswith(("Neg", "Mean", "Sum", "Mul", "Div"))]
    is_likelihood = "".join(negated[:1]).startswith("LogSigmoid")  # which is never above zero
    return "SubBackward0" in outer or ({"NegBackward0", "AddBackward0"} <= outer and not is_likelihood)


def weighted(history: TrainingHistory) -> bool:
    """Whether samples' losses are multiplied by something, as log-probabilities by an advantage."""
    return "MulBackward0" in history.model.loss_ops[:4]


def may_rise(history: TrainingHistory) -> bool:
    """Whether the loss may rise while all is well: a term is to grow, or its targets follow the model."""
    follows = of_chosen_outputs(history) or bootstraps_targets(history) or beside_an_actor(history)
    return rewarded(history) or follows or reinforces(history)


def reinforces(history: TrainingHistory, *, most: int = _OF_A_STATE) -> bool:
    """Whether the loss is a chosen probability times a return, state by state, as a policy gradient has it.

    A mask times a cross-entropy looks the same, but for its batches: at most `most` samples, or another number each
    time, as of episodes. A clipped ratio of probabilities (PPO) is enough. Not where an objective was told.
    """
    ops = policy_operations(history)
    is_chosen = any(op.startswith(_CHOSEN) for op in ops) and not any(op.startswith("Nll") for op in ops)
    is_chosen = is_chosen or (ops.count("MulBackward0") > 1 and any(op.startswith("Log") for op in ops))
    sizes = [x.num_samples for _, x in history.batches if x.training and x.with_grad]
    are_of_episodes = len(sizes) > 2 and 2 * len({*sizes}) > len(sizes)
    is_weighed = is_chosen and "MulBackward0" in ops and (max(sizes, default=most + 1) <= most or are_of_episodes)
    return not history.model.objective and (is_weighed or clips_ratios(history))


def clips_ratios(history: TrainingHistory) -> bool:
    """Whether the loss takes the smaller one of two ratios of probabilities, as PPO does."""
    return {*policy_operations(history)} >= _RATIOS


def beside_an_actor(history: TrainingHistory) -> bool:
    """Whether another guard's loss does, so that this one may be that of a critic, whose targets are returns."""
    return {*history.model.loss_ops_beside} >= _RATIOS


def policy_operations(history: TrainingHistory) -> list[str]:
    """The operations of the loss down to the last layer."""
    return [*itertools.takewhile(lambda op: not op.startswith(_LAYERS), history.model.loss_ops)]


def of_chosen_outputs(history: TrainingHistory) -> bool:
    """Whether the loss, of no told objective, is an error of one chosen output a row, as of values of actions."""
    ops = policy_operations(history)
    is_chosen = "GatherBackward0" in ops and "LogSoftmaxBackward0" not in ops  # which is a likelihood
    return is_chosen and is_of_numbers(history) and not history.model.objective


def bootstraps_targets(history: TrainingHistory, *, share: float = 0.3) -> bool:
    """Whether the model gives its own targets: in training it answers without gradients in a `share` of the steps."""
    passes = [(step, x.with_grad) for step, x in history.batches if x.training and step]
    learning, asking = ({step for step, with_grad in passes if with_grad is way} for way in (True, False))
    return not history.model.objective and len(asking) > share * len(learning) > 0.0


def ranks_pairs(history: TrainingHistory) -> bool:
    """Whether the loss is minus the logarithm of a sigmoid, as of the difference of two scores: it has no targets."""
    ops = [op for op in computing(history.model.loss_ops) if not op.startswith(("Neg", "Mean", "Sum"))]
    return "".join(ops[:2]).startswith(("LogSigmoid", "LogBackward0Sigmoid"))


def contrasts(history: TrainingHistory) -> bool:
    """Whether what looks like classes are columns put together of similarities, as in InfoNCE: one is always right."""
    return "CatBackward0" in policy_operations(history)


def margin(history: TrainingHistory) -> bool:
    """A loss that is zero where a margin is met, such as a hinge: what is learnt easily soon has no gradient."""
    return any(part in op for op in history.model.loss_ops[:3] for part in _MARGINS)


def penalty(history: TrainingHistory, *, near: float = 0.05) -> str:
    """What a term of the loss takes of the weights, "|w|" or "w²", where it is nearly all of the gradient; else empty.

    Gradients of three weight matrices or more are of one size, or as large beside the weights as they began.
    """
    notes, tensors = history.model, history.tensors
    spreads = {name: std for name, (std, _) in notes.initialization.items() if std > 0.0 and name in tensors}
    outer = itertools.takewhile(lambda op: op.startswith(_SUMS), notes.loss_ops)
    sizes = [tensors[name].log_rms for name in spreads]
    if len(spreads) < 3 or "AddBackward0" not in outer or math.isnan(sum(sizes)):
        return ""
    beside = sorted(tensors[name].first_log_rms - math.log(std) for name, std in spreads.items())
    return "|w|" if max(sizes) - min(sizes) < near else "w²" if beside[-2] - beside[0] < near else ""


def full_precision(history: TrainingHistory) -> bool | None:
    """No half precision, which overflows by itself."""
    is_half = half_precision(history)
    return None if is_half is None else not is_half


def has_finite_gradients(history: TrainingHistory) -> bool:
    """Whether no gradient was ever NaN or Inf."""
    return not history.num_nonfinite and not history.num_skipped


def is_undefined(history: TrainingHistory) -> bool:
    """Whether losses were NaN from the first on, of a finite output or after an operation without a value."""
    losses = [entry.loss for entry in history.recent if entry.loss is not None]
    is_nan = bool(losses) and not history.num_clean and all(map(math.isnan, losses))
    outputs = [x.output_num_nonfinite for _, x in history.batches if x.training and x.with_grad]
    is_after = bool(outputs) and not any(outputs)
    return is_nan and (is_after or any(op.startswith(_UNDEFINED) for op in history.model.loss_ops))


def singular(history: TrainingHistory) -> bool | None:
    """An operation that may have no finite value or derivative, and no half precision, which overflows by itself."""
    if half_precision(history) is True:
        return False
    return None if history.model.is_smooth is not True or is_undefined(history) else False


def is_squared_error(history: TrainingHistory) -> bool:
    """Whether the loss, by its graph or gradient, is a mean squared error: one of the first is what that would be."""
    notes = history.model
    rounding = 1e-2 if half_precision(history) else 2e-3
    pairs = itertools.product(notes.squared_losses[:3], history.loss_trend.firsts)
    may_be = notes.loss_kind == "squared error" or notes.loss_ops[:1] == ("MseLossBackward0",)
    return may_be and any(abs(loss - then) <= rounding * abs(then) for then, loss in pairs)


def is_binary(history: TrainingHistory) -> bool:
    """Whether the loss is a binary cross-entropy, torch's or one by hand: the logarithm of a sigmoid, or a softplus."""
    names = [op.partition("Backward")[0] for op in computing(history.model.loss_ops)]
    terms = [*itertools.dropwhile(lambda name: name.startswith((*_SUMS, "Mean", "Sum")), names)]
    is_by_hand = "".join(terms[:1]) in ("Softplus", "LogSigmoid") or {"Log", "Sigmoid"} <= {*names}
    return is_by_hand or any(name.startswith("BinaryCrossEntropy") for name in names)


def is_of_numbers(history: TrainingHistory) -> bool:
    """Whether the loss is an error between numbers, squared or not: its least value is the noise of the targets."""
    kind, ops = history.model.loss_kind, history.model.loss_ops[:3]
    if any(op.startswith(("Nll", "BinaryCrossEntropy")) for op in ops):
        return False  # whatever the gradient looks like
    return "error" in kind or any(op.startswith(("Mse", "L1", "SmoothL1", "Huber")) for op in ops)


def floor_at_zero(history: TrainingHistory) -> bool | None:
    """A loss that is zero where all is learnt: a cross-entropy, a squared or absolute error; False for others."""
    notes = history.model
    if "cross-entropy" in notes.loss_kind or notes.loss_kind in ("negative log-likelihood", "log of the output"):
        return True
    if is_squared_error(history):
        return True
    if not notes.loss_ops:
        return None
    if notes.loss_ops[0] == "NegBackward0":
        return False
    return any(op.startswith(ZERO_FLOORED) for op in notes.loss_ops[:4])
