"""The largest element of each parameter: whether it is finite, and whether it has grown as no optimizer has it grow."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

_GROWN, _LEAST = 16.0, 1e-2  # times what it was; below which size growing is learning


def largest(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The largest absolute value of each, float64 [N] on the device of the first; None where there is nothing to ask.

    Cost: one read of all of them, no sync.
    """
    asked = [t.detach() for t in tensors if (t.is_floating_point() or t.is_complex()) and t.itemsize > 1]
    asked = [t for t in asked if t.numel() and t.layout is torch.strided and not t.is_meta]
    if not asked:
        return None
    with torch.no_grad():
        found = torch._foreach_norm(asked, math.inf)
        return torch.stack([x.to(asked[0].device, torch.float64) for x in found])


def have_not_grown(now: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """Whether no largest element is sixteen times what it was; None where they are not those of the same tensors."""
    if now is None or before is None or now.shape != before.shape or now.device != before.device:
        return None
    return (now <= _GROWN * before.clamp(min=_LEAST)).all()
