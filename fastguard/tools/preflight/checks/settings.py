"""The optimizer's settings, as they are written down."""

from __future__ import annotations

from typing import Any

from ....diagnosis import Finding
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
    reads="eps, betas, momentum, alpha of all groups",
    source='Kingma and Ba 2015; Choi et al. 2019, "On empirical comparisons of optimizers"',
    remedy="Begin with the optimizer's own defaults; change one setting at a time.",
)
def unusual_optimizer_settings(
    evidence: Evidence,
    *,
    largest_eps: float = 0.01,
    least_beta2: float = 0.5,
    largest_beta1: float = 0.995,
    largest_momentum: float = 0.995,
) -> Finding | None:
    """A setting is outside what is used.

    An eps above `largest_eps` (next to it gradients count for nothing; Adagrad's and Adadelta's are other things), a
    first beta above `largest_beta1` or above the second, a second below `least_beta2`, a momentum above
    `largest_momentum` or below 0.
    """
    for group in evidence.groups:
        eps, momentum = _number(group, "eps"), _number(group, "momentum")
        betas = group.get("betas")
        odd = ""
        if eps is not None and eps > largest_eps:
            odd = (
                f"eps is {eps:g}: where gradients are smaller, steps are smaller than the learning rate by their ratio"
            )
        elif isinstance(betas, (tuple, list)) and len(betas) >= 2:
            b1, b2 = float(betas[0]), float(betas[1])
            if b1 > largest_beta1:
                odd = f"the first beta is {b1:g}: a step is the mean of the last {1 / max(1 - b1, 1e-12):.0f} gradients"
            elif b2 < least_beta2 or (b1 > b2 and b2 < 0.9):
                odd = f"the betas are {b1:g} and {b2:g}: the second is to be the larger, near 0.999"
        if not odd and momentum is not None and not 0.0 <= momentum <= largest_momentum:
            odd = f"momentum is {momentum:g}: steps go on growing to {1 / max(1 - momentum, 1e-12):.0f} times"
        if odd:
            return Finding(f"Of {_of(evidence)} {odd}.", evidence={"optimizer": _of(evidence)}, confidence=0.88)
    return None


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


@check(
    "zero-learning-rate",
    cause="learning-rate-too-low",
    severity="critical",
    reads="lr of all groups",
    source="a step of length 0",
    remedy="Set a learning rate; with a warm-up make the scheduler before this check, so that it knows the rate meant.",
)
def zero_learning_rate(evidence: Evidence) -> Finding | None:
    """The learning rate of every group is 0 or below, and no scheduler has written down another one."""
    rates = [max(_number(g, "lr") or 0.0, float(g.get("initial_lr", 0.0))) for g in evidence.groups if "lr" in g]
    if not rates or max(rates) > 0.0:
        return None
    return Finding(f"The learning rate is {max(rates):g}.", severity="critical", confidence=0.97)
