"""What the weights of each kind of module should measure: fan-in, expected standard deviation, and the rule.

What follows a layer decides: from the traced graph where there can be one, else from the order of registration.
"""

from __future__ import annotations

import copy
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...names import strip_wrappers
from ...step.wrappers import unwrapped

TOO_SMALL, TOO_LARGE = 0.1, 10.0  # times the expected standard deviation


class Follower(NamedTuple):
    """The activation that follows a layer.

    Attributes:
        rule: "he", "xavier" or "lecun".
        gain: the expected standard deviation is that of the rule times this.
        name: the activation, in words.
    """

    rule: str
    gain: float
    name: str


LINEAR = Follower("lecun", 1.0, "no activation")
RELU = Follower("he", 1.0, "ReLU")
# Functions of torch, and its modules in lower case.
_KNOWN: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("relu", "relu6", "gelu", "silu", "mish", "elu", "celu", "softplus", "hardswish"), ("he", 1.0)),
    "selu": ("lecun", 1.0),
    **dict.fromkeys(("tanh", "hardtanh", "softsign"), ("xavier", 5 / 3)),
    **dict.fromkeys(("sigmoid", "hardsigmoid", "logsigmoid"), ("xavier", 1.0)),
}


def _leaky(slope: float) -> Follower:
    return Follower("he", 1 / math.sqrt(1 + slope * slope), f"leaky ReLU, slope {slope:g}")


def _called(name: str) -> Follower | None:
    known = _KNOWN.get(name.lower().removesuffix("_"))
    return None if known is None else Follower(*known, name)


# What leaves the question of the activation to the next in line.
_TRANSPARENT = (
    *(nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.ChannelShuffle),
    *(nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd),
    *(nn.modules.pooling._AdaptiveMaxPoolNd, nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d),
    *([nn.RMSNorm] if hasattr(nn, "RMSNorm") else []),
)
_TRANSPARENT_FUNCTIONS = {
    *("add", "add_", "iadd", "dropout", "dropout1d", "dropout2d", "alpha_dropout", "interpolate", "to", "float"),
    *("flatten", "view", "reshape", "permute", "transpose", "contiguous", "squeeze", "unsqueeze"),
    *("batch_norm", "layer_norm", "group_norm", "rms_norm", "boolean_dispatch"),  # the last is max_pool2d's own name
    *("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
}


def of_module(module: Any) -> Follower | None:
    """What `module` is as a follower; None if it is no activation."""
    if isinstance(module, (nn.LeakyReLU, nn.RReLU)):
        slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else (module.lower + module.upper) / 2
        return _leaky(slope)
    if isinstance(module, nn.PReLU):
        return RELU if module.weight.is_meta else _leaky(float(module.weight.detach().mean()))
    names = (cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch."))
    return next((known for known in map(_called, names) if known is not None), None)


def _is_transparent(module: nn.Module) -> bool:
    return isinstance(module, _TRANSPARENT) or "norm" in type(module).__name__.lower()


def by_registration(model: nn.Module) -> dict[nn.Module, Follower]:
    """The first activation registered after each module, with nothing but norms, dropout and the like in between."""
    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    found = {}
    for i, leaf in enumerate(leaves):
        after = next((m for m in leaves[i + 1 :] if not _is_transparent(m)), None)
        found[leaf] = (of_module(after) if after is not None else None) or LINEAR
    for module in model.modules():  # torch's own transformer layers keep their activation as a function
        activation = getattr(module, "activation", None)
        inner = getattr(module, "linear1", None)
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)) and inner is not None:
            is_module = isinstance(activation, nn.Module)
            known = of_module(activation) if is_module else _called(getattr(activation, "__name__", ""))
            found[inner], found[module.linear2] = known or LINEAR, LINEAR
    return found


def _twin(model: nn.Module) -> nn.Module:
    """A copy with the same tensors and no hooks: what tracing leaves in it does not reach the original."""
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for module in twin.modules():
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        module._compiled_call_impl = None  # set where the module was compiled in place
    return twin


def by_graph(model: nn.Module) -> tuple[dict[nn.Module, Follower], str]:
    """The activation that each module's output reaches first, from the traced graph; and why there is none, or ""."""
    import torch.fx

    inner = unwrapped(model)
    if any(type(m).__name__ == "OptimizedModule" or isinstance(m, torch.jit.ScriptModule) for m in inner.modules()):
        return {}, "it holds compiled modules"
    tracer = torch.fx.Tracer()
    try:
        graph = tracer.trace(_twin(inner))
    except Exception as error:  # whatever the model's own code raises on being run with stand-ins for tensors
        return {}, f"{type(error).__name__}: {error}".splitlines()[0]
    modules = dict(inner.named_modules(remove_duplicate=False))
    found: dict[nn.Module, Follower] = {}
    for node in graph.nodes:
        if node.op == "call_module" and node.target in modules:
            follower = next(_activations_after(node, modules), LINEAR)
            if found.get(modules[node.target], LINEAR) is LINEAR:  # of a module called twice: an activation counts
                found[modules[node.target]] = follower
    return found, ""


def _activations_after(node: Any, modules: dict[str, nn.Module]) -> Iterator[Follower]:
    """Activations that the output reaches through nothing but what is transparent, nearest first."""
    queue, seen = list(node.users), set()
    while queue:
        user = queue.pop(0)
        if user in seen:
            continue
        seen.add(user)
        if user.op == "call_module" and user.target in modules:
            module = modules[user.target]
            follower, transparent = of_module(module), _is_transparent(module)
        else:
            name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
            follower = _called(name) or (_of_leaky_call(user) if name.startswith("leaky_relu") else None)
            transparent = name in _TRANSPARENT_FUNCTIONS or user.target in (operator.add, operator.iadd)
        if follower is not None:
            yield follower
        elif transparent:
            queue.extend(user.users)


def _of_leaky_call(node: Any) -> Follower:
    slope = node.kwargs.get("negative_slope", node.args[1] if len(node.args) > 1 else 0.01)
    return _leaky(slope if isinstance(slope, (int, float)) else 0.01)


def find_followers(model: nn.Module) -> tuple[dict[nn.Module, Follower], str]:
    """What follows each module: from the traced graph, else the order of registration; why no graph, or ""."""
    traced, problem = by_graph(model)
    return {**by_registration(model), **traced}, problem


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


class WeightInModel(NamedTuple):
    """Where a weight is, and what it should measure: its whole name, its module, and its name there."""

    name: str
    module: nn.Module
    attribute: str
    weight: Weight


def weights_in(model: nn.Module, followers: dict[nn.Module, Follower]) -> dict[int, WeightInModel]:
    """The weights of a model by the id of their tensor; a shared one where it comes first."""
    found: dict[int, WeightInModel] = {}
    for prefix, module in modules_with_names(model):
        if any(p is not None and missing_values(p) is not None for p in module._parameters.values()):
            continue
        for name, weight in weights_of(module, followers.get(module, LINEAR)).items():
            known = found.setdefault(id(weight.tensor), WeightInModel(prefix + name, module, name, weight))
            if (known.weight.kind == "embedding") is not (weight.kind == "embedding"):
                pair = (weight, known.weight) if weight.kind == "embedding" else (known.weight, weight)
                found[id(weight.tensor)] = known._replace(weight=tied(*pair))
    return found
