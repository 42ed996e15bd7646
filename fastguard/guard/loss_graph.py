"""What the graph of a loss says of it: which operations made it, and whose parameters."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection
from typing import Any

import torch

MAX_NODES = 4096
NUM_OPS = 16


def facts_of_loss(loss: Any, parameters: Collection[int] | None) -> dict[str, Any]:
    """The facts `loss_ops` and `num_foreign_parameters` of a loss; empty where it is no tensor with a graph.

    Args:
        loss: what was observed. Backward may have freed what the graph saved; the graph itself is still there.
        parameters: ids of the model's, and of those under guard; None where there is no model to tell them by.

    Cost: 1 us a node, of at most 4096. No sync.
    """
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
        return {}
    ops = _chain(loss.grad_fn)
    if parameters is None:
        return {"loss_ops": ops}
    return {"loss_ops": ops, "num_foreign_parameters": len(parameters_of_loss(loss).difference(parameters))}


def parameters_of_loss(loss: Any) -> set[int]:
    """Ids of the parameters in the graph of a loss. Cost: as of `facts_of_loss`."""
    found: set[int] = set()
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
        return found
    seen = {loss.grad_fn}
    waiting = deque[Any]([loss.grad_fn])
    while waiting and len(seen) < MAX_NODES:
        node = waiting.popleft()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            found.add(id(leaf))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def _chain(node: Any) -> tuple[str, ...]:
    """Names of the nodes from the loss down, along the first argument that has a graph."""
    names = []
    for _ in itertools.repeat(None, NUM_OPS):
        names.append(node.name().rpartition("::")[2])
        following = [function for function, _ in node.next_functions if function is not None]
        following = [function for function in following if not function.name().endswith("AccumulateGrad")]
        if not following:
            break
        node = following[0]
    return tuple(names)
