"""A rule on experts and other branches side by side, some of which are never chosen."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ...records import TrainingHistory
from ..finding import Finding, Severity, listed
from ..registry import rule
from ..signals import is_felt_by_the_loss

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
    reads="which parameters of modules that are alike get no gradient at any step, or only zeros at all sampled ones",
    source="our own; expert collapse of Shazeer et al. 2017, section 4, and the load loss of Fedus et al. 2022",
    remedy="The router never chooses these: add a loss that balances the load, noise to the router's logits, or a "
    "capacity; look at how the router begins. An expert that has never had a token learns nothing.",
)
def idle_experts(
    history: TrainingHistory, *, samples: int = 5, min_steps: int = 40, share: float = 0.5, most: float = 0.7
) -> Finding | None:
    """Of modules side by side, some never got a gradient, or none for a hundred steps; asked from `min_steps` steps on.

    Or only zeros in `samples` samples. No parameter of theirs did, while those of others did. Info; a warning from a
    `share` of them on where the loss has not kept what it had gained; critical where it is at least `most` of them.
    Side by side are those whose names say so, and those with an idle one between two that are not: what stands behind
    a dead layer in a row is no expert.
    """
    tensors, frozen = history.tensors, {*history.model.without_gradient, *history.model.not_in_optimizer}
    if tensors.num_samples < samples or tensors.last_step < min_steps or not history.norm_max:
        return None
    names = [*(history.model.names or tensors)]
    if frozen:
        names = [name for name in names if name not in frozen]
    are_all_here = tensors.all_are("last_step", tensors.last_step) and tensors.hold(names)
    if are_all_here and tensors.all_are("zero_since", -1.0):
        return None
    worst: tuple[float, list[str], list[str], list[str]] | None = None
    for modules in siblings(names):
        idle = [module for module, mine in modules.items() if all(_is_idle(history, n, samples) for n in mine)]
        if not idle or len(idle) == len(modules) or not _are_parallel(list(modules), idle):
            continue
        lost = len(idle) / len(modules)
        if worst is None or lost > worst[0]:
            worst = lost, idle, list(modules), [name for module in idle for name in modules[module]]
    if worst is None:
        return None
    lost, idle, modules_of, blamed = worst
    return Finding(
        f"{len(idle)} of {len(modules_of)} modules side by side get no gradient: {listed(idle)}.",
        history.recent[0].step if history.recent else None,
        tensors.last_step,
        severity=severity_of(lost, share, most, history),
        layers=tuple(blamed[:8]),
        evidence={"num_idle": len(idle), "num_modules": len(modules_of), "threshold_share": share},
        confidence=0.95,
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
