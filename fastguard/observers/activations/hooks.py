"""Hooks on modules. In a compiled graph they are operators that mutate a token, so that the graph stays whole.

There they stay, and each value of `Collector.is_on` has its own graph; elsewhere they are set at sampled steps only.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..observer import Transient, leave_to_python
from ..tensors import inputs_of, labelled, leaves
from .collector import Collector

TOKEN = torch.zeros(1, device="cpu")  # the operators claim to change it, so that none is dropped or moved
_numbers = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Hook] = weakref.WeakValueDictionary()


class Seen(NamedTuple):
    """What a hook reads of a call: tensors with their paths, and what returns the module's inputs; None if unknown."""

    tensors: Sequence[tuple[str, torch.Tensor]]
    inputs: Callable[[], Sequence[torch.Tensor]] | None = None


def outputs(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Seen:
    """All tensors that a module returned."""
    return Seen(labelled(output), lambda: inputs_of(args, kwargs))


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Seen:
    """The first tensor that a module was given."""
    return Seen([("", tensor) for _, tensor in leaves((args, kwargs))[:1]])


def nothing(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Seen:
    """For a hook that is only called."""
    return Seen(())


class Hook(Transient):
    """One hook on one module: `show` gets what `find` reads of a call, or nothing if the hook has no `name`.

    It runs after the `forward` of the module, or before it unless `at_end`.
    """

    def __init__(
        self,
        module: nn.Module,
        collector: Collector,
        find: Callable[..., Seen],
        show: Callable[..., None],
        name: str = "",
        *,
        at_end: bool = True,
        on_every_step: bool = False,
    ) -> None:
        self._module = weakref.ref(module)
        self._handle: RemovableHandle | None = None
        self.collector, self.find, self.show, self.name = collector, find, show, name
        self.at_end, self.on_every_step = at_end, on_every_step  # also at steps that are not sampled
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
                seen, inputs = self.find(args, kwargs, output)
                found = [x.detach() for _, x in seen]
                given = [] if inputs is None else [x.detach() for x in inputs()]
                torch.ops.fastguard.see(found, given, TOKEN, self.number, [path for path, _ in seen])
        else:
            self.look(lambda: self.find(args, kwargs, output))

    def look(self, find: Callable[[], Seen]) -> None:
        if self.collector.is_wanted():
            if self.name:
                self.collector.run(self.name, lambda: self.show(*find()))
            else:  # it is only called
                self.show()


leave_to_python(Hook)


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
        hook.look(lambda: Seen(list(zip(paths, seen)), (lambda: inputs) if hook.at_end else None))


_see.register_fake(lambda *args: None)
