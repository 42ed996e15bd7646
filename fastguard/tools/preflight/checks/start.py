"""How signals and gradients go through the model as it was initialised."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...._text import listed
from ....diagnosis import Finding
from ...initialization import check_initialization
from ..evidence import Evidence, TrialPass
from ..registry import check
from ..watcher import BREAKERS, LOSSES, Activity

TITLE = "Initialisation and gradient flow"
_HE = "He et al. 2015, Glorot and Bengio 2010; the expectations of `fastguard.tools.check_initialization`"
_HALF = (torch.float16, torch.bfloat16)


def _weights(evidence: Evidence) -> list[str]:
    """Weights of layers that were called, in that order, as the model names them."""
    found = []
    for layer in evidence.layers:
        for own, p in layer.module.named_parameters(recurse=False):
            name = next((n for n, q in evidence.parameters.items() if q is p), None)
            if p.dim() >= 2 and p.requires_grad and name is not None and not own.startswith("weight_hh"):
                found.append(name)
    return list(dict.fromkeys(found))


@check(
    "weights-out-of-scale",
    cause="poor-initialisation",
    depth=1,
    reads="weights of all layers, by their number of inputs and what follows them",
    source=_HE,
    remedy="Initialise by fan-in: kaiming_normal_ for ReLU, xavier_normal_ for tanh; biases zero.",
)
def weights_out_of_scale(evidence: Evidence, *, least_layers: int = 1) -> Finding | None:
    """At least `least_layers` layers have weights below 0.1 or above 10 times their expected standard deviation.

    The last layer may begin anywhere up to ten times, also at zero; a layer of zeros among others that are well is
    taken for the end of a residual branch.
    """
    try:
        result = check_initialization(evidence.bench.model)
    except ValueError:  # it has no matrices
        return None
    names = _weights(evidence)
    last = names[-1] if names else ""
    bad = {
        name: layer
        for name, layer in result.layers.items()
        if layer.status != "ok" and not (name == last and layer.status == "too_small") and layer.kind != "embedding"
    }
    is_zero = [name for name, layer in bad.items() if layer.actual_std == 0 and _is_zero(evidence, name)]
    if len(is_zero) <= len(result.layers) // 2:
        bad = {name: layer for name, layer in bad.items() if name not in is_zero or name == names[0]}
    biases = [name for name, other in result.others.items() if other.status != "ok"]
    if len(bad) < least_layers and not biases:
        return None
    if not bad:
        return Finding(
            f"Biases or norms begin far from usual: {listed(biases)}.",
            layers=tuple(biases[:8]),
            evidence={"num_off": len(biases)},
            confidence=0.6,
        )
    worst = max(bad, key=lambda name: abs(math.log(max(bad[name].ratio, 1e-12))))
    return Finding(
        f"{len(bad)} of {len(result.layers)} layers begin with weights out of scale: {listed(bad)}; that of {worst} is "
        f"{bad[worst].ratio:.2g} times the expected standard deviation of {bad[worst].expected_std:.2g}.",
        layers=tuple(bad)[:8],
        evidence={"num_off": len(bad), "num_layers": len(result.layers), "ratio": bad[worst].ratio},
        confidence=0.93,
    )


def _is_zero(evidence: Evidence, name: str) -> bool:
    p = evidence.parameters.get(name)
    return p is not None and not bool(p.detach().any())


@check(
    "identical-units",
    cause="poor-initialisation",
    depth=1,
    severity="critical",
    reads="weights of hidden layers",
    source="Goodfellow et al. 2016, section 8.4: initial parameters must break symmetry",
    remedy="Initialise with random numbers: torch's own default will do.",
)
def identical_units(evidence: Evidence) -> Finding | None:
    """All units of a hidden layer begin with the same weights: they stay the same for ever.

    Zeros in half of the hidden layers or fewer, not in the first, are taken for ends of residual branches.
    """
    names = _weights(evidence)[:-1]
    found = []
    for name in names:
        p = evidence.parameters[name].detach()
        flat = p.reshape(p.shape[0], -1)
        if p.shape[0] >= 2 and bool((flat == flat[:1]).all()):
            found.append(name)
    zero = [name for name in found if _is_zero(evidence, name)]
    if zero and 2 * len(zero) <= len(names) and names[0] not in zero:  # ends of residual branches
        found = [name for name in found if name not in zero]
    if not found:
        return None
    return Finding(
        f"The units of {listed(found)} all begin with the same weights, and so learn the same.",
        severity="critical",
        layers=tuple(found[:8]),
        evidence={"num_layers": len(found)},
        confidence=0.95,
    )


def _share_of_dead(output: Tensor) -> float:
    """Units (last dimension of 2-d and 3-d, channels of images) that are 0 or below for every sample."""
    if output.dim() < 2 or output.shape[0] < 2:
        return 0.0
    dim = 1 if output.dim() >= 4 else output.dim() - 1
    flat = output.transpose(dim, -1).reshape(-1, output.shape[dim])
    return float((flat <= 0).all(0).double().mean())


@check(
    "dead-units-at-start",
    cause="dead-units",
    depth=2,
    reads="outputs of ReLU on the batches",
    source="AUTOTRAINER (Zhang et al. 2021), dying ReLU: a share of 0.7; Lu et al. 2019 on deep narrow nets",
    remedy="Use fewer or wider layers, LeakyReLU or normalisation, and look for biases far below zero.",
)
def dead_units_at_start(evidence: Evidence, *, share: float = 0.75, least_samples: int = 8) -> Finding | None:
    """More than `share` of a ReLU's units give 0 for each of at least `least_samples` samples, before any step."""
    worst: tuple[float, Activity] | None = None
    for one in evidence.hidden:
        if one.kind in ("relu", "relu6") and one.output.shape[0] >= least_samples and one.output.is_floating_point():
            dead = _share_of_dead(one.output)
            if worst is None or dead > worst[0]:
                worst = dead, one
    if worst is None or worst[0] <= share:
        return None
    dead, one = worst
    return Finding(
        f"{dead:.0%} of the units of {one.module or 'a ReLU'} give nothing for any sample of the batch.",
        severity="critical" if dead == 1.0 else "warning",
        layers=(one.module,) if one.module else (),
        evidence={"dead": dead, "threshold": share},
        confidence=0.93 if dead == 1.0 else 0.8,
    )


