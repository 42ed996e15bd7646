"""Clipping by the norm of all gradients together."""

from __future__ import annotations

import math
import operator
from typing import Any

from ..records import values
from .policy import ClipPolicy


class GlobalNorm(ClipPolicy):
    """Clips the 2-norm of all gradients together to `max_norm`.

    factor = min(1, max_norm / (norm + 1e-6)), the formula of `torch.nn.utils.clip_grad_norm_`.

    Args:
        max_norm: the largest norm, > 0; `inf` never clips. Any real number, also NumPy's, a Fraction or a tensor
            without dimensions. You may set it later.

    Raises:
        ValueError: `max_norm` is not > 0.

    Source: Pascanu et al. 2013, section 3.2; the 1e-6 is torch's.

    Cost: none beyond the step's own read. Gradients above the limit are written once, or scaled by a fused optimizer as
    it reads them. No sync.

    >>> import torch, fastguard
    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = fastguard.wrap(torch.optim.SGD([p], lr=1.0), clip=GlobalNorm(1.0))  # or max_norm=1.0
    >>> p.grad = torch.tensor([4.0])
    >>> optimizer.step()
    >>> round(optimizer.guard.last.clip_coef, 6)
    0.25
    """

    is_sound = True
    limit: float | None = math.inf  # None in a subclass with a formula of its own

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def _set_max_norm(self, max_norm: float) -> None:
        self._max_norm = values.positive("max_norm", max_norm, "Leave it out for no clipping.")
        if self.limit is not None:
            self.limit = self._max_norm  # each step reads it: a property would take 2 us there

    max_norm = property(operator.attrgetter("_max_norm"), _set_max_norm, doc="Largest norm let through.")

    def limits(self) -> tuple[float, float]:
        return self._max_norm, self._max_norm

    def state_dict(self) -> dict[str, Any]:
        return {"max_norm": self.max_norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The limit of this run stays: a resumed run may have been given another one on purpose."""

    def __repr__(self) -> str:
        return f"GlobalNorm({self.max_norm:g})"
