"""What attention and routers choose, read at sampled steps: weights of some queries, experts of some tokens."""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..facts import kind_of
from ..tensors import Extract, is_dense, leaves, unreadable
from .collector import TOKEN, Collector, Hook, Seen, nothing
from .selection import ATTENTION_WEIGHTS, ROUTER, Selector, Target, is_never_caller, matcher

ATTENTION_KIND = "[attention]"
_NAME = "scaled_dot_product_attention"
_MAX_SEQUENCES, _MAX_HEADS, _MAX_QUERIES = 2, 16, 16
# Elements of a part: little memory on a CPU, few launches elsewhere.
_PART_CPU, _PART_DEVICE = 1 << 15, 1 << 23
_MASKED = -9e3  # added to masked logits: -Inf, the least of a dtype, -1e9, -1e4
ROUTER_KIND = "[router]"
_MAX_TOKENS = 4096
_ROUTER_NAME = re.compile(r"router|switch|(^|_)gat(e|er|ing)$", re.I)
_EXPERTS_NAME = re.compile(r"expert|(^|_)(ffns|mlps)$", re.I)
_TOP_K = ("top_k", "topk", "k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k")

_Site = tuple[ModuleType, str]

_lock = threading.Lock()
_watches: list[AttentionWatch] = []
_replaced: dict[_Site, tuple[Any, Any]] = {}  # the original function, and its replacement


class AttentionWatch:
    """Sees the arguments with which the modules of one model call the function, while it is on."""

    def __init__(self, collector: Collector, named: Mapping[str, nn.Module], fits: Callable[[Target], bool]) -> None:
        self._collector = collector
        targets = [Target(module, name or kind_of(module), ATTENTION_WEIGHTS) for name, module in named.items()]
        self._names = {id(target.module): target.name if fits(target) else None for target in targets}
        self._within: list[int] = []  # ids of the modules that are being called, the innermost last
        self._sites = _sites(named)

    def hooks(self, modules: Iterable[nn.Module]) -> list[Hook]:
        """Hooks that keep track of which module is being called."""
        return [
            Hook(module, self._collector, nothing, functools.partial(move, id(module)), at_end=at_end)
            for module in modules
            for at_end, move in ((False, self._within.append), (True, self._leave))
            if not is_never_caller(module)
        ]

    def _leave(self, left: int) -> None:
        while self._within and self._within.pop() != left:
            pass  # one that raised

    def begin(self) -> None:
        self._within.clear()
        with _lock:
            _watches.append(self)
            for site in self._sites:
                if site not in _replaced:
                    before = getattr(*site)
                    _replaced[site] = before, _watching(before)
                    setattr(*site, _replaced[site][1])

    def end(self) -> None:
        """Stops. The last watch restores the functions, except those that something else has replaced since."""
        with _lock:
            if self not in _watches:
                return
            _watches.remove(self)
            for site, (before, now) in list(_replaced.items()) if not _watches else ():
                if getattr(*site, None) is now:
                    setattr(*site, before)
                    del _replaced[site]

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads one call. Raises nothing."""
        name = self._names.get(self._within[-1]) if self._within else None
        if name is not None and self._collector.is_wanted():
            self._collector.run(name + ATTENTION_KIND, self._see, name, args, kwargs)

    def _see(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._collector.see_extract(name, ATTENTION_KIND, ATTENTION_WEIGHTS, attention_extracts(*args, **kwargs))


def _sites(named: Mapping[str, nn.Module]) -> list[_Site]:
    """Modules that hold the function: torch's own, and those of the model's classes that imported it."""
    function = inspect.unwrap(getattr(nn.functional, _NAME))
    modules = {sys.modules.get(kind.__module__) for module in named.values() for kind in type(module).__mro__}
    found = [(m, key) for m in modules if m is not None for key, value in list(vars(m).items()) if value is function]
    return list(dict.fromkeys([(nn.functional, _NAME), *found]))


@functools.cache  # one for each function: compiled graphs have a guard on its identity
def _watching(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            for watch in list(_watches):
                watch.look(args, kwargs)
        elif torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            _show(*args, **kwargs)
        return function(*args, **kwargs)

    return scaled_dot_product_attention


class _Call(NamedTuple):
    """The arguments of the function."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _show(*args: Any, **kwargs: Any) -> None:
    """Adds the operator that reads the call to the graph that is being compiled."""
    q, k, _, mask, _, is_causal, scale, _ = _Call(*args, **kwargs)
    if is_dense(q) and is_dense(k) and (mask is None or is_dense(mask)):
        mask = None if mask is None else mask.detach()
        torch.ops.fastguard.attend(q.detach(), k.detach(), mask, is_causal, scale, TOKEN)


