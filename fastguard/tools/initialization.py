"""check_initialization and stable_weight_init: are weights as He, Xavier and LeCun would have chosen them?"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import kernels
from .._text import NAME_WIDTH, in_columns, listed, number, prose, shown
from ..diagnosis.signals import as_in_gpt2
from ..kernels.tensors import as_tensor
from ..names import named_parameters, strip_wrappers
from ..records import TensorRow
from .bench import first_tensor, output_of, randomness_restored, require_module

TOO_SMALL, TOO_LARGE = 0.1, 10.0  # times the expected standard deviation
_EMBEDDING_STD = 0.02
_WITHOUT_VALUES = (
    "lazy, without a shape yet: run one batch through the model first",
    "on the meta device, without values: materialise it (to_empty and an initialisation) first",
)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# Rule and gain, by the class name of a module in lower case.
_ACTIVATIONS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("relu", "relu6", "leakyrelu", "prelu", "rrelu", "elu", "celu", "softplus"), ("He", 1.0)),
    **dict.fromkeys(("gelu", "silu", "mish", "hardswish"), ("He", 1.0)),
    "selu": ("LeCun", 1.0),
    **dict.fromkeys(("tanh", "hardtanh", "softsign"), ("Xavier", 5 / 3)),
    **dict.fromkeys(("sigmoid", "hardsigmoid", "logsigmoid"), ("Xavier", 1.0)),
}
# Behind these, and behind norms, the next in line counts.
_TRANSPARENT = re.compile(r".*(norm|dropout|pool|shuffle|flatten|upsample|zeropad|identity)", re.IGNORECASE)


class _Rule(NamedTuple):
    """A rule ("He", "Xavier" or "LeCun"), a gain, and the activation that it is for."""

    name: str
    gain: float
    activation: str

    def std(self, fan_in: float, fan_out: float) -> float:
        """The expected standard deviation of the layer's weight; 0 without inputs."""
        total = {"He": fan_in / 2, "Xavier": (fan_in + fan_out) / 2, "LeCun": fan_in}[self.name]
        return self.gain / math.sqrt(total) if total else 0.0


_LINEAR = _Rule("LeCun", 1.0, "no activation")


def _rule_before(activation: Any) -> _Rule:
    """The rule for a layer that this module, or function, follows."""
    names = [cls.__name__ for cls in type(activation).__mro__] + [getattr(activation, "__name__", "")]
    return next((_Rule(*_ACTIVATIONS[n.lower()], n) for n in names if n.lower() in _ACTIVATIONS), _LINEAR)


def _rules_of(model: nn.Module) -> dict[nn.Module, _Rule]:
    """The rule of each module without children, by what comes next in the order of registration."""
    found: dict[nn.Module, _Rule] = {}
    behind: Any = None
    for leaf in reversed([m for m in model.modules() if not any(True for _ in m.children())]):
        found[leaf] = _rule_before(behind)
        behind = behind if _TRANSPARENT.match(type(leaf).__name__) else leaf
    for module in model.modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):  # the activation is a function
            found[module.linear1], found[module.linear2] = _rule_before(module.activation), _LINEAR
    return found


class _Weight(NamedTuple):
    """A weight to judge: where it is, what its standard deviation should be about, and why."""

    name: str
    tensor: Tensor
    fan_in: int
    expected_std: float
    rule: str
    module: nn.Module | None = None


def _fans_of(m: Any, rule: _Rule) -> Iterator[tuple[str, Tensor, float, float, _Rule]]:
    """Attribute, tensor, fan-in, fan-out and rule of the weights of a module, without its children."""
    if isinstance(m, nn.modules.conv._ConvNd):
        taps = math.prod(m.kernel_size)
        fan_in, fan_out = m.in_channels // m.groups * taps, m.out_channels // m.groups * taps
        # An output of a transposed convolution lies under only some positions of the kernel.
        yield "weight", m.weight, max(1, fan_in / math.prod(m.stride)) if m.transposed else fan_in, fan_out, rule
    elif isinstance(m, (*_RECURRENT, nn.MultiheadAttention)):
        is_relu = getattr(m, "nonlinearity", getattr(m, "mode", "")) in ("relu", "RNN_RELU")
        gate = _Rule("He", 1.0, "ReLU") if is_relu else _Rule("Xavier", 1.0, "a gate, tanh or attention")
        for name, p in m.named_parameters(recurse=False):
            if "weight" in name:
                fan_out = m.hidden_size if isinstance(m, _RECURRENT) else m.embed_dim
                yield name, p, p.shape[1], fan_out, _LINEAR if name.startswith("weight_hr") else gate
    elif isinstance(m, (nn.Linear, nn.Bilinear)):
        yield "weight", m.weight, math.prod(m.weight.shape[1:]), m.weight.shape[0], rule
    elif "norm" not in type(m).__name__.lower():
        own = m._parameters.get("weight")
        if own is not None and own.dim() == 2:
            is_transposed = type(m).__name__ == "Conv1D" and hasattr(m, "nf")  # transformers' linear layer, [in, out]
            fan_out, fan_in = reversed(own.shape) if is_transposed else own.shape
            yield "weight", own, fan_in, fan_out, rule


