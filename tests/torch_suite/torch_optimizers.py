"""Every optimizer of torch.optim with its settings, as data; parameters for them, and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import optim

Shapes = Sequence[tuple[int, ...]]


class Spec(NamedTuple):
    """An optimizer and what it takes.

    Attributes:
        settings: arguments of its constructor, each once; flags that choose an implementation are in `ways`.
        shapes: of parameters that it takes.
        sparse: whether it takes sparse gradients: "no", "too" or "only".
        closure: whether its step needs one.
        groups: whether it has more than one parameter group.
    """

    cls: Any
    settings: Sequence[dict[str, Any]]
    ways: Sequence[dict[str, Any]] = ({"foreach": False}, {"foreach": True})
    shapes: Shapes = ((4, 3), (5,), ())
    sparse: str = "no"
    is_complex: bool = True
    is_differentiable: bool = True
    closure: bool = False
    groups: bool = True

    @property
    def takes_dense(self) -> bool:
        return self.sparse != "only"


_FUSED = ({"foreach": False}, {"foreach": True}, {"fused": True})
_ADAM = (
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True, "eps": 1e-6},
    {"maximize": True, "weight_decay": 0.1},
    {"lr": 0.02, "betas": (0.8, 0.95), "amsgrad": True, "weight_decay": 0.1},
)
_DECAYS = ({}, {"weight_decay": 0.1}, {"maximize": True}, {"maximize": True, "weight_decay": 0.1})

_ALL = [
    Spec(optim.Adadelta, [*_DECAYS, {"rho": 0.8, "eps": 1e-5, "lr": 0.5}]),
    Spec(
        optim.Adafactor,
        [*_DECAYS, {"beta2_decay": -0.5, "eps": (1e-7, 1e-2), "d": 1.5}],
        is_complex=False,
        is_differentiable=False,
    )
    if hasattr(optim, "Adafactor")
    else None,
    Spec(
        optim.Adagrad,
        [*_DECAYS, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}, {"eps": 1e-6, "lr": 0.1, "weight_decay": 0.1}],
        _FUSED,
        sparse="too",
    ),
    Spec(optim.Adam, _ADAM, _FUSED),
    Spec(optim.AdamW, _ADAM, _FUSED),
    Spec(optim.Adamax, [*_DECAYS, {"betas": (0.8, 0.95), "eps": 1e-6, "lr": 0.02}]),
    Spec(optim.ASGD, [*_DECAYS, {"t0": 2, "lambd": 0.01, "alpha": 0.6, "lr": 0.02}]),
    Spec(
        optim.LBFGS,
        [
            {},
            {"history_size": 2, "lr": 0.5},
            {"tolerance_grad": 1e-3, "tolerance_change": 1e-4},
            {"max_eval": 3, "line_search_fn": "strong_wolfe"},
        ],
        ({"max_iter": 2},),  # more of them, and some gradients are above any limit
        is_differentiable=False,
        closure=True,
        groups=False,
    ),
    Spec(
        optim.Muon,
        [
            {},
            {"weight_decay": 0.0},
            {"momentum": 0.8, "nesterov": False},
            {"adjust_lr_fn": "match_rms_adamw"},
            {"ns_steps": 3, "ns_coefficients": (3.4, -4.7, 2.0), "eps": 1e-6},
        ],
        ({},),
        shapes=[(4, 3), (2, 5)],
        is_complex=False,
        is_differentiable=False,
    )
    if hasattr(optim, "Muon")
    else None,
    Spec(
        optim.NAdam,
        [*_DECAYS, {"momentum_decay": 6e-3, "lr": 0.02}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    ),
    Spec(optim.RAdam, [*_DECAYS, {"eps": 1e-6, "lr": 0.02}, {"weight_decay": 0.1, "decoupled_weight_decay": True}]),
    Spec(
        optim.RMSprop,
        [
            *_DECAYS,
            {"momentum": 0.9},
            {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
            {"alpha": 0.9, "centered": True},
        ],
    ),
    Spec(optim.Rprop, [{}, {"maximize": True}, {"etas": (0.4, 1.5), "step_sizes": (1e-4, 3.0), "lr": 0.02}]),
    Spec(
        optim.SGD,
        [
            *_DECAYS,
            {"momentum": 0.9},
            {"momentum": 0.9, "dampening": 0.5},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"momentum": 0.9, "maximize": True, "lr": 0.02},
        ],
        _FUSED,
        sparse="too",
    ),
    Spec(
        optim.SparseAdam,
        [{}, {"maximize": True}, {"betas": (0.8, 0.95), "eps": 1e-6, "lr": 0.02}],
        ({},),
        shapes=[(5, 3), (4, 2)],
        sparse="only",
        is_complex=False,
        is_differentiable=False,
    ),
]
OPTIMIZERS = {spec.cls.__name__: spec for spec in _ALL if spec is not None}
DENSE = [name for name, spec in OPTIMIZERS.items() if spec.takes_dense]
WITHOUT_CLOSURE = [name for name in DENSE if not OPTIMIZERS[name].closure]


def make_parameters(
    shapes: Shapes, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype).to(device)) for s in shapes]


def set_gradients(parameters: Iterable[torch.Tensor], step: int, sparse: bool = False) -> None:
    """Gradients that depend on nothing but the step and the place of the parameter."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in parameters:
        if sparse:
            rows = torch.randint(p.shape[0], (1, 3), generator=generator)  # may come twice: not coalesced
            values = torch.randn(3, *p.shape[1:], generator=generator, dtype=p.dtype)
            p.grad = torch.sparse_coo_tensor(rows, values, p.shape)
        else:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def loss_of(parameters: Iterable[torch.Tensor], step: int) -> torch.Tensor:
    """A bowl whose middle moves with the step; made by autograd."""
    parts = [(p - 0.1 * (step + 1)).abs().square().sum() for p in parameters]
    return torch.stack([part.double() for part in parts]).sum()


def evaluating(optimizer: Any, parameters: Sequence[torch.Tensor], step: int) -> Callable[[], torch.Tensor]:
    """A closure."""

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(parameters, step)
        loss.backward()
        return loss

    return evaluate


def take_steps(
    optimizer: Any,
    parameters: Sequence[torch.Tensor],
    steps: Iterable[int],
    *,
    sparse: bool = False,
    closure: bool = False,
) -> list[Any]:
    """What the steps gave, with gradients of `set_gradients`, or of `loss_of` within a closure."""
    gave = []
    for step in steps:
        if closure:
            gave.append(optimizer.step(evaluating(optimizer, parameters, step)).detach())
        else:
            set_gradients(parameters, step, sparse)
            gave.append(optimizer.step())
    return gave


def state_of(parameters: Iterable[torch.Tensor], *others: Any) -> list[Any]:
    """Copies of parameters and gradients, and of the state dicts of optimizers, schedulers and scalers."""
    values = [(p.detach(), p.grad) for p in parameters]
    return copied([values, [other.state_dict() for other in others]])


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(v) for v in value]
    return value
