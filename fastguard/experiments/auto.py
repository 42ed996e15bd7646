"""AutoGuard: guards every optimizer of this process at its first step, without a word of the script that makes it."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _current_graph_task_id as graph_task
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _env
from ..errors import FastguardError, NotGuardedError
from ..observers.observer import unwrapped
from ..records.failures import describe
from ..step import Guard, wrap
from ..step.wrappers import HOOKED_STEP, left_to_python
from .script_losses import Patches, ScriptLosses

_MOST_GUARDS = 20


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    is_up = dist.is_available() and dist.is_initialized()
    return (dist.get_rank() if is_up else _env.rank()) == 0


class AutoGuard:
    """Guards every `torch.optim.Optimizer` at its first step and tells the guard its losses.

    It only watches: unless it `protects`, nothing is clipped or skipped, training stays bit-identical, and an error of
    fastguard's own ends the guard and not the training. `settings` returns the arguments of `wrap` for a guard's
    number; `made` is called with each.

    Cost: a step costs what `wrap` costs, a backward pass one Python frame more. Each optimizer once, one look for its
    model at all objects.
    """

    def __init__(
        self,
        settings: Callable[[int], dict[str, Any]],
        made: Callable[[Guard], None] = lambda guard: None,
        *,
        protects: bool = False,
    ) -> None:
        self._settings, self._made, self._protects = settings, made, protects
        self._patches = Patches()
        self._waiting: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # have not taken a step
        self._hook: Any = None
        self.losses = ScriptLosses(self._keep)
        self.guards: list[Guard] = []  # those made so far
        self.others: list[Guard] = []  # guards that the script has made by itself
        self.problems: dict[str, str] = {}  # what is not watched, and why

    def start(self) -> None:
        self._patches.around(torch.optim.Optimizer, "_patch_step_function", self._expect)
        self._patches.around(torch.jit, "script", _script)
        self.losses.start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: None if _env.is_arm else self.stop())  # an arm goes on with it

    def stop(self) -> None:
        """Leaves torch as it was. The guards stay."""
        self._patches.restore()
        self.losses.stop()
        self._end_waiting()

    def finish(self, *, has_ended: bool) -> None:
        """Stops, delivers what is on its way, and closes the sinks; judges the training as a whole if it has ended."""
        self.stop()
        ends = [guard.close if has_ended else functools.partial(guard.change_sinks, ()) for guard in self.guards]
        for end in (self.losses.finish, *ends):
            try:
                end()
            except Exception as error:
                self._keep("the last steps", error)

    def _keep(self, what: str, error: Exception) -> None:
        self.problems.setdefault(what, describe(error))

    def _expect(self, original: Callable[[Any], None], optimizer: Any) -> None:
        """As torch's, which each optimizer calls when it is made, copied or unpickled."""
        original(optimizer)
        self._waiting.add(optimizer)
        self.losses.keeps_newest = True
        self.losses.changed()
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(left_to_python(self._before_step))

    def _end_waiting(self) -> None:
        """No optimizer waits for its first step. Not to be called within one: torch goes through its hooks then."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Ahead of each step while an optimizer has not taken one."""
        if optimizer not in self._waiting:
            return
        name = type(optimizer).__name__
        try:
            self._guard(optimizer)
        except Exception as error:
            if self._protects and isinstance(error, FastguardError):
                raise
            self._keep(name, error)
        finally:
            self._waiting.discard(optimizer)
            self.losses.when_idle = None if self._waiting else self._end_waiting

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        with contextlib.suppress(NotGuardedError):
            self.others.append(Guard.of(optimizer))  # the script's own
            return
        if graph_task() != -1:
            self.problems[name] = "it steps within the backward pass: call fastguard.wrap_backward in the script"
        elif len(self.guards) >= _MOST_GUARDS:
            self.problems["more optimizers"] = f"only the first {_MOST_GUARDS} are guarded"
        elif not _is_within_another(optimizer):
            self._wrap(optimizer)

    def _wrap(self, optimizer: torch.optim.Optimizer) -> None:
        model: torch.nn.Module | None = None
        names: dict[torch.Tensor, str] = {}
        try:
            model, names = find_model(p for group in optimizer.param_groups for p in group["params"])
        except Exception as error:
            self._keep(f"the model of {type(optimizer).__name__}", error)
        settings = {"skip_nonfinite": self._protects, **self._settings(len(self.guards))}
        guard = Guard.of(wrap(optimizer, model, names=names or None, **settings))
        known = guard.history.model.names
        others = [one for one in self.guards if one._run.step > 1 and one.model is not model]
        if any(one.history.model.names == known for one in others):
            guard.history.note_model(initialization={})  # its weights may be those of a trained model
        self.guards.append(guard)
        guard._run.on_error = functools.partial(self._goes_on, weakref.ref(guard))
        for hooks in () if self._protects else guard._hooks:  # a GradScaler unscales and skips as without a guard
            hooks._scaler.leave(optimizer)
        self.losses.add(guard)
        self._made(guard)

    def _goes_on(self, ref: Callable[[], Guard | None], error: Exception) -> bool:
        """Whether training goes on, unguarded, after an error in the hooks of a guard."""
        guard = ref()
        if guard is None or (self._protects and isinstance(error, FastguardError)):
            return False
        self._keep(f"steps from step {guard._run.step} on", error)
        guard._run.is_short = False
        for member in guard._run.members:
            member.is_paused = True
        if guard in self.losses.guards:
            self.losses.guards.remove(guard)
            self.losses.changed()
        return True


