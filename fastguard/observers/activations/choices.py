"""What attention chooses, read at sampled steps: the weights of some queries."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..facts import kind_of
from ..tensors import Extract, is_dense, unreadable
from .collector import TOKEN, Collector, Hook, nothing
from .selection import ATTENTION_WEIGHTS, Target, is_never_caller

ATTENTION_KIND = "[attention]"
_NAME = "scaled_dot_product_attention"
_MAX_SEQUENCES, _MAX_HEADS, _MAX_QUERIES = 2, 16, 16
# Elements of a part: little memory on a CPU, few launches elsewhere.
_PART_CPU, _PART_DEVICE = 1 << 15, 1 << 23
_MASKED = -9e3  # added to masked logits: -Inf, the least of a dtype, -1e9, -1e4

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