@check(
    "saturated-units-at-start",
    cause="poor-initialisation",
    depth=2,
    reads="outputs of sigmoid and tanh on the batches",
    source="Glorot and Bengio 2010; DeepDiagnosis (Wardat et al. 2022) counts pre-activations outside ±5",
    remedy="Scale the inputs to about 1, and initialise by fan-in (xavier_normal_).",
)
def saturated_units_at_start(evidence: Evidence, *, share: float = 0.85) -> Finding | None:
    """More than `share` of what a hidden sigmoid or tanh gives lies within a hundredth of its ends."""
    for one in evidence.hidden:
        if one.kind not in ("tanh", "sigmoid") or one.output.numel() < 32:
            continue
        out = one.output.double()
        ends = ((out.abs() > 0.99) if one.kind == "tanh" else ((out < 0.01) | (out > 0.99))).double().mean()
        if float(ends) > share:
            return Finding(
                f"{float(ends):.0%} of what {one.module or one.kind} gives lies at the ends of its range.",
                layers=(one.module,) if one.module else (),
                evidence={"saturated": float(ends), "threshold": share},
                confidence=0.7,
            )
    return None


def _spread(tensor: Tensor | None) -> float:
    """Root mean square, over features, of the standard deviation over samples."""
    if tensor is None or tensor.dim() < 2 or tensor.shape[0] < 4 or not tensor.is_floating_point():
        return math.nan
    flat = tensor.detach().reshape(tensor.shape[0], -1)[:, :4096].double()
    return float(flat.std(0).square().mean().sqrt())


