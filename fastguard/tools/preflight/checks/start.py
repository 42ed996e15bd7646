"""How signals and gradients pass through the model as it was initialised."""

from __future__ import annotations

import math
from typing import Any

import torch

from ....diagnosis.finding import Seen, Severity
from ...initialization import check_initialization
from ..asking import check
from ..evidence import Evidence
from ..watcher import BREAKERS, LOSSES, is_finite

TITLE = "Initialisation and gradient flow"
_HE = "He et al. 2015, Glorot and Bengio 2010; the expectations of `fastguard.tools.check_initialization`"


def _weights(evidence: Evidence) -> list[str]:
    """Weights of the layers that were called, in that order, as the model names them."""
    names = {id(p): name for name, p in evidence.parameters.items()}
    found = []
    for layer in evidence.layers:
        for own, p in layer.module.named_parameters(recurse=False):
            if p.dim() >= 2 and p.requires_grad and id(p) in names and not own.startswith("weight_hh"):
                found.append(names[id(p)])
    return list(dict.fromkeys(found))


@check(
    "weights-out-of-scale",
    cause="poor-initialisation",
    like="poor-initialisation",
    depth=1,
    see="{num_off} of {num_layers} layers begin with weights out of scale: {layers}. The weights of {_worst} have "
    "{ratio:.2g} times the expected standard deviation of {_std:.2g}.",
    sure=0.93,
    source=_HE,
)
def weights_out_of_scale(evidence: Evidence, *, least_layers: int = 1) -> Seen | None:
    """At least `least_layers` layers have weights below 0.1 or above 10 times their expected standard deviation.

    The last layer may begin with anything up to ten times, also with zeros. A layer of zeros among sound ones is the
    end of a residual branch.
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
        if layer.status != "ok" and not (name == last and layer.status == "too_small")
    }
    parameters = evidence.parameters
    is_zero = [name for name in bad if name in parameters and not bool(parameters[name].detach().any())]
    if len(is_zero) <= len(result.layers) // 2:
        bad = {name: layer for name, layer in bad.items() if name not in is_zero or name == names[0]}
    if len(bad) < least_layers:
        return None
    worst = max(bad, key=lambda name: abs(math.log(max(bad[name].ratio, 1e-12))))
    counts: dict[str, Any] = {"num_off": len(bad), "num_layers": len(result.layers), "ratio": bad[worst].ratio}
    return Seen(layers=bad, _worst=worst, _std=bad[worst].expected_std, **counts)


@check(
    "dead-units-at-start",
    cause="dead-units",
    depth=2,
    severity="critical",
    see="{dead:.0%} of the units of {_where} return nothing for any sample of the batch.",
    source="AUTOTRAINER (Zhang et al. 2021), dying ReLU: a share of 0.7; Lu et al. 2019 on deep narrow nets",
    remedy="Use fewer or wider layers, LeakyReLU or normalisation, and look for biases far below zero.",
)
def dead_units_at_start(evidence: Evidence, *, share: float = 0.75, least_samples: int = 8) -> Seen | None:
    """More than `share` of a ReLU's units return 0 for each of at least `least_samples` samples, before any step."""
    activities = evidence.first.seen.activities
    dead, where = 0.0, ""
    for one in activities if evidence.output_made_by is None else activities[:-1]:  # without that of the output
        x = one.output
        if one.kind in ("relu", "relu6") and x.dim() >= 2 and len(x) >= max(2, least_samples):
            dim = 1 if x.dim() >= 4 else x.dim() - 1  # of units: the channels of images
            found = float((x <= 0).transpose(dim, -1).flatten(0, -2).all(0).double().mean())
            dead, where = max((dead, where), (found, one.module), key=lambda pair: pair[0])
    if dead <= share:
        return None
    sure = 0.93 if dead == 1.0 else 0.8
    severity: Severity = "critical" if dead == 1.0 else "warning"
    return Seen(dead=dead, severity=severity, sure=sure, layers=filter(None, [where]), _where=where or "a ReLU")


@check(
    "non-finite-at-start",
    cause="singular-operation",
    depth=2,
    severity="critical",
    see="The loss is {_loss:.3g}: {_what}.",
    sure=0.9,
    source="log 0, sqrt 0 (its derivative), 0/0, a softmax over nothing but -inf; float16 ends at 65504",
    remedy="Keep the argument away from the point: clamp(min=eps), log_softmax instead of log(softmax), sqrt(x + eps).",
)
def non_finite_at_start(evidence: Evidence) -> Seen | None:
    """Loss or gradients of the first pass are NaN or Inf, although inputs, targets and weights are finite.

    The first NaN or Inf came from a function that is not defined everywhere, from a root or norm of exactly zero, or
    from an overflow in float16.
    """
    first, seen = evidence.first, evidence.first.seen
    given = [*evidence.inputs, *evidence.targets, *evidence.parameters.values()]
    if first.error is not None or not is_finite(given) or (evidence.ran and is_finite([*first.gradients.values()])):
        return None
    name, module = seen.origin or ("", "")
    more: dict[str, Any] = {}
    if name in BREAKERS or name in LOSSES:
        what = f"{name} is the first to return NaN or Inf for finite arguments"
    elif not name and seen.zero_roots:
        name, module = seen.zero_roots[0]
        what = f"{name} is taken of exactly zero, where it has no derivative, so gradients are NaN or Inf"
    elif torch.float16 in seen.dtypes.union(p.dtype for p in evidence.parameters.values()):
        what = "values leave the range of float16, and gradients are not finite"
        remedy = "Use bfloat16, or keep that layer in float32; look why values are so large."
        more = {"cause": "half-precision-overflow", "do": remedy}
    else:
        return None
    return Seen(layers=filter(None, [module]), function=name, _loss=first.loss, _what=what, **more)
