"""How to judge the output of a module: which values are saturated, which are zero, and whether it has units."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from torch import nn

THRESHOLD = 0.99  # where nothing better is known
_MARGIN = 1.0 - THRESHOLD
_SMOOTH_ZERO = 1e-3  # GELU and SiLU come close to zero without reaching it


class Judgement(NamedTuple):
    """What counts as saturated and as zero in the output of one module."""

    family: str  # as in `ModuleActivity`
    # low, high: values outside are saturated; infinite if the family has no such limit
    low: float = -math.inf
    high: float = math.inf
    near_zero: float = 1e-6  # elements with |x| below it count as near zero
    has_units: bool = False  # whether to judge each index of the unit dimension on its own
    row_dim: int | None = None  # dimension along which slices sum to one (softmax); None for other modules
    # share of a unit's elements that must be near zero for it to be dead; None: the monitor's
    unit_share: float | None = None

    @property
    def limits(self) -> tuple[float, float, float]:
        return self.low, self.high, self.near_zero


RELU = Judgement("relu", has_units=True)
GELU = Judgement("gelu", near_zero=_SMOOTH_ZERO, has_units=True)
TANH = Judgement("tanh", -THRESHOLD, THRESHOLD, has_units=True)
SIGMOID = Judgement("sigmoid", _MARGIN, THRESHOLD, has_units=True)
ATTENTION = Judgement("attention")
NORM = Judgement("norm")
BLOCK = Judgement("block")
LINEAR = Judgement("linear")
PLAIN = Judgement("other")  # only checked for NaN and Inf, such as the second tensor of a tuple
ATTENTION_WEIGHTS = Judgement("attention_weights", high=THRESHOLD)
ROUTER = Judgement("router", has_units=True, unit_share=1.0)  # an expert of 256 gets few tokens, and is alive
UNKNOWN = Judgement("other", -THRESHOLD, THRESHOLD, has_units=True)

_BATCH_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)  # instance norms among them
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_LINEARS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.Identity, nn.Flatten, nn.Unflatten)
_SOFTMAXES = (nn.Softmax, nn.Softmin, nn.LogSoftmax)
_FAMILIES: tuple[tuple[tuple[Any, ...], Judgement], ...] = (
    ((nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Threshold), RELU),
    ((nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish, nn.GLU), GELU),
    ((nn.Sigmoid, nn.Hardsigmoid), SIGMOID),
    ((nn.Tanh, nn.Softsign, nn.RNNBase, nn.RNNCellBase), TANH),
    ((*_BATCH_NORMS, nn.LayerNorm, nn.LocalResponseNorm), NORM),
    ((nn.MultiheadAttention,), ATTENTION),
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
    if isinstance(module, nn.ReLU6):  # a Hardtanh to torch
        return RELU._replace(high=6.0 * THRESHOLD)
    if isinstance(module, nn.Hardtanh):
        slack = _MARGIN * (module.max_val - module.min_val) / 2
        return Judgement("hardtanh", module.min_val + slack, module.max_val - slack, has_units=True)
    if isinstance(module, (nn.ELU, nn.CELU)):
        return GELU._replace(low=-THRESHOLD * module.alpha)
    if isinstance(module, nn.SELU):
        return GELU._replace(low=-THRESHOLD * 1.7580993408473766)  # scale * alpha, what it tends to
    if isinstance(module, nn.RNN) and module.nonlinearity == "relu":
        return RELU
    if isinstance(module, _SOFTMAXES):
        # Each slice has at most one entry above the threshold: its largest probability.
        high = math.log(THRESHOLD) if isinstance(module, nn.LogSoftmax) else THRESHOLD
        return Judgement("softmax", high=high, row_dim=-1 if module.dim is None else module.dim)
    for types, judgement in _FAMILIES:
        if isinstance(module, types):
            return judgement
    name = type(module).__name__
    if _NORM_NAME.search(name):
        return NORM
    if next(module.children(), None) is not None:
        return ATTENTION if _ATTENTION_NAME.search(name) else BLOCK
    return next(judgement for pattern, judgement in _LEAVES_BY_NAME if pattern.search(name))


def is_block(module: nn.Module, parent: nn.Module | None) -> bool:
    """Whether `module` is one of several like it: an entry of a list, or named a block or a layer."""
    if next(module.children(), None) is None:
        return False
    return isinstance(parent, (nn.ModuleList, nn.Sequential)) or bool(_BLOCK_NAME.search(type(module).__name__))


def unit_dim_after(module: nn.Module) -> int | None:
    """The dimension of the units after `module`: 1 after a convolution, -1 after a linear layer; None if not known."""
    if isinstance(module, (*_CONVOLUTIONS, *_BATCH_NORMS)):
        return 1
    return -1 if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding, nn.RNNBase)) else None