def _weights_in(model: nn.Module) -> list[_Weight]:
    """The weights of a model that have an expectation; a shared one where it comes first."""
    found: dict[int, _Weight] = {}
    rules, looked_up = _rules_of(model), {id(m.weight) for m in _embeddings(model)}
    names = {id(p): name for name, p in named_parameters(model)}
    for path, m in model.named_modules():
        if any(p is not None and _why_not_judged(p) for p in m._parameters.values()):
            continue
        for own, tensor, fan_in, fan_out, rule in _fans_of(m, rules.get(m, _LINEAR)):
            if id(tensor) not in looked_up:
                name = names.get(id(tensor)) or strip_wrappers(f"{path}.{own}")  # parametrized weights have none
                std, why = rule.std(fan_in, fan_out), f"{rule.name}: {rule.activation} follows"
                found.setdefault(id(tensor), _Weight(name, tensor, round(fan_in), std, why, m))
    return list(found.values())


def _embeddings(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]


def _why_not_judged(tensor: Tensor) -> str:
    """Why there are no values to judge; "" if there are."""
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return _WITHOUT_VALUES[0]
    if tensor.is_meta:
        return _WITHOUT_VALUES[1]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return f"its values are {tensor.dtype}"
    return "" if tensor.numel() else "empty"


class AttributeDict(dict[str, Any]):
    """A dict whose keys are attributes too. Of layers, keys are names of weights; "0" finds "0.weight", 0 the first."""

    def __missing__(self, key: Any) -> Any:
        name = [*self, ""][min(key, len(self))] if isinstance(key, int) else f"{key}.weight"
        if name not in self:
            raise KeyError(f"nothing is named '{shown(key)}' here; there is: {listed(self, 16)}")
        return self[name]

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"no {name!r} here; there is: {listed(self, 16)}")


class InitializationReport(AttributeDict):
    """The result of `check_initialization`: a dict of each layer by the name of its weight, and the verdict `all_ok`.

    A layer has `status` ("ok", "too_small", "too_large" or "not_finite"), `expected_std`, `actual_std`, their `ratio`,
    `fan_in` and `rule`; with a batch also `output_variance` and `variance_ratio`, to the layer before it. Keys are also
    attributes. So are `layers`, `not_judged` (reasons by name) and, with a batch, `variance_ok` (no ratio outside
    [0.1, 10]). `all_ok`: all layers are ok and none was without values.
    """

    def __init__(self, layers: AttributeDict, all_ok: bool, **more: Any) -> None:
        super().__init__(layers, all_ok=all_ok)
        self.__dict__.update(layers=layers, **more)

    def __missing__(self, key: Any) -> Any:
        return self.__dict__[key] if key in self.__dict__ else self.layers[key]

    def __str__(self) -> str:
        columns = ["expected_std", "actual_std", "ratio", *(["variance_ratio"] if self.variance_ok is not None else [])]
        rows = [("layer", "status", *(column.replace("_", " ") for column in columns), "rule")]
        for name, entry in self.layers.items():
            cells = [number(entry.get(column)) for column in columns]
            rows.append((shown(name, NAME_WIDTH), entry.status, *cells, entry.rule))
        text = in_columns(rows, left=(0, 1, len(rows[0]) - 1))
        text.insert(1, "-" * max(map(len, text)))
        text += [f"{shown(name, NAME_WIDTH)}: not judged, {prose(why)}" for name, why in self.not_judged.items()]
        bad = sum(entry.status != "ok" for entry in self.layers.values())
        text.append("all ok" if self["all_ok"] else f"not all ok: {bad} of {len(self.layers)} are off")
        return "\n".join(text)

    __repr__ = __str__


