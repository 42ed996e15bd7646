"""Clipping each unit by the norm of its weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch

from ..records import values
from .policy import ClipPolicy
from .value import Rows, Shrunk, Tensors, dense


class AGC(ClipPolicy):
    """Clips the gradient of each unit (row, output channel) to a share of the norm of its weights.

    limit = clipping * max(|w|, eps); g <- g * limit / max(|g|, 1e-6) where |g| > limit; norms over all but the first
    dimension, and over all of a tensor with fewer than two

    Args:
        clipping: the share, > 0.
        eps: least norm of weights, > 0; without it a unit of zeros could never move.
        exclude: shell-style patterns of tensor names. Exclude the last layer, as the paper does.

    Raises:
        ValueError: `clipping` or `eps` is not > 0.

    Source: Brock et al. 2021, section 4.1, with the floor and the 1e-6 of timm.

    Cost: one more read of all gradients and of all weights, in about ten torch operations a tensor. No sync. The CPU
    writes only gradients above a limit, and names them in `StepStats.over`; a GPU writes all, and names none.
    """

    is_sound = True
    scope = "unit"
    trigger = None  # each unit has its own

    def __init__(self, clipping: float = 0.01, eps: float = 1e-3, *, exclude: Sequence[str] = ()) -> None:
        self.clipping = values.positive("clipping", clipping, "")
        self.eps = values.positive("eps", eps, "")
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)

    def shrink(self, names: Any, params: Tensors, gradients: Tensors, rows: Rows, scale: Any, is_off: Any) -> Shrunk:
        over, norms = [], []
        for i, (name, param, gradient) in enumerate(zip(names, params, gradients, strict=True)):
            is_excluded = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)
            if is_excluded or not gradient.numel():
                left = rows[i][0] if rows else torch.linalg.vector_norm(_unit_norms(dense(gradient, i))) / scale
                norms.append(left)
                continue
            view = dense(gradient, i)
            own = _unit_norms(view)
            limit = self.clipping * _unit_norms(param.detach()).clamp_min_(self.eps) * scale
            is_above = own > limit
            if is_off is not None:
                is_above &= ~is_off
            factor = torch.where(is_above, limit / torch.clamp(own, min=1e-6 * scale), 1.0)
            if rows is None or bool(is_above.any()):
                view.mul_(factor)
                over.append(i)
            left = torch.linalg.vector_norm(own * factor) / scale
            norms.append(left if rows is None else left.item())
        return ([] if rows is None else over), norms

    def __repr__(self) -> str:
        excluded = f", exclude={list(self.exclude)}" if self.exclude else ""
        return f"AGC({self.clipping:g}, eps={self.eps:g}{excluded})"


def _unit_norms(x: torch.Tensor) -> torch.Tensor:
    """Of each index of the first dimension, or of all of a tensor with fewer than two; other dimensions have size 1."""
    dims = tuple(range(1, x.dim())) if x.dim() > 1 else tuple(range(x.dim()))
    compute = torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32
    if x.is_complex():
        compute = compute.to_complex()
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=compute)
