"""Hooks on modules, what collects their readings for the passes of one step, and how often it may.

In a compiled graph hooks are operators that mutate a token, so that the graph stays whole. There they stay, and each
value of `Collector.is_on` has its own graph; elsewhere they are set at sampled steps only.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import UnsupportedTensorError
from ...records.failures import Failures, describe
from ..observer import Transient, leave_to_python
from ..tensors import has_values, inputs_of, is_dense, labelled, leaves, unit_dim_of
from .arrivals import DeferredReader, ImmediateReader, Measurement, Sighting, reader_for
from .selection import PLAIN, Judgement, Target

Inputs: TypeAlias = Callable[[], Sequence[torch.Tensor]]  # of a module, asked for only if they matter
Seen: TypeAlias = "tuple[Sequence[tuple[str, torch.Tensor]], Inputs | None]"
TOKEN = torch.zeros(1, device="cpu")  # the operators claim to change it, so that none is dropped or moved
_numbers = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Hook] = weakref.WeakValueDictionary()
_MAX_CALLS = 8  # of one module within a pass, with a record each
_RECENT_COSTS = 3
_RECENT_STEPS = 20
_GROWTH = 4  # at most, of the interval from one sample to the next


class _Known(NamedTuple):
    """A tensor that was measured in this pass, with its version at that time."""

    tensor: weakref.ref[torch.Tensor]
    version: int | None
    judgement: Judgement
    measured: Measurement


class Collector:
    """Measures the tensors that hooks show it. A pass that ends with an exception leaves nothing."""

    def __init__(self, backend: str) -> None:
        self.failures = Failures()  # counts errors, because a hook must not stop a forward pass
        self.root: Callable[[], nn.Module | None] = lambda: None  # refers to the model
        self._backend = backend
        self._readers: dict[torch.device, ImmediateReader | DeferredReader] = {}
        self._done: list[Sighting] = []
        self._pass: list[Sighting] = []
        self._calls: dict[str, int] = {}
        self._known: dict[int, _Known] = {}
        # whether the current step is sampled. Compiled graphs have a guard on it, so it must be a bool
        self._is_open = self.is_on = self.is_paused = False  # paused: nothing is recorded
        self.seconds = 0.0  # host time spent here since it was last set to zero

    def begin(self) -> None:
        """Begins a pass through the model, and drops one that never ended."""
        self._pass, self._is_open = [], True
        self._calls.clear()
        self._known.clear()

    def end(self) -> None:
        self._done += self._pass
        self.begin()
        self._is_open = False

    def deliver(self) -> tuple[list[Sighting], list[Any]]:
        """The readings of all complete passes, and of modules called outside of a pass; and events of their arrival."""
        if self._is_open:
            self.begin()
        self.end()
        sightings, self._done = self._done, []
        events = [reader.deliver() for reader in self._readers.values()] if sightings else []
        return sightings, [event for event in events if event is not None]

    def see(self, target: Target, seen: Iterable[tuple[str, torch.Tensor]], inputs: Inputs | None) -> None:
        """Measures the tensors `seen` of one call, which come with their paths; one with a path only for NaN and Inf.

        Cost: one read of each tensor that this pass has not read before, and of the inputs; on the CPU of these only
        where the output is not finite.
        """
        for path, tensor in seen:
            name = target.name + path
            call = self._calls[name] = self._calls.get(name, 0) + 1
            if has_values(tensor):
                key = name if call == 1 else f"{target.name}#{min(call, _MAX_CALLS)}{path}"
                with contextlib.suppress(UnsupportedTensorError):
                    self._measure(key, target._replace(judgement=PLAIN) if path else target, inputs, tensor)

    def _reader(self, x: torch.Tensor) -> ImmediateReader | DeferredReader:
        reader = self._readers.get(x.device)
        if reader is None:
            reader = self._readers[x.device] = reader_for(x.device, self._backend)
        return reader

    def _measure(self, key: str, target: Target, given: Inputs | None, x: torch.Tensor) -> None:
        """Adds a reading of `x` and, where `given` may matter, of these."""
        judgement, reader, before = target.judgement, self._reader(x), self._known.get(id(x))
        if before is not None and before.tensor() is not x:
            before = None
        known = before
        if known is None or known.version != _version(x) or known.judgement[1:5] != judgement[1:5]:
            real = _real(x)
            dim = unit_dim_of(real, target.unit_dim) if judgement.has_units and is_dense(real) else None
            known = _Known(weakref.ref(x), _version(x), judgement, reader.measure(real, judgement, dim))
            if known.version is not None:
                self._known[id(x)] = known
        inputs = None
        if given is not None and not (isinstance(reader, ImmediateReader) and known.measured().row.is_finite):
            readable = [(i == 0, given_x) for i, given_x in enumerate(given()) if has_values(given_x)]
            # An in-place module has overwritten its input: what was known of it is what it got.
            inputs = [(first, before and before.measured if y is x else self._input(y)) for first, y in readable]
        self._pass.append(Sighting(key, judgement, known.measured, inputs, target.is_quiet))

    def _input(self, x: torch.Tensor) -> Measurement:
        known = self._known.get(id(x))
        if known is not None and known.tensor() is x and known.version == _version(x):
            return known.measured
        return self._reader(x).measure(_real(x), PLAIN, None)


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x


def _version(x: torch.Tensor) -> int | None:
    return None if x.is_inference() else x._version


class Hook(Transient):
    """A hook on a module: shows what it takes or returns to the collector, or, without a target, calls `call`."""

    def __init__(
        self,
        module: nn.Module,
        collector: Collector,
        target: Target | None = None,
        call: Callable[[], None] | None = None,
        *,
        at_end: bool = True,  # after its `forward`, or before
    ) -> None:
        self._module = weakref.ref(module)
        self._handle: RemovableHandle | None = None
        self.collector, self.call, self.at_end = collector, call, at_end
        self.target = None if target is None else target._replace(module=None)  # a hook does not keep its module alive
        self.on_every_step = target is None  # also at steps that are not sampled
        self.is_compiled = False  # whether it is in a compiled graph and must stay
        self.number = next(_numbers)
        _hooks[self.number] = self

    def attach(self) -> None:
        """Sets the hook, unless it is set."""
        module = self._module()
        if self._handle is None and module is not None:
            register = module.register_forward_hook if self.at_end else module.register_forward_pre_hook
            self._handle = register(self, with_kwargs=True)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        if not (self.on_every_step or self.collector.is_on):
            return
        if torch.compiler.is_compiling():
            if not torch.compiler.is_exporting():
                seen, inputs = self._find(args, kwargs, output)
                found = [x.detach() for _, x in seen]
                given = [] if inputs is None else [x.detach() for x in inputs()]
                torch.ops.fastguard.see(found, given, TOKEN, self.number, [path for path, _ in seen])
        else:
            self.look(lambda: self._find(args, kwargs, output))

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Seen:
        """What it reads of a call: tensors with their paths, and what returns the module's inputs; None if unknown."""
        if self.target is None:
            return (), None
        if self.target.of_input:
            return [("", tensor) for _, tensor in leaves((args, kwargs))[:1]], None
        return labelled(output), lambda: inputs_of(args, kwargs)

    def look(self, find: Callable[[], Seen]) -> None:
        """Counts the time, and notes errors, also those of a model's own objects.

        Not in a recomputation in backward, nor in evaluation.
        """
        collector = self.collector
        if collector.is_paused or torch._C._current_graph_task_id() != -1 or torch._C._is_tracing():
            return
        root = collector.root()
        if root is not None and not root.training:
            return
        if self.call is not None:
            self.call()
        if self.target is not None:
            started = time.perf_counter()
            try:
                collector.see(self.target, *find())
            except Exception as error:  # an output may be anything; the report names it, training goes on
                what = f"{describe(error)}, at {self.target.name}"
                collector.failures.note("activation sampler", what, "This output was left out.")
            finally:
                collector.seconds += time.perf_counter() - started


