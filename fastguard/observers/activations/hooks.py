"""The hooks on modules. In a compiled graph they become operators that mutate a token, so that the graph stays whole.

Hooks that no compiled graph holds are removed on steps that are not sampled. In a compiled graph they stay and read
`Switch.on`, of which each value has a graph of its own: a step that is not sampled runs a graph without them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..observer import leave_to_python
from .collector import Collector
from .families import Judgement
from .outputs import Call, inputs_of, labelled, leaves
from .routers import KIND, Router
from .selection import Target

_is_exporting = torch.compiler.is_exporting
_numbers = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Hook] = weakref.WeakValueDictionary()


class Switch:
    """Whether the step under way is sampled. Compiled graphs are guarded by `on`, a bool for that reason."""

    token = torch.zeros(1, device="cpu")  # what the operators claim to change, so that none is dropped or moved

    def __init__(self) -> None:
        self.on = False


def is_traced() -> bool:
    """Whether dynamo reads this, instead of Python running it, and not for an export."""
    return torch.compiler.is_dynamo_compiling() and not _is_exporting()


def inert(*args: Any, **kwargs: Any) -> None:
    """What a hook is in a copy of the model, or in a file, and an operator where it is traced: nothing."""


class Hook:
    """One hook on one module.

    Attributes:
        is_compiled: a compiled graph holds it, so that it must stay.
    """

    def __init__(self, module: nn.Module, switch: Switch, collector: Collector) -> None:
        self._module = weakref.ref(module)
        self._handle: RemovableHandle | None = None
        self.switch = switch
        self.collector = collector
        self.is_compiled = False
        self.number = next(_numbers)
        _hooks[self.number] = self

    def attach(self) -> None:
        """Sets the hook, unless it is set."""
        module = self._module()
        if self._handle is None and module is not None:
            self._handle = self._register(module)

    def remove(self) -> None:
        """Takes the hook away."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _register(self, module: nn.Module) -> RemovableHandle:
        raise NotImplementedError

    def on_compiled(self, output: Any, inputs: list[torch.Tensor], path: str) -> None:
        """Runs where a compiled graph calls."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _inert, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert


def _inert() -> Callable[..., None]:
    return inert


class _Watching(Hook):
    def __init__(self, target: Target, switch: Switch, collector: Collector) -> None:
        super().__init__(target.module, switch, collector)
        self.name = target.name
        self.judgement: Judgement = target.judgement
        self.unit_dim = target.unit_dim
        if target.is_quiet:
            collector.quiet.add(target.name)

    def on_compiled(self, output: Any, inputs: list[torch.Tensor] | None, path: str) -> None:
        if self.collector.is_wanted():
            call = None if inputs is None else Call(inputs, {})
            self.collector.see_all(self.name, self.judgement, self.unit_dim, call, lambda: [(path, output)])


class OutputHook(_Watching):
    """Looks at what a module returned."""

    def _register(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self.switch.on:
            return
        if torch.compiler.is_compiling():
            if not _is_exporting():
                inputs = [x.detach() for x in inputs_of(Call(args, kwargs))]
                for path, tensor in labelled(output):
                    torch.ops.fastguard.see(tensor.detach(), inputs, self.switch.token, self.number, path)
        elif self.collector.is_wanted():
            self.collector.see(self.name, self.judgement, self.unit_dim, Call(args, kwargs), output)


class InputHook(_Watching):
    """Looks at the first tensor that a module was given."""

    def _register(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.switch.on:
            return
        if torch.compiler.is_compiling():
            if not _is_exporting():
                for _, tensor in leaves((args, kwargs))[:1]:
                    torch.ops.fastguard.see(tensor.detach(), [], self.switch.token, self.number, "")
        elif self.collector.is_wanted():
            first = lambda: [("", tensor) for _, tensor in leaves((args, kwargs))[:1]]  # noqa: E731
            self.collector.see_all(self.name, self.judgement, self.unit_dim, None, first)

    def on_compiled(self, output: Any, inputs: list[torch.Tensor] | None, path: str) -> None:
        super().on_compiled(output, None, path)


class RouterHook(_Watching):
    """Looks at what a router chose."""

    def __init__(self, target: Target, switch: Switch, collector: Collector, router: Router) -> None:
        super().__init__(target, switch, collector)
        self._router = router

    def _register(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.switch.on:
            return
        scores, indices = self._router.found(output)
        if torch.compiler.is_compiling():
            seen = [x.detach() for x in (scores, indices) if x is not None]
            if seen and not _is_exporting():
                torch.ops.fastguard.see(seen[0], seen[1:], self.switch.token, self.number, "")
        elif self.collector.is_wanted():
            self._see(scores, indices)

    def on_compiled(self, output: Any, inputs: list[torch.Tensor] | None, path: str) -> None:
        if self.collector.is_wanted():
            both = (output, inputs[0] if inputs else None)
            self._see(*(both if output.is_floating_point() else (None, output)))

    def _see(self, scores: torch.Tensor | None, indices: torch.Tensor | None) -> None:
        self.collector.see_extract(self.name, KIND, self.judgement, lambda: self._router.extracts(scores, indices))


class PassHook(Hook):
    """Where a pass through the model begins, or ends.

    Attributes:
        on_every_step: whether it calls on steps that are not sampled, too.
    """

    def __init__(
        self, module: nn.Module, switch: Switch, collector: Collector, call: Callable[[], None], *, at_end: bool
    ) -> None:
        super().__init__(module, switch, collector)
        self.call = call
        self.at_end = at_end
        self.on_every_step = True

    def _register(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self) if self.at_end else module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if not (self.on_every_step or self.switch.on):
            return
        if torch.compiler.is_compiling():
            if not _is_exporting():
                torch.ops.fastguard.mark(self.switch.token, self.number)
        elif self.collector.is_wanted():
            self.call()

    def on_compiled(self, output: Any, inputs: list[torch.Tensor], path: str) -> None:
        if self.collector.is_wanted():
            self.call()


class PlaceHook(PassHook):
    """Where a compiled module begins, or ends."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if self.switch.on and is_traced():
            torch.ops.fastguard.mark(self.switch.token, self.number)


def _run(number: int, output: Any, inputs: list[torch.Tensor], path: str) -> None:
    hook = _hooks.get(number)
    if hook is not None:  # else its monitor is gone, and the graph is not
        hook.is_compiled = True
        hook.on_compiled(output, inputs, path)


leave_to_python(OutputHook, InputHook, RouterHook, PassHook, PlaceHook)


# Its schema is spelled out: torch 2.6 cannot derive one from `list[torch.Tensor]`.
_SEE = "(Tensor output, Tensor[] inputs, Tensor(a!) token, SymInt number, str path) -> ()"


@torch.library.custom_op("fastguard::see", mutates_args={"token"}, schema=_SEE)
def _see(output: torch.Tensor, inputs: list[torch.Tensor], token: torch.Tensor, number: int, path: str) -> None:
    _run(number, output, inputs, path)


@torch.library.custom_op("fastguard::mark", mutates_args={"token"})
def _mark(token: torch.Tensor, number: int) -> None:
    _run(number, None, [], "")


_see.register_fake(inert)
_mark.register_fake(inert)
