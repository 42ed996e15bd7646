"""What the weights of each kind of module should measure: fan-in, expected standard deviation, and the rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...names import strip_wrappers
from .followers import LINEAR, RELU, Follower
from .report import TOO_LARGE, TOO_SMALL


class Weight(NamedTuple):
    """A weight to be judged.

    Attributes:
        tensor: its values.
        kind: "weight", "recurrent" or "embedding".
        fan_in: how many inputs each output adds up.
        expected_std: what its standard deviation should be about.
        rule: where that comes from, in words.
        low, high: what is too small and too large.
        module: whose output it makes.
    """

    tensor: Tensor
    kind: str
    fan_in: int
    expected_std: float
    rule: str
    low: float
    high: float
    module: nn.Module | None = None


def he(fan_in: float) -> float:
    """sqrt(2 / fan_in): He et al. 2015, equation 10."""
    return math.sqrt(2 / fan_in) if fan_in else 0.0


def _by_rule(follower: Follower, fan_in: float, fan_out: float) -> tuple[float, str]:
    if follower.rule == "he":
        return follower.gain * he(fan_in), f"He: {follower.name} follows"
    if follower.rule == "xavier":
        std = math.sqrt(2 / (fan_in + fan_out)) if fan_in + fan_out else 0.0
        return follower.gain * std, f"Xavier: {follower.name} follows"
    return follower.gain * (1 / math.sqrt(fan_in) if fan_in else 0.0), f"LeCun: {follower.name} follows"


def weight(
    tensor: Tensor, fan_in: float, std_rule: tuple[float, str], kind: str = "weight", module: nn.Module | None = None
) -> Weight:
    """A weight judged by 0.1 and 10 times its expected standard deviation."""
    std, rule = std_rule
    return Weight(tensor, kind, round(fan_in), std, rule, TOO_SMALL * std, TOO_LARGE * std, module)


def bare(tensor: Tensor) -> Weight:
    """A weight of which only the values are known: [out, in, *kernel] as torch has it, and He's rule."""
    fan_in = tensor[0].numel() if tensor.shape[0] else 0
    return weight(tensor, fan_in, (he(fan_in), "He"))


def _linear(m: Any, follower: Follower) -> dict[str, Weight]:
    fan_out, fan_in = m.weight.shape[0], math.prod(m.weight.shape[1:])  # of nn.Bilinear both inputs' pairs
    return {"weight": weight(m.weight, fan_in, _by_rule(follower, fan_in, fan_out), module=m)}


def _transposed_linear(m: Any, follower: Follower) -> dict[str, Weight]:
    fan_in, fan_out = m.weight.shape
    return {"weight": weight(m.weight, fan_in, _by_rule(follower, fan_in, fan_out), module=m)}


def _conv(m: Any, follower: Follower) -> dict[str, Weight]:
    taps = math.prod(m.kernel_size)
    fan_in, fan_out = m.in_channels // m.groups * taps, m.out_channels // m.groups * taps
    if m.transposed:  # each output lies under only so many positions of the kernel
        fan_in = max(1, fan_in / math.prod(m.stride))
    return {"weight": weight(m.weight, fan_in, _by_rule(follower, fan_in, fan_out), module=m)}


def _recurrent(m: Any, follower: Follower) -> dict[str, Weight]:
    own = RELU if getattr(m, "nonlinearity", getattr(m, "mode", "")) in ("relu", "RNN_RELU") else None
    gates = Follower("xavier", 1.0, "a gate or tanh")
    found = {}
    for name, p in m.named_parameters(recurse=False):
        if not name.startswith("weight"):
            continue
        fan_in = p.shape[1] if p.dim() == 2 else 0
        rule = LINEAR if name.startswith("weight_hr") else own or gates
        hidden = p.shape[0] if rule is LINEAR else m.hidden_size  # one gate's share of the rows
        found[name] = weight(p, fan_in, _by_rule(rule, fan_in, hidden), "recurrent", m)
    return found


def _attention(m: nn.MultiheadAttention, follower: Follower) -> dict[str, Weight]:
    found = {}
    for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        p = getattr(m, name)
        if p is not None:
            rule = _by_rule(Follower("xavier", 1.0, "attention"), p.shape[1], m.embed_dim)
            found[name] = weight(p, p.shape[1], rule)
    return found


def _embedding(m: Any, follower: Follower) -> dict[str, Weight]:
    """Looked up, not summed: GPT's 0.02, 1/sqrt(dim), as where it is tied, and torch's own 1 are customary."""
    small = min(1 / math.sqrt(m.embedding_dim), 0.1) if m.embedding_dim else 0.0
    w = Weight(m.weight, "embedding", 1, 1.0, "looked up: 0.02, or 1/sqrt(dim) to 1", TOO_SMALL * small, TOO_LARGE, m)
    return {"weight": w}


_Maker = Callable[[Any, Follower], dict[str, Weight]]
_KINDS: tuple[tuple[type | tuple[type, ...], _Maker], ...] = (
    ((nn.Linear, nn.Bilinear), _linear),
    (nn.modules.conv._ConvNd, _conv),
    ((nn.RNNBase, nn.RNNCellBase), _recurrent),
    (nn.MultiheadAttention, _attention),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
)


def weights_of(module: nn.Module, follower: Follower) -> dict[str, Weight]:
    """The weights of one module (not of its children) that have an expectation, by attribute."""
    for cls, make in _KINDS:
        if isinstance(module, cls):
            return make(module, follower)
    own = module._parameters.get("weight")
    if own is None or own.dim() != 2 or "norm" in type(module).__name__.lower():
        return {}
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' linear layer, [in, out]
        return _transposed_linear(module, follower)
    return _linear(module, follower)


def tied(embedding: Weight, other: Weight) -> Weight:
    """The expectation of a weight that is looked up as well as multiplied with: the latter's, which is narrower."""
    dim = embedding.tensor.shape[1]
    rule = (1 / math.sqrt(dim) if dim else 0.0, f"LeCun: tied to an embedding of {dim}")
    return weight(other.tensor, dim, rule, "embedding", embedding.module)


class Missing(NamedTuple):
    """Why a tensor can't be judged, and whether it is to be filled yet."""

    reason: str
    is_pending: bool


def missing_values(tensor: Tensor) -> Missing | None:
    """None, or why the tensor has no values to be judged."""
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return Missing("lazy, without a shape yet: run one batch through the model first", True)
    if tensor.is_meta:
        return Missing(
            "on the meta device, without values: materialise it (to_empty and an initialisation) first", True
        )
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return Missing(f"its values are {tensor.dtype}", False)
    return None if tensor.numel() else Missing("empty", False)


def modules_with_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules, and what comes before the names of their parameters, without the prefixes of wrappers."""
    parameters = [name for name, _ in model.named_parameters()]
    # Not where a module of the user's own is called "module".
    is_clear = len(set(map(strip_wrappers, parameters))) == len(parameters)
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        yield (strip_wrappers(prefix) if is_clear else prefix), module