def check_initialization(
    model_or_weights: nn.Module | Mapping[str, Any] | Iterable[Any], batch: Any = None
) -> InitializationReport:
    """Checks that each weight of a new model has about the standard deviation that it should have.

    A weight is ok if actual_std is within [0.1, 10] × expected_std. For weights alone, expected_std = sqrt(2 / fan_in)
    (He). In a model it depends on the activation module that comes next in the order of registration; functions
    (`F.relu`) are not seen. Before ReLU, GELU, SiLU and the like: sqrt(2 / fan_in). Before tanh and sigmoid, and of
    RNNs and attention: gain · sqrt(2 / (fan_in + fan_out)), gain 5/3 for tanh and else 1. Otherwise 1 / sqrt(fan_in).

    fan_in is that of one group of a grouped convolution. GPT-2's 0.02 for every fan-in is ok in a model that
    normalises. Parametrized weights (weight norm) are judged as they are used. Embeddings, also tied ones, biases and
    norms are not judged.

    Args:
        model_or_weights: a module; or weights laid out [out, in, *kernel], tensors or NumPy arrays, as a dict by name
            (a state dict) or a list. Those of less than two dimensions are left out.
        batch: the arguments of one forward pass of a model: a tensor, a tuple or a dict. Each layer then has the
            variance of its output, and its ratio to that of the layer run before it. The pass is made without
            gradients, in the mode the model is in; buffers and random generators are restored.

    Returns:
        A dict by layer, with the verdict under `all_ok`; see `InitializationReport`. `print` it for a table.

    Raises:
        TypeError: neither a module nor weights; a `batch` with weights alone.
        ValueError: there is nothing to judge (all lazy or meta, or no weights at all).

    Cost: one read of all parameters. Synchronises on an accelerator.

    Source: He et al. 2015, Glorot and Bengio 2010, LeCun et al. 1998; the thresholds are the toolkit's.

    >>> import torch, fastguard
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    >>> _ = torch.nn.init.normal_(model[2].weight, std=2.0)
    >>> result = fastguard.tools.check_initialization(model)
    >>> result["all_ok"], result["0"]["status"], result["2.weight"]["status"]
    (False, 'ok', 'too_large')
    """
    kinds, missing, weights = set[str](), dict[str, str](), list[_Weight]()
    model = model_or_weights if isinstance(model_or_weights, nn.Module) else None
    if model is not None:
        kinds = {type(module).__name__ for module in model.modules()}
        embedded = {id(m.weight) for m in _embeddings(model)}
        for name, p in model.named_parameters():
            missing[strip_wrappers(name)] = _why_not_judged(p) or ("an embedding" if id(p) in embedded else "")
        with torch.no_grad():
            weights = _weights_in(model)
    elif batch is not None:
        raise TypeError("`batch` must be left out where there is no model to run it through, only weights")
    else:
        for name, tensor in _named(model_or_weights).items():
            missing[name] = _why_not_judged(tensor)
            if not missing[name] and tensor.dim() >= 2:
                fan_in = tensor[0].numel() if tensor.shape[0] else 0
                weights.append(_Weight(name, tensor, fan_in, _Rule("He", 1.0, "").std(fan_in, 0), "He"))
    missing = {name: why for name, why in missing.items() if why}
    if not weights and "an embedding" not in missing.values():
        given = prose("; ".join(f"{name}: {why}" for name, why in missing.items())) or "it has no weight matrices"
        raise ValueError(f"`model_or_weights` must hold at least one weight that can be judged, got none ({given})")
    rows = kernels.tensor_stats([w.tensor.detach() for w in weights], names=[w.name for w in weights])
    layers = AttributeDict((w.name, _judged(w, row)) for w, row in zip(weights, rows))
    for name in as_in_gpt2({name: layer.actual_std for name, layer in layers.items()}, kinds):
        if layers[name].status == "too_small":
            layers[name].update(status="ok", rule="GPT-2: 0.02, less at the ends of residual branches")
    variances = {} if model is None or batch is None else _output_variances(model, batch, weights)
    for (name, variance), last in zip(variances.items(), [0.0, *variances.values()]):
        layers[name].update(output_variance=variance, variance_ratio=variance / last if last else None)
    ratios = [one.variance_ratio for one in layers.values() if one.get("variance_ratio") is not None]
    return InitializationReport(
        layers,
        all_ok=all(one.status == "ok" for one in layers.values()) and not {*missing.values()} & {*_WITHOUT_VALUES},
        not_judged=missing,
        variance_ok=None if batch is None else all(TOO_SMALL <= ratio <= TOO_LARGE for ratio in ratios),
    )


def _named(weights: Any) -> dict[str, Tensor]:
    if not isinstance(weights, Iterable):
        what = type(weights).__name__
        raise TypeError(f"`model_or_weights` must be a module, or a dict or list of weights, got {what}")
    found = weights if isinstance(weights, Mapping) else {f"layer{i}": w for i, w in enumerate(weights)}
    for name, w in found.items():
        if not (isinstance(w, Tensor) or hasattr(w, "__array_interface__")):
            what = f"{type(w).__name__} - at {name!r}. Pass the weights themselves, or the model."
            raise TypeError(f"`model_or_weights` must hold tensors or arrays, got {what}")
    return {str(name): w.detach() if isinstance(w, Tensor) else as_tensor(w) for name, w in found.items()}


