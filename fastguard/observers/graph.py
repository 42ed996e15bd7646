"""Walks the graph of autograd, and goes backward through parts of it without the engine."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from typing import Any

import torch

MAX_NODES = 4096
# What may leave rounding errors where a derivative is zero, or depends on all elements by statistics of a batch.
_INEXACT = re.compile("Fft|BatchNorm|GroupNorm|::")  # "::" is in names of CopySlices and of extensions


def nodes_of(top: Any) -> Collection[Any]:
    """A node, which may be None, and those below it, as far as `MAX_NODES` nodes. Cost: 1 us a node."""
    seen: dict[Any, None] = {} if top is None else {top: None}
    waiting = deque(seen)
    while waiting and len(seen) < MAX_NODES:
        new = [node for node, _ in waiting.popleft().next_functions if node is not None and node not in seen]
        seen.update(dict.fromkeys(new))
        waiting += dict.fromkeys(new)
    return seen


def gradient_at(top: Any, gradients: Mapping[int, torch.Tensor], wanted: Any) -> torch.Tensor | None:
    """The gradient of what the node `wanted` put out, from `gradients` of what the node `top` did, by place.

    Equivalent to: `torch.autograd.grad(y, GradientEdge(wanted, 0), gradient, retain_graph=True)`, where `top` made `y`.
    But it calls the nodes itself, so that no hooks of tensors and nodes run, and no `.grad` changes.

    Returns None if it is not known: a function of Python's is on the way, or a saved tensor with hooks (as of a
    checkpoint), or an operation whose derivative is not exactly zero where nothing depends; or nothing is on the way.

    Cost: 3 us a node, and a backward pass through those on the way.
    """
    nodes = nodes_of(top)
    leading, between = {wanted}, list[Any]()
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):  # in the order of the forward pass
        if any(child in leading for child, _ in node.next_functions):
            leading.add(node)
            between.append(node)
    if len(nodes) >= MAX_NODES or not all(map(_can_be_called, between)):
        return None
    arrived: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict, {top: dict(gradients)})
    for node in reversed(between):
        if node not in arrived:
            continue
        given = arrived.pop(node)
        made = node(*map(given.get, range(len(node._input_metadata))))
        for (child, place), part in zip(node.next_functions, made if isinstance(made, tuple) else (made,)):
            if part is not None and child in leading:
                about, before = child._input_metadata[place], arrived[child].get(place)
                part = part.sum_to_size(about.shape).to(about.dtype)  # as the engine does after a broadcast
                arrived[child][place] = part if before is None else before + part
    return arrived[wanted].get(0)


def _can_be_called(node: Any) -> bool:
    """Whether a node is torch's own, exact, and saved its tensors as they are."""
    if isinstance(node, torch._C._FunctionBase) or _INEXACT.search(node.name()):
        return False
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    each = [x for one in saved for x in (one if isinstance(one, (tuple, list)) else (one,))]
    return all(x is None or x.unpack_hook is None for x in each)
