"""Optimizer settings, training and evaluation mode, dropout, normalisation, precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ....diagnosis.finding import Seen
from ....diagnosis.rules.setup import odd_settings
from ..asking import check
from ..evidence import Evidence

TITLE = "Settings, modes and precision"
_DECOUPLED = ("AdamW", "Lion", "SGDW", "Adafactor", "Muon")
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


def _kind(evidence: Evidence) -> str:
    return type(evidence.bench.optimizer).__name__


def _number(group: dict[str, Any], key: str) -> float:
    try:
        return float(group.get(key, 0.0))
    except (TypeError, ValueError, RuntimeError):
        return 0.0


@check(
    "unusual-optimizer-settings",
    cause="wrong-optimizer-settings",
    like="odd-optimizer-settings",
    see="{optimizer} runs with unusual settings: {_odd}.",
    sure=0.88,
    reads="eps, betas and momentum of all groups",
    source='Kingma and Ba 2015; Choi et al. 2019, "On empirical comparisons of optimizers"',
)
def unusual_optimizer_settings(evidence: Evidence, *, eps: float = 0.01, momentum: float = 0.995) -> Seen | None:
    """eps is at least `eps`, momentum or beta1 above `momentum`, or beta2 below 0.5 or almost 1."""
    kind = _kind(evidence)
    odd = [text for group in evidence.groups for text in odd_settings({**group, "kind": kind}, eps, momentum)]
    return Seen(optimizer=kind, _odd=list(dict.fromkeys(odd))) if odd else None


@check(
    "heavy-weight-decay",
    cause="weight-decay-too-high",
    see="weight_decay is {weight_decay:g}{_how}.",
    sure=0.88,
    reads="weight_decay and lr of all groups",
    source="Loshchilov and Hutter 2019; usual are 1e-5 to 1e-2 as a part of the gradient, up to 0.3 for AdamW",
    remedy="Divide weight_decay by 10 or more, and leave biases and norms out of it.",
)
def heavy_weight_decay(evidence: Evidence, *, in_gradient: float = 0.05, per_step: float = 0.005) -> Seen | None:
    """Weight decay in the gradient is above `in_gradient`, or decoupled decay takes more than `per_step` each step."""
    for group in evidence.groups:
        decay, lr = _number(group, "weight_decay"), _number(group, "lr")
        is_decoupled = _kind(evidence) in _DECOUPLED or bool(group.get("decoupled_weight_decay"))
        shrinks = decay * max(lr, _number(group, "initial_lr"))
        if shrinks > per_step if is_decoupled else decay > in_gradient:
            how = f": each step takes {shrinks:.2g} off every weight" if is_decoupled else ", as a part of the gradient"
            return Seen(weight_decay=decay, lr=lr, is_decoupled=is_decoupled, _how=how)
    return None


def _modules(evidence: Evidence, kinds: tuple[type, ...]) -> dict[str, Any]:
    return {name: m for name, m in evidence.bench.model.named_modules() if isinstance(m, kinds)}


@check(
    "eval-mode-in-training",
    cause="normalisation-statistics",
    see="The model is in evaluation mode: {layers} {_what}.",
    reads="`training` of the model and of its BatchNorm and Dropout modules",
    source="torch.nn.Module.train: dropout and batch statistics are off in evaluation mode",
    remedy="Call model.train() before training; keep single modules in evaluation mode by a train() of your own.",
)
def eval_mode_in_training(evidence: Evidence) -> Seen | None:
    """The whole model is in evaluation mode, and it has BatchNorm or Dropout modules, which that changes."""
    norms = _modules(evidence, _BATCH_NORMS)
    changed = {**norms, **_modules(evidence, _DROPOUTS)}
    if evidence.bench.model.training or not changed or any(m.training for m in changed.values()):
        return None
    what = "use running statistics that nothing updates" if norms else "drop nothing"
    return Seen(layers=changed, num_modules=len(changed), warn=bool(norms), _what=what)


@check(
    "normalised-over-too-few",
    cause="normalisation-statistics",
    see="{layers} take mean and variance over {num_values} values.",
    reads="the number of values that each BatchNorm takes its statistics from",
    source='Wu and He 2018, "Group normalization": batch statistics of few samples are noise',
    remedy="Use larger batches, or GroupNorm or LayerNorm instead; drop_last=True for a last batch of 1.",
)
def normalised_over_too_few(evidence: Evidence, *, least_values: int = 4) -> Seen | None:
    """A BatchNorm in training mode takes mean and variance over fewer than `least_values` values."""
    found = {}
    for layer in evidence.first.seen.normalisations.values():
        x = layer.input
        if isinstance(layer.module, _BATCH_NORMS) and layer.module.training and x is not None and x.dim() >= 2:
            found[layer.name] = x.numel() // max(1, x.shape[1])
    found = {name: number for name, number in found.items() if number < least_values}
    return Seen(layers=found, num_values=next(iter(found.values())), threshold=least_values) if found else None


@check(
    "most-is-dropped",
    cause="dropout-too-high",
    like="dropout-high",
    see="{_worst} drops {share:.0%}.",
    sure=0.9,
    reads="the probabilities of dropout modules, and of calls of torch.nn.functional.dropout",
    source="Srivastava et al. 2014, section 7.3; UMLAUT warns above 0.5",
)
def most_is_dropped(evidence: Evidence, *, share: float = 0.65) -> Seen | None:
    """A dropout module, or a call of dropout in training mode, drops more than `share`."""
    given = {**evidence.first.seen.dropped, **{n: float(m.p) for n, m in _modules(evidence, _DROPOUTS).items()}}
    found = {name: p for name, p in given.items() if p > share}
    if not found:
        return None
    worst = max(found, key=lambda name: found[name])
    return Seen(layers=found, share=found[worst], threshold=share, _worst=worst)


@check(
    "half-precision-parameters",
    cause="half-precision-overflow",
    see="{num_half} trainable parameter tensors are float16.",
    sure=0.8,
    reads="dtypes of the trainable parameters; eps of the optimizer",
    source="Micikevicius et al. 2018, section 3.1: a float32 master copy of the weights",
    remedy="Keep parameters in float32 and use torch.autocast with a GradScaler, or bfloat16.",
)
def half_precision_parameters(evidence: Evidence) -> Seen | None:
    """Trainable parameters are float16: updates below 1/2000 of a weight are lost, and an eps of 1e-8 is 0."""
    found = [name for name, p in evidence.trainable.items() if p.dtype is torch.float16]
    return Seen(layers=found, num_half=len(found)) if found else None
