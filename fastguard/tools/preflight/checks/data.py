"""Inputs and targets: NaN and scale."""

from __future__ import annotations

import math

import torch

from ....diagnosis.finding import Seen
from ....observers.batch_sample import is_mask
from ..asking import check
from ..evidence import Evidence
from ..watcher import REGRESSION

TITLE = "Inputs and targets"
_MOST = 1 << 20  # elements of a tensor that are read


@check(
    "non-finite-inputs",
    cause="bad-batch",
    severity="critical",
    see="{num_nonfinite} of {num_elements} elements of the {_what} are NaN or Inf.",
    sure=0.98,
    remedy="Find the samples and drop or fill them; look for 0/0 in the normalisation of constant features.",
)
def non_finite_inputs(evidence: Evidence) -> Seen | None:
    """Inputs or targets contain NaN or Inf."""
    for what, tensors in (("inputs", evidence.inputs), ("targets", evidence.targets)):
        bad = sum(int((~torch.isfinite(t)).sum()) for t in tensors if t.is_floating_point() and not is_mask(t))
        if bad:
            return Seen(num_nonfinite=bad, num_elements=sum(t.numel() for t in tensors), _what=what)
    return None


@check(
    "inputs-out-of-scale",
    cause="unnormalised-inputs",
    like="input-scale",
    see="The input of the first layer has a root mean square of {rms:.3g} and values up to {largest:.3g}: {_how}.",
    source="LeCun et al. 1998, section 4.3; DeepDiagnosis and UMLAUT ask for [-1, 1]",
)
def inputs_out_of_scale(evidence: Evidence, *, largest_rms: float = 20.0, smallest_rms: float = 0.01) -> Seen | None:
    """The input of the first layer with weights has a root mean square above `largest_rms` or below `smallest_rms`.

    Or the standard deviation of a feature is above 1, and 300 times that of the median feature. Read behind embeddings
    and normalisation layers, which correct the scale.
    """
    given = evidence.layers[0].input if evidence.layers else None
    if given is None or not given.is_floating_point() or not given.numel() or given.shape[0] < 2:
        return None
    flat = given.detach().flatten(1) if given.dim() > 1 else given.detach()[:, None]
    rows = flat[: max(1, _MOST // flat.shape[1])].double()
    rms, largest, stds = float(rows.square().mean().sqrt()), float(rows.abs().max()), rows.std(0)
    varying = stds[stds > 0]
    relative = float(varying.max() / varying.median()) if varying.numel() > 1 and rows.shape[0] >= 8 else 1.0
    is_spread = relative > 300.0 and float(varying.max()) > 1.0
    if not rms or not math.isfinite(rms) or (smallest_rms <= rms <= largest_rms and not is_spread):
        return None
    sure = 0.85 if rms < 3 * largest_rms or is_spread else 0.92
    how = f"one feature varies {relative:.0f} times as much as the median one" if is_spread else "far from 1"
    return Seen(rms=rms, largest=largest, spread=relative, layers=[evidence.layers[0].name], sure=sure, _how=how)


@check(
    "targets-out-of-scale",
    cause="unnormalised-targets",
    like="target-scale",
    see="The targets have mean {mean:.3g} and standard deviation {std:.3g}; the model's first outputs are far {_size}.",
    sure=0.88,
    source="LeCun et al. 1998, section 4.5; the first steps of a regression learn mean and scale",
)
def targets_out_of_scale(evidence: Evidence, *, largest_rms: float = 20.0, smallest_rms: float = 0.003) -> Seen | None:
    """The root mean square of a regression's targets is above `largest_rms` or below `smallest_rms`.

    Or their mean is above 3, and more than 10 standard deviations from 0. Info if the trial steps at the given learning
    rate reach the loss of the best constant answer.
    """
    call, output = evidence.call, evidence.output
    if call is not None and call.kind not in REGRESSION:
        return None
    targets = [t for t in evidence.targets if t.is_floating_point() and t.numel()]
    if not targets or (call is None and output is None):
        return None
    t = torch.cat([one.reshape(-1).double() for one in targets])
    rms, std, mean = float(t.square().mean().sqrt()), float(t.std()) if t.numel() > 1 else 0.0, float(t.mean())
    at_start = 0.0 if output is None or not output.numel() else float(output.detach().double().square().mean().sqrt())
    scales_itself = at_start > 0.1 * rms > 0.1 * largest_rms
    is_usual = smallest_rms <= rms <= largest_rms and not (abs(mean) > 10.0 * std and abs(mean) > 3.0)
    if scales_itself or is_usual or not rms or not math.isfinite(rms) or not std:
        return None
    fit = evidence.fit
    gets_there = fit is not None and evidence.baseline is not None and fit.given.end < evidence.baseline
    size = "smaller" if rms > 1 else "larger"
    return Seen(mean=mean, std=std, rms=rms, warn=not gets_there, _size=size)
