"""What the graph of a loss says of it: which operations made it, and whose parameters."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection
from typing import Any

import torch

MAX_NODES = 4096
NUM_OPS = 16
# Operations whose derivative is finite wherever they are. So is a quotient's where the divisor has no graph (one of
# zero would have made the loss infinite), and a power's from 1 on.
_NAMES = """
    AccumulateGrad Add Addmm Addmv Alias AsStrided Baddbmm Bmm Cat Clone Copy Expand Gather Index IndexSelect
    Linear Mm Mul Mv Neg Permute Repeat Roll Select Slice Split SplitWithSizes Squeeze Stack Sub T ToCopy
    Transpose Unbind UnsafeView Unsqueeze View ViewAs ReshapeAlias Mean Sum MaskedFill Where Embedding Relu
    LeakyRelu Elu Gelu Silu Mish Hardtanh Sigmoid Tanh Softplus LogSoftmax Softmax NllLoss NllLoss2D NllLossNd
    MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropyWithLogits Dropout NativeDropout NativeLayerNorm
    NativeBatchNorm NativeGroupNorm Convolution MaxPool2DWithIndices AvgPool2D AdaptiveAvgPool2D
    ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention
    ScaledDotProductAttentionMath
"""
_SMOOTH = frozenset(_NAMES.split())


def facts_of_loss(loss: Any, parameters: Collection[int] | None) -> dict[str, Any]:
    """The facts `loss_ops`, `is_smooth` and `num_foreign_parameters` of a loss; empty where it has no graph.

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
    nodes = _nodes(loss)
    foreign = _parameters(nodes).difference(parameters)
    is_smooth = len(nodes) < MAX_NODES and all(map(_is_smooth, nodes))
    return {"loss_ops": ops, "is_smooth": is_smooth, "num_foreign_parameters": len(foreign)}


def parameters_of_loss(loss: Any) -> set[int]:
    """Ids of the parameters in the graph of a loss. Cost: as of `facts_of_loss`."""
    return _parameters(_nodes(loss))


def _parameters(nodes: Collection[Any]) -> set[int]:
    leaves = (getattr(node, "variable", None) for node in nodes)
    return {id(leaf) for leaf in leaves if isinstance(leaf, torch.nn.Parameter)}


def _is_smooth(node: Any) -> bool:
    name = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
    if name == "Div":
        return len(node.next_functions) < 2 or node.next_functions[1][0] is None
    if name == "Pow":
        exponent = getattr(node, "_saved_exponent", None)
        return isinstance(exponent, (int, float)) and exponent >= 1
    return name in _SMOOTH


def _nodes(loss: Any) -> Collection[Any]:
    """The graph of a loss, as far as `MAX_NODES` nodes."""
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
        return ()
    seen = {loss.grad_fn: None}
    waiting = deque[Any]([loss.grad_fn])
    while waiting and len(seen) < MAX_NODES:
        node = waiting.popleft()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen[following] = None
                waiting.append(following)
    return seen


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
