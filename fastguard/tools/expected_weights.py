"""The weights of a model that have an expected spread: of He, Xavier or LeCun, by the activation that follows."""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..names import strip_wrappers
from ..observers.observer import unwrapped

WITHOUT_VALUES = (
    "lazy, without a shape yet: run one batch through the model first",
    "on the meta device, without values: materialise it (to_empty and an initialisation) first",
)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# Rule and gain, by the name of torch's function or module, in lower case and without underscores.
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


_LINEAR = Follower("LeCun", 1.0, "no activation")


def _follower(names: list[str], slope: float | None = None) -> Follower | None:
    """The activation of one of these names, or leaky with `slope`; None if there is none."""
    if slope is not None:
        return Follower("He", 1 / math.sqrt(1 + slope * slope), f"leaky ReLU, slope {slope:g}")
    known = ((name, _ACTIVATIONS.get(name.lower().replace("_", ""))) for name in names)
    return next((Follower(*found, name.removesuffix("_")) for name, found in known if found), None)


def _read(module: nn.Module) -> tuple[list[str], Follower | None]:
    """The names of a module's classes, and what it is as an activation."""
    slope, names = None, [cls.__name__ for cls in type(module).__mro__]
    if isinstance(module, nn.LeakyReLU):
        slope = module.negative_slope
    elif isinstance(module, nn.RReLU):
        slope = (module.lower + module.upper) / 2
    elif isinstance(module, nn.PReLU):
        slope = 0.0 if module.weight.is_meta else float(module.weight.detach().mean())
    return names, _follower(names, slope)


def _is_transparent(names: list[str]) -> bool:
    bare = [re.sub(r"\d+d$", "", name.lower().replace("_", "")) for name in names]
    return any(name in _TRANSPARENT or "norm" in name for name in bare)


def find_followers(model: nn.Module) -> tuple[dict[nn.Module, Follower], str]:
    """What follows each module, by the traced graph or else the order of registration; why there is no graph, or ""."""
    found: dict[nn.Module, Follower] = {}
    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    for i, leaf in enumerate(leaves):
        behind = (follower for names, follower in map(_read, leaves[i + 1 :]) if not _is_transparent(names))
        found[leaf] = next(behind, None) or _LINEAR
    for module in model.modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):  # the activation is a function
            name = getattr(module.activation, "__name__", type(module.activation).__name__)
            found[module.linear1], found[module.linear2] = _follower([name]) or _LINEAR, _LINEAR
    inner, problem = unwrapped(model), ""
    try:
        graph = _graph(inner)
    except Exception as error:  # the model's own code may raise anything when it runs with stand-ins for tensors
        return found, f"{type(error).__name__}: {error}".splitlines()[0]
    modules = dict(inner.named_modules(remove_duplicate=False))
    traced: dict[nn.Module, Follower] = {}
    for node in graph.nodes:
        if node.op == "call_module" and node.target in modules:
            module = modules[node.target]
            if traced.get(module, _LINEAR) is _LINEAR:  # of several calls, one with an activation counts
                traced[module] = _after(node, modules)
    return {**found, **traced}, problem


