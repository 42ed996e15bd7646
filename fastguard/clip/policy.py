"""What a clip policy is, and the window of norms that some remember."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..records import values
from ..records.running import quantile_of_sorted

NO_LIMITS = (float("inf"), float("inf"))


class Place(NamedTuple):
    """A parameter: its name, the number of its param group over all optimizers, and the index of its optimizer."""

    name: str
    group: int
    optimizer: int


class ClipPolicy:
    """Says above which norm to scale gradients, and to what. Derive your own policies from it.

    `limits` gives a trigger and a target before a step; `observe` takes the norm afterwards. Both know only the past,
    so the limits travel to the device before the step, and nothing waits. If the norm is above the trigger, the
    gradients are multiplied by target / norm; with a target of 0 the step is skipped.

    Attributes:
        scope: what has a norm: "model", all gradients together; "group", the gradients with the same `group_of`; or
            "tensor", each gradient.
        names: of the groups or tensors, in the order of the limits; empty until `begin`, and with scope "model".
        limit: set it to have gradients multiplied by min(1, limit / (norm + 1e-6)); then no method is called. None
            otherwise.
        is_sound: set by classes whose methods never raise and always give valid limits; subclasses do not inherit it.

    >>> class TwiceTheLast(ClipPolicy):
    ...     last = float("inf")
    ...     def limits(self):
    ...         return 2 * self.last, self.last
    ...     def observe(self, norms, loss=None):
    ...         self.last = norms
    >>> import torch, fastguard
    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = fastguard.wrap(torch.optim.SGD([p], lr=1.0), clip=TwiceTheLast())
    >>> for gradient in (1.0, 8.0):
    ...     p.grad = torch.full((1,), gradient)
    ...     optimizer.step()
    >>> p.item(), optimizer.guard.last.trigger, optimizer.guard.last.clip_coef
    (-2.0, 2.0, 0.125)
    """

    scope: str = "model"
    names: tuple[str, ...] = ()
    limit: float | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "limits" in cls.__dict__ and "limit" not in cls.__dict__:
            cls.limit = None  # of the parent's formula

    def limits(self) -> tuple[Any, Any]:
        """(trigger, target) for the next step: two floats >= 0; (inf, inf) does nothing.

        With scope "group" or "tensor": two sequences with one float for each of `names`, or two floats for all
        gradients together. If it raises or gives anything else, the step is not clipped; this is logged once and
        counted in the report.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must have a method limits() -> (trigger, target)")

    def observe(self, norms: Any, loss: float | None = None) -> None:
        """Takes the norm of a step, unscaled and before clipping. Not called for steps with NaN or Inf.

        Args:
            norms: a float; with scope "group" or "tensor" a sequence with one float for each of `names`, -1.0 where
                there was no gradient. The next step overwrites it: copy what you keep.
            loss: the newest finite loss; on the CPU that of the step before.

        On a GPU it is called as records arrive, a step or two late.
        """

    def begin(self, names: Sequence[str]) -> None:
        """Takes the names of groups or tensors, before the first step and whenever the parameters change."""
        self.names = tuple(names)

    def group_of(self, place: Place) -> str | None:
        """The group of a parameter, with scope "group"; None for a parameter that is not clipped."""
        return f"group{place.group}"

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from, as plain data; empty for a policy without memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a `state_dict`."""


class SortedWindow:
    """Up to `size` numbers, the newest. Cost of `add`: 1 us, whatever the size up to some thousands."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: deque[float] = deque()
        self.ordered: list[float] = []

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        self.values.append(value)
        insort(self.ordered, value)
        if len(self.values) > self.size:
            del self.ordered[bisect_left(self.ordered, self.values.popleft())]

    def quantile(self, share: float) -> float:
        """With linear interpolation, as `numpy.quantile`; NaN of nothing."""
        return quantile_of_sorted(self.ordered, share)

    def median_deviation(self, centre: float) -> float:
        """The (upper) median of |value - centre|. Cost: 2 us; no pass over the window."""
        ordered, rank = self.ordered, len(self.ordered) // 2
        # Sorted deviations are those below the centre, backwards, merged with those above: the one with `rank`
        # smaller ones is found by halving how many of these come from below.
        split = bisect_left(ordered, centre)
        low, high = max(0, rank - (len(ordered) - split)), min(rank, split)
        while low < high:
            taken = (low + high) // 2  # from below; rank - taken from above
            if centre - ordered[split - taken - 1] < ordered[split + rank - taken - 1] - centre:
                low = taken + 1
            else:
                high = taken
        below = centre - ordered[split - low - 1] if low < split else math.inf
        above = ordered[split + rank - low] - centre if split + rank - low < len(ordered) else math.inf
        return min(below, above)

    def restart(self, kept: Iterable[float]) -> None:
        self.values = deque(kept)
        self.ordered = sorted(self.values)


def finite_numbers(value: Any) -> list[float]:
    """What a saved window must be; raises a MisfitError for anything else."""
    numbers = [float(number) for number in values.each(values.number, value)]
    if not all(map(math.isfinite, numbers)):
        raise values.MisfitError("must be finite numbers")
    return numbers
