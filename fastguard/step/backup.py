"""A copy of everything that a step of an optimizer may change, so that the step can be undone whatever it did."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ..recovery.snapshots import Kept, is_same, package

_STRUCTURE = "entries of groups, state and attributes"
_PARAMETERS = "parameters"
_NUM_LEARNING_STEPS = 3  # steps with a closure that are watched for changes before the closure returns
_MAX_LEARNING_BYTES = 1 << 30  # held during these steps, beside the memory of the closure


class _KeptTensor:
    """A tensor, its memory, and a copy of its values."""

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self.tensor, self.label = tensor, label
        self.memory = tensor.data
        self.version = 0 if tensor.is_inference() else tensor._version
        self.values: torch.Tensor | None = None

    def copy(self) -> None:
        # An expanded tensor overlaps itself and cannot be written in place, by a step neither.
        shape = self.tensor.shape
        strides = self.tensor.stride() if self.tensor.layout is torch.strided else shape
        if self.values is None and not any(n > 1 and not s for n, s in zip(shape, strides)):
            self.values = self.memory.clone()

    def has_moved(self) -> bool:
        if not self.tensor.is_inference() and self.tensor._version != self.version:
            return True
        if not self._is_plain():
            return False
        return self._has_other_memory() or (self.values is not None and not torch.equal(self.memory, self.values))

    def restore(self) -> None:
        if self.values is not None:
            if self._is_plain() and self._has_other_memory():
                self.tensor.data = self.memory
            self.memory.copy_(self.values)

    def _is_plain(self) -> bool:
        return type(self.tensor) in (torch.Tensor, torch.nn.Parameter) and self.tensor.layout is torch.strided

    def _has_other_memory(self) -> bool:
        return self.tensor.data_ptr() != self.memory.data_ptr() or self.tensor.shape != self.memory.shape


class Backup(Kept):
    """A backup of what `optimizer` may change: parameters, state, groups and attributes, also those of optimizers and
    other objects of its own package that it holds. Modules are not searched: a closure changes their buffers. `labels`
    are of the tensors to copy at once: `_PARAMETERS`, or the keys that hold them; None for all. Without the copies it
    costs 1 us an entry."""

    def __init__(self, optimizer: Optimizer, labels: Collection[str] | None = None, more: Iterable[Any] = ()) -> None:
        super().__init__(package(optimizer))
        self.tensors: list[_KeptTensor] = []
        roots = [(root, "") for root in (*more, optimizer, optimizer.state, optimizer.param_groups)]
        self._keep([*roots, *((p, _PARAMETERS) for group in optimizer.param_groups for p in group["params"])])
        for kept in self.tensors:
            if labels is None or kept.label in labels:
                kept.copy()

    def complete(self) -> None:
        """Copies the tensors that have not been copied yet."""
        for kept in self.tensors:
            kept.copy()

    def moved(self) -> set[str]:
        """Labels of what has changed. Compares the tensors that were copied; of others only autograd's counter."""
        labels = {kept.label for kept in self.tensors if kept.has_moved()}
        return labels if all(is_same(now, then) for now, then in self._containers) else {*labels, _STRUCTURE}

    def restore(self) -> None:
        super().restore()
        for kept in self.tensors:
            kept.restore()

    def _keep_tensor(self, tensor: torch.Tensor, label: str, waiting: list[tuple[Any, str]]) -> None:
        self.tensors.append(_KeptTensor(tensor, label))
        waiting.append((getattr(tensor, "__dict__", None), label))


class ClosureBackup:
    """A backup for steps with a closure, which may change parameters before the closure returns, as schedule-free and
    sharpness-aware optimizers do. The first three steps show what to copy ahead, or that nothing changes that early. Up
    to 1 GiB is copied to learn that; later steps look at the version of one parameter."""

    def __init__(self) -> None:
        self._num_left = _NUM_LEARNING_STEPS
        self._labels: set[str] = set()
        self._backup: Backup | None = None
        self._probe: tuple[torch.Tensor, int] | None = None
        self.is_late = False  # this step changed something before it was copied

    def begin(self, optimizer: Optimizer) -> None:
        """Call it ahead of a step with a closure."""
        self._backup, self.is_late = None, False
        if self._num_left or self._labels:
            backup = Backup(optimizer, self._labels)
            if self._num_left and sum(kept.memory.nbytes for kept in backup.tensors) <= _MAX_LEARNING_BYTES:
                backup.complete()
            self._backup = backup
            self._num_left -= self._num_left > 0
        p = next((p for group in optimizer.param_groups for p in group["params"]), None)
        self._probe = None if p is None else (p, p._version)

    def look(self) -> None:
        """Call it when the closure is about to run."""
        if self._backup is not None:
            moved = self._backup.moved()
            if moved - self._labels:
                is_copied = all(kept.values is not None for kept in self._backup.tensors if kept.label in moved)
                self.is_late = self.is_late or not is_copied
                self._labels |= moved
        elif self._probe is not None and self._probe[0]._version != self._probe[1]:
            self._num_left, self.is_late = _NUM_LEARNING_STEPS, True

    def complete(self, optimizer: Optimizer) -> Backup:
        """All of `optimizer` as it was before the step."""
        if self._backup is None:
            self._backup = Backup(optimizer)
        else:
            self._backup.complete()
        return self._backup

    def end(self) -> None:
        self._backup = self._probe = None
