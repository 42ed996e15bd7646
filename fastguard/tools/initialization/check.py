"""check_initialization: a model, or weights alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import kernels
from ..._text import NAME_WIDTH, in_columns, listed, prose, shown
from ...kernels.tensors import as_tensor
from ...observers.buffers import forward_undone
from ...records import TensorRow
from ...records.model import as_in_gpt2
from .expected import (
    TOO_LARGE,
    TOO_SMALL,
    Missing,
    Weight,
    bare,
    find_followers,
    missing_values,
    modules_with_names,
    weights_in,
)  # fmt: skip

_EXPECTED_RMS = {"norm": 1.0, "bias": 1.0}
OK, SMALL, LARGE, NOT_FINITE = "ok", "too_small", "too_large", "not_finite"


class AttributeDict(dict[str, Any]):
    """A dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r} here; there is: {listed(self, 16)}") from None

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except KeyError:
            return False
        return True

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        return self[key] if key in self else default  # noqa: SIM401


class InitializationReport(AttributeDict):
    """What was found: an `AttributeDict` for each layer under its name, and the verdict under `all_ok`.

    The name is that of the weight ("0.weight"); the layer's own ("0") and its place (0) find it too.

    | key of a layer | what it is |
    |---|---|
    | `status` | `ok`; `too_small` (below 0.1 × expected); `too_large` (above 10 ×); `not_finite` |
    | `expected_std`, `actual_std`, `ratio` | standard deviations; actual over expected |
    | `kind` | `weight`, `recurrent`, `embedding` |
    | `fan_in`, `rule` | inputs to each output; which rule the expectation comes from, and why |
    | `output_variance`, `variance_ratio` | with a batch: of its output; over the one before it, None for the first |

    Beside the layers stand, as keys and attributes that are not iterated over: `layers` (all of them), `others`
    (biases, norms and the like: `kind`, `status`, `rms`, `expected_rms`), `not_judged` (name -> reason), `followers`
    (where it was learned what follows each layer), and with a batch `variance_ok` (no ratio outside [0.1, 10]).
    `all_ok` is True if all layers and others are ok and none was without values.
    """

    def __init__(
        self,
        layers: dict[str, AttributeDict],
        others: dict[str, AttributeDict],
        not_judged: dict[str, str],
        followers: str,
        all_ok: bool,
        variance_ok: bool | None,
    ) -> None:
        super().__init__(layers)
        self["all_ok"] = all_ok
        self._beside: dict[str, Any] = {
            "layers": _Layers(layers),
            "others": others,
            "not_judged": not_judged,
            "followers": followers,
            "variance_ok": variance_ok,
        }

    def __missing__(self, key: Any) -> Any:
        return self._beside[key] if key in self._beside else self._beside["layers"][key]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        beside = {k: v for k, v in self._beside.items() if k not in ("layers", "others")}
        tables = {k: {name: dict(e) for name, e in self._beside[k].items()} for k in ("layers", "others")}
        return {"all_ok": self["all_ok"], **tables, **beside}

    def __reduce__(self) -> tuple[Any, ...]:
        b = self._beside
        arguments = (dict(b["layers"]), b["others"], b["not_judged"], b["followers"], self["all_ok"], b["variance_ok"])
        return InitializationReport, arguments

    def __repr__(self) -> str:
        return f"InitializationReport({len(self._beside['layers'])} layers, all_ok={self['all_ok']})"

    def __str__(self) -> str:
        layers, others = self._beside["layers"], self._beside["others"]
        with_batch = self._beside["variance_ok"] is not None
        rows = [_cells(name, e, with_batch) for name, e in layers.items()]
        rows.insert(0, ("layer", "status", *_HEADINGS[: 3 + with_batch], "rule"))
        text = in_columns(rows, left=(0, 1, len(rows[0]) - 1))
        text.insert(1, "-" * max(map(len, text)))
        remarks = {n: f"{e.status}, {e.kind} of rms {e.rms:.3g}" for n, e in others.items() if e.status != OK}
        remarks |= {n: f"not judged, {reason}" for n, reason in self._beside["not_judged"].items()}
        text += [f"{shown(name, NAME_WIDTH)}: {prose(remark)}" for name, remark in remarks.items()]
        bad = sum(e.status != OK for e in (*layers.values(), *others.values()))
        text.append("all ok" if self["all_ok"] else f"not all ok: {bad} of {len(layers) + len(others)} are off")
        return "\n".join(text)


_HEADINGS = ("expected std", "actual std", "ratio", "variance ratio")


def _cells(name: str, e: AttributeDict, with_batch: bool) -> tuple[str, ...]:
    numbers = [f"{e.expected_std:.3e}", f"{e.actual_std:.3e}", f"{e.ratio:.2f}"]
    if with_batch:
        ratio = e.get("variance_ratio")
        numbers.append("-" if ratio is None else f"{ratio:.2f}")
    return (shown(name, NAME_WIDTH), e.status, *numbers, e.rule)


class _Layers(AttributeDict):
    """Layers by the name of their weight; the layer's own name and its place lead there too."""

    def __missing__(self, key: Any) -> AttributeDict:
        if isinstance(key, int) and -len(self) <= key < len(self):
            return list(self.values())[key]
        if isinstance(key, str) and dict.__contains__(self, f"{key}.weight"):
            return self[f"{key}.weight"]
        raise KeyError(f"no layer is named '{shown(key)}'; the layers are: {listed(self, 16)}")


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
    others: dict[str, tuple[str, Tensor]] = {}
    missing: dict[str, Missing] = {}
    with torch.no_grad():
        found = weights_in(model, followers)
        seen = set(found)
        for prefix, module in modules_with_names(model):
            for name, p in module._parameters.items():
                if p is None or id(p) in seen:
                    continue
                if (unset := missing_values(p)) is not None:
                    missing[prefix + name] = unset
                else:
                    seen.add(id(p))
                    others[prefix + name] = (_kind(module, name), p.detach())
    weights = {place.name: place.weight for place in found.values()}
    variances = {}
    if batch is not None:
        firsts: dict[nn.Module, str] = {}  # modules whose outputs are looked at, by their first weight
        for name, weight in weights.items():
            if weight.module is not None:
                firsts.setdefault(weight.module, name)
        variances = output_variances(model, batch, firsts, backend)
    kinds = {type(module).__name__ for module in model.modules()}
    return _judge(weights, others, missing, how, variances, backend, with_batch=batch is not None, kinds=kinds)


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


def output_variances(
    model: nn.Module, batch: Any, modules: Mapping[nn.Module, str], backend: str
) -> dict[str, tuple[float, float | None]]:
    """By the names of `modules`, in the order in which they run: the output's variance; its ratio to the one before.

    Of a module that runs several times the first counts. The ratio is None for the first module, and after an output
    that is constant. NaN and Inf are left out of a variance.
    """
    found: dict[str, float] = {}

    def look(name: str, output: Any) -> None:
        tensor = _first_tensor(output)
        if name not in found and tensor is not None:
            found[name] = (
                kernels.tensor_stats([tensor.detach()], names=[f"output of {name}"], backend=backend)[0].std ** 2
            )

    handles = [m.register_forward_hook(lambda _m, _i, out, name=name: look(name, out)) for m, name in modules.items()]
    try:
        with torch.no_grad(), forward_undone(model):
            _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    result: dict[str, tuple[float, float | None]] = {}
    before = None
    for name, variance in found.items():
        result[name] = (variance, variance / before if before else None)
        before = variance
    return result


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.numel() and (output.is_floating_point() or output.is_complex()) else None
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((t for t in map(_first_tensor, values) if t is not None), None)