@check(
    "signal-dies-out",
    cause="poor-initialisation",
    depth=2,
    reads="how what goes into each layer differs from sample to sample",
    source="He et al. 2015, section 2.2: a product of many factors below 1",
    remedy="Initialise by fan-in: kaiming_normal_ for ReLU, xavier_normal_ for tanh; or normalise between layers.",
)
def signal_dies_out(
    evidence: Evidence, *, share: float = 0.001, least_layers: int = 4, most_dead: float = 0.75
) -> Finding | None:
    """What goes into the last layer differs between samples by less than `share` of what goes into the first.

    Of models with `least_layers` layers or more, without sigmoids between, whose outputs are alike by nature, and
    without a ReLU that has more than `most_dead` of its units dead, which is told by itself.
    """
    layers = [layer for layer in evidence.layers if layer.input is not None]
    if len(layers) < least_layers or any(one.kind == "sigmoid" for one in evidence.hidden):
        return None
    at_first, at_last = _spread(layers[0].input), _spread(layers[-1].input)
    if not at_first > 0 or not at_last < share * at_first:
        return None
    dead = max((_share_of_dead(one.output) for one in evidence.hidden if one.kind in ("relu", "relu6")), default=0.0)
    if dead > most_dead:
        return None  # told by itself
    return Finding(
        f"Samples differ by {at_first:.2g} where they enter the model, and by {at_last:.2g} where they enter its last "
        "layer: every sample's output is nearly the same.",
        layers=(layers[-1].name,),
        evidence={"at_first": at_first, "at_last": at_last, "threshold": share},
        confidence=0.85,
    )


def _flow(evidence: Evidence, passes: list[TrialPass]) -> tuple[str, str, float, float] | None:
    """First and last layer's weight, and the root mean squares of their gradients; of what is not zero at both."""
    names = _weights(evidence)
    norms = {}
    for name in names:
        gradients = [p.gradients.get(name) for p in passes]
        found = [float(g.double().square().mean().sqrt()) for g in gradients if g is not None and g.numel()]
        if found:
            norms[name] = max(found)
    if len(norms) < 3 or not all(map(math.isfinite, norms.values())):
        return None
    first, last = next(iter(norms)), list(norms)[-1]
    return first, last, norms[first], norms[last]


@check(
    "gradient-vanishes-at-start",
    cause="vanishing-gradients",
    depth=2,
    reads="gradients of the first and the last layer's weights",
    source="AUTOTRAINER (Zhang et al. 2021), β1 = 1e-3 and β2 = 1e-4",
    remedy="Use ReLU-like activations, normalisation, residual connections, or an initialisation that keeps variance.",
)
def gradient_vanishes_at_start(
    evidence: Evidence, *, ratio: float = 1e-3, largest: float = 1e-4, least_layers: int = 3
) -> Finding | None:
    """The first layer's gradient is below `ratio` of the last one's and below `largest`, of `least_layers` or more.

    At the start, and still after five steps: a last layer may begin at zero, or with units that are alike.
    """
    flow = _flow(evidence, evidence.passes)
    if not evidence.ran or flow is None or len(_weights(evidence)) < least_layers or not evidence.in_optimizer:
        return None
    for looked_at in (evidence.passes, None):
        flow = _flow(evidence, [evidence.later] if looked_at is None else looked_at)
        if flow is None or not flow[3] or flow[2] >= ratio * flow[3] or flow[2] >= largest:
            return None
    first, last, at_first, at_last = flow
    return Finding(
        f"The gradient of {first} is {at_first / at_last:.2g} of that of {last}: hardly any arrives.",
        layers=(first,),
        evidence={"first": at_first, "last": at_last, "ratio": at_first / at_last, "threshold": ratio},
        confidence=0.9,
    )


