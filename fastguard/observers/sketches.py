"""Compares a few elements of gradients and of parameters from one step to the next."""

from __future__ import annotations

import heapq
import itertools
import math
import weakref
from array import array
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..kernels.cpu import extension
from .observer import Observer
from .tensors import can_be_read

_NUM_GRADIENTS, _PER_GRADIENT = 4, 1024
_NUM_CHECKED = 64  # the largest gradients, among which those that are compared are looked for
_NUM_PARAMETERS, _PER_PARAMETER = 16, 4
_MAX_NAMES = 64
_SPAN = 50  # steps with one pair of looks
_NUM_FIRST, _RARE_FROM = 20, 1000

_guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def next_look(step: int) -> int:
    """The first step after `step` that is sampled.

    The first twenty steps are sampled, then one pair of steps in each span of fifty, at another place in each, so that
    nothing periodic can hide: gradients are compared within the pair.

    >>> [step for step in range(1000, 1250) if next_look(step - 1) == step]
    [1042, 1043, 1050, 1051, 1107, 1108, 1164, 1165, 1221, 1222]
    """
    starts = map(_pair_of, (step // _SPAN, step // _SPAN + 1))
    return step + 1 if step < _NUM_FIRST else next(due for at in starts for due in (at, at + 1) if due > step)


def _pair_of(span: int) -> int:
    """The first step of the pair in a span; none in the first span, whose first steps are all sampled."""
    return span * _SPAN + span * 7 % (_SPAN - 1) if span else -_SPAN


def guarded_parameters(but: Collection[torch.optim.Optimizer] = ()) -> set[int]:
    """Ids of the parameters of all guarded optimizers except those in `but`."""
    return {id(p) for o in list(_guarded) if o not in but for group in o.param_groups for p in group["params"]}


def sample(tensors: Sequence[torch.Tensor], number: int) -> bytearray | None:
    """Up to `number` elements of each tensor, evenly spaced, as float64; None if one is not plain. Cost: 2 ns each."""
    found: bytearray | None = None if extension is None else extension.sketch(tensors, number)
    if found is not None or not all(map(_is_plain, tensors)):
        return found
    numbers = array("d")
    for x in tensors:
        count = min(number, x.numel())
        numbers.extend(torch.as_strided(x.detach(), (count,), (x.numel() // count,)).double().tolist())
    return bytearray(numbers)


def _is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is a dense real tensor in CPU memory that torch computes with (not float8), without gaps."""
    if not (x.is_cpu and x.is_floating_point() and x.itemsize > 1 and can_be_read(x) and x.numel()):
        return False
    return x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)


def _dot(a: bytearray, b: bytearray) -> float:
    if extension is not None:
        return float(extension.dot(a, b))
    return float(torch.dot(torch.frombuffer(a, dtype=torch.float64), torch.frombuffer(b, dtype=torch.float64)))


class Snapshot:
    """Four elements each of up to sixteen parameters around `step`, to say later which of them have changed.

    Parameters that cannot be read, or all without `may_read`, are compared by their count of writes; unless `is_exact`,
    they are left out, and a difference within rounding is none. Cost: 20 us to take, 20 us to compare.
    """

    def __init__(
        self, step: int, named: Sequence[tuple[torch.Tensor, str]], *, may_read: bool = True, is_exact: bool = True
    ) -> None:
        self.step, self._is_exact = step, is_exact
        # each with its values, or the count of writes
        self._seen: list[tuple[weakref.ref[torch.Tensor], str, torch.dtype, bytearray | int]] = []
        for p, name in named[:: max(1, -(-len(named) // _NUM_PARAMETERS))]:
            values = sample([p], _PER_PARAMETER) if may_read else None
            if values is not None or is_exact:
                self._seen.append((weakref.ref(p), name, p.dtype, p._version if values is None else values))

    @property
    def params(self) -> list[torch.Tensor]:
        """Those that are there still."""
        return [p for ref, *_ in self._seen if (p := ref()) is not None]

    def changed(self, elsewhere: Collection[int] = ()) -> list[str] | None:
        """Names of those that have changed, but for those whose ids are in `elsewhere`; None if they were moved."""
        found = []
        for ref, name, dtype, before in self._seen:
            p = ref()
            if isinstance(before, int):
                found += [name] if p is not None and p._version != before else []
                continue
            now = sample([p], _PER_PARAMETER) if p is not None and p.dtype is dtype else None
            if now is None or len(now) != len(before):
                return None
            if now == before or id(p) in elsewhere:
                continue
            was, has = (memoryview(values).cast("d").tolist() for values in (before, now))
            rounding = 0.0 if self._is_exact else torch.finfo(dtype).eps
            largest = max((abs(value) for value in was if math.isfinite(value)), default=0.0)
            tolerance = max(2.0 * rounding, min(64.0 * rounding, 1e-3)) * largest
            if any(abs(b - a) > tolerance or math.isfinite(a) is not math.isfinite(b) for a, b in zip(was, has)):
                found.append(name)
        return found


class Sketches(Observer):
    """How gradients turn from step to step, and whether parameters change between steps. Only on the CPU.

    Gradients: the cosine of up to 1024 elements of each of the four largest with those of the step before. Parameters:
    a `Snapshot` after the first step of a pair, compared when the next one begins. Cost: 10 us for gradients, and that
    of `Snapshot`.
    """

    def __init__(self, run: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._run = run
        self._own: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet(optimizers)
        self._chosen: list[tuple[weakref.ref[torch.Tensor], int]] = []  # parameters, and the sizes of their gradients
        self._gradients: tuple[int, bytearray] | None = None  # of the last step that was read
        self._kept: Snapshot | None = None
        self._names: dict[str, None] = {}  # of parameters that had changed
        _guarded.update(optimizers)

    def next_after(self, step: int) -> float:
        return next_look(step)

    @property
    def has_before(self) -> bool:
        return self._kept is not None

    def before(self, step: int) -> None:
        kept, self._kept = self._kept, None
        if kept is None or kept.step != step - 1 or not self._run.may_wait:
            return
        changed = kept.changed()
        if changed:  # by more than rounding: unless another guard steps them
            changed = kept.changed(guarded_parameters(but=self._own))
        self._names.update(dict.fromkeys((changed or ())[: _MAX_NAMES - len(self._names)]))

    def after(self, step: int) -> None:
        run = self._run
        if not run.may_wait:
            return
        cosine = self._cosine(step)
        if cosine is not None and (run.ring.step != step or run.ring.is_finite):
            run.ring.attach(step, grad_cosine=cosine)
        span = step // _SPAN
        is_first = step == _pair_of(span) and not (step >= _RARE_FROM and span % 2)  # then, in every second span
        if is_first if step > _NUM_FIRST else step % 4 == 3:
            params, names = run.params(), run.known_names
            places = range(0, min(len(params), len(names)), max(1, -(-len(params) // _NUM_PARAMETERS)))
            self._kept = Snapshot(step, [(params[i], names[i]) for i in places], is_exact=False)

    def _cosine(self, step: int) -> float | None:
        """The cosine with the gradients of the step before; None if unknown, or one is zero or not finite."""
        now = self._sample_chosen()
        if now is None:
            self._gradients = None
            # Checks only the largest: torch keeps 64 bytes for each storage that Python has seen.
            sizes = ((p, -1 if p.grad is None else p.grad.numel()) for p in self._run.params())
            largest = heapq.nlargest(_NUM_CHECKED, sizes, key=lambda pair: pair[1])
            plain = (
                (weakref.ref(p), size) for p, size in largest if p.grad is not None and sample([p.grad], 1) is not None
            )
            self._chosen = list(itertools.islice(plain, _NUM_GRADIENTS))
            now = self._sample_chosen()
        before, self._gradients = self._gradients, None if now is None else (step, now)
        if now is None or before is None or before[0] != step - 1 or len(before[1]) != len(now):
            return None
        norms = math.sqrt(_dot(now, now)) * math.sqrt(_dot(before[1], before[1]))
        cosine = _dot(now, before[1]) / norms if norms > 0.0 else math.nan
        return max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else None

    def _sample_chosen(self) -> bytearray | None:
        """A sample of the chosen gradients; None if one has changed its size, or none is chosen."""
        gradients = []
        for ref, numel in self._chosen:
            parameter = ref()
            gradient = None if parameter is None else parameter.grad
            if gradient is None or gradient.numel() != numel:
                return None
            gradients.append(gradient)
        return sample(gradients, _PER_GRADIENT) if gradients else None

    def resume(self, names: Sequence[str]) -> None:
        """Goes on from `names`, which had changed before."""
        self._names = dict.fromkeys(names)

    def facts(self) -> dict[str, Any]:
        return {"overwritten": list(self._names)}

    def forget(self) -> None:
        self._gradients = self._kept = None

    def close(self) -> None:
        self._kept = None