def _graph(model: nn.Module) -> Any:
    """The graph of a twin with the same tensors and without hooks, so that tracing does not change the original."""
    import torch.fx

    if any(type(m).__name__ == "OptimizedModule" or isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise TypeError("it holds compiled modules")
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for module in twin.modules():
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        module._compiled_call_impl = None
    return torch.fx.Tracer().trace(twin)


def _after(node: Any, modules: dict[str, nn.Module]) -> Follower:
    """The nearest activation that the output reaches through nothing but what is transparent."""
    queue, seen = list(node.users), set()
    while queue:
        user = queue.pop(0)
        if user in seen:
            continue
        seen.add(user)
        if user.op == "call_module" and user.target in modules:
            names, follower = _read(modules[user.target])
        else:
            names, slope = [user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")], None
            if names[0].startswith("leaky_relu"):
                slope = user.kwargs.get("negative_slope", user.args[1] if len(user.args) > 1 else 0.01)
                slope = slope if isinstance(slope, (int, float)) else 0.01
            follower = _follower(names, slope)
        if follower is not None:
            return follower
        if _is_transparent(names):
            queue.extend(user.users)
    return _LINEAR


class Weight(NamedTuple):
    """A weight to judge: where it is, what its standard deviation should be about, and why."""

    name: str
    tensor: Tensor
    fan_in: int
    expected_std: float
    rule: str
    kind: str = "weight"  # "weight", "recurrent" or "embedding"
    least: float | None = None  # smallest usual standard deviation, if that is far below the expected one
    module: nn.Module | None = None
    attribute: str = ""


def _fans_of(m: Any, follower: Follower) -> Iterator[tuple[str, Tensor, float, float, Follower]]:
    """Attribute, tensor, fan-in, fan-out and follower of the weights of a module, without its children."""
    if isinstance(m, nn.modules.conv._ConvNd):
        taps = math.prod(m.kernel_size)
        fan_in, fan_out = m.in_channels // m.groups * taps, m.out_channels // m.groups * taps
        # An output of a transposed convolution lies under only some positions of the kernel.
        yield "weight", m.weight, max(1, fan_in / math.prod(m.stride)) if m.transposed else fan_in, fan_out, follower
    elif isinstance(m, _RECURRENT):
        is_relu = getattr(m, "nonlinearity", getattr(m, "mode", "")) in ("relu", "RNN_RELU")
        gate = Follower("He", 1.0, "ReLU") if is_relu else Follower("Xavier", 1.0, "a gate or tanh")
        for name, p in m.named_parameters(recurse=False):
            if name.startswith("weight"):
                yield name, p, p.shape[1], m.hidden_size, _LINEAR if name.startswith("weight_hr") else gate
    elif isinstance(m, nn.MultiheadAttention):
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if (p := getattr(m, name)) is not None:
                yield name, p, p.shape[1], m.embed_dim, Follower("Xavier", 1.0, "attention")
    elif isinstance(m, (nn.Linear, nn.Bilinear)):
        yield "weight", m.weight, math.prod(m.weight.shape[1:]), m.weight.shape[0], follower
    elif "norm" not in type(m).__name__.lower():
        own = m._parameters.get("weight")
        if own is not None and own.dim() == 2:
            is_transposed = type(m).__name__ == "Conv1D" and hasattr(m, "nf")  # transformers' linear layer, [in, out]
            fan_out, fan_in = reversed(own.shape) if is_transposed else own.shape
            yield "weight", own, fan_in, fan_out, follower


def weights_in(model: nn.Module, followers: dict[nn.Module, Follower]) -> list[Weight]:
    """The weights of a model that have an expectation; a shared one where it comes first."""
    found: dict[int, Weight] = {}
    parameters = [name for name, _ in model.named_parameters()]
    is_clear = len(set(map(strip_wrappers, parameters))) == len(parameters)  # no module of the user's is "module"
    for path, m in model.named_modules():
        prefix = f"{path}." if path else ""
        prefix = strip_wrappers(prefix) if is_clear else prefix
        if any(p is not None and why_not_judged(p) for p in m._parameters.values()):
            continue
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            # Looked up, not added up: GPT's 0.02 and torch's 1 are usual.
            least = min(1 / math.sqrt(m.embedding_dim), 0.1) if m.embedding_dim else 0.0
            rule = "looked up: 0.02, or 1/sqrt(dim) to 1"
            weights = [Weight(prefix + "weight", m.weight, 1, 1.0, rule, "embedding", least, m, "weight")]
        else:
            kind = "recurrent" if isinstance(m, _RECURRENT) else "weight"
            weights = []
            for name, tensor, fan_in, fan_out, then in _fans_of(m, followers.get(m, _LINEAR)):
                std, rule = then.std(fan_in, fan_out), f"{then.rule}: {then.name} follows"
                weights.append(Weight(prefix + name, tensor, round(fan_in), std, rule, kind, None, m, name))
        for weight in weights:
            first = found.setdefault(id(weight.tensor), weight)
            if (first.kind == "embedding") is not (weight.kind == "embedding"):  # looked up, and multiplied with
                dim, table = weight.tensor.shape[1], first if first.kind == "embedding" else weight
                tied: dict[str, Any] = {"fan_in": dim, "expected_std": _LINEAR.std(dim, 0), "least": None}
                tied["rule"] = f"LeCun: tied to an embedding of {dim}"
                found[id(weight.tensor)] = table._replace(name=first.name, **tied)
    return list(found.values())


def why_not_judged(tensor: Tensor) -> str:
    """Why there are no values to judge; "" if there are."""
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return WITHOUT_VALUES[0]
    if tensor.is_meta:
        return WITHOUT_VALUES[1]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return f"its values are {tensor.dtype}"
    return "" if tensor.numel() else "empty"
