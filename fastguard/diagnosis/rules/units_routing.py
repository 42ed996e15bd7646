"""Rules on what is chosen within a model: attention logits, and the experts of a router, from samples."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...records import TrainingHistory
from ...records.sampled import Point, Window
from ...records.samples import ModuleActivity
from ..finding import Finding, Severity, listed
from ..registry import rule
from ..signals import is_felt_by_the_loss, signals_of
from .units_experts import severity_of

TITLE = "Units"


def _newest(
    history: TrainingHistory, family: str, samples: int
) -> Iterator[tuple[str, Window[ModuleActivity], list[Point[ModuleActivity]]]]:
    """Name, window and newest samples of the modules of a family that have so many."""
    for name, window in signals_of(history).modules.get(family, ()):
        newest = list(window.recent)[-samples:]
        if len(newest) == samples:
            yield name, window, newest


def _also(names: list[str]) -> str:
    return f"; so also in {listed(names[1:])}." if len(names) > 1 else "."


@rule(
    "attention-logits-large",
    of="attention-collapse",
    severity="critical",
    source="Dehghani et al. 2023 (ViT-22B), section 2, and Wortsman et al. 2023, section 3.1: runs whose logits passed "
    "about 1e4 diverged; Kimi Team 2025, section 2.1: growth beyond 1000, held at 100",
    remedy="Normalise queries and keys (a LayerNorm or RMSNorm on each head), lower the learning rate of their "
    "projections, or cap the logits. The softmax of such logits looks at one key, and passes hardly any gradient.",
)
def attention_logits_large(
    history: TrainingHistory, *, limit: float = 100.0, severe: float = 1e3, most: float = 1e4, samples: int = 2
) -> Finding | None:
    """The largest attention logit of a module is above `limit` in `samples` samples in a row: info.

    A warning above `severe`; critical above `most` where the loss has not kept what it had gained.
    """
    found = []
    for name, window, newest in _newest(history, "attention_weights", samples):
        least = min(point.value.max_logit or 0.0 for point in newest)
        if least > limit:
            found.append((least, name, newest[0].step, window.first.value.max_logit))
    if not found:
        return None
    largest, name, _, began = max(found, key=lambda one: one[0])
    severity: Severity = "info" if largest <= severe else "warning"
    if largest > most and is_felt_by_the_loss(history):
        severity = "critical"
    grown = f", from {began:.3g} at first" if began is not None and began < 0.5 * largest else ""
    names = [name, *(other for _, other, _, _ in found if other != name)]
    return Finding(
        f"Attention logits of {name} reach {largest:.3g}{grown}{_also(names)}",
        min(step for _, _, step, _ in found),
        history.activations.last_step,
        severity=severity,
        layers=tuple(names[:8]),
        evidence={"max_logit": largest, "num_modules": len(found), "threshold": limit},
        confidence=0.95 if largest > severe else 0.7,
    )


@rule(
    "unused-experts",
    of="idle-experts",
    severity="critical",
    remedy="Balance the load: an auxiliary loss on it, noise on the router's logits, or a bias for each expert; look "
    "at how the router begins. An expert without tokens learns nothing.",
)
def unused_experts(
    history: TrainingHistory, *, batches: int = 4, min_tokens: float = 20.0, share: float = 0.5, most: float = 0.7
) -> Finding | None:
    """Experts to which no token went in at least `batches` sampled batches in a row: info.

    A warning from a `share` of a router's experts on where the loss has not kept what it had gained; critical from
    `most` on. Asked where an expert would have had `min_tokens` tokens in these, had they been spread evenly.
    """
    found = []
    for name, window, newest in _newest(history, "router", 1):
        router = newest[-1].value
        due = router.stats.total_elements * sum(router.load or ()) / max(router.num_units, 1) ** 2 * router.num_batches
        if router.num_dead_units and router.num_batches >= batches and due >= min_tokens:
            began = [point.step for point in window.recent][-router.num_batches :][0]
            found.append((router.num_dead_units / router.num_units, name, router, began))
    if not found:
        return None
    lost, name, router, began = max(found, key=lambda one: one[0])
    names = [name, *(other for _, other, _, _ in found if other != name)]
    return Finding(
        f"{router.num_dead_units} of {router.num_units} experts of {name} had no token in {router.num_batches} sampled "
        f"batches: {listed([str(i) for i in router.dead_units])}{_also(names)}",
        began,
        history.activations.last_step,
        severity=severity_of(lost, share, most, history),
        layers=tuple(names[:8]),
        evidence={"num_idle": router.num_dead_units, "num_modules": router.num_units, "threshold_share": share},
        confidence=0.95,
    )


def used_experts(load: tuple[float, ...]) -> float:
    """How many experts are in use: the exponential of the entropy of their shares of the load.

    >>> used_experts((0.5, 0.5, 0.5, 0.5)), used_experts((1.0, 0.0, 0.0, 0.0))
    (4.0, 1.0)
    """
    total = sum(load)
    return math.exp(-sum(x / total * math.log(x / total) for x in load if x)) if total else 0.0


@rule(
    "router-collapse",
    of="idle-experts",
    remedy="Nearly all tokens go the same way, so the other experts hardly train: balance the load by an auxiliary "
    "loss or a bias for each expert, lower the learning rate of the router, or add noise to its logits.",
)
def router_collapse(history: TrainingHistory, *, share: float = 0.1, samples: int = 3) -> Finding | None:
    """Nearly all tokens go to the same few experts, in `samples` samples in a row.

    In use are exp(entropy of the load) experts, at least the k to which each token goes, at most all n. It is told when
    not more than a `share` of the way from k to n is in use.
    """
    found = []
    for name, _, newest in _newest(history, "router", samples):
        ways = [_way(point.value) for point in newest]
        if max(ways) <= share:
            found.append((max(ways), name, newest))
    if not found:
        return None
    way, name, newest = min(found, key=lambda one: one[0])
    load = newest[-1].value.load or ()
    names = [name, *(other for _, other, _ in found if other != name)]
    return Finding(
        f"{max(load):.0%} of the tokens at {name} go to expert {load.index(max(load))} of {len(load)}; "
        f"{used_experts(load):.1f} are in use{_also(names)}",
        min(points[0].step for _, _, points in found),
        history.activations.last_step,
        layers=tuple(names[:8]),
        evidence={"ratio": way, "num_modules": len(found), "threshold": share},
        confidence=0.9,
    )


def _way(router: ModuleActivity) -> float:
    """How far from the fewest experts to all of them those in use reach; 1.0 where there is nothing to choose."""
    load = router.load or ()
    least = round(sum(load))
    tokens = router.stats.total_elements / max(len(load), 1)
    if not 0 < least < len(load) or tokens < 2 * len(load):
        return 1.0
    return max(0.0, used_experts(load) - least) / (len(load) - least)
