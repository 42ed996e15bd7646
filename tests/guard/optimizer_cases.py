"""Every optimizer that the guard is tested with, as data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import optim


class GroupCounter(optim.Optimizer):
    """Like some third-party optimizers: one step counter a group, made late, and advanced with or without gradients."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["step"])
        return loss


class Case(NamedTuple):
    """How to make one optimizer, and what it needs."""

    id: str
    make: Callable[[Any], optim.Optimizer]
    model: str = "mlp"
    closure: bool = False
    can_skip: bool = True


def _case(cls, *, tag="", model="mlp", closure=False, **settings):
    settings = {"lr": 0.05, **settings}
    shown = [str(v) if k == "lr" else k if v is True else f"{k}={v}" for k, v in settings.items() if k != "lr"]
    return Case(
        "-".join([cls.__name__, *filter(None, [tag]), *shown]),
        lambda params: cls(params, **settings),
        model,
        closure,
        cls is not optim.LBFGS,
    )


# lambda settings would not show; `foreach=False` with `fused` left out is torch's "single".
_WAYS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
_TWO_WAYS = _WAYS[:2]

CASES = [
    *(_case(optim.SGD, **way) for way in _WAYS),
    *(_case(optim.SGD, momentum=0.9, weight_decay=0.01, **way) for way in _WAYS),
    *(_case(optim.SGD, momentum=0.9, nesterov=True, **way) for way in _WAYS),
    *(_case(optim.SGD, momentum=0.9, dampening=0.5, maximize=True, **way) for way in _WAYS),
    *(_case(optim.Adam, weight_decay=0.01, **way) for way in _WAYS),
    *(_case(optim.Adam, amsgrad=True, **way) for way in _WAYS),
    *(_case(optim.AdamW, **way) for way in _WAYS),
    *(_case(optim.AdamW, amsgrad=True, **way) for way in _WAYS),
    *(_case(optim.Adagrad, lr_decay=0.1, **way) for way in _WAYS),
    *(_case(optim.RMSprop, momentum=0.9, centered=True, **way) for way in _TWO_WAYS),
    *(_case(optim.NAdam, **way) for way in _TWO_WAYS),
    *(_case(optim.RAdam, **way) for way in _TWO_WAYS),
    *(_case(optim.Adadelta, **way) for way in _TWO_WAYS),
    *(_case(optim.Adamax, **way) for way in _TWO_WAYS),
    *(_case(optim.ASGD, t0=2, **way) for way in _TWO_WAYS),
    *(_case(optim.Rprop, **way) for way in _TWO_WAYS),
    _case(optim.SparseAdam, model="embedding"),
    _case(optim.LBFGS, closure=True, max_iter=3),
    _case(optim.LBFGS, closure=True, max_iter=3, line_search_fn="strong_wolfe"),
    Case("GroupCounter", GroupCounter),
]
if hasattr(optim, "Muon"):  # came with torch 2.9
    CASES.append(_case(optim.Muon, model="matrices"))
if hasattr(optim, "Adafactor"):  # came with torch 2.5
    CASES += [_case(optim.Adafactor, **way) for way in _TWO_WAYS]

SKIPPING = [case for case in CASES if case.can_skip]
BY_ID = {case.id: case for case in CASES}
