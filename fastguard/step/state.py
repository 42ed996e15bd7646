"""What Python shares with the step hooks in C++: base classes whose attributes lie in C structs, and these hooks. See
`csrc/state.h`. Without the extension each base class is `object`, the hooks are None, and Python does everything."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch._C._autograd import _get_sequence_nr as num_operations

from ..kernels.cpu import extension

_Function = TypeVar("_Function")
RingState: Any = getattr(extension, "RingState", object)
RunState: Any = getattr(extension, "RunState", object)
HooksState: Any = getattr(extension, "HooksState", object)
LedgerState: Any = getattr(extension, "LedgerState", object)
GuardState: Any = getattr(extension, "GuardState", object)
StepPreHook: Any = getattr(extension, "StepPreHook", None)
StepPostHook: Any = getattr(extension, "StepPostHook", None)
guard_attribute: Any = getattr(extension, "guard_attribute", None)
if extension is not None:
    extension.set_step_calls(torch.get_num_threads, torch.is_grad_enabled, num_operations)


def observing(function: _Function) -> _Function:
    """The method `Guard.observe`, which C++ stands in for where the loss is a plain one of the newest step."""
    return function if extension is None else extension.observe_method(function)