def _judged(weight: _Weight, row: TensorRow) -> AttributeDict:
    # The spread of complex numbers is that of both parts together.
    std, expected, rule = row.std * math.sqrt(1 + weight.tensor.is_complex()), weight.expected_std, weight.rule
    status = "too_small" if std < TOO_SMALL * expected else "too_large" if std > TOO_LARGE * expected else "ok"
    if status == "too_small" and not row.abs_max:
        rule += "; all zero, which only a branch beside a residual may be"
    status = "not_finite" if row.num_nans or row.num_infs else status
    ratio = std / expected if expected else math.nan
    numbers = {"expected_std": expected, "actual_std": std, "ratio": ratio, "fan_in": weight.fan_in}
    return AttributeDict(status=status, **numbers, rule=rule)


def _output_variances(model: nn.Module, batch: Any, weights: list[_Weight]) -> dict[str, float]:
    """By the name of each module's first weight, in the order in which modules first run."""
    found: dict[str, float] = {}

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = first_tensor(output, floating=True)
        if name not in found and tensor is not None:
            row = kernels.tensor_stats([tensor.detach()], names=[f"output of {name}"])[0]
            found[name] = row.std**2

    modules = {w.module: w.name for w in reversed(weights) if not isinstance(w.module, nn.MultiheadAttention)}
    with contextlib.ExitStack() as hooks, torch.no_grad(), randomness_restored(None), _restored(model):
        for module, name in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(look, name)))  # type: ignore[union-attr]
        output_of(model, batch)
    return found


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restores the buffers of `model` afterwards."""
    stores = [module._buffers for module in model.modules()]
    kept = [(store, key, b, b.detach().clone()) for store in stores for key, b in store.items() if b is not None]
    try:
        yield
    finally:
        for store, key, buffer, values in kept:
            buffer.copy_(values)
            store[key] = buffer


def stable_weight_init(model: nn.Module) -> InitializationReport:
    """Initialises a new model in place, by what follows each layer, and returns `check_initialization(model)`.

    Weights are normal with mean 0 and the standard deviation that `check_initialization` expects. Embeddings have 0.02,
    also as output layers, and zeros at their `padding_idx`. Biases are 0, weights of norms 1. Left as they are: frozen
    parameters, other parameters (positions, scales), parametrized weights (weight norm) and running statistics. A
    branch that is to begin with zeros has to be set to zero afterwards.

    Args:
        model: with values in its parameters: not lazy, not on the meta device.

    Returns:
        An `InitializationReport`: `all_ok`, and each layer's rule.

    Raises:
        ValueError: a parameter is lazy or on the meta device; the model has no weights. Nothing is changed then.

    Cost: one write of all parameters and one read. Synchronises.

    Source: He et al. 2015, Glorot and Bengio 2010; 0.02: Radford et al. 2018 (GPT).

    >>> import torch, fastguard
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    >>> report = fastguard.tools.stable_weight_init(model)
    >>> report.all_ok, report["0"].rule, report["2"].rule
    (True, 'He: ReLU follows', 'LeCun: no activation follows')
    """
    require_module(model)
    for name, p in model.named_parameters():
        if (why := _why_not_judged(p)) in _WITHOUT_VALUES:
            raise ValueError(f"`model` must have values in all parameters, got none - at {name!r}: {why}")
    if not any(p.requires_grad and p.dim() >= 2 for p in model.parameters()):
        raise ValueError("`model` must have weights that are not frozen, got none")
    with torch.no_grad():
        for module in model.modules():
            is_norm = "norm" in type(module).__name__.lower()
            for name, p in module.named_parameters(recurse=False):
                if p.requires_grad and "bias" in name and (p.dim() < 2 or is_norm):  # a table of biases is a weight
                    p.zero_()
                elif p.requires_grad and is_norm and name == "weight":
                    p.fill_(1.0)
        for weight in _weights_in(model):
            if isinstance(weight.tensor, nn.Parameter) and weight.tensor.requires_grad:
                weight.tensor.normal_(0.0, weight.expected_std)
        for module in _embeddings(model):
            if module.weight.requires_grad:
                module.weight.normal_(0.0, _EMBEDDING_STD)
                if module.padding_idx is not None:
                    module.weight[module.padding_idx].zero_()
    return check_initialization(model)
