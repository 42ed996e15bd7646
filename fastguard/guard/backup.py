"""Everything that a step of an optimizer may change, kept, so that the step can be undone whatever it did."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})
_STRUCTURE = "entries of groups, state and attributes"
_PARAMETERS = "parameters"
_NUM_LEARNED = 3  # closure steps of which it is looked what changes before the closure is done
_MOST_LEARNED_BYTES = 1 << 30  # memory held meanwhile, while the closure needs its own


def _package(thing: Any) -> str:
    return type(thing).__module__.partition(".")[0]


class _KeptTensor:
    """A tensor, the memory that it had, and what was in there."""

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self.tensor, self.label = tensor, label
        self.memory = tensor.data
        self.version = 0 if tensor.is_inference() else tensor._version
        self.values: torch.Tensor | None = None

    def copy(self) -> None:
        # What lies on itself, as an expanded number does, cannot be written in place: neither by a step.
        if self.values is None and not any(n > 1 and not s for n, s in zip(self.tensor.shape, _strides(self.tensor))):
            self.values = self.memory.clone()

    def has_moved(self) -> bool:
        if not self.tensor.is_inference() and self.tensor._version != self.version:
            return True
        if not self._is_ordinary():
            return False
        return self._has_other_memory() or (self.values is not None and not torch.equal(self.memory, self.values))

    def restore(self) -> None:
        if self.values is not None:
            if self._is_ordinary() and self._has_other_memory():
                self.tensor.data = self.memory
            self.memory.copy_(self.values)

    def _is_ordinary(self) -> bool:
        return type(self.tensor) in (torch.Tensor, torch.nn.Parameter) and self.tensor.layout is torch.strided

    def _has_other_memory(self) -> bool:
        return self.tensor.data_ptr() != self.memory.data_ptr() or self.tensor.shape != self.memory.shape


def _strides(tensor: torch.Tensor) -> Iterable[int]:
    return tensor.stride() if tensor.layout is torch.strided else tensor.shape


def _is_same(now: Any, then: Any) -> bool:
    """Whether a container holds what it held, object for object."""
    if len(now) != len(then):
        return False
    if isinstance(now, dict):
        return all(k in now and now[k] is value for k, value in then.items())
    return all(a is b for a, b in zip(now, then))


class Backup:
    """What `optimizer` may change: parameters, state, groups, its attributes, and those of optimizers and other objects
    of its own package that it holds. Modules are not looked into: a closure changes their buffers.

    Args:
        labels: which tensors to copy at once: `_PARAMETERS`, or keys of the entries that they are in; None for all.

    Cost: a copy of the tensors; without, 1 us an entry.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, labels: Collection[str] | None = None) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._others: list[tuple[Callable[[Any], Any], Any]] = []
        self._tensors: list[_KeptTensor] = []
        self._seen: dict[int, Any] = {}
        self._package = _package(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._keep(parameters, _PARAMETERS)
        self._keep(optimizer.param_groups, "")
        self._keep(optimizer.state, "")
        self._keep(optimizer, "")
        for kept in self._tensors:
            if labels is None or kept.label in labels:
                kept.copy()

    @property
    def num_bytes(self) -> int:
        """Of all tensors, copied or not."""
        return sum(kept.memory.numel() * kept.memory.element_size() for kept in self._tensors)

    def complete(self) -> None:
        """Copies what has not been copied yet."""
        for kept in self._tensors:
            kept.copy()

    def moved(self) -> set[str]:
        """Labels of what is no longer as it was. Reads what was copied; of the rest, only autograd's counter."""
        labels = {kept.label for kept in self._tensors if kept.has_moved()}
        return labels if all(_is_same(now, then) for now, then in self._containers) else {*labels, _STRUCTURE}

    def lacks(self, labels: Collection[str]) -> bool:
        """Whether a tensor under one of `labels` was not copied."""
        return any(kept.values is None for kept in self._tensors if kept.label in labels)

    def restore(self) -> None:
        """Puts everything back in place. May be called again, after it was interrupted too."""
        for now, then in self._containers:
            if _is_same(now, then):
                continue
            if isinstance(now, dict):  # never empty in between: it may be an object's own
                now.update(then)
                for key in [key for key in now if key not in then]:
                    del now[key]
            elif isinstance(now, list):
                now[:] = then
            elif isinstance(now, set):
                now |= then
                now &= then
            else:
                now.clear()
                now.extend(then)
        with torch.no_grad():
            for kept in self._tensors:
                kept.restore()
        for put_back, state in self._others:
            put_back(state)

    def _keep(self, root: Any, label: str) -> None:
        waiting = [(root, label)]
        while waiting:
            thing, label = waiting.pop()
            if type(thing) in _PLAIN or id(thing) in self._seen:
                continue
            self._seen[id(thing)] = thing
            if isinstance(thing, torch.Tensor):
                self._tensors.append(_KeptTensor(thing, label))
                waiting.append((getattr(thing, "__dict__", None), label))
            elif isinstance(thing, dict):
                self._containers.append((thing, dict(thing)))
                waiting += [(value, key if isinstance(key, str) else label) for key, value in thing.items()]
            elif isinstance(thing, (list, deque, set)):
                self._containers.append((thing, set(thing) if isinstance(thing, set) else list(thing)))
                waiting += [(value, label) for value in thing]
            elif isinstance(thing, tuple):
                waiting += [(value, label) for value in thing]
            elif isinstance(thing, random.Random):
                self._others.append((thing.setstate, thing.getstate()))
            elif isinstance(thing, torch.Generator):
                self._others.append((thing.set_state, thing.get_state()))
            elif _package(thing) == "numpy" and hasattr(thing, "__array__"):
                self._others.append((functools.partial(thing.__setitem__, ...), thing.copy()))
            elif self._is_part(thing):
                waiting.append((vars(thing), label))

    def _is_part(self, thing: Any) -> bool:
        if isinstance(thing, torch.optim.Optimizer):
            return True
        if isinstance(thing, (type, torch.nn.Module)) or not hasattr(thing, "__dict__") or callable(thing):
            return False
        return _package(thing) == self._package and self._package not in ("torch", "builtins")


class Preparations:
    """Learns what an optimizer changes before its closure is done, and keeps that beforehand: a step that moves
    parameters first, as schedule-free and sharpness-aware ones do, could not be undone otherwise.

    Looks at the first three steps with a closure, of up to 1 GiB; from then on at the version of one parameter.
    """

    def __init__(self) -> None:
        self._num_left = _NUM_LEARNED
        self._labels: set[str] = set()
        self._backup: Backup | None = None
        self._probe: tuple[torch.Tensor, int] | None = None
        self.is_late = False  # something was moved in this step that nobody has kept

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Ahead of a step with a closure."""
        self._backup, self.is_late = None, False
        if self._num_left or self._labels:
            backup = Backup(optimizer, self._labels)
            if self._num_left and backup.num_bytes <= _MOST_LEARNED_BYTES:
                backup.complete()
            self._backup = backup
            self._num_left -= self._num_left > 0
        p = next((p for group in optimizer.param_groups for p in group["params"]), None)
        self._probe = None if p is None else (p, p._version)

    def look(self) -> None:
        """The closure is about to be evaluated."""
        if self._backup is not None:
            moved = self._backup.moved()
            if moved - self._labels:
                self.is_late = self.is_late or self._backup.lacks(moved)
                self._labels |= moved
        elif self._probe is not None and self._probe[0]._version != self._probe[1]:
            self._num_left, self.is_late = _NUM_LEARNED, True

    def backup(self, optimizer: torch.optim.Optimizer) -> Backup:
        """All of `optimizer` as it was before the step."""
        if self._backup is None:
            self._backup = Backup(optimizer)
        else:
            self._backup.complete()
        return self._backup

    def end(self) -> None:
        """The step is over."""
        self._backup = self._probe = None
