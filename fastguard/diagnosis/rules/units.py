"""Rules on units that no longer answer to their input, from sampled activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...records import TrainingHistory
from ...records.samples import ModuleActivity
from ..finding import Finding, count, listed
from ..registry import rule
from ..signals import is_felt_by_the_loss, signals_of

TITLE = "Units"

_MANY_BATCHES = 4
_NEARLY_ALL = 0.95


def _lasting(
    history: TrainingHistory,
    families: Iterable[str],
    share: Callable[[ModuleActivity], float],
    limit: float,
    samples: int,
) -> list[tuple[str, float, int]]:
    """(module, least share, first step) of those above `limit` in the newest `samples` samples, worst first.

    One sample is enough if units were judged over four batches.
    """
    modules, found = signals_of(history).modules, []
    for name, window in (pair for family in families for pair in modules.get(family, ())):
        need = 1 if window.last.value.num_units and window.last.value.num_batches >= _MANY_BATCHES else samples
        newest = list(window.recent)[-need:]
        least = min(share(sample.value) for sample in newest)
        if len(newest) == need and least >= limit:
            began = newest[0].step
            for sample in reversed(window.recent):
                if share(sample.value) < limit:
                    break
                began = sample.step
            found.append((name, least, began))
    return sorted(found, key=lambda one: -one[1])


def _dead(module: ModuleActivity) -> float:
    ratio = module.stats.near_zero_ratio  # without units told apart, all or nothing
    return module.dead_unit_ratio if module.num_units else ratio if ratio >= 0.99 else 0.0


def _is_hurt(history: TrainingHistory) -> bool:
    """Whether the loss has come up from its best, or was never seen to fall; True where there is none."""
    trend = history.loss_trend
    gained = trend.first - trend.best
    return not gained > 0.1 * abs(trend.first) or trend.mean > trend.best + 0.25 * gained


def _also(found: list[tuple[str, float, int]]) -> str:
    return f"; also in {listed([name for name, _, _ in found[1:]])}." if len(found) > 1 else "."


def _finding(
    found: list[tuple[str, float, int]], history: TrainingHistory, what: str, limit: float, severe: float = 0.0
) -> Finding:
    is_severe = found[0][1] >= severe and (found[0][1] >= _NEARLY_ALL or _is_hurt(history))
    return Finding(
        what.format(100 * found[0][1], found[0][0]) + _also(found),
        min(step for _, _, step in found),
        history.activations.last_step,
        severity="warning" if is_severe else "info",
        layers=tuple(name for name, _, _ in found[:8]),
        evidence={"ratio": found[0][1], "num_modules": len(found), "threshold": limit},
        confidence=0.95 if found[0][1] > 0.8 else 0.8,
    )


@rule(
    "dead-units",
    was="dead-relu-units dead-smooth-units",
    reads="sampled activations of ReLUs, GELUs and SiLUs",
    source="SageMaker Debugger DeadRelu (a layer fires at 50 % dead units) and torchmortem (50 %)",
    remedy="A step or a bias pushed these units below zero for every input: lower the learning rate or add warm-up, "
    "look at the bias or normalisation before them, use LeakyReLU or GELU. Dead units do not come back by themselves.",
)
def dead_units(
    history: TrainingHistory, *, share: float = 0.5, severe: float = 0.75, samples: int = 2
) -> Finding | None:
    """At least a `share` of a module's units are (near) zero for every input, in `samples` samples in a row: info.

    A warning from `severe` on if the loss suffers, or from 95 % on: networks live with half of their units. A unit that
    is often zero is sparse, not dead. Where units were not told apart, the share of zeros must reach 0.99.
    """
    found = _lasting(history, ("relu", "gelu", "silu"), _dead, share, samples)
    return _finding(found, history, "{:.0f} % of the units of {} are dead", share, severe) if found else None


@rule(
    "saturated-units",
    reads="sampled activations of tanh, sigmoid and hardtanh",
    source="SageMaker Debugger SaturatedActivation (a layer fires at 50 %) and torchmortem (50 %)",
    remedy="The inputs of these units are so large that hardly any gradient passes: initialise the layer before them "
    "smaller, normalise its input or output, or lower the learning rate.",
)
def saturated_units(
    history: TrainingHistory, *, share: float = 0.5, severe: float = 0.75, samples: int = 2
) -> Finding | None:
    """At least a `share` of the output of a tanh, sigmoid or hardtanh is at its ends, in `samples` samples in a row.

    Info; a warning from `severe` on if the loss suffers, or from 95 % on.
    """

    def saturation(module: ModuleActivity) -> float:
        return max(module.stats.saturation_ratio, module.saturated_unit_ratio)

    found = _lasting(history, ("tanh", "sigmoid", "hardtanh"), saturation, share, samples)
    return _finding(found, history, "{:.0f} % of the output of {} is saturated", share, severe) if found else None


@rule(
    "attention-collapse",
    reads="sampled outputs of softmax modules, and attention weights of scaled_dot_product_attention",
    source="our own; entropy collapse of Zhai et al. 2023",
    remedy="Each query looks at one key only: lower the learning rate, normalise queries and keys, or scale the logits "
    "down.",
)
def attention_collapse(
    history: TrainingHistory, *, share: float = 0.9, entropy: float = 0.03, samples: int = 2
) -> Finding | None:
    """At least a `share` of a softmax's output is zero to within 1e-6, in `samples` samples in a row.

    A causal mask alone makes less than half of it zero. Of `scaled_dot_product_attention`: the mean entropy of a
    query's weights is at most `entropy` of what it could be, and the loss has not kept what it had gained, as a task
    may be solved by looking at one place.
    """
    found = _lasting(history, ("softmax",), lambda m: m.stats.near_zero_ratio, share, samples)
    if found:
        return _finding(found, history, "{:.0f} % of the weights of {} are zero", share)
    weights = ("attention_weights",)
    found = _lasting(
        history, weights, lambda m: 1.0 - (1.0 if m.entropy is None else m.entropy), 1.0 - entropy, samples
    )
    if not found or not is_felt_by_the_loss(history):
        return None
    return _finding(found, history, "The attention of {1} is {0:.0f} % certain: nearly each query has one key", entropy)


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
    found = _lasting(history, ("attention_weights",), lambda m: m.max_logit or 0.0, limit, samples)
    if not found:
        return None
    name, largest, _ = found[0]
    began = history.activations[name].first.value.max_logit
    grown = f", from {began:.3g} at first" if began is not None and began < 0.5 * largest else ""
    is_lost = largest > most and is_felt_by_the_loss(history)
    return Finding(
        f"Attention logits of {name} reach {largest:.3g}{grown}{_also(found)}",
        min(step for _, _, step in found),
        history.activations.last_step,
        severity="critical" if is_lost else "warning" if largest > severe else "info",
        layers=tuple(name for name, _, _ in found[:8]),
        evidence={"max_logit": largest, "num_modules": len(found), "threshold": limit},
        confidence=0.95 if largest > severe else 0.7,
    )


@rule(
    "dropout-high",
    reads="shares of the model's dropout modules",
    source="Srivastava et al. 2014, section 7.3: error is flat for a retained share of 0.4 to 0.8 and rises below",
    remedy="Hardly anything passes such a layer: 0.1 to 0.5 is usual. Is the share meant to be kept, not dropped?",
)
def dropout_high(history: TrainingHistory, *, share: float = 0.8) -> Finding | None:
    """A dropout module leaves out more than `share`."""
    high = {name: p for name, p in history.model.dropout.items() if p > share}
    if not high or not history.num_clean:
        return None
    names = sorted(high, key=lambda name: -high[name])
    return Finding(
        f"{count(len(high), 'dropout module')} {'leaves' if len(high) == 1 else 'leave'} out {high[names[0]]:.0%} of "
        f"the units: {listed(names)}.",
        layers=tuple(names[:8]),
        evidence={"dropout": high[names[0]], "num_modules": len(high), "threshold": share},
        confidence=0.9,
    )
