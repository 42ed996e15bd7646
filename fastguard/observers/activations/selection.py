"""Chooses the modules to watch, their names, and how to judge their outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ...names import strip_wrappers
from ..facts import kind_of

THRESHOLD = 0.99  # where nothing better is known
_MARGIN = 1.0 - THRESHOLD
_SMOOTH_ZERO = 1e-3  # GELU and SiLU come close to zero without reaching it

_SILENT = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # never called
_ACTIVATIONS = ("relu", "gelu", "tanh", "sigmoid", "hardtanh", "softmax")


class Judgement(NamedTuple):
    """What counts as saturated and as zero in the output of one module."""

    family: str  # as in `ModuleActivity`
    # low, high: values outside are saturated; infinite if the family has no such limit
    low: float = -math.inf
    high: float = math.inf
    near_zero: float = 1e-6  # elements with |x| below it count as near zero
    has_units: bool = False  # whether to judge each index of the unit dimension on its own


RELU = Judgement("relu", has_units=True)
GELU = Judgement("gelu", near_zero=_SMOOTH_ZERO, has_units=True)
TANH = Judgement("tanh", -THRESHOLD, THRESHOLD, has_units=True)
SIGMOID = Judgement("sigmoid", _MARGIN, THRESHOLD, has_units=True)
ATTENTION = Judgement("attention")
NORM = Judgement("norm")
BLOCK = Judgement("block")
LINEAR = Judgement("linear")
PLAIN = Judgement("other")  # only checked for NaN and Inf, such as the second tensor of a tuple
UNKNOWN = Judgement("other", -THRESHOLD, THRESHOLD, has_units=True)

_BATCH_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)  # instance norms among them
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_LINEARS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.Identity, nn.Flatten, nn.Unflatten)
_FAMILIES: tuple[tuple[tuple[Any, ...], Judgement], ...] = (
    ((nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Threshold), RELU),
    ((nn.ReLU6,), RELU._replace(high=6.0 * THRESHOLD)),
    ((nn.SELU,), GELU._replace(low=-THRESHOLD * 1.7580993408473766)),  # scale * alpha, what it tends to
    ((nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish, nn.GLU), GELU),
    ((nn.Sigmoid, nn.Hardsigmoid), SIGMOID),
    ((nn.Tanh, nn.Softsign, nn.RNNBase, nn.RNNCellBase), TANH),
    ((*_BATCH_NORMS, nn.LayerNorm, nn.LocalResponseNorm), NORM),
    ((nn.MultiheadAttention,), ATTENTION),
    ((nn.Softmax, nn.Softmin, nn.LogSoftmax), Judgement("softmax")),
    ((*_LINEARS, *_CONVOLUTIONS), LINEAR),
)
# By the name of the class, for modules of other libraries; the first that fits.
_LEAVES_BY_NAME = (
    (re.compile(r"gelu|silu|swish|mish|swiglu|geglu", re.I), GELU),
    (re.compile(r"relu", re.I), RELU),
    (re.compile(r"sigmoid", re.I), SIGMOID),
    (re.compile(r"tanh", re.I), TANH),
    (re.compile(r"dropout|drop_?path|pool|upsample|pad|conv\d?d?$|linear|embedding", re.I), LINEAR),
    (re.compile(r"attention|attn", re.I), ATTENTION),
    (re.compile(""), UNKNOWN),
)
_ATTENTION_NAME = re.compile(r"attention|attn", re.I)
_NORM_NAME = re.compile(r"norm(\dd)?$", re.I)
_BLOCK_NAME = re.compile(r"block|bottleneck|layer$", re.I)


def judgement_of(module: nn.Module) -> Judgement:
    """How to judge the output of `module`, by its type or else by the name of its class."""
    if isinstance(module, nn.Hardtanh) and not isinstance(module, nn.ReLU6):
        slack = _MARGIN * (module.max_val - module.min_val) / 2
        return Judgement("hardtanh", module.min_val + slack, module.max_val - slack, has_units=True)
    if isinstance(module, (nn.ELU, nn.CELU)):
        return GELU._replace(low=-THRESHOLD * module.alpha)
    if isinstance(module, nn.RNN) and module.nonlinearity == "relu":
        return RELU
    for types, judgement in _FAMILIES:
        if isinstance(module, types):
            return judgement
    name = type(module).__name__
    if _NORM_NAME.search(name):
        return NORM
    if next(module.children(), None) is not None:
        return ATTENTION if _ATTENTION_NAME.search(name) else BLOCK
    return next(judgement for pattern, judgement in _LEAVES_BY_NAME if pattern.search(name))


class Target(NamedTuple):
    """Something to watch: the output of `module`, or its input."""

    module: Any
    name: str
    judgement: Judgement
    unit_dim: int | None = None  # dimension of its units; None if the shape of the tensor decides
    of_input: bool = False  # watch the input instead
    is_quiet: bool = False  # it makes a record only when it is not finite


def names_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of `model` by name, without wrappers and their names; "" is the model itself."""
    return {strip_wrappers(f"{name}.").rstrip("."): module for name, module in model.named_modules()}