leave_to_python(Hook.__call__)


@torch.library.custom_op(
    "fastguard::see",
    mutates_args={"token"},
    schema="(Tensor[] seen, Tensor[] inputs, Tensor(a!) token, SymInt number, str[] paths) -> ()",
)
def _see(
    seen: list[torch.Tensor], inputs: list[torch.Tensor], token: torch.Tensor, number: int, paths: list[str]
) -> None:
    hook = _hooks.get(number)
    if hook is not None:  # None if the graph outlives its monitor
        hook.is_compiled = True
        hook.look(lambda: (list(zip(paths, seen)), (lambda: inputs) if hook.at_end else None))


_see.register_fake(lambda *args: None)


class Cost(NamedTuple):
    """Cost so far."""

    seconds: float  # host time spent in the monitor
    # num_samples, num_steps: sampled steps, and all steps
    num_samples: int
    num_steps: int
    interval: int  # steps from one sample to the next at present


class Budget:
    """Stretches the interval between samples to a multiple of `every` that keeps their cost within `share`.

    A sample costs the least of the last three, without the very first, which loads and compiles; a step takes the
    median of the last twenty. The interval grows at most fourfold at once, so that one slow sample decides little.
    """

    def __init__(self, every: int, share: float | None) -> None:
        self.every, self.share, self.interval = every, share, every
        self.num_samples = self.num_steps = 0
        self._spent_s = self._since_sample_s = 0.0
        self._costs: deque[float] = deque(maxlen=_RECENT_COSTS)
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)

    def step(self, seconds: float | None, cost_s: float, sampled: bool, num_steps: int = 1) -> None:
        """Takes the steps since the last call: their time if known, the monitor's part, if the last was sampled."""
        self.num_steps += num_steps
        self._spent_s += cost_s
        self._since_sample_s += cost_s  # figures may arrive, and be counted, some steps later
        if seconds is not None:
            self._steps.append(max(0.0, seconds - cost_s) / num_steps)
        if not sampled:
            return
        self.num_samples += 1
        if self.num_samples > 1:
            self._costs.append(self._since_sample_s)
        if self._costs and self._steps and self.share is not None:
            step_s = max(statistics.median(self._steps), 1e-9)
            needed = math.ceil(min(self._costs) / (self.share * step_s * self.every))
            self.interval = self.every * max(1, min(needed, _GROWTH * self.interval // self.every))
        self._since_sample_s = 0.0

    def cost(self) -> Cost:
        return Cost(self._spent_s, self.num_samples, self.num_steps, self.interval)
