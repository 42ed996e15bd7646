"""The optimizer's settings, as they are written down."""

from __future__ import annotations

from typing import Any

from ...._text import listed
from ....diagnosis import Finding
from ....diagnosis.rules.setup import odd_settings
from ..evidence import Evidence
from ..registry import check

TITLE = "Optimizer settings"
_DECOUPLED = ("AdamW", "Lion", "SGDW", "Adafactor", "Muon")


def _of(evidence: Evidence) -> str:
    return type(evidence.bench.optimizer).__name__


def _number(group: dict[str, Any], key: str) -> float | None:
    value = group.get(key)
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


@check(
    "unusual-optimizer-settings",
    cause="wrong-optimizer-settings",
    reads="eps, betas and momentum of all groups",
    source='Kingma and Ba 2015; Choi et al. 2019, "On empirical comparisons of optimizers"',
    remedy="Begin with the optimizer's own defaults; change one setting at a time.",
)
def unusual_optimizer_settings(evidence: Evidence, *, eps: float = 0.01, momentum: float = 0.995) -> Finding | None:
    """eps from `eps` on, a momentum or beta1 above `momentum`, a beta2 below 0.5 or of nearly 1."""
    odd = [text for group in evidence.groups for text in odd_settings({**group, "kind": _of(evidence)}, eps, momentum)]
    if not odd:
        return None
    return Finding(
        f"{_of(evidence)} runs with unusual settings: {listed(list(dict.fromkeys(odd)))}.",
        evidence={"optimizer": _of(evidence)},
        confidence=0.88,
    )


@check(
    "heavy-weight-decay",
    cause="weight-decay-too-high",
    reads="weight_decay and lr of all groups",
    source="Loshchilov and Hutter 2019; usual are 1e-5 to 1e-2 where it is a part of the gradient, up to 0.3 of AdamW",
    remedy="Divide weight_decay by 10 or more, and leave biases and norms out of it.",
)
def heavy_weight_decay(evidence: Evidence, *, in_gradient: float = 0.05, per_step: float = 0.005) -> Finding | None:
    """Weight decay in the gradient is above `in_gradient`, or the decoupled takes more than `per_step` a step."""
    for group in evidence.groups:
        decay, lr = _number(group, "weight_decay") or 0.0, _number(group, "lr") or 0.0
        if not decay:
            continue
        is_decoupled = _of(evidence) in _DECOUPLED or bool(group.get("decoupled_weight_decay"))
        shrinks = decay * max(lr, float(group.get("initial_lr", 0.0)))
        if shrinks > per_step if is_decoupled else decay > in_gradient:
            return Finding(
                f"weight_decay is {decay:g}"
                + (
                    f": each step takes {shrinks:.2g} off every weight"
                    if is_decoupled
                    else ", as a part of the gradient"
                )
                + ".",
                evidence={"weight_decay": decay, "lr": lr, "is_decoupled": is_decoupled},
                confidence=0.88,
            )
    return None
