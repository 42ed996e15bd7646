"""A few elements of gradients and of parameters, compared from one step to the next."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from .. import kernels

_Chosen: TypeAlias = list[tuple[weakref.ref[torch.Tensor], int]]  # parameters, and their places among all

_NUM_GRADIENTS = 4
_PER_GRADIENT = 1024
_NUM_PARAMETERS = 16
_PER_PARAMETER = 4
_MAX_NAMES = 64

Parameters: TypeAlias = Callable[[], Sequence[torch.Tensor]]  # all of them, in their order; asked only where needed
_guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def guarded_parameters(but: Collection[torch.optim.Optimizer] = ()) -> set[int]:
    """Ids of the parameters of all guarded optimizers, but for those in `but`."""
    return {id(p) for o in list(_guarded) if o not in but for group in o.param_groups for p in group["params"]}


def is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is real numbers in CPU memory without gaps, all of which is there."""
    if type(x) is not torch.nn.Parameter and hasattr(x, "to_local"):
        return False  # a part of a tensor
    if not x.is_cpu or not x.is_floating_point() or x.layout is not torch.strided or x.is_nested or not x.numel():
        return False
    if not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
        return False
    return not kernels.lacks_memory(x)


def _some(x: torch.Tensor, number: int) -> torch.Tensor:
    """A view of `number` elements of `x`, evenly over its memory."""
    numel = x.numel()
    number = min(number, numel)
    return torch.as_strided(x, (number,), (numel // number,))


def _num_gradients(p: torch.Tensor) -> int:
    return -1 if p.grad is None else p.grad.numel()


class GradientSketch:
    """A strided sample of the gradients at one step, 1024 elements each of the four largest at most, and the cosine
    with that of the step before. Cost: 15 us a step at which it is asked."""

    def __init__(self) -> None:
        self._chosen: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._before: tuple[int, torch.Tensor, float] | None = None

    def cosine(self, step: int, params: Parameters, *, is_wanted: bool) -> float | None:
        """The cosine of the gradients of `step` with those of the step before, where it was asked there too.

        None without such, and where there are none, or one of the two is all zeros or not finite.
        """
        sample, before = self._sample(params), self._before
        self._before = None
        if sample is None:
            return None
        square = float(torch.dot(sample, sample))
        if not 1e-30 < square < math.inf and sample.dtype is torch.float32:  # squares beyond its range
            sample = sample.double()
            square = float(torch.dot(sample, sample))
        if not 0.0 < square < math.inf:
            return None
        self._before = step, sample, math.sqrt(square)
        if not is_wanted or before is None or before[0] != step - 1 or before[1].numel() != sample.numel():
            return None
        other = before[1] if before[1].dtype is sample.dtype else before[1].to(sample.dtype)
        cosine = float(torch.dot(sample, other)) / (before[2] * self._before[2])
        return max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else None

    def forget(self) -> None:
        """What comes next does not follow what was."""
        self._before = None

    def _sample(self, params: Parameters) -> torch.Tensor | None:
        parts = self._parts()
        if parts is None:
            self._before = None
            self._choose(params())
            parts = self._parts()
        if parts is None:
            return None
        sample = torch.cat(parts)
        return sample if sample.dtype is torch.float32 else sample.double()

    def _parts(self) -> list[torch.Tensor] | None:
        """A view of each gradient that was chosen; None if one is not as it was."""
        parts = []
        for ref, numel in self._chosen:
            parameter = ref()
            gradient = None if parameter is None else parameter.grad
            if gradient is None or gradient.numel() != numel or not is_plain(gradient):
                return None
            parts.append(_some(gradient, _PER_GRADIENT))
        return parts or None

    def _choose(self, params: Iterable[torch.Tensor]) -> None:
        # Whether one is plain is asked of the largest alone: torch keeps what Python sees of a storage, 64 bytes each.
        largest = sorted(params, key=_num_gradients, reverse=True)
        plain = (p for p in largest if p.grad is not None and is_plain(p.grad))
        self._chosen = [(weakref.ref(p), _num_gradients(p)) for p in itertools.islice(plain, _NUM_GRADIENTS)]


class ParameterSketch:
    """Four elements each of at most sixteen parameters as a step has left them, to be found again when the next begins.

    Attributes:
        names: of those that were not, in the order in which that was seen; a dict whose values mean nothing.
        num_compared, num_changed: how often it was looked, and at how many of these some had changed.

    Cost: 20 us to take, 20 us to compare.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._own: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet(optimizers)
        self._taken: tuple[int, _Chosen, torch.Tensor] | None = None
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int, torch.dtype]] = {}  # by place; were plain
        self.names: dict[str, None] = {}
        self.num_compared = 0
        self.num_changed = 0
        _guarded.update(optimizers)

    def take(self, step: int, params: Sequence[torch.Tensor]) -> None:
        """Remembers `params`, all those of the optimizers, as `step` has left them."""
        places = range(0, len(params), max(1, -(-len(params) // _NUM_PARAMETERS)))
        chosen = [(weakref.ref(p), i) for i in places if self._is_plain(p := params[i], i)]
        self._known = {i: (ref, (p := params[i]).data_ptr(), p.numel(), p.dtype) for ref, i in chosen}
        values = self._values(chosen)
        self._taken = None if values is None else (step, chosen, values)

    def _is_plain(self, p: torch.Tensor, place: int) -> bool:
        """Whether `p` is plain; not asked again where it lies as when it was: what was freed lies elsewhere."""
        ref, address, numel, dtype = self._known.get(place, (None, 0, 0, None))
        if address and ref is not None and ref() is p and p.numel() == numel and p.dtype is dtype:
            return p.data_ptr() == address or is_plain(p)
        return is_plain(p)

    @property
    def awaits(self) -> bool:
        """Whether something was taken, to be compared."""
        return self._taken is not None

    def compare(self, step: int, names: Sequence[str]) -> None:
        """Looks for what has changed since the step before `step`; `names` are of all parameters."""
        taken, self._taken = self._taken, None
        if taken is None or taken[0] != step - 1:
            return
        _, chosen, before = taken
        now = self._values(chosen)
        if now is None or now.numel() != before.numel() or now.dtype != before.dtype:
            return  # moved, or made anew
        self.num_compared += 1
        if torch.equal(now, before):
            return
        changed = self._changed(chosen, before, now)
        self.num_changed += bool(changed)
        for place in changed:
            if len(self.names) < _MAX_NAMES:
                self.names[names[place] if place < len(names) else f"param{place}"] = None

    def forget(self) -> None:
        """What was taken is of no use: steps were taken that nobody saw."""
        self._taken = None

    def state(self) -> list[int]:
        """What was counted; the names are among the facts."""
        return [self.num_compared, self.num_changed]

    def load(self, state: Sequence[int], names: Sequence[str]) -> None:
        """Goes on from `state`, and from the names that were told."""
        self.num_compared, self.num_changed = state
        self.names = dict.fromkeys(names)
        self._taken = None

    def facts(self) -> dict[str, Any]:
        """What was found, as facts about the model."""
        if not self.num_compared:
            return {}
        return {"overwritten": list(self.names), "num_overwritten": self.num_changed, "num_compared": self.num_compared}

    def close(self) -> None:
        """The optimizers are not guarded any more."""
        self._taken = None
        for optimizer in self._own:
            _guarded.discard(optimizer)

    def _values(self, chosen: _Chosen) -> torch.Tensor | None:
        found = [p for ref, i in chosen if (p := ref()) is not None and self._is_plain(p, i)]
        if not found or len(found) != len(chosen):
            return None
        return torch.cat([_some(p, _PER_PARAMETER) for p in found])

    def _changed(self, chosen: _Chosen, before: torch.Tensor, now: torch.Tensor) -> list[int]:
        """Places of the parameters that differ by more than rounding, and that no other guard's optimizer holds."""
        elsewhere = guarded_parameters(but=self._own)
        start = 0
        found: list[int] = []
        for ref, place in chosen:
            p = ref()
            if p is None:
                return found
            end = start + min(_PER_PARAMETER, p.numel())
            was, has = before[start:end].double(), now[start:end].double()
            start = end
            rounding = torch.finfo(p.dtype).eps
            tolerance = max(2.0 * rounding, min(64.0 * rounding, 1e-3)) * float(was.abs().nan_to_num(0, 0).max())
            away = (has - was).abs()
            is_other = (away > tolerance) | (was.isfinite() & ~has.isfinite()) | (has.isfinite() & ~was.isfinite())
            if bool(is_other.any()) and id(p) not in elsewhere:
                found.append(place)
        return found
