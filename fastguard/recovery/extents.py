"""The largest element of each parameter: whether it is finite, and whether it has grown more than training grows it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from .. import kernels
from ..ranks.shards import locals_of

_GROWN, _LEAST = 16.0, 1e-2  # times the earlier size; below this size growth is learning


def largest(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The largest absolute value of each tensor or local part; NaN or Inf if it holds some; None without tensors.

    Returns float64 [N] on the device of the first tensor. Cost: one read, no sync.
    """
    asked = [*_asked(tensors)]
    if not asked:
        return None
    if all(t.device.type == "cpu" for t in asked):  # a sixth of what torch takes
        rows = kernels.tensor_stats(asked)
        known = zip(*(rows.column(name).tolist() for name in ("abs_max", "num_nans", "num_infs")))
        sizes = [math.nan if num_nans else math.inf if num_infs else size for size, num_nans, num_infs in known]
        return torch.tensor(sizes, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        found = torch._foreach_norm(asked, math.inf)
        return torch.stack([x.to(asked[0].device, torch.float64) for x in found])


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all elements are. Cost: one read; on an accelerator a sync."""
    sizes = largest(tensors)
    return sizes is None or bool(sizes.isfinite().all())


def have_not_grown(now: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """Whether no largest element has grown sixteenfold; None if they do not belong to the same tensors."""
    if now is None or before is None or now.shape != before.shape or now.device != before.device:
        return None
    return (now <= _GROWN * before.clamp(min=_LEAST)).all()


def _asked(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for t in locals_of(tensors):
        if not (t.is_floating_point() or t.is_complex()) or t.itemsize == 1 or t.layout is not torch.strided:
            continue
        if t.numel() and not t.is_meta:
            yield t.detach()
