"""Collects the readings of the hooks of one monitor, for the passes of one step."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from ...errors import UnsupportedTensorError
from ...kernels.tensors import plain
from ...records.failures import Failures, describe
from ..tensors import Call, Extract, chunks, inputs_of, is_dense, unit_dim_of, unreadable
from .families import PLAIN, Judgement
from .readers import DeferredReader, Event, ImmediateReader, Measurement, reader_for
from .selection import WatchedModule
from .sightings import Sighting, is_finite

_MAX_CALLS = 8  # of one module within a pass, with a record each
_MAX_SKIPPED = 1000


class _Known(NamedTuple):
    """A tensor that was measured in this pass, with its version at that time."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    judgement: Judgement
    measured: Measurement


class Collector:
    """Measures the tensors that hooks show it. A pass that ends with an exception leaves nothing.

    Attributes:
        is_on: whether the current step is sampled. Compiled graphs have a guard on it, so it must be a bool.
        is_paused: nothing is recorded.
        skipped: outputs that could not be read, and why, by name.
        seconds: host time spent here since `take_seconds`.
        failures: counts errors, because a hook must not stop a forward pass.
    """

    def __init__(self, root: nn.Module, backend: str, failures: Failures, *, training_only: bool) -> None:
        self.failures = failures
        self._root = weakref.ref(root)
        self._backend = backend
        self._training_only = training_only
        self._readers: dict[torch.device, ImmediateReader | DeferredReader] = {}
        self._done: list[Sighting] = []
        self._pass: list[Sighting] = []
        self._calls: dict[str, int] = {}
        self._known: dict[int, _Known] = {}
        self._is_open = False
        self.is_on = False
        self.is_paused = False
        self.skipped: dict[str, str] = {}
        self.seconds = 0.0

    def is_wanted(self) -> bool:
        """Whether to record the current pass: not a recomputation in backward, nor evaluation."""
        if self.is_paused or torch._C._current_graph_task_id() != -1 or torch._C._is_tracing():
            return False
        root = self._root()
        return root is None or root.training or not self._training_only

    def begin(self) -> None:
        """Begins a pass through the model, and drops one that never ended."""
        self._forget_pass()
        self._is_open = True

    def end(self) -> None:
        """Ends the pass."""
        self._done += self._pass
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._pass = []
        self._calls.clear()
        self._known.clear()
        self._is_open = False

    def deliver(self) -> tuple[list[Sighting], list[Event]]:
        """The readings of all complete passes, and of modules called outside of a pass; and events of their arrival."""
        if not self._is_open:
            self._done += self._pass
        self._forget_pass()
        sightings, self._done = self._done, []
        if not sightings:
            return [], []
        events = [reader.deliver() for reader in self._readers.values()]
        return sightings, [event for event in events if event is not None]

    def take_seconds(self) -> float:
        """The host time spent here since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def see(
        self, subject: WatchedModule, call: Call | None, find: Callable[[], list[tuple[str, torch.Tensor]]]
    ) -> None:
        """Measures the tensors of one call of one module, which `find` returns with their paths. Raises nothing.

        A tensor with a path is only checked for NaN and Inf. If `call` is None, the inputs are unknown.

        Cost: one read of each tensor that this pass has not read before, and of the inputs; on the CPU of these only if
        the output is not finite.
        """
        with self._kept(subject.name):
            for path, tensor in find():
                key = self._numbered(subject.name, path)
                problem = unreadable(tensor)
                if problem is None:
                    problem = self._measure(key, subject._replace(judgement=PLAIN) if path else subject, call, tensor)
                if problem is not None and not subject.is_quiet:
                    self._skip(key, problem)

    def see_extract(
        self, name: str, kind: str, judgement: Judgement, make: Callable[[], Iterable[Extract] | str]
    ) -> None:
        """Measures the parts that `make` returns, under the name of the module and the kind; a text says why it cannot.

        Raises nothing. Cost: one read of up to three small tensors a part, and the cost of `make`.
        """
        with self._kept(name + kind):
            found = make()
            key = self._numbered(name, kind)
            if isinstance(found, str):
                self._skip(key, found)
                return
            for part in found:
                reader = self._reader(part.values.device)
                measured = reader.measure(part.values, judgement, part.unit_dim)
                entropy, largest = (
                    None if x is None else reader.measure(x, PLAIN, None) for x in (part.entropy, part.largest)
                )
                self._pass.append(Sighting(key, judgement, measured, entropy=entropy, largest=largest))

    @contextlib.contextmanager
    def _kept(self, name: str) -> Iterator[None]:
        """Counts the time, and notes errors, also those of a model's own objects."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            said = describe(error)
            self._skip(name, said)
            self.failures.note("activation sampler", f"{said}, at {name}", "This output was left out.")
        finally:
            self.seconds += time.perf_counter() - started

    def _skip(self, key: str, problem: str) -> None:
        if len(self.skipped) < _MAX_SKIPPED:
            self.skipped.setdefault(key, problem)

    def _numbered(self, name: str, path: str) -> str:
        call = self._calls[name + path] = self._calls.get(name + path, 0) + 1
        return name + path if call == 1 else f"{name}#{min(call, _MAX_CALLS)}{path}"

    def _reader(self, device: torch.device) -> ImmediateReader | DeferredReader:
        reader = self._readers.get(device)
        if reader is None:
            reader = self._readers[device] = reader_for(device, self._backend)
        return reader

    def _measure(self, key: str, subject: WatchedModule, call: Call | None, x: torch.Tensor) -> str | None:
        """Adds a reading of `x`. Returns why not, if it cannot."""
        x = _real(x)
        judgement, before = subject.judgement, self._lookup(x)  # as what an in-place module got
        try:
            if before is not None and before.version == _version(x) and _serves(before.judgement, judgement):
                measured = before.measured
            else:
                dim = unit_dim_of(x, subject.unit_dim) if judgement.has_units and is_dense(x) else None
                measured = self._reader(x.device).measure(x, judgement, dim)
                version = _version(x)
                if version is not None:
                    self._known[id(x)] = _Known(weakref.ref(x), version, judgement, measured)
            inputs = self._inputs(call, x, before, measured)
        except UnsupportedTensorError as error:
            return error.problem
        size = x.shape[judgement.row_dim] if judgement.row_dim is not None and x.ndim else 1
        is_masked = inputs is not None and self._reader(x.device).immediate and _is_only_masked(x)
        self._pass.append(Sighting(key, judgement, measured, size, inputs, is_masked, subject.is_quiet))
        return None

    def _lookup(self, x: torch.Tensor) -> _Known | None:
        known = self._known.get(id(x))
        return known if known is not None and known.tensor() is x else None

    def _inputs(
        self, call: Call | None, output: torch.Tensor, before: _Known | None, measured: Measurement
    ) -> tuple[tuple[Measurement | None, bool], ...] | None:
        """Readings of the inputs, each with whether it is the first one; None for one that the call has overwritten.

        None if the call is unknown, or if the output is known to be finite. `before` is what was known about the memory
        of the output ahead of the call.
        """
        if call is None or (self._reader(output.device).immediate and is_finite(measured().row)):
            return None
        found: list[tuple[Measurement | None, bool]] = []
        for i, x in enumerate(inputs_of(call)):
            if unreadable(x) is not None:
                continue
            known = before if x is output else self._as_given(x, output)
            reading = None if known is None else known.measured
            if reading is None and not _same_memory(x, output):
                reading = self._reader(x.device).measure(_real(x), PLAIN, None)
            found.append((reading, i == 0))
        return tuple(found)

    def _as_given(self, x: torch.Tensor, output: torch.Tensor) -> _Known | None:
        """What is known about the input `x` as the module got it."""
        known = self._lookup(x)
        if known is not None and known.version != _version(x) and not _same_memory(x, output):
            return None  # something between two modules changed it
        return known


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x


def _is_only_masked(x: torch.Tensor) -> bool:
    """Whether `x` holds no other bad value than -Inf, as masked scores do."""
    return not any(bool((part.isnan() | (part == torch.inf)).any()) for part in chunks(plain(x.detach(), 0)))


def _version(x: torch.Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _serves(had: Judgement, wanted: Judgement) -> bool:
    """Whether a reading for one judgement holds the figures of another."""
    if had is wanted:
        return True
    return wanted.near_zero == had.near_zero and not wanted.has_units and wanted.low == -torch.inf == -wanted.high


def _same_memory(x: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether the output is the input, or in the same memory."""
    if x is output:
        return True
    return is_dense(x) and is_dense(output) and x.data_ptr() == output.data_ptr() != 0
