"""Rules on experts and routers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

from ...records import TrainingHistory
from ...records.samples import ModuleActivity
from ..finding import Seen, Severity, listed
from ..registry import rule
from ..signals import is_felt_by_the_loss, signals_of

TITLE = "Units"

_SAYS_SO = re.compile(r"expert|branch|heads?$|moe", re.IGNORECASE)  # what the list of them is called
_NUMBER = re.compile(r"\.\d+(?=\.)")


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


@rule(
    "idle-experts",
    severity="critical",
    source="our own; expert collapse of Shazeer et al. 2017, section 4, and the load loss of Fedus et al. 2022",
    see="{num_idle} of {num_modules} modules side by side get no gradient: {_idle}.",
    sure=0.95,
    remedy="Balance the load by an auxiliary loss, noise on the router's logits, or a capacity for each expert.",
)
def idle_experts(history: TrainingHistory, *, samples: int = 5, min_steps: int = 40, share: float = 0.5) -> Seen | None:
    """Of modules side by side, some never got a gradient, or none for a hundred steps, after `min_steps` steps.

    Zeros in `samples` samples count as none. Info; a warning from a share `share` of them on if the loss has lost part
    of its gain; critical from 0.7 on. Modules are side by side if their names say so, or if an idle one is between two
    that are not.
    """
    tensors, frozen = history.tensors, {*history.model.without_gradient, *history.model.not_in_optimizer}
    if tensors.num_samples < samples or tensors.last_step < min_steps or not history.norm_max:
        return None
    names = [name for name in history.model.names or tensors if name not in frozen]
    if tensors.all_are("last_step", tensors.last_step) and tensors.hold(names) and tensors.all_are("zero_since", -1.0):
        return None
    found = []
    for modules in siblings(names):
        idle = [module for module, mine in modules.items() if all(_is_idle(history, n, samples) for n in mine)]
        if idle and len(idle) < len(modules) and _are_parallel(list(modules), idle):
            found.append((len(idle) / len(modules), idle, modules))
    if not found:
        return None
    lost, idle, modules = max(found, key=lambda one: one[0])
    return Seen(
        at=(history.recent[0].step if history.recent else None, tensors.last_step),
        severity=severity_of(lost, share, 0.7, history),
        layers=[name for module in idle for name in modules[module]],
        num_idle=len(idle),
        num_modules=len(modules),
        _idle=idle,
    )


def severity_of(lost: float, share: float, most: float, history: TrainingHistory) -> Severity:
    """Of a share of experts that are lost."""
    if lost >= most:
        return "critical"
    return "warning" if lost >= share and is_felt_by_the_loss(history) else "info"


def idle_branches(names: Iterable[str], absent: Collection[str]) -> set[str]:
    """Those of `absent` that belong to branches side by side, of which others are not absent."""
    found: set[str] = set()
    for modules in siblings(names):
        idle = [module for module, mine in modules.items() if all(name in absent for name in mine)]
        if idle and len(idle) < len(modules) and _are_parallel(list(modules), idle):
            found.update(name for module in idle for name in modules[module])
    return found


def _is_idle(history: TrainingHistory, name: str, samples: int) -> bool:
    """Whether a parameter never had a gradient, or none for a hundred steps, or only zeros at `samples` samples."""
    notes, tensors = history.model, history.tensors
    if notes.num_seen is not None and (name in notes.never_seen or name in notes.unseen_lately):
        return True
    if name not in tensors:
        return notes.num_seen is None
    track = tensors[name]
    if track.last_step != tensors.last_step:
        return notes.num_seen is None and tensors.last_step - track.last_step >= 20 * samples
    since = track.zero_since
    if since is None or track.num_zero < samples:
        return False
    return since == track.first_step or track.last_step - since >= 60 * samples  # chosen once, it may be so again


def _are_parallel(modules: list[str], idle: list[str]) -> bool:
    """Whether modules stand side by side, and not one behind the other."""
    if _SAYS_SO.search(modules[0].rpartition(".")[0].rpartition(".")[2]):
        return True
    places = [module not in idle for module in modules]
    first, last = places.index(True), len(places) - 1 - places[::-1].index(True)
    return not all(places[first : last + 1])


@rule(
    "unused-experts",
    of="idle-experts",
    severity="critical",
    see="{num_idle} of {num_modules} experts of {_name} had no token in {_num_batches} batches: {_experts}{_also}.",
    sure=0.95,
    remedy="Balance the load by an auxiliary loss, noise on the router's logits, or a bias for each expert.",
)
def unused_experts(history: TrainingHistory, *, batches: int = 4, min_tokens: float = 20.0) -> Seen | None:
    """No token went to some experts in at least `batches` sampled batches in a row.

    Info; a warning from a share 0.5 of a router's experts on if the loss has lost part of its gain; critical from 0.7
    on. Fires only if an expert would have had `min_tokens` tokens in an even spread.
    """
    found = []
    for name, window in signals_of(history).modules.get("router", ()):
        router = window.last.value
        due = router.stats.total_elements * sum(router.load or ()) / max(router.num_units, 1) ** 2 * router.num_batches
        if router.num_dead_units and router.num_batches >= batches and due >= min_tokens:
            found.append((router.num_dead_units / router.num_units, name, window))
    if not found:
        return None
    lost, name, window = max(found, key=lambda one: one[0])
    others = [other for _, other, _ in found if other != name]
    router = window.last.value
    return Seen(
        at=([point.step for point in window.recent][-router.num_batches :][0], history.activations.last_step),
        severity=severity_of(lost, 0.5, 0.7, history),
        num_idle=router.num_dead_units,
        num_modules=router.num_units,
        _num_batches=router.num_batches,
        _experts=list(router.dead_units),
        layers=[name, *others],
        _name=name,
        _also=f"; also at {listed(others)}" if others else "",
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
    see="{_share:.0%} of the tokens at {_name} go to expert {_expert} of {_num_experts}; {_used:.1f} are used{_also}.",
    remedy="Balance the load by an auxiliary loss or noise on the logits; lower the router's learning rate.",
)
def router_collapse(history: TrainingHistory, *, share: float = 0.1, samples: int = 3) -> Seen | None:
    """Nearly all tokens go to the same few experts, in `samples` samples in a row.

    exp(entropy of the load) experts are in use: at least the k that each token goes to, at most all n. Fires if at most
    a share `share` of the way from k to n is in use.
    """
    found = []
    for name, window in signals_of(history).modules.get("router", ()):
        newest = list(window.recent)[-samples:]
        way = max(_way(point.value) for point in newest)
        if len(newest) == samples and way <= share:
            found.append((way, name, newest))
    if not found:
        return None
    way, name, newest = min(found, key=lambda one: one[0])
    load, others = newest[-1].value.load or (), [other for _, other, _ in found if other != name]
    return Seen(
        at=(min(points[0].step for _, _, points in found), history.activations.last_step),
        ratio=way,
        _share=max(load),
        _expert=load.index(max(load)),
        _num_experts=len(load),
        _used=used_experts(load),
        layers=[name, *others],
        _name=name,
        _also=f"; also at {listed(others)}" if others else "",
    )


def _way(router: ModuleActivity) -> float:
    """How far from the fewest experts to all of them those in use reach; 1.0 where there is nothing to choose."""
    load = router.load or ()
    least = round(sum(load))
    tokens = router.stats.total_elements / max(len(load), 1)
    if not 0 < least < len(load) or tokens < 2 * len(load):
        return 1.0
    return max(0.0, used_experts(load) - least) / (len(load) - least)
