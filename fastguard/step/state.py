"""What Python shares with the step hooks in C++: base classes whose attributes lie in C structs, and these hooks.

See `csrc/state.h`. Without the extension each base class is `object`, the hooks are None, and Python does everything.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch._C._autograd import _get_sequence_nr as num_operations

from ..kernels.cpu import extension

_Function = TypeVar("_Function")
RingState: Any = object
RunState: Any = object
HooksState: Any = object
LedgerState: Any = object
GuardState: Any = object
StepPreHook: Any = None
StepPostHook: Any = None
guard_attribute: Any = None

if extension is not None:
    RingState, RunState, HooksState = extension.RingState, extension.RunState, extension.HooksState
    LedgerState, GuardState = extension.LedgerState, extension.GuardState
    StepPreHook, StepPostHook = extension.StepPreHook, extension.StepPostHook
    guard_attribute = extension.guard_attribute
    extension.set_step_calls(torch.get_num_threads, torch.is_grad_enabled, num_operations)


def observing(function: _Function) -> _Function:
    """The method `Guard.observe`, which C++ stands in for where the loss is a plain one of the newest step."""
    return function if extension is None else extension.observe_method(function)
