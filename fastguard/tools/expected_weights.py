"""The standard deviation that each weight of a model should have: by fan-in, and by the activation that follows."""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..names import strip_wrappers
from ..step.wrappers import unwrapped

TOO_SMALL, TOO_LARGE = 0.1, 10.0  # times the expected standard deviation
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# By the name of torch's function or module, in lower case and without underscores.
_ACTIVATIONS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("relu", "relu6", "gelu", "silu", "mish", "elu", "celu", "softplus", "hardswish"), ("He", 1.0)),
    "selu": ("LeCun", 1.0),
    **dict.fromkeys(("tanh", "hardtanh", "softsign"), ("Xavier", 5 / 3)),
    **dict.fromkeys(("sigmoid", "hardsigmoid", "logsigmoid"), ("Xavier", 1.0)),
}
# Behind these, the next in line counts. `boolean_dispatch` is the name that max_pool2d has in a graph.
_TRANSPARENT = {
    *("add", "iadd", "dropout", "alphadropout", "interpolate", "upsample", "identity", "to", "float"),
    *("flatten", "unflatten", "view", "reshape", "permute", "transpose", "contiguous", "squeeze", "unsqueeze"),
    *("maxpool", "avgpool", "adaptivemaxpool", "adaptiveavgpool", "booleandispatch"),
    *("pixelshuffle", "pixelunshuffle", "channelshuffle", "zeropad"),
}


class Follower(NamedTuple):
    """The activation that follows a layer: the rule for it ("He", "Xavier" or "LeCun"), a gain, and its name."""

    rule: str
    gain: float
    name: str

    def std(self, fan_in: float, fan_out: float) -> float:
        """The expected standard deviation of the layer's weight; 0 without inputs."""
        total = {"He": fan_in / 2, "Xavier": (fan_in + fan_out) / 2, "LeCun": fan_in}[self.rule]
        return self.gain / math.sqrt(total) if total else 0.0


LINEAR = Follower("LeCun", 1.0, "no activation")
_GATE, _ATTENTION = Follower("Xavier", 1.0, "a gate or tanh"), Follower("Xavier", 1.0, "attention")


def _leaky(slope: float) -> Follower:
    return Follower("He", 1 / math.sqrt(1 + slope * slope), f"leaky ReLU, slope {slope:g}")


def _as_activation(name: str) -> Follower | None:
    known = _ACTIVATIONS.get(name.lower().replace("_", ""))
    return None if known is None else Follower(*known, name.removesuffix("_"))


def _names(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]


def _of_module(module: nn.Module) -> Follower | None:
    """The module as a follower; None if it is not an activation."""
    if isinstance(module, nn.LeakyReLU):
        return _leaky(module.negative_slope)
    if isinstance(module, nn.RReLU):
        return _leaky((module.lower + module.upper) / 2)
    if isinstance(module, nn.PReLU):
        return _leaky(0.0 if module.weight.is_meta else float(module.weight.detach().mean()))
    return next(filter(None, map(_as_activation, _names(module))), None)


def _is_transparent(names: list[str]) -> bool:
    bare = [re.sub(r"\d+d$", "", name.lower().replace("_", "")) for name in names]
    return any(name in _TRANSPARENT or "norm" in name for name in bare)


def _by_registration(model: nn.Module) -> dict[nn.Module, Follower]:
    """The first activation registered after each module, with only norms, dropout and the like between."""
    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    found = {}
    for i, leaf in enumerate(leaves):
        after = next((m for m in leaves[i + 1 :] if not _is_transparent(_names(m))), None)
        found[leaf] = (_of_module(after) if after is not None else None) or LINEAR
    for module in model.modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):  # the activation is a function
            name = getattr(module.activation, "__name__", type(module.activation).__name__)
            found[module.linear1], found[module.linear2] = _as_activation(name) or LINEAR, LINEAR
    return found


def _twin(model: nn.Module) -> nn.Module:
    """A copy with the same tensors and without hooks, so that tracing does not change the original."""
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for module in twin.modules():
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        module._compiled_call_impl = None
    return twin