@check(
    "gradient-explodes-at-start",
    cause="exploding-gradients",
    depth=2,
    severity="critical",
    reads="gradients of the first and the last layer's weights; the size of each layer's output",
    source="AUTOTRAINER (Zhang et al. 2021), β3 = 70",
    remedy="Use tanh or ReLU instead of what grows faster, an initialisation by fan-in, normalisation, and clipping.",
)
def gradient_explodes_at_start(
    evidence: Evidence, *, ratio: float = 70.0, smallest: float = 10.0, growth: float = 1e4
) -> Finding | None:
    """The first layer's gradient is above `ratio` times the last one's and above `smallest`.

    Or outputs grow from layer to layer, to `growth` times what went in, or beyond what a number can be.
    """
    flow = _flow(evidence, evidence.passes)
    outs = [
        (layer.name, float(layer.output.detach().abs().max()))
        for layer in evidence.layers
        if layer.output is not None and layer.output.numel() and layer.output.is_floating_point()
    ]
    given = evidence.layers[0].input if evidence.layers else None
    at_input = float(given.detach().abs().max()) if given is not None and given.numel() else math.nan
    if not math.isfinite(at_input):
        return None
    largest = max((size for _, size in outs if math.isfinite(size)), default=0.0)
    grew = largest > growth * max(at_input, 1.0) or any(not math.isfinite(size) for _, size in outs)
    if grew and len(outs) > 1:
        where = max(outs, key=lambda one: one[1] if math.isfinite(one[1]) else math.inf)[0]
        return Finding(
            f"Outputs grow from layer to layer: {at_input:.3g} goes in, and {largest:.3g} or more comes out of "
            f"{where}.",
            severity="critical",
            layers=(where,),
            evidence={"input": at_input, "largest": largest, "threshold": growth},
            confidence=0.5 if any(p.dtype in _HALF for p in evidence.parameters.values()) else 0.9,
        )
    if flow is None or not evidence.ran or flow[2] <= ratio * flow[3] or flow[2] <= smallest:
        return None
    return Finding(
        f"The gradient of {flow[0]} is {flow[2] / max(flow[3], 1e-300):.3g} times that of {flow[1]}.",
        layers=(flow[0],),
        evidence={"first": flow[2], "last": flow[3], "threshold": ratio},
        confidence=0.8,
    )


@check(
    "non-finite-at-start",
    cause="singular-operation",
    depth=2,
    severity="critical",
    reads="the first function of torch whose result is not finite although its arguments are; dtypes",
    source="log 0, sqrt 0 (its derivative), 0/0, a softmax over nothing but -inf; float16 ends at 65504",
    remedy="Keep the argument away from the point: clamp(min=eps), log_softmax instead of log(softmax), sqrt(x + eps).",
)
def non_finite_at_start(evidence: Evidence) -> Finding | None:
    """Loss or gradients of the first pass are NaN or Inf, although inputs, targets and weights are finite.

    A function with points where it is not defined was the first to make one, or a root or a norm of exactly zero was
    taken; or the model is in float16, and overflows.
    """
    first, gradients = evidence.first, evidence.first.gradients.values()
    given = (*evidence.inputs, *evidence.targets, *evidence.parameters.values())
    if first.error is not None or not all(bool(torch.isfinite(t).all()) for t in given if t.is_floating_point()):
        return None
    if evidence.ran and all(bool(torch.isfinite(g).all()) for g in gradients if g is not None):
        return None
    name, module = first.seen.origin or ("", "")
    dtypes = {p.dtype for p in evidence.parameters.values()}
    dtypes |= {layer.output.dtype for layer in evidence.layers if layer.output is not None}
    told: dict[str, str] = {"function": name}
    if name in BREAKERS or name in LOSSES:
        what, remedy = f"{name} is the first to give NaN or Inf, of arguments that are finite", ""
    elif not name and first.seen.zero_roots:
        name, module = first.seen.zero_roots[0]
        what, remedy = f"{name} is taken of exactly zero, where it has no derivative, and gradients are NaN or Inf", ""
        told["function"] = name
    elif torch.float16 in dtypes:
        what, told["cause"] = (
            "values leave the range of float16, and gradients are not finite",
            "half-precision-overflow",
        )
        remedy = "Use bfloat16, or keep that layer in float32; look why values are so large."
    else:
        return None
    return Finding(
        f"The loss is {first.loss:.3g}: {what}.",
        severity="critical",
        layers=(module,) if module else (),
        evidence=told,
        recommendation=remedy,
        confidence=0.9,
    )
