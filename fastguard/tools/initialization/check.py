"""check_initialization: a model, or weights alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import kernels
from ..._text import prose
from ...kernels.tensors import as_tensor
from ...records import TensorRow
from ...records.model import as_in_gpt2
from .expected import Missing, Weight, bare, missing_values, modules_with_names, tied, weights_of
from .followers import LINEAR, find_followers
from .report import LARGE, NOT_FINITE, OK, SMALL, TOO_LARGE, TOO_SMALL, AttributeDict, InitializationReport
from .variance import output_variances

_EXPECTED_RMS = {"norm": 1.0, "bias": 1.0}


def check_initialization(
    model_or_weights: nn.Module | Mapping[str, Any] | Iterable[Any], batch: Any = None, *, backend: str = "auto"
) -> InitializationReport:
    """Whether each weight of a new model has about the standard deviation that it should have.

    ok if actual_std is within [0.1, 10] × expected_std. Of weights alone: expected_std = sqrt(2 / fan_in) (He). Of a
    model, by what follows the layer:

    - ReLU family (ReLU, GELU, SiLU, …): sqrt(2 / fan_in), over sqrt(1 + slope²) for a leaky one;
    - tanh, sigmoid: gain · sqrt(2 / (fan_in + fan_out)), gain 5/3 and 1; a gate of an RNN, attention's inputs: gain 1;
    - nothing, a softmax, SELU: 1 / sqrt(fan_in).

    fan_in is that of one group of a grouped convolution; of a transposed one, that of one output position (over the
    strides). Embeddings may be anything from 0.02, or 1/sqrt(dim), to 1; one tied to an output layer is judged as that
    layer's. GPT-2's spreads, 0.02 whatever the fan-in, are ok in a model that normalises. Biases and norms go to
    `others`: too large above a root mean square of 10, norms too small below 0.1 (all zero is taken for a branch that
    starts off). Parametrized weights (weight norm) are judged as they are used.

    Args:
        model_or_weights: a module; a dict by name (a state dict), or a list, of weights laid out [out, in, *kernel]:
            tensors or NumPy arrays. Of these, what has less than two dimensions is left to `others`.
        batch: of a model, the arguments of one forward pass: a tensor, a tuple or a dict. Each layer then gets the
            variance of its output, and its ratio to that of the layer run before it. The pass is made without
            gradients, in the mode the model is in; buffers and random generators are put back.
        backend: as for `fastguard.tensor_stats`.

    Returns:
        A dict by layer, with the verdict under `all_ok`; see `InitializationReport`. `print` it for a table.

    Raises:
        TypeError: neither a module nor weights; a `batch` with weights alone.
        ValueError: nothing in it can be judged (all lazy or meta, or no weights at all).

    Cost: one read of all parameters; to learn what follows each layer the model is traced with torch.fx (no tensor is
    touched), and where it can't be, the order of registration counts. Synchronises on an accelerator.

    Source: He et al. 2015, Glorot and Bengio 2010, LeCun et al. 1998; the thresholds are the toolkit's.

    >>> import torch, fastguard
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    >>> _ = torch.nn.init.normal_(model[2].weight, std=2.0)
    >>> result = fastguard.tools.check_initialization(model)
    >>> result["all_ok"], result["0"]["status"], result["2.weight"]["status"]
    (False, 'ok', 'too_large')
    """
    if isinstance(model_or_weights, nn.Module):
        return _check_model(model_or_weights, batch, backend)
    if batch is not None:
        raise TypeError("`batch` must be left out where there is no model to run it through, only weights")
    return _check_weights(_named(model_or_weights), backend)


def _named(weights: Any) -> dict[str, Tensor]:
    if isinstance(weights, Mapping):
        found = {str(name): w for name, w in weights.items()}
    else:
        single = isinstance(weights, Tensor) or hasattr(weights, "__array_interface__")
        if not single and not isinstance(weights, Iterable):
            what = type(weights).__name__
            raise TypeError(f"`model_or_weights` must be a module, or a dict or list of weights, got {what}")
        found = {f"layer{i}": w for i, w in enumerate([weights] if single else weights)}
    for name, w in found.items():
        if not isinstance(w, Tensor) and not hasattr(w, "__array_interface__"):
            raise TypeError(
                f"`model_or_weights` must hold tensors or arrays, got {type(w).__name__} - at {name!r}. "
                "Pass the weights themselves, or the model."
            )
    return {name: w.detach() if isinstance(w, Tensor) else as_tensor(w) for name, w in found.items()}


def _check_weights(tensors: dict[str, Tensor], backend: str) -> InitializationReport:
    weights: dict[str, Weight] = {}
    others: dict[str, tuple[str, Tensor]] = {}
    missing: dict[str, Missing] = {}
    for name, tensor in tensors.items():
        problem = missing_values(tensor)
        if problem is not None:
            missing[name] = problem
        elif tensor.dim() >= 2:
            weights[name] = bare(tensor)
        else:
            others[name] = (_kind_of_vector(name), tensor)
    return _judge(weights, others, missing, "not looked for: weights alone", {}, backend)


def _kind_of_vector(name: str) -> str:
    last = name.rpartition(".")[2]
    return "bias" if "bias" in last else "running" if "running" in last else "vector"


def _check_model(model: nn.Module, batch: Any, backend: str) -> InitializationReport:
    followers, problem = find_followers(model)
    how = f"order of registration; the model can't be traced ({problem})" if problem else "traced graph"
    weights: dict[str, Weight] = {}
    others: dict[str, tuple[str, Tensor]] = {}
    missing: dict[str, Missing] = {}
    seen: dict[int, str] = {}
    with torch.no_grad():
        for prefix, module in modules_with_names(model):
            problems = {n: missing_values(p) for n, p in module._parameters.items() if p is not None}
            unset = {n: problem for n, problem in problems.items() if problem is not None}
            missing.update({prefix + n: problem for n, problem in unset.items()})
            found = {} if unset else weights_of(module, followers.get(module, LINEAR))
            for name, weight in found.items():
                known = seen.setdefault(id(weight.tensor), prefix + name)
                if known == prefix + name:
                    weights[known] = weight
                elif (weights[known].kind == "embedding") is not (weight.kind == "embedding"):
                    pair = (weight, weights[known]) if weight.kind == "embedding" else (weights[known], weight)
                    weights[known] = tied(*pair)
            for name, p in module._parameters.items():
                if p is not None and name not in found and name not in unset and id(p) not in seen:
                    seen[id(p)] = prefix + name
                    others[prefix + name] = (_kind(module, name), p.detach())
    variances = {} if batch is None else output_variances(model, batch, _modules(weights), backend)
    kinds = {type(module).__name__ for _, module in modules_with_names(model)}
    return _judge(weights, others, missing, how, variances, backend, with_batch=batch is not None, kinds=kinds)


def _modules(weights: dict[str, Weight]) -> dict[nn.Module, str]:
    """Modules whose outputs are looked at, by their first weight."""
    found: dict[nn.Module, str] = {}
    for name, weight in weights.items():
        if weight.module is not None:
            found.setdefault(weight.module, name)
    return found


def _kind(module: nn.Module, name: str) -> str:
    if "bias" in name:
        return "bias"
    if "norm" in type(module).__name__.lower() and name == "weight":
        return "norm"
    return "parameter"


def _judge(
    weights: dict[str, Weight],
    others: dict[str, tuple[str, Tensor]],
    missing: dict[str, Missing],
    how: str,
    variances: dict[str, tuple[float, float | None]],
    backend: str,
    with_batch: bool = False,
    kinds: Iterable[str] = (),
) -> InitializationReport:
    if not weights:
        given = prose("; ".join(f"{name}: {m.reason}" for name, m in missing.items())) or "it has no weight matrices"
        raise ValueError(f"`model_or_weights` must hold at least one weight that can be judged, got none ({given})")
    tensors = [w.tensor.detach() for w in weights.values()] + [t for _, t in others.values()]
    rows = list(kernels.tensor_stats(tensors, names=[*weights, *others], backend=backend))
    layers = {n: _entry(w, row) for (n, w), row in zip(weights.items(), rows)}
    for name in as_in_gpt2({n: layer.actual_std for n, layer in layers.items()}, kinds):
        if layers[name].status == SMALL:
            layers[name].update(status=OK, rule="GPT-2: 0.02, less at the ends of residual branches")
    for name, (variance, ratio) in variances.items():
        layers[name].update(output_variance=variance, variance_ratio=ratio)
    beside = {n: _other(kind, row) for (n, (kind, _)), row in zip(others.items(), rows[len(weights) :])}
    all_ok = all(e.status == OK for e in (*layers.values(), *beside.values()))
    all_ok = all_ok and not any(m.is_pending for m in missing.values())  # that may turn out anyhow
    reasons = {name: m.reason for name, m in missing.items()}
    ratios = [ratio for _, ratio in variances.values() if ratio is not None]
    variance_ok = all(TOO_SMALL <= ratio <= TOO_LARGE for ratio in ratios) if with_batch else None
    return InitializationReport(layers, beside, reasons, how, all_ok, variance_ok)


def _entry(weight: Weight, row: TensorRow) -> AttributeDict:
    # A complex number's spread is that of both its parts together.
    std = row.std * math.sqrt(2) if weight.tensor.is_complex() else row.std
    status = SMALL if std < weight.low else LARGE if std > weight.high else OK
    rule = weight.rule
    if not row.abs_max and status == SMALL:
        rule += "; all zero, which only a branch beside a residual may be"
    return AttributeDict(
        status=NOT_FINITE if row.num_nans or row.num_infs else status,
        expected_std=weight.expected_std,
        actual_std=std,
        ratio=std / weight.expected_std if weight.expected_std else math.nan,
        fan_in=weight.fan_in,
        kind=weight.kind,
        rule=rule,
    )


def _other(kind: str, row: TensorRow) -> AttributeDict:
    rms = math.sqrt(row.sum_sq / row.numel) if row.numel else 0.0
    expected = _EXPECTED_RMS.get(kind)
    status = OK
    if row.num_nans or row.num_infs:
        status = NOT_FINITE
    elif expected is not None and rms > TOO_LARGE * expected:
        status = LARGE
    elif kind == "norm" and 0 < rms < TOO_SMALL:
        status = SMALL
    return AttributeDict(kind=kind, status=status, rms=rms, expected_rms=expected)
