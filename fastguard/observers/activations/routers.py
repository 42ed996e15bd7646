"""Routers of experts: finds them, and reads their choices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..tensors import Extract, is_dense, leaves, unreadable
from .collector import Collector, Seen
from .selection import ROUTER, Selector, Target, matcher

KIND = "[router]"
_MAX_TOKENS = 4096
_ROUTER_NAME = re.compile(r"router|switch|(^|_)gat(e|er|ing)$", re.I)
_EXPERTS_NAME = re.compile(r"expert|(^|_)(ffns|mlps)$", re.I)
_TOP_K = ("top_k", "topk", "k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k")


class Router(NamedTuple):
    """A module that chooses among experts."""

    num_experts: int | None  # number of experts; None: the width of the output
    top_k: int  # number of experts for each token, if the output does not hold their indices

    def find(self, args: Any, kwargs: Any, output: Any) -> Seen:
        """The "scores" [..., experts] in an output, and the "indices" [..., k] of the chosen experts, without dots."""
        tensors = [x for _, x in leaves(output) if x.ndim]
        floats = [x for x in tensors if x.is_floating_point() and self.num_experts in (None, x.shape[-1])]
        scores = [x for x in floats if x.shape[-1] > 1][:1]
        whole = [x for x in tensors if not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)]
        if scores:
            num, size = scores[0].shape[-1], scores[0].numel()
            whole = [x for x in whole if x.shape[-1] < num and x.numel() * num == size * x.shape[-1]]
        else:
            whole = [x for x in whole if x.shape[-1] <= (self.num_experts or 0)]
        return Seen([*(("scores", x) for x in scores), *(("indices", x) for x in whole[:1])])

    def extracts(self, scores: torch.Tensor | None = None, indices: torch.Tensor | None = None) -> Iterator[Extract]:
        """The experts of up to 4096 tokens, [tokens, experts] of 1.0 and 0.0, and entropy of the probabilities."""
        first = scores if scores is not None else indices
        if first is None or not first.numel():
            return
        num, entropy = self.num_experts or first.shape[-1], None
        with torch.no_grad():
            chosen = None if indices is None else _tokens(indices)
            if scores is not None:
                p = _tokens(scores).float()
                are_probabilities = (p >= 0.0).all() & ((p.sum(-1) - 1.0).abs() < 1e-2).all()
                p = torch.where(are_probabilities, p, p.softmax(-1))
                entropy = torch.special.entr(p).sum(-1) / math.log(num)
                chosen = p.topk(min(self.top_k, num)).indices if chosen is None else chosen
            experts = torch.arange(num, device=first.device)
            extract = Extract((chosen[..., None] == experts).any(1).float(), 1, entropy)  # type: ignore[index]
        yield extract

    def show(self, collector: Collector, name: str, seen: Iterable[tuple[str, torch.Tensor]], _: Any = None) -> None:
        found = dict(seen)
        scores = found.get("scores")
        problem = None if scores is None else unreadable(scores)
        odd = next((x for x in found.values() if not is_dense(x)), None)
        if odd is not None:
            problem = problem or f"a {type(odd).__name__}"
        if not found and self.num_experts is None:
            problem = "no scores of experts in the output"
        collector.see_extract(name, KIND, ROUTER, problem or self.extracts(**found))


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Up to 4096 tokens, [tokens, …], evenly spaced."""
    x = x.detach().flatten(0, -2) if x.dim() > 1 else x.detach()[None]
    return x[:: -(-len(x) // _MAX_TOKENS)]


def routers_of(
    named: Mapping[str, nn.Module], selector: Selector | None, fits: Callable[[Target], bool]
) -> list[tuple[Target, Router]]:
    """The routers among these modules: those that match `selector`, or with "default" those next to experts.

    Experts are a list of modules of one class, or a module named so with a tensor of three dimensions. A router is
    called router, gate or the like, or is the only linear layer next to them, and has an output for each expert.
    """
    if selector is None:
        return []
    if isinstance(selector, str) and selector == "default":
        return [pair for pair in _beside_experts(named) if fits(pair[0])]
    asked = matcher("routers", selector)
    chosen = [target for name, module in named.items() if name and asked(target := Target(module, name, ROUTER))]
    if not chosen:
        raise ValueError(f"`routers` must fit a module, got {selector!r}. Patterns are searched in the modules' names.")
    parents = [named.get(target.name.rpartition(".")[0], target.module) for target in chosen]
    return [(t, Router(None, _top_k(t.module, parent))) for t, parent in zip(chosen, parents)]


def _beside_experts(named: Mapping[str, nn.Module]) -> Iterator[tuple[Target, Router]]:
    for name, parent in named.items():
        parts = dict(parent.named_children())
        for key, experts in parts.items():
            for num in _num_experts(key, experts):
                others = {k: m for k, m in parts.items() if m is not experts and _num_choices(m) == num}
                routers = {k: m for k, m in others.items() if _ROUTER_NAME.search(k)}
                if not routers and _EXPERTS_NAME.search(key) and len(others) == 1:
                    routers = others
                for k, module in routers.items():
                    target = Target(module, f"{name}.{k}" if name else k, ROUTER)
                    yield target, Router(num, min(num, _top_k(module, parent)))


def _num_experts(key: str, module: nn.Module) -> set[int]:
    """Possible numbers of experts in a module; empty if it holds none."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        parts = list(module.children())
        alike = len({type(part) for part in parts}) == 1 and next(parts[0].parameters(), None) is not None
        return {len(parts)} if alike and len(parts) > 1 else set()
    if not _EXPERTS_NAME.search(key):
        return set()
    inside = [num for k, part in module.named_children() for num in _num_experts("experts", part)]
    return {num for num in (*inside, *(p.shape[0] for p in module.parameters() if p.ndim == 3)) if num > 1}


def _num_choices(module: nn.Module) -> int | None:
    """Number of outputs of a module for each token, by its parameters; None if they do not say."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    stated = getattr(module, "num_experts", None)
    if isinstance(stated, int):
        return stated
    weights = [p for p in module.parameters() if p.ndim == 2]
    return weights[-1].shape[0] if weights else None


def _top_k(*modules: nn.Module) -> int:
    stated = (getattr(module, name, None) for module in modules for name in _TOP_K)
    return next((k for k in stated if isinstance(k, int) and not isinstance(k, bool) and k > 0), 1)
