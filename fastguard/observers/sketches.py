"""Compares a few elements of gradients and of parameters from one step to the next."""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from ..kernels.cpu import extension
from .observer import ObservedRun, Observer
from .tensors import can_be_read

_Chosen: TypeAlias = list[tuple[weakref.ref[torch.Tensor], int, torch.dtype]]  # parameters, and their places among all

_NUM_GRADIENTS, _NUM_CHECKED = 4, 64  # gradients that are compared; the largest, among which they are looked for
_PER_GRADIENT = 1024
_NUM_PARAMETERS = 16
_PER_PARAMETER = 4
_MAX_NAMES = 64
_SPAN = 50  # steps with one pair of looks
_BLOCK = 1000  # steps whose looks are worked out together
READ, COMPARE, KEEP = 1, 2, 4  # gradients; gradients with those of the step before; parameters, as the step leaves them

Parameters: TypeAlias = Callable[[], Sequence[torch.Tensor]]  # all of them, in their order; called only if needed
_guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@functools.lru_cache(maxsize=4)
def looks(block: int) -> dict[int, int]:
    """The steps of a block of 1000 that are sampled, in order, and what to do: READ, COMPARE, KEEP.

    These are the first twenty steps, then pairs of steps, one pair in each span of fifty: gradients are compared within
    the pair, and parameters between its steps; from step 1000 on, parameters in every second pair. A pair lies at
    another place in each span, so that nothing periodic can hide. A record with a cosine takes the slow path into the
    log, so there are few.

    >>> [step for step, what in looks(1).items() if what & COMPARE][:5]
    [1043, 1051, 1108, 1165, 1222]
    """
    found = {}
    if not block:
        found = {step: READ | (COMPARE if step else 0) | (KEEP if step % 4 == 3 else 0) for step in range(21)}
    for number in range(block * _BLOCK // _SPAN or 1, (block + 1) * _BLOCK // _SPAN):
        start = number * _SPAN + number * 7 % (_SPAN - 1)
        found[start] = READ | (0 if block and number % 2 else KEEP)
        found[start + 1] = READ | COMPARE
    return found


@functools.lru_cache(maxsize=4)
def _steps(block: int) -> tuple[int, ...]:
    return tuple(looks(block))


def next_look(step: int) -> int:
    """The first step after `step` that is sampled."""
    for block in itertools.count(step // _BLOCK):
        due = _steps(block)
        if step < due[-1]:
            return due[bisect.bisect_right(due, step)]
    raise AssertionError("no block is the last")


def guarded_parameters(but: Collection[torch.optim.Optimizer] = ()) -> set[int]:
    """Ids of the parameters of all guarded optimizers except those in `but`."""
    return {id(p) for o in list(_guarded) if o not in but for group in o.param_groups for p in group["params"]}


def is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is a dense real tensor in CPU memory that torch computes with (not float8), without gaps."""
    if not (x.is_cpu and x.is_floating_point() and x.itemsize > 1 and can_be_read(x) and x.numel()):
        return False
    return x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)


def sample(tensors: Sequence[torch.Tensor], number: int) -> bytearray | None:
    """Up to `number` elements of each tensor, evenly over its memory, as float64; None if one of them is not plain.

    Cost: 1 us, and 2 ns an element.
    """
    found: bytearray | None = None if extension is None else extension.sketch(tensors, number)
    if found is not None or not all(map(is_plain, tensors)):
        return found
    numbers = array("d")
    for x in tensors:
        count = min(number, x.numel())
        numbers.extend(torch.as_strided(x.detach(), (count,), (x.numel() // count,)).double().tolist())
    return bytearray(numbers)


def dot(a: bytearray, b: bytearray) -> float:
    """The sum of the products of two samples."""
    if extension is not None:
        return float(extension.dot(a, b))
    return float(torch.dot(torch.frombuffer(a, dtype=torch.float64), torch.frombuffer(b, dtype=torch.float64)))


def _num_gradients(p: torch.Tensor) -> int:
    return -1 if p.grad is None else p.grad.numel()


class GradientSketch:
    """A strided sample of the gradients of one step, up to 1024 elements of each of the four largest, and its cosine
    with that of the step before. Cost: 10 us a call, nearly all of it for 4096 cache misses."""

    def __init__(self) -> None:
        self._chosen: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._before: tuple[int, bytearray] | None = None

    def cosine(self, step: int, params: Parameters) -> float | None:
        """The cosine of the gradients of `step` with those of the step before, if that was sampled too.

        None otherwise, and if one of the two has no gradients, is zero or is not finite.
        """
        known = self._sample_chosen()
        if known is None:
            self._before = None
            self._choose(params())
            known = self._sample_chosen()
        before, self._before = self._before, None if known is None else (step, known)
        if known is None or before is None or before[0] != step - 1 or len(before[1]) != len(known):
            return None
        norms = math.sqrt(dot(known, known)) * math.sqrt(dot(before[1], before[1]))
        cosine = dot(known, before[1]) / norms if norms > 0.0 else math.nan
        return max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else None

    def forget(self) -> None:
        """The next step does not follow the last one."""
        self._before = None

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

    def _choose(self, params: Iterable[torch.Tensor]) -> None:
        # Checks only the largest: torch keeps 64 bytes for each storage that Python has seen.
        largest = heapq.nlargest(_NUM_CHECKED, params, key=_num_gradients)
        plain = (p for p in largest if p.grad is not None and is_plain(p.grad))
        self._chosen = [(weakref.ref(p), _num_gradients(p)) for p in itertools.islice(plain, _NUM_GRADIENTS)]


class ParameterSketch:
    """Four elements each of up to sixteen parameters after a step, to compare when the next one begins.

    Attributes:
        names: of parameters that had changed, in the order in which that was found; the keys of a dict.
        num_compared, num_changed: number of comparisons, and of those with changes.

    Cost: 20 us to take, 20 us to compare.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._own: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet(optimizers)
        self._taken: tuple[int, _Chosen, bytearray] | None = None
        self.names: dict[str, None] = {}
        self.num_compared = 0
        self.num_changed = 0
        _guarded.update(optimizers)

    def take(self, step: int, params: Sequence[torch.Tensor]) -> None:
        """Remembers `params`, all parameters of the optimizers, after `step`."""
        places: Sequence[int] = range(0, len(params), max(1, -(-len(params) // _NUM_PARAMETERS)))
        values = sample([params[i] for i in places], _PER_PARAMETER)
        if values is None:
            places = [i for i in places if is_plain(params[i])]
            values = sample([params[i] for i in places], _PER_PARAMETER)
        chosen = [(weakref.ref(params[i]), i, params[i].dtype) for i in places]
        self._taken = (step, chosen, values) if values else None

    @property
    def awaits(self) -> bool:
        """Whether there is something to compare."""
        return self._taken is not None

    def compare(self, step: int, names: Sequence[str]) -> None:
        """Finds what has changed since the step before `step`; `names` are those of all parameters."""
        taken, self._taken = self._taken, None
        if taken is None or taken[0] != step - 1:
            return
        _, chosen, before = taken
        params = [p for ref, _, dtype in chosen if (p := ref()) is not None and p.dtype is dtype]
        now = sample(params, _PER_PARAMETER) if len(params) == len(chosen) else None
        if now is None or len(now) != len(before):
            return  # moved or replaced
        self.num_compared += 1
        if now == before:
            return
        changed = self._changed(chosen, before, now)
        self.num_changed += bool(changed)
        for place in changed:
            if len(self.names) < _MAX_NAMES:
                self.names[names[place] if place < len(names) else f"param{place}"] = None

    def forget(self) -> None:
        """Drops what was taken: there were unobserved steps."""
        self._taken = None

    def state(self) -> list[int]:
        """The counts; the names are among the facts."""
        return [self.num_compared, self.num_changed]

    def load(self, state: Sequence[int], names: Sequence[str]) -> None:
        """Resumes from `state`, and from the names in the facts."""
        self.num_compared, self.num_changed = state
        self.names = dict.fromkeys(names)
        self._taken = None

    def facts(self) -> dict[str, Any]:
        """What was found, as facts about the model."""
        if not self.num_compared:
            return {}
        return {"overwritten": list(self.names), "num_overwritten": self.num_changed, "num_compared": self.num_compared}

    def close(self) -> None:
        """The optimizers are no longer guarded."""
        self._taken = None
        for optimizer in self._own:
            _guarded.discard(optimizer)

    def _changed(self, chosen: _Chosen, before: bytearray, now: bytearray) -> list[int]:
        """Places of the parameters that differ by more than rounding, without those of other guards."""
        elsewhere = guarded_parameters(but=self._own)
        start = 0
        found: list[int] = []
        for ref, place, dtype in chosen:
            p = ref()
            if p is None:
                return found
            end = start + 8 * min(_PER_PARAMETER, p.numel())
            was, has = (memoryview(values).cast("B")[start:end].cast("d").tolist() for values in (before, now))
            start = end
            rounding = torch.finfo(dtype).eps
            largest = max((abs(value) for value in was if math.isfinite(value)), default=0.0)
            tolerance = max(2.0 * rounding, min(64.0 * rounding, 1e-3)) * largest
            is_other = any(abs(b - a) > tolerance or math.isfinite(a) is not math.isfinite(b) for a, b in zip(was, has))
            if is_other and id(p) not in elsewhere:
                found.append(place)
        return found


class Sketches(Observer):
    """How gradients turn from step to step, and whether parameters change between steps. Only on the CPU.

    Cost: as stated for `GradientSketch` and `ParameterSketch`, at the steps that `looks` gives.
    """

    def __init__(self, run: ObservedRun, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._run = run
        self._gradients = GradientSketch()
        self.parameters = ParameterSketch(optimizers)

    def next_after(self, step: int) -> float:
        return next_look(step)

    @property
    def has_before(self) -> bool:
        return self.parameters.awaits

    def before(self, step: int) -> None:
        if self._run.may_wait and self.parameters.awaits:
            self.parameters.compare(step, self._run.known_names)

    def after(self, step: int) -> None:
        run, what = self._run, looks(step // _BLOCK).get(step, 0)
        if not what or not run.may_wait:
            return
        if what & READ:
            cosine = self._gradients.cosine(step, run.params)
            if cosine is not None and (run.ring.step != step or run.ring.is_finite):
                run.ring.attach(step, grad_cosine=cosine)
        if what & KEEP:
            self.parameters.take(step, run.params())

    def facts(self) -> dict[str, Any]:
        return self.parameters.facts()

    def forget(self) -> None:
        self._gradients.forget()
        self.parameters.forget()

    def close(self) -> None:
        self.parameters.close()
