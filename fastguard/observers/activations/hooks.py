"""Hooks on modules. In a compiled graph they are operators that mutate a token, so that the graph stays whole.

Hooks outside of compiled graphs are removed at steps that are not sampled. In a compiled graph they stay and read
`Collector.is_on`. Each of its values has its own graph, so steps that are not sampled run a graph without hooks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..observer import Transient, leave_to_python
from ..tensors import Call, inputs_of, labelled, leaves
from .collector import Collector
from .routers import KIND, Router
from .selection import Target

TOKEN = torch.zeros(1, device="cpu")  # the operators claim to change it, so that none is dropped or moved
_is_exporting = torch.compiler.is_exporting
_numbers = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Hook] = weakref.WeakValueDictionary()


def is_traced() -> bool:
    """Whether dynamo is tracing this, and not for an export."""
    return torch.compiler.is_dynamo_compiling() and not _is_exporting()


class Hook(Transient):
    """One hook on one module.

    Attributes:
        at_end: whether it runs after the `forward` of the module, or before it.
        on_every_step: whether it also acts at steps that are not sampled.
        is_compiled: whether it is in a compiled graph and must stay.
    """

    at_end = True
    on_every_step = False

    def __init__(self, module: nn.Module, collector: Collector) -> None:
        self._module = weakref.ref(module)
        self._handle: RemovableHandle | None = None
        self.collector = collector
        self.is_compiled = False
        self.number = next(_numbers)
        _hooks[self.number] = self

    def attach(self) -> None:
        """Sets the hook, unless it is set."""
        module = self._module()
        if self._handle is None and module is not None:
            if self.at_end:
                self._handle = module.register_forward_hook(self, with_kwargs=True)
            else:
                self._handle = module.register_forward_pre_hook(self, with_kwargs=True)

    def remove(self) -> None:
        """Removes the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        if not (self.on_every_step or self.collector.is_on):
            return
        if torch.compiler.is_compiling():
            if not _is_exporting():
                self.trace(args, kwargs, output)
        elif self.collector.is_wanted():
            self.look(args, kwargs, output)

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Reads a call of the module."""
        raise NotImplementedError

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Adds operators that read the call to the graph that is being compiled."""
        raise NotImplementedError

    def look_compiled(self, output: Any, inputs: list[torch.Tensor], path: str) -> None:
        """Reads the arguments of one of these operators."""
        raise NotImplementedError


class TensorHook(Hook):
    """Reads all tensors that a module returned, or its first input."""

    def __init__(self, target: Target, collector: Collector) -> None:
        super().__init__(target.module, collector)
        self.subject = target.subject()
        self.at_end = not target.of_input

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.at_end:
            self.collector.see(self.subject, Call(args, kwargs), lambda: labelled(output))
        else:
            self.collector.see(self.subject, None, lambda: _first_of(args, kwargs))

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = [x.detach() for x in inputs_of(Call(args, kwargs))] if self.at_end else []
        for path, tensor in labelled(output) if self.at_end else _first_of(args, kwargs):
            torch.ops.fastguard.see(tensor.detach(), inputs, TOKEN, self.number, path)

    def look_compiled(self, output: Any, inputs: list[torch.Tensor], path: str) -> None:
        self.collector.see(self.subject, Call(inputs, {}) if self.at_end else None, lambda: [(path, output)])


def _first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [("", tensor) for _, tensor in leaves((args, kwargs))[:1]]


class RouterHook(Hook):
    """Reads the choices of a router."""

    def __init__(self, target: Target, collector: Collector, router: Router) -> None:
        super().__init__(target.module, collector)
        self.subject = target.subject()
        self._router = router

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._see(*self._router.found(output))

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen = [x.detach() for x in self._router.found(output) if x is not None]
        if seen:
            torch.ops.fastguard.see(seen[0], seen[1:], TOKEN, self.number, "")

    def look_compiled(self, output: Any, inputs: list[torch.Tensor], path: str) -> None:
        both = (output, inputs[0] if inputs else None)
        self._see(*(both if output.is_floating_point() else (None, output)))

    def _see(self, scores: torch.Tensor | None, indices: torch.Tensor | None) -> None:
        name, judgement = self.subject.name, self.subject.judgement
        self.collector.see_extract(name, KIND, judgement, lambda: self._router.extracts(scores, indices))


class PlaceHook(Hook):
    """Calls `call` when a module begins or ends."""

    def __init__(self, module: nn.Module, collector: Collector, call: Callable[[], None], *, at_end: bool) -> None:
        super().__init__(module, collector)
        self.call = call
        self.at_end = at_end

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.call()

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        torch.ops.fastguard.mark(TOKEN, self.number)

    def look_compiled(self, output: Any, inputs: list[torch.Tensor], path: str) -> None:
        self.call()


leave_to_python(Hook)


def _run(number: int, output: Any, inputs: list[torch.Tensor], path: str) -> None:
    hook = _hooks.get(number)
    if hook is not None:  # None if the graph outlives its monitor
        hook.is_compiled = True
        if hook.collector.is_wanted():
            hook.look_compiled(output, inputs, path)


# The schema is explicit because torch 2.6 cannot derive it from `list[torch.Tensor]`.
_SEE = "(Tensor output, Tensor[] inputs, Tensor(a!) token, SymInt number, str path) -> ()"


@torch.library.custom_op("fastguard::see", mutates_args={"token"}, schema=_SEE)
def _see(output: torch.Tensor, inputs: list[torch.Tensor], token: torch.Tensor, number: int, path: str) -> None:
    _run(number, output, inputs, path)


@torch.library.custom_op("fastguard::mark", mutates_args={"token"})
def _mark(token: torch.Tensor, number: int) -> None:
    _run(number, None, [], "")


_see.register_fake(lambda *args: None)
_mark.register_fake(lambda *args: None)