def _script(original: Any, obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **options: Any) -> Any:
    """`torch.jit.script` for models under guard, whose hooks cannot be scripted."""
    stores = [module.__dict__ for module in obj.modules()] if isinstance(obj, torch.nn.Module) else []
    names = ("_forward_hooks", "_forward_pre_hooks")
    hidden = [(store, name, store[name]) for store in stores for name in names if name in store]
    try:
        for store, name, hooks in hidden:
            others = {i: hook for i, hook in hooks.items() if not type(hook).__module__.startswith("fastguard.")}
            store[name] = OrderedDict(others)
        return original(obj, optimize, _frames_up + 2, *args, **options)
    finally:
        for store, name, hooks in hidden:
            store[name] = hooks


def _is_within_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this step is part of that of another optimizer with the same parameters, as of one around it."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        other = frame.f_locals.get("self") if frame.f_code is HOOKED_STEP else None
        groups = [] if other is None or other is optimizer else other.param_groups
        if any(id(p) in own for group in groups for p in group["params"]):
            return True
        frame = frame.f_back
    return False


def find_model(params: Iterable[torch.Tensor]) -> tuple[nn.Module | None, dict[torch.Tensor, str]]:
    """The outermost module with most elements of `params`, and names for those that belong to other models.

    A LightningModule, or any module without a `forward`, only holds the model: of its children the one with the same
    parameters is taken. Cost: one look at every object of the garbage collector, some 0.2 s for a million.
    """
    wanted = {id(p): p for p in params}
    # The type and not the object: `__class__` of a lazy proxy would be computed.
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and "_modules" in m.__dict__]
    sizes = lambda root: (-_num_elements(root, wanted), sum(1 for _ in root.parameters()))  # noqa: E731
    roots = sorted(_roots(modules, wanted), key=sizes)
    if not roots:
        return None, {}
    names: dict[torch.Tensor, str] = {}
    own = {id(p) for p in roots[0].parameters()}
    for number, root in enumerate(roots[1:], 2):
        others = ((name, p) for name, p in root.named_parameters() if id(p) in wanted and id(p) not in own)
        names.update((p, f"{type(unwrapped(root)).__name__}{number}.{name}") for name, p in others if p not in names)
    return _called(roots[0], wanted), names


def _roots(modules: list[nn.Module], wanted: dict[int, torch.Tensor]) -> list[nn.Module]:
    """The outermost of the modules that contain a parameter in `wanted`."""
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    own = [m for m in modules if any(id(p) in wanted for p in m.__dict__.get("_parameters", {}).values())]
    found = new = {id(m): m for m in own}
    while new:
        new = {id(m): m for child in new for m in parents.get(child, ()) if id(m) not in found}
        found = {**found, **new}
    return [m for key, m in found.items() if key not in parents]


def _called(root: nn.Module, wanted: dict[int, torch.Tensor]) -> nn.Module:
    inner = unwrapped(root)
    while hasattr(inner, "training_step") or type(inner).forward is nn.Module.forward:
        all_of_it = _num_elements(inner, wanted)
        child = next((m for m in inner.children() if _num_elements(m, wanted) == all_of_it), None)
        if child is None:
            break
        root = inner = child
    return root


def _num_elements(module: nn.Module, wanted: dict[int, torch.Tensor]) -> int:
    return sum(p.numel() for p in module.parameters() if id(p) in wanted)
