"""Clipping each element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ..errors import UnsupportedTensorError
from ..kernels.reference import wide_dtype
from ..kernels.tensors import plain
from ..records import values
from .policy import ClipPolicy

Tensors: TypeAlias = Sequence[torch.Tensor]
Rows: TypeAlias = Sequence[tuple[float, float]] | None  # norm and largest |g| of each gradient, unscaled
Shrunk: TypeAlias = tuple[list[int], list[Any]]


class Value(ClipPolicy):
    """Clips each element of the gradients to [-max_value, max_value].

    Equivalent to: `torch.nn.utils.clip_grad_value_(parameters, max_value)`. NaN stays NaN, so the step is still
    skipped. Real and imaginary parts of complex gradients are clipped separately.

    Args:
        max_value: the largest |g|, > 0.

    Raises:
        ValueError: `max_value` is not > 0.

    Cost: the CPU reads and writes once more the gradients with a larger element. A GPU writes all gradients at each
    step and reads them once more for the remaining norm: four launches a tensor; no sync.

    >>> import torch, fastguard
    >>> p = torch.nn.Parameter(torch.zeros(3))
    >>> optimizer = fastguard.wrap(torch.optim.SGD([p], lr=1.0), clip=Value(1.0))
    >>> p.grad = torch.tensor([0.5, -3.0, 4.0])
    >>> optimizer.step()
    >>> p.tolist(), optimizer.guard.last.clipped_norm
    ([-0.5, 1.0, -1.0], 1.5)
    """

    is_sound = True
    scope = "element"

    def __init__(self, max_value: float) -> None:
        self.max_value = values.positive("max_value", max_value, "Leave it out for no clipping.")

    def shrink(self, names: Any, params: Tensors, gradients: Tensors, rows: Rows, scale: Any, is_off: Any) -> Shrunk:
        """Clips `gradients` in place; says which were, as far as the host knows, and the norm that each has then.

        There are no `rows` where the host must not wait. `scale` is what the gradients are multiplied by, a float or a
        tensor on their device; where `is_off`, a flag on the device, is true, nothing is done."""
        over, norms = [], []
        for i, gradient in enumerate(gradients):
            if rows is not None and not rows[i][1] > self.max_value:
                norms.append(rows[i][0])
                continue
            view = dense(gradient, i)
            view = torch.view_as_real(view) if view.is_complex() else view
            limit = self.max_value * scale
            if is_off is not None:
                limit = torch.where(is_off, math.inf, limit)
            if isinstance(limit, torch.Tensor):
                view.clamp_(min=(-limit).to(view.dtype), max=limit.to(view.dtype))
            else:
                view.clamp_(-limit, limit)
            left = torch.linalg.vector_norm(view, dtype=wide_dtype(view.device)) / scale
            norms.append(left if rows is None else left.item())
            over.append(i)
        return ([] if rows is None else over), norms

    @property
    def trigger(self) -> float:
        """What is told of it in the records."""
        return self.max_value

    def __repr__(self) -> str:
        return f"Value({self.max_value:g})"


def dense(gradient: torch.Tensor, index: int) -> torch.Tensor:
    """A dense gradient to write to; raises UnsupportedTensorError for any other."""
    if gradient.layout is not torch.strided:
        problem = f"must be dense for a clip policy of elements or units, got layout {gradient.layout}"
        raise UnsupportedTensorError(index, f"{problem}. Clip by norm instead")
    return plain(gradient.detach(), index, writable=True)