def choose(named: dict[str, nn.Module], is_default: bool, fits: Callable[[Target], bool]) -> list[Target]:
    """The targets in a model whose modules are `named`; a ValueError if nothing matches.

    With `is_default`, all but activation functions, attention, norms, blocks and the whole model are quiet.
    """
    found: list[Target] = []
    dim: int | None = None  # of the units, by the preceding layer in the order of registration
    for name, module in named.items():
        if isinstance(module, (*_CONVOLUTIONS, *_BATCH_NORMS)):
            dim = 1
        elif isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding, nn.RNNBase)):
            dim = -1
        if isinstance(module, _SILENT):
            continue
        judgement, is_quiet = judgement_of(module), False
        if is_default and judgement.family not in (*_ACTIVATIONS, "attention", "norm"):
            # A block is one of several like it: an entry of a list, or named a block or a layer.
            is_entry = isinstance(named.get(name.rpartition(".")[0]), (nn.ModuleList, nn.Sequential))
            is_like_others = is_entry or _BLOCK_NAME.search(type(module).__name__)
            is_quiet = bool(name and not (is_like_others and [*module.children()]))
            judgement = judgement._replace(has_units=False) if is_quiet else BLOCK
        found.append(Target(module, name or kind_of(module), judgement, dim, is_quiet=is_quiet))
        projection, hidden = _hidden(module)
        if hidden is not None:
            found.append(Target(projection, f"{name}[hidden]", hidden, -1, of_input=True))
    chosen = list(filter(fits, found))
    if all(target.is_quiet for target in chosen):
        some = ", ".join(repr(name) for name in list(named)[1:9]) or kind_of(named[""])
        raise ValueError(
            f"`modules` must match at least one module, got none - in a model of {len(named)} modules such as {some}. "
            "Patterns are searched in these names."
        )
    return chosen


def _hidden(module: nn.Module) -> tuple[nn.Module | None, Judgement | None]:
    """Of an MLP whose activation is not a module: the down projection, whose input is the hidden layer."""
    parts = dict(module.named_children())
    if "down_proj" in parts and ("gate_proj" in parts or "gate_up_proj" in parts):
        return parts["down_proj"], GELU
    if {"w1", "w2", "w3"} <= parts.keys():
        return parts["w2"], GELU
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        kind = getattr(module.activation, "__name__", "")  # a function; a module is watched on its own
        return module.linear2, {"relu": RELU, "gelu": GELU}.get(kind)
    return None, None


def searched(pattern: str) -> Callable[[Target], bool]:
    """Whether the name of a target has `pattern`, a regular expression; "default" and "all" fit everything."""
    if not isinstance(pattern, str):
        raise TypeError(f"`modules` must be a regular expression, got {pattern!r}")
    try:
        found = re.compile("" if pattern in ("default", "all") else pattern)
    except re.error as error:
        raise ValueError(f"`modules` must be a regular expression, got {pattern!r}: {error}") from None
    return lambda target: found.search(target.name) is not None
