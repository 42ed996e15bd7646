"""Optimizers whose updates are measured, as data: those with a formula, and those that take a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import optim


class Case(NamedTuple):
    id: str
    make: Callable[[Any], optim.Optimizer]
    has_formula: bool


class Halving(optim.SGD):
    """A subclass whose step is not its parent's: no formula of the parent's may be used."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.5)


def _case(cls: type, has_formula: bool, **settings: Any) -> Case:
    settings = {"lr": 0.01, **settings}
    shown = [cls.__name__, *(f"{k}={v}" for k, v in settings.items())]
    return Case("-".join(shown), lambda params: cls(params, **settings), has_formula)


_WAYS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
_TWO = _WAYS[:2]
_TENSOR_LR = torch.tensor(0.01, dtype=torch.float64)

WITH_FORMULA = [
    *(_case(optim.SGD, True, **way) for way in _WAYS),
    *(_case(optim.SGD, True, weight_decay=0.5, maximize=True, **way) for way in _WAYS),
    *(_case(optim.SGD, True, momentum=0.9, dampening=0.3, weight_decay=0.5, **way) for way in _WAYS),
    *(_case(optim.SGD, True, momentum=0.9, maximize=True, **way) for way in _WAYS),
    _case(optim.SGD, True, lr=_TENSOR_LR, weight_decay=0.5),
    *(_case(optim.Adam, True, **way) for way in _WAYS),
    *(_case(optim.Adam, True, weight_decay=0.5, **way) for way in _WAYS),
    *(_case(optim.Adam, True, amsgrad=True, maximize=True, **way) for way in _WAYS),
    *(_case(optim.AdamW, True, weight_decay=0.5, **way) for way in _WAYS),
    *(_case(optim.AdamW, True, weight_decay=0.5, amsgrad=True, maximize=True, **way) for way in _WAYS),
    *(_case(optim.AdamW, True, lr=_TENSOR_LR, **way) for way in ({"foreach": False}, {"fused": True})),
    *(_case(optim.Adamax, True, weight_decay=0.5, **way) for way in _TWO),
    *(_case(optim.RMSprop, True, **way) for way in _TWO),
    *(_case(optim.RMSprop, True, centered=True, maximize=True, **way) for way in _TWO),
    *(_case(optim.RMSprop, True, momentum=0.9, weight_decay=0.5, centered=True, **way) for way in _TWO),
    *(_case(optim.Adagrad, True, lr_decay=0.1, **way) for way in _WAYS),
    *(_case(optim.Adagrad, True, maximize=True, **way) for way in _WAYS),
]
WITHOUT_FORMULA = [
    *(_case(optim.SGD, False, momentum=0.9, nesterov=True, **way) for way in _WAYS),
    *(_case(optim.SGD, False, momentum=0.9, nesterov=True, weight_decay=0.5, maximize=True, **way) for way in _WAYS),
    _case(optim.SGD, False, lr=2.0, weight_decay=0.5),  # 1 - lr * decay is 0
    _case(optim.AdamW, False, lr=2.0, weight_decay=0.5),
    _case(optim.RMSprop, False, weight_decay=0.5),
    _case(optim.Adagrad, False, weight_decay=0.5),
    _case(optim.NAdam, False, weight_decay=0.5),
    _case(optim.RAdam, False),
    _case(optim.Adadelta, False, lr=1.0),
    _case(optim.ASGD, False, t0=1),
    _case(optim.Rprop, False),
    Case("Halving", lambda params: Halving(params, lr=0.1), False),
]
CASES = WITH_FORMULA + WITHOUT_FORMULA