@torch.library.custom_op(
    "fastguard::attend",
    mutates_args={"token"},
    schema="(Tensor query, Tensor key, Tensor? mask, bool is_causal, float? scale, Tensor(a!) token) -> ()",
)
def _attend(*args: Any) -> None:
    query, key, mask, is_causal, scale, _ = args
    for watch in list(_watches):
        watch.look((query, key, None, mask, 0.0, is_causal, scale), {})


_attend.register_fake(lambda *args: None)


def attention_extracts(*args: Any, **kwargs: Any) -> Iterator[Extract] | str:
    """Weights and logits of one call, in parts; a text says why there are none.

    Of up to 16 queries of up to 16 heads of up to 2 sequences, evenly spaced. Masked keys have weight 0 and do not
    count towards the largest entropy. It computes in float32, draws no random numbers and does not sync. Cost: 2 ·
    queries · keys · width multiplications; on a CPU memory for the keys of a few heads.
    """
    query, key, _, mask, _, is_causal, scale, _ = _Call(*args, **kwargs)
    for x in (query, key):
        problem = unreadable(x) or (None if is_dense(x) else f"a {type(x).__name__}")
        if problem is not None:
            return problem
    if not (query.numel() and key.numel()):
        return "nothing to attend to"
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        mask = _four(mask.detach().broadcast_to((*query.shape[:-1], key.shape[-2])))
    return _parts(_four(query.detach()), _four(key.detach()), mask, is_causal, scale)


def _parts(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float
) -> Iterator[Extract]:
    rows, heads = _spread(q.shape[2], _MAX_QUERIES), _spread(q.shape[1], _MAX_HEADS)
    most = _PART_CPU if q.is_cpu else _PART_DEVICE
    size = max(1, most // (k.shape[2] * max(len(rows), k.shape[3])))
    for sequence in _spread(q.shape[0], _MAX_SEQUENCES):
        of_sequence = k[sequence * k.shape[0] // q.shape[0]]  # sequences and heads may share keys
        for some in (heads[i : i + size] for i in range(0, len(heads), size)):
            where = sequence, _slice(some), _slice(rows)
            with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                keys = torch.stack([of_sequence[head * len(of_sequence) // q.shape[1]] for head in some])
                logits = q[where].float() * scale @ keys.float().mT
                extract = _figures(logits, None if mask is None else mask[where], is_causal, rows)
            yield extract


def _slice(places: range) -> slice:
    return slice(places.start, places.stop, places.step)


def _figures(logits: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, places: range) -> Extract:
    allowed = torch.ones((), dtype=torch.bool, device=logits.device)
    if mask is not None:
        allowed = mask if mask.dtype is torch.bool else mask > _MASKED
        logits = logits if mask.dtype is torch.bool else logits + mask
    elif is_causal:
        rows = torch.arange(places.start, places.stop, places.step, device=logits.device)
        allowed = torch.arange(logits.shape[-1], device=logits.device) <= rows[:, None]
    logits = logits.masked_fill(~allowed, -torch.inf)
    count = allowed.expand(logits.shape).sum(-1)
    weights = logits.softmax(-1).masked_fill((count == 0)[..., None], 0.0)
    entropy = torch.special.entr(weights).sum(-1) / count.log()
    return Extract(weights, None, entropy.masked_fill(count < 2, torch.nan), logits.amax(-1))


def _four(x: torch.Tensor) -> torch.Tensor:
    """`x` as [sequences, heads, places, width]; of further leading dimensions, the first index."""
    while x.ndim > 4:
        x = x[0]
    return x[(None,) * (4 - x.ndim)]


def _spread(size: int, count: int) -> range:
    """Up to `count` indices of `size`, evenly spaced, the last among them."""
    step = -(-size // count)
    return range((size - 1) % step, size, step)


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
        collector.see_extract(name, ROUTER_KIND, ROUTER, problem or self.extracts(**found))


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
