"""What comes after each layer: from the traced graph where there can be one, else from the order of registration."""

from __future__ import annotations

import copy
import math
import operator
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ...step.wrappers import unwrapped


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


def _leaky(slope: float) -> Follower:
    return Follower("he", 1 / math.sqrt(1 + slope * slope), f"leaky ReLU, slope {slope:g}")


def _he(name: str) -> Follower:
    return Follower("he", 1.0, name)


_TANH = Follower("xavier", 5 / 3, "tanh")
_SIGMOID = Follower("xavier", 1.0, "sigmoid")
_MODULES: dict[type, Follower] = {
    **dict.fromkeys((nn.ReLU, nn.ReLU6), RELU),
    **{cls: _he(cls.__name__) for cls in (nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.Softplus, nn.Hardswish)},
    nn.SELU: Follower("lecun", 1.0, "SELU"),
    **{cls: _TANH._replace(name=cls.__name__) for cls in (nn.Tanh, nn.Hardtanh, nn.Softsign)},
    **{cls: _SIGMOID._replace(name=cls.__name__) for cls in (nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid)},
}
_FUNCTIONS: dict[str, Follower] = {
    **dict.fromkeys(("relu", "relu_", "relu6"), RELU),
    **{name: _he(name) for name in ("gelu", "silu", "silu_", "mish", "elu", "elu_", "celu", "softplus", "hardswish")},
    "selu": Follower("lecun", 1.0, "SELU"),
    **dict.fromkeys(("tanh", "tanh_", "hardtanh", "softsign"), _TANH),
    **dict.fromkeys(("sigmoid", "sigmoid_", "hardsigmoid", "logsigmoid"), _SIGMOID),
}
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
    return next((f for cls, f in _MODULES.items() if isinstance(module, cls)), None)


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
            known = of_module(activation) if is_module else _FUNCTIONS.get(getattr(activation, "__name__", ""))
            found[inner], found[module.linear2] = known or LINEAR, LINEAR
    return found


def _skeleton(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """The module again, with the same tensors and no hooks: what tracing leaves in it does not reach the original."""
    if id(module) in made:
        return made[id(module)]
    new = made[id(module)] = object.__new__(type(module))
    new.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if name.endswith("_hooks") or name.startswith(("_forward_hooks", "_forward_pre_hooks")):
            new.__dict__[name] = OrderedDict()
        elif isinstance(value, (list, dict, set)):  # parameters and buffers too
            new.__dict__[name] = copy.copy(value)
    new.__dict__["_compiled_call_impl"] = None  # set where the module was compiled in place
    children = {n: None if m is None else _skeleton(m, made) for n, m in module._modules.items()}
    new.__dict__["_modules"] = children
    return new


def by_graph(model: nn.Module) -> tuple[dict[nn.Module, Follower], str]:
    """The activation that each module's output reaches first, from the traced graph; and why there is none, or ""."""
    import torch.fx

    inner = unwrapped(model)
    if any(type(m).__name__ == "OptimizedModule" or isinstance(m, torch.jit.ScriptModule) for m in inner.modules()):
        return {}, "it holds compiled modules"
    tracer = torch.fx.Tracer()
    try:
        graph = tracer.trace(_skeleton(inner, {}))
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
            follower = _FUNCTIONS.get(name) or (_of_leaky_call(user) if name.startswith("leaky_relu") else None)
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
