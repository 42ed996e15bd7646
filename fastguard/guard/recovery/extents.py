"""The largest element of each parameter: whether it is finite, and whether it has grown as no optimizer has it grow."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ... import kernels

_AT_ONCE = 1_000_000  # elements
_GROWN, _LEAST = 16.0, 1e-2  # times what it was; below which size growing is learning


def largest(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The largest absolute value of each, float64 [N] on the device of the first, NaN or Inf for one that holds such;
    None where there is nothing to ask.

    Cost: one read of all of them, no sync.
    """
    asked = _asked(tensors)
    if not asked:
        return None
    if all(t.device.type == "cpu" for t in asked):  # a sixth of what torch takes
        rows = kernels.tensor_stats(asked)
        sizes = [math.nan if row.num_nans else math.inf if row.num_infs else row.abs_max for row in rows]
        return torch.tensor(sizes, dtype=torch.float64)
    with torch.no_grad():
        found = torch._foreach_norm(asked, math.inf)
        return torch.stack([x.to(asked[0].device, torch.float64) for x in found])


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all elements are. Cost: one read, up to the first million that has others; on an accelerator a sync."""
    asked, group, count = _asked(tensors), [], 0
    for i, tensor in enumerate(asked, 1):
        group.append(tensor)
        count += tensor.numel()
        if (count >= _AT_ONCE and tensor.is_cpu) or i == len(asked):
            sizes = largest(group)
            if sizes is not None and not sizes.isfinite().all():
                return False
            group, count = [], 0
    return True


def have_not_grown(now: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """Whether no largest element is sixteen times what it was; None where they are not those of the same tensors."""
    if now is None or before is None or now.shape != before.shape or now.device != before.device:
        return None
    return (now <= _GROWN * before.clamp(min=_LEAST)).all()


def _asked(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    asked = [t.detach() for t in tensors if (t.is_floating_point() or t.is_complex()) and t.itemsize > 1]
    return [t for t in asked if t.numel() and t.layout is torch.strided and not t.is_meta]
