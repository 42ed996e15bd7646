"""What the hooks of one monitor write into: the sightings of the passes of one step."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import UnsupportedTensorError
from ...kernels.tensors import plain
from ...records.failures import Failures, describe
from ..thinning import chunks
from .families import PLAIN, Judgement
from .outputs import Call, Extract, inputs_of, is_dense, labelled, unit_dim_of, unreadable
from .readers import Delivery, Measurement, Reader, reader_for
from .sightings import Sighting, is_finite

_MAX_CALLS = 8  # of one module within a pass, told apart
_MAX_SKIPPED = 1000


class _Known(NamedTuple):
    """A tensor that was measured in this pass, as it was then."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    judgement: Judgement
    measured: Measurement


class Collector:
    """Measures what hooks show it, and keeps passes apart: one that did not end, by an exception, leaves nothing.

    Attributes:
        is_paused: nothing is recorded.
        quiet: names of modules of which only what is not finite is of interest.
        skipped: what could not be read, and why, by name.
        seconds: host time spent here since `take_seconds`.
        failures: where it is counted what raises: no hook may stop a forward pass.
    """

    def __init__(self, root: nn.Module, backend: str, failures: Failures, *, training_only: bool) -> None:
        self.failures = failures
        self._root = weakref.ref(root)
        self._backend = backend
        self._training_only = training_only
        self._readers: dict[torch.device, Reader] = {}
        self._done: list[Sighting] = []
        self._pass: list[Sighting] = []
        self._calls: dict[str, int] = {}
        self._known: dict[int, _Known] = {}
        self._is_open = False
        self.is_paused = False
        self.quiet: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.seconds = 0.0

    def is_wanted(self) -> bool:
        """Whether the pass under way is to be recorded: not a recomputation within backward, nor evaluation."""
        if self.is_paused or torch._C._current_graph_task_id() != -1 or torch._C._is_tracing():
            return False
        root = self._root()
        return root is None or root.training or not self._training_only

    def begin(self) -> None:
        """A pass through the model begins; one that never ended is dropped."""
        self._forget_pass()
        self._is_open = True

    def end(self) -> None:
        """The pass is complete."""
        self._done += self._pass
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._pass = []
        self._calls.clear()
        self._known.clear()
        self._is_open = False

    def deliver(self) -> tuple[list[Sighting], list[Delivery]]:
        """The sightings of all complete passes, on their way; of modules called outside any pass, too."""
        if not self._is_open:
            self._done += self._pass
        self._forget_pass()
        sightings, self._done = self._done, []
        if not sightings:
            return [], []
        return sightings, [reader.deliver() for reader in self._readers.values()]

    def take_seconds(self) -> float:
        """The host time spent here since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def see(self, name: str, judgement: Judgement, unit_dim: int | None, call: Call | None, output: Any) -> None:
        """Measures all tensors in the output of one call of one module. `call` None: its inputs are not known.

        Cost: one read of each tensor that this pass has not read before; of the inputs, on the CPU only if the output
        is not finite.
        """
        self.see_all(name, judgement, unit_dim, call, lambda: labelled(output))

    def see_all(
        self,
        name: str,
        judgement: Judgement,
        unit_dim: int | None,
        call: Call | None,
        find: Callable[[], list[tuple[str, torch.Tensor]]],
    ) -> None:
        """As `see`, of the tensors that `find` gives with their paths. Raises nothing."""
        started = time.perf_counter()
        try:
            for path, tensor in find():
                self.see_one(name, judgement, unit_dim, call, tensor, path)
        except Exception as error:
            self._note(name, error)
        self.seconds += time.perf_counter() - started

    def see_extract(
        self, name: str, kind: str, judgement: Judgement, make: Callable[[], Iterable[Extract] | str]
    ) -> None:
        """Measures what `make` gives, under the name of the module and the kind; a text says why it cannot be read.

        Raises nothing. Cost: one read of up to three small tensors a part, and that of making them.
        """
        started = time.perf_counter()
        try:
            found = make()
            key = self._numbered(name, kind)
            if isinstance(found, str):
                if len(self.skipped) < _MAX_SKIPPED:
                    self.skipped[key] = found
                return
            for part in found:
                reader = self._reader(part.values.device)
                measured = reader.measure(part.values, judgement, part.unit_dim)
                entropy, largest = (
                    None if x is None else reader.measure(x, PLAIN, None) for x in (part.entropy, part.largest)
                )
                self._pass.append(Sighting(key, judgement, measured, entropy=entropy, largest=largest))
        except Exception as error:  # whatever a model's own objects raise: noted, and this output left out
            self._note(name + kind, error)
        finally:
            self.seconds += time.perf_counter() - started

    def _note(self, name: str, error: Exception) -> None:
        said = describe(error)
        if name not in self.skipped and len(self.skipped) < _MAX_SKIPPED:
            self.skipped[name] = said
        self.failures.note("activation sampler", f"{said}, at {name}", "This output was left out.")

    def see_one(
        self, name: str, judgement: Judgement, unit_dim: int | None, call: Call | None, tensor: torch.Tensor, path: str
    ) -> None:
        """Measures one tensor of an output; one with a path is only looked at for NaN and Inf."""
        key = self._numbered(name, path)
        problem = unreadable(tensor)
        if problem is None:
            problem = self._measure(key, PLAIN if path else judgement, unit_dim, call, tensor, name in self.quiet)
        if problem is not None and name not in self.quiet and len(self.skipped) < _MAX_SKIPPED:
            self.skipped[key] = problem

    def _numbered(self, name: str, path: str) -> str:
        call = self._calls[name + path] = self._calls.get(name + path, 0) + 1
        return name + path if call == 1 else f"{name}#{min(call, _MAX_CALLS)}{path}"

    def _reader(self, device: torch.device) -> Reader:
        reader = self._readers.get(device)
        if reader is None:
            reader = self._readers[device] = reader_for(device, self._backend)
        return reader

    def _measure(
        self, key: str, judgement: Judgement, unit_dim: int | None, call: Call | None, x: torch.Tensor, is_quiet: bool
    ) -> str | None:
        """Adds the sighting of `x`; says why not if it cannot."""
        if x.is_complex():
            x = torch.view_as_real(x.detach().resolve_conj())
        reader = self._reader(x.device)
        before = self._lookup(x)  # as what an in-place module got
        try:
            measured = self._reading(x, before, reader, judgement, unit_dim)
            finite, readings = self._judge_inputs(call, x, before, reader, measured)
        except UnsupportedTensorError as error:
            return error.problem
        size = 1
        if judgement.row_dim is not None and x.ndim:
            size = x.shape[judgement.row_dim]
        masked = False
        if finite:
            masked = not _has_bad(x, may_be_masked=True)
        self._pass.append(Sighting(key, judgement, measured, size, finite, readings, masked, is_quiet))
        return None

    def _reading(
        self, x: torch.Tensor, known: _Known | None, reader: Reader, judgement: Judgement, unit_dim: int | None
    ) -> Measurement:
        if known is not None and known.version == _version(x) and _serves(known.judgement, judgement):
            return known.measured
        dim = unit_dim_of(x, unit_dim) if judgement.has_units and is_dense(x) else None
        measured = reader.measure(x, judgement, dim)
        version = _version(x)
        if version is not None:
            self._known[id(x)] = _Known(weakref.ref(x), version, judgement, measured)
        return measured

    def _lookup(self, x: torch.Tensor) -> _Known | None:
        known = self._known.get(id(x))
        return known if known is not None and known.tensor() is x else None

    def _judge_inputs(
        self, call: Call | None, output: torch.Tensor, before: _Known | None, reader: Reader, measured: Measurement
    ) -> tuple[bool | None, tuple[tuple[Measurement, bool], ...] | None]:
        """Whether the inputs were finite, or the readings that will tell."""
        if call is None:
            return None, None
        if not reader.immediate:
            return None, self._later(inputs_of(call), output, before)
        row = measured.reading().row
        if is_finite(row):
            return None, None  # nobody asks
        readable = [(x, i == 0) for i, x in enumerate(inputs_of(call)) if unreadable(x) is None]
        verdicts = [self._is_finite(x, is_first, output, before) for x, is_first in readable]
        return (False if False in verdicts else None if None in verdicts else True), None

    def _is_finite(self, x: torch.Tensor, is_first: bool, output: torch.Tensor, before: _Known | None) -> bool | None:
        """Whether the input `x` was finite; -Inf is allowed in all but the first, as masks hold it."""
        known = self._before(x, output, before)
        if known is not None:
            row = known.measured.reading().row
            if is_finite(row):
                return True
            if is_first:
                return False
        if _same_memory(x, output):  # written over, so what it was before cannot be read any more
            return None if known is None else False
        return not _has_bad(x, may_be_masked=not is_first)

    def _before(self, x: torch.Tensor, output: torch.Tensor, before: _Known | None) -> _Known | None:
        """What is known of the input `x` as the module got it; `before` is what is known of the output from earlier."""
        if x is output:
            return before
        known = self._lookup(x)
        if known is not None and known.version != _version(x) and not _same_memory(x, output):
            return None  # something between two modules changed it
        return known

    def _later(
        self, inputs: list[torch.Tensor], output: torch.Tensor, before: _Known | None
    ) -> tuple[tuple[Measurement, bool], ...] | None:
        """Readings of the inputs, each with whether it is the first; None if one cannot be read any more."""
        found = []
        for i, x in enumerate(inputs):
            if unreadable(x) is not None:
                continue
            known = self._before(x, output, before)
            if known is None and _same_memory(x, output):
                return None
            if known is not None:
                measured = known.measured
            else:
                x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x
                measured = self._reader(x.device).measure(x, PLAIN, None)
            found.append((measured, i == 0))
        return tuple(found)


def _has_bad(x: torch.Tensor, *, may_be_masked: bool) -> bool:
    """Whether there is NaN or Inf in what is here of `x`; -Inf counts unless it may stand for what is masked."""
    for part in chunks(plain(x.detach(), 0)):
        bad = part.isnan() | (part == torch.inf) if may_be_masked else part.isfinite().logical_not()
        if bool(bad.any()):
            return True
    return False


def _version(x: torch.Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _serves(had: Judgement, wanted: Judgement) -> bool:
    """Whether a reading taken for one judgement holds the figures of another."""
    if had is wanted:
        return True
    return wanted.near_zero == had.near_zero and not wanted.has_units and wanted.low == -torch.inf == -wanted.high


def _same_memory(x: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether the output was written over the input, or is the input."""
    if x is output:
        return True
    return is_dense(x) and is_dense(output) and x.data_ptr() == output.data_ptr() != 0
