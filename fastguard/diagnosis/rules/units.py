"""Rules on units that no longer answer to their input, from sampled activations."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from ...records import TrainingHistory
from ...records.samples import ModuleActivity
from ..finding import Seen, listed
from ..registry import rule
from ..signals import signals_of

TITLE = "Units"

_SAYS_SO = re.compile(r"expert|branch|heads?$|moe", re.IGNORECASE)  # what the list of them is called
_NUMBER = re.compile(r"\.\d+(?=\.)")
_MANY_BATCHES = 4
_NEARLY_ALL = 0.95
_Lasting = list[tuple[str, float, int]]  # module, least share, first step


def _lasting(
    history: TrainingHistory,
    families: tuple[str, ...],
    share: Callable[[ModuleActivity], float],
    limit: float,
    num: int,
) -> _Lasting:
    """The modules above `limit` in the newest `num` samples, worst first.

    One sample is enough if units were judged over four batches.
    """
    modules, found = signals_of(history).modules, []
    for name, window in (pair for family in families for pair in modules.get(family, ())):
        need = 1 if window.last.value.num_units and window.last.value.num_batches >= _MANY_BATCHES else num
        newest = list(window.recent)[-need:]
        least = min(share(sample.value) for sample in newest)
        if len(newest) == need and least >= limit:
            below = [i for i, sample in enumerate(window.recent) if share(sample.value) < limit]
            began = list(window.recent)[below[-1] + 1 if below else 0].step
            found.append((name, least, began))
    return sorted(found, key=lambda one: -one[1])


def _seen(found: _Lasting, history: TrainingHistory, limit: float, severe: float = 0.0, see: str = "") -> Seen | None:
    """What was found of modules; a warning from a share `severe` on if the loss suffers, or from 95% on."""
    if not found:
        return None
    (worst, ratio, _), others = found[0], [name for name, _, _ in found[1:]]
    trend = history.loss_trend
    gained = trend.first - trend.best
    is_hurt = not gained > 0.1 * abs(trend.first) or trend.mean > trend.best + 0.25 * gained
    return Seen(
        at=(min(step for _, _, step in found), history.activations.last_step),
        layers=[worst, *others],
        warn=ratio >= severe and (ratio >= _NEARLY_ALL or is_hurt),
        sure=0.95 if ratio > 0.8 else 0.8,
        see=see,
        ratio=ratio,
        num_modules=len(found),
        _worst=worst,
        _also=f"; also in {listed(others)}" if others else "",
    )


def _dead(module: ModuleActivity) -> float:
    ratio = module.stats.near_zero_ratio  # without units told apart, all or nothing
    return module.dead_unit_ratio if module.num_units else ratio if ratio >= 0.99 else 0.0


def _saturated(module: ModuleActivity) -> float:
    return max(module.stats.saturation_ratio, module.saturated_unit_ratio)


@rule(
    "dead-units",
    was="dead-relu-units dead-smooth-units",
    source="SageMaker Debugger DeadRelu (a layer fires at 50% dead units) and torchmortem (50%)",
    see="{ratio:.0%} of the units of {_worst} are dead{_also}.",
    remedy="Lower the learning rate, add warm-up, look at the bias before these units, or use LeakyReLU or GELU.",
)
def dead_units(history: TrainingHistory, *, share: float = 0.5, severe: float = 0.75, samples: int = 2) -> Seen | None:
    """At least a share `share` of a module's units are (near) zero for every input, in `samples` samples in a row.

    Info; a warning from `severe` on if the loss suffers, or from 95% on. If single units are unknown, the share of
    zeros must reach 0.99.
    """
    return _seen(_lasting(history, ("relu", "gelu", "silu"), _dead, share, samples), history, share, severe)


@rule(
    "saturated-units",
    source="SageMaker Debugger SaturatedActivation (a layer fires at 50%) and torchmortem (50%)",
    see="{ratio:.0%} of the output of {_worst} is saturated{_also}.",
    remedy="Initialise the layer before these units smaller, normalise, or lower the learning rate.",
)
def saturated_units(history: TrainingHistory, *, share: float = 0.5, severe: float = 0.75) -> Seen | None:
    """At least a `share` of the output of a tanh, sigmoid or hardtanh is at its ends, in 2 samples in a row.

    Info; a warning from `severe` on if the loss suffers, or from 95% on.
    """
    return _seen(_lasting(history, ("tanh", "sigmoid", "hardtanh"), _saturated, share, 2), history, share, severe)


@rule(
    "dropout-high",
    source="Srivastava et al. 2014, section 7.3: error is flat for a retained share of 0.4 to 0.8 and rises below",
    see="{num_modules:dropout module} with a dropout of {dropout:.0%} of the units: {layers}.",
    remedy="Use 0.1 to 0.5. Check whether the number was meant as the share to keep.",
)
def dropout_high(history: TrainingHistory, *, share: float = 0.8) -> Seen | None:
    """A dropout module leaves out more than `share`."""
    high = {name: p for name, p in history.model.dropout.items() if p > share}
    if not high or not history.num_clean:
        return None
    names = sorted(high, key=lambda name: -high[name])
    return Seen(layers=names, dropout=high[names[0]], num_modules=len(high))


def siblings(names: Iterable[str]) -> list[dict[str, list[str]]]:
    """Modules that differ in one number of their name and have the same parameters: names of these by module.

    >>> siblings(["experts.0.up.weight", "experts.1.up.weight", "head.weight"])
    [{'experts.0': ['experts.0.up.weight'], 'experts.1': ['experts.1.up.weight']}]
    """
    families: dict[str, dict[str, list[str]]] = {}
    for name in names:
        for found in _NUMBER.finditer("." + name):
            prefix, module = name[: max(found.start() - 1, 0)], name[: found.end() - 1]
            families.setdefault(prefix, {}).setdefault(module, []).append(name)
    alike = []
    for modules in families.values():
        inner = {frozenset(name.removeprefix(module) for name in mine) for module, mine in modules.items()}
        if len(modules) > 1 and len(inner) == 1:
            alike.append(modules)
    return alike


def idle_branches(names: Iterable[str], absent: Collection[str]) -> set[str]:
    """The names in `absent` that belong to parallel branches, where other branches are present."""
    found: set[str] = set()
    for modules in siblings(names):
        idle = [module for module, mine in modules.items() if all(name in absent for name in mine)]
        if idle and len(idle) < len(modules) and _are_parallel(list(modules), idle):
            found.update(name for module in idle for name in modules[module])
    return found


def _are_parallel(modules: list[str], idle: list[str]) -> bool:
    """Whether modules stand side by side, and not one behind the other."""
    if _SAYS_SO.search(modules[0].rpartition(".")[0].rpartition(".")[2]):
        return True
    places = [module not in idle for module in modules]
    first, last = places.index(True), len(places) - 1 - places[::-1].index(True)
    return not all(places[first : last + 1])
