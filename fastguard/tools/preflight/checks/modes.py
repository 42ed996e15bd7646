"""Training and evaluation mode, dropout, normalisation, precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...._text import listed
from ....diagnosis import Finding
from ..evidence import Evidence
from ..registry import check

TITLE = "Modes and precision"
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


def _named(evidence: Evidence, kinds: tuple[type, ...]) -> dict[str, Any]:
    return {name: m for name, m in evidence.bench.model.named_modules() if isinstance(m, kinds)}


@check(
    "eval-mode-in-training",
    cause="normalisation-statistics",
    reads="`training` of the model and of its BatchNorm and Dropout modules",
    source="torch.nn.Module.train: dropout and batch statistics are off in evaluation mode",
    remedy="Call model.train() before training; keep single modules in evaluation mode by a train() of your own.",
)
def eval_mode_in_training(evidence: Evidence) -> Finding | None:
    """The whole model is in evaluation mode, and it has BatchNorm or Dropout modules, which that changes."""
    changed = {**_named(evidence, _BATCH_NORMS), **_named(evidence, _DROPOUTS)}
    if evidence.bench.model.training or not changed or any(m.training for m in changed.values()):
        return None
    has_norm = bool(_named(evidence, _BATCH_NORMS))
    return Finding(
        f"The model is in evaluation mode: {listed(changed)} "
        f"{'use running statistics that nothing updates' if has_norm else 'drop nothing'}.",
        severity="warning" if has_norm else "info",
        layers=tuple(changed)[:8],
        evidence={"num_modules": len(changed)},
        confidence=0.85,
    )


@check(
    "normalised-over-too-few",
    cause="normalisation-statistics",
    reads="how many values each BatchNorm takes its statistics of",
    source='Wu and He 2018, "Group normalization": batch statistics of few samples are noise',
    remedy="Use larger batches, or GroupNorm or LayerNorm instead; drop_last=True for a last batch of 1.",
)
def normalised_over_too_few(evidence: Evidence, *, least_values: int = 4) -> Finding | None:
    """A BatchNorm in training mode takes mean and variance of fewer than `least_values` values."""
    found = []
    for layer in evidence.first.seen.normalisations.values():
        x = layer.input
        if isinstance(layer.module, _BATCH_NORMS) and layer.module.training and x is not None and x.dim() >= 2:
            values = x.numel() // max(1, x.shape[1])
            if values < least_values:
                found.append((layer.name, values))
    if not found:
        return None
    return Finding(
        f"{listed([name for name, _ in found])} take mean and variance of {found[0][1]} values.",
        layers=tuple(name for name, _ in found)[:8],
        evidence={"num_values": found[0][1], "threshold": least_values},
        confidence=0.85,
    )


@check(
    "most-is-dropped",
    cause="dropout-too-high",
    reads="shares of the dropout modules, and of calls of torch.nn.functional.dropout",
    source="Srivastava et al. 2014, section 7.3; UMLAUT warns above 0.5",
    remedy="0.1 to 0.5 is usual. Is the share meant to be kept, not dropped?",
)
def most_is_dropped(evidence: Evidence, *, share: float = 0.65) -> Finding | None:
    """A dropout module, or a call of dropout in training mode, leaves out more than `share`."""
    given = {**evidence.first.seen.dropped, **{n: float(m.p) for n, m in _named(evidence, _DROPOUTS).items()}}
    found = {name: p for name, p in given.items() if p > share}
    if not found:
        return None
    worst = max(found, key=lambda name: found[name])
    return Finding(
        f"{worst} leaves out {found[worst]:.0%}.",
        layers=tuple(found)[:8],
        evidence={"share": found[worst], "threshold": share},
        confidence=0.9,
    )


@check(
    "half-precision-parameters",
    cause="half-precision-overflow",
    reads="dtypes of the trainable parameters; eps of the optimizer",
    source="Micikevicius et al. 2018, section 3.1: a float32 master copy of the weights",
    remedy="Keep parameters in float32 and use torch.autocast with a GradScaler, or bfloat16.",
)
def half_precision_parameters(evidence: Evidence) -> Finding | None:
    """Trainable parameters are float16: updates below 1/2000 of a weight are lost, and an eps of 1e-8 is 0."""
    found = [name for name, p in evidence.trainable.items() if p.dtype is torch.float16]
    if not found:
        return None
    return Finding(
        f"{len(found)} trainable parameter tensors are float16.",
        layers=tuple(found[:8]),
        evidence={"num_half": len(found)},
        confidence=0.8,
    )