def _by_graph(model: nn.Module) -> tuple[dict[nn.Module, Follower], str]:
    """The activation that each module's output reaches first in the traced graph; why there is no graph, or ""."""
    import torch.fx

    inner = unwrapped(model)
    if any(type(m).__name__ == "OptimizedModule" or isinstance(m, torch.jit.ScriptModule) for m in inner.modules()):
        return {}, "it holds compiled modules"
    try:
        graph = torch.fx.Tracer().trace(_twin(inner))
    except Exception as error:  # the model's own code may raise anything when it runs with stand-ins for tensors
        return {}, f"{type(error).__name__}: {error}".splitlines()[0]
    modules = dict(inner.named_modules(remove_duplicate=False))
    found: dict[nn.Module, Follower] = {}
    for node in graph.nodes:
        if node.op == "call_module" and node.target in modules:
            module = modules[node.target]
            if found.get(module, LINEAR) is LINEAR:  # of several calls, one with an activation counts
                found[module] = _after(node, modules)
    return found, ""


def _after(node: Any, modules: dict[str, nn.Module]) -> Follower:
    """The nearest activation that the output reaches through nothing but what is transparent."""
    queue, seen = list(node.users), set()
    while queue:
        user = queue.pop(0)
        if user in seen:
            continue
        seen.add(user)
        if user.op == "call_module" and user.target in modules:
            module = modules[user.target]
            follower, names = _of_module(module), _names(module)
        else:
            names = [user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")]
            follower = _as_activation(names[0])
            if names[0].startswith("leaky_relu"):
                slope = user.kwargs.get("negative_slope", user.args[1] if len(user.args) > 1 else 0.01)
                follower = _leaky(slope if isinstance(slope, (int, float)) else 0.01)
        if follower is not None:
            return follower
        if _is_transparent(names):
            queue.extend(user.users)
    return LINEAR


def find_followers(model: nn.Module) -> tuple[dict[nn.Module, Follower], str]:
    """What follows each module, by the traced graph or else the order of registration; why there is no graph, or ""."""
    traced, problem = _by_graph(model)
    return {**_by_registration(model), **traced}, problem


@dataclass(frozen=True)
class Weight:
    """A weight to judge."""

    name: str  # its name in the model
    tensor: Tensor  # its values
    fan_in: int  # number of inputs that each output adds up
    expected_std: float  # about what its standard deviation should be
    rule: str  # where that comes from, in words
    kind: str = "weight"  # "weight", "recurrent" or "embedding"
    # the smallest usual standard deviation; that of an embedding is far below the expected one
    least: float | None = None
    module: nn.Module | None = None  # module, attribute: where it is; None and "" for weights alone
    attribute: str = ""

    def status(self, std: float) -> str:
        """ "ok", or "too_small" or "too_large" by a factor of ten."""
        if std < TOO_SMALL * (self.expected_std if self.least is None else self.least):
            return "too_small"
        return "too_large" if std > TOO_LARGE * self.expected_std else "ok"


def weight_alone(name: str, tensor: Tensor) -> Weight:
    """A weight of an unknown model, [out, in, *kernel]: by He's rule."""
    fan_in = tensor[0].numel() if tensor.shape[0] else 0
    return Weight(name, tensor, fan_in, Follower("He", 1.0, "").std(fan_in, 0), "He")


def _fans_of(m: Any, follower: Follower) -> Iterator[tuple[str, Tensor, float, float, Follower]]:
    """Attribute, tensor, fan-in, fan-out and follower of the weights of a module, without its children."""
    if isinstance(m, nn.modules.conv._ConvNd):
        taps = math.prod(m.kernel_size)
        fan_in, fan_out = m.in_channels // m.groups * taps, m.out_channels // m.groups * taps
        # An output of a transposed convolution lies under only some positions of the kernel.
        yield "weight", m.weight, max(1, fan_in / math.prod(m.stride)) if m.transposed else fan_in, fan_out, follower
    elif isinstance(m, _RECURRENT):
        is_relu = getattr(m, "nonlinearity", getattr(m, "mode", "")) in ("relu", "RNN_RELU")
        gate = Follower("He", 1.0, "ReLU") if is_relu else _GATE
        for name, p in m.named_parameters(recurse=False):
            if name.startswith("weight"):
                yield name, p, p.shape[1], m.hidden_size, LINEAR if name.startswith("weight_hr") else gate
    elif isinstance(m, nn.MultiheadAttention):
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if (p := getattr(m, name)) is not None:
                yield name, p, p.shape[1], m.embed_dim, _ATTENTION
    elif isinstance(m, (nn.Linear, nn.Bilinear)):
        yield "weight", m.weight, math.prod(m.weight.shape[1:]), m.weight.shape[0], follower
    elif "norm" not in type(m).__name__.lower():
        own = m._parameters.get("weight")
        if own is not None and own.dim() == 2:
            is_transposed = type(m).__name__ == "Conv1D" and hasattr(m, "nf")  # transformers' linear layer, [in, out]
            fan_out, fan_in = reversed(own.shape) if is_transposed else own.shape
            yield "weight", own, fan_in, fan_out, follower


def _weights_of(prefix: str, m: Any, follower: Follower) -> list[Weight]:
    if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):  # looked up, not added up: GPT's 0.02 and torch's 1 are usual
        least = min(1 / math.sqrt(m.embedding_dim), 0.1) if m.embedding_dim else 0.0
        rule = "looked up: 0.02, or 1/sqrt(dim) to 1"
        return [Weight(prefix + "weight", m.weight, 1, 1.0, rule, "embedding", least, m, "weight")]
    found = []
    kind = "recurrent" if isinstance(m, _RECURRENT) else "weight"
    for name, tensor, fan_in, fan_out, then in _fans_of(m, follower):
        std, rule = then.std(fan_in, fan_out), f"{then.rule}: {then.name} follows"
        found.append(Weight(prefix + name, tensor, round(fan_in), std, rule, kind, None, m, name))
    return found


def weights_in(model: nn.Module, followers: dict[nn.Module, Follower]) -> list[Weight]:
    """The weights of a model that have an expectation; a shared one where it comes first."""
    found: dict[int, Weight] = {}
    for prefix, module in modules_with_names(model):
        if any(p is not None and why_not_judged(p) for p in module._parameters.values()):
            continue
        for weight in _weights_of(prefix, module, followers.get(module, LINEAR)):
            first = found.setdefault(id(weight.tensor), weight)
            if (first.kind == "embedding") is not (weight.kind == "embedding"):  # looked up, and multiplied with
                dim, table = weight.tensor.shape[1], first if first.kind == "embedding" else weight
                rule = f"LeCun: tied to an embedding of {dim}"
                found[id(weight.tensor)] = replace(
                    table, name=first.name, fan_in=dim, expected_std=LINEAR.std(dim, 0), least=None, rule=rule
                )
    return list(found.values())


def is_without_values(tensor: Tensor) -> bool:
    """Whether the tensor is lazy or on the meta device, so that it has no values yet."""
    return isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)) or tensor.is_meta


def why_not_judged(tensor: Tensor) -> str:
    """Why there are no values to judge; "" if there are."""
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return "lazy, without a shape yet: run one batch through the model first"
    if tensor.is_meta:
        return "on the meta device, without values: materialise it (to_empty and an initialisation) first"
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return f"its values are {tensor.dtype}"
    return "" if tensor.numel() else "empty"


def modules_with_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules, each with the prefix of its parameters' names, without the prefixes of wrappers."""
    parameters = [name for name, _ in model.named_parameters()]
    is_clear = len(set(map(strip_wrappers, parameters))) == len(
        parameters
    )  # no module of the user's is called "module"
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        yield (strip_wrappers(prefix) if is_clear else prefix), module
