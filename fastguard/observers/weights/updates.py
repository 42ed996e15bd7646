"""What an optimizer's step changed a parameter by, from the state it left behind: no copy of the parameter.

The formulas are those of torch.optim's documentation, read after the step. Where one of them has no use for the weights
from before the step, it needs none; where weight decay does, w = (w' + rest) / (1 - lr * decay) gives them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from ... import kernels
from ...records import GradientStats, TensorRow, TensorStats, fold_rows

# Elements worked on at once: in cache on a CPU, few launches elsewhere. Several such chunks are held at a time.
_CHUNK_CPU, _CHUNK_DEVICE = 1 << 15, 1 << 24
_PRECISE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_SINGULAR = 0.5  # below, (1 - lr * decay) magnifies too much of the rounding to be divided by


class Formula(NamedTuple):
    """How to get one parameter's update.

    Attributes:
        sources: tensors of the parameter's shape, in the order in which `update` takes them.
        update: elementwise, from chunks of the sources to the same chunk of the update (or of minus the update); may
            not write to its arguments. None where the update is the only source, times `factor`.
        factor: a number or a tensor of one element.
    """

    sources: tuple[Tensor, ...]
    update: Callable[..., Tensor] | None
    factor: Any = 1.0


_Group = dict[str, Any]
_Maker = Callable[[_Group, Tensor, dict[str, Any]], "Formula | None"]


def _scalar(value: Any) -> Any:
    """A number, or on an accelerator a float64 tensor of one element, so that nothing waits for it."""
    if not isinstance(value, Tensor):
        return value
    return float(value.detach()) if _may_wait(value) else value.detach().double().reshape(())


def _may_wait(tensor: Tensor) -> bool:
    return tensor.is_cpu


def _sgd(group: _Group, p: Tensor, state: dict[str, Any]) -> Formula | None:
    lr, decay = _scalar(group["lr"]), group["weight_decay"]
    if group["momentum"]:
        buffer = state.get("momentum_buffer")
        return None if buffer is None else Formula((buffer,), None, lr)
    if p.grad is None:
        return None
    if not decay:
        return Formula((p.grad,), None, lr)
    signed = -lr if group["maximize"] else lr
    return Formula((p, p.grad), lambda w, g: _with_decay(w, g * signed, lr * decay))


def _with_decay(after: Tensor, rest: Tensor, decay: Any) -> Tensor:
    """The update `rest + decay * before`, where `after = before - update`."""
    return (after + rest).mul_(decay / (1 - decay)).add_(rest)


def _is_decoupled(group: _Group) -> bool:
    return bool(group.get("decoupled_weight_decay", False))


def _adamw(group: _Group, p: Tensor, state: dict[str, Any]) -> Formula | None:
    return _adam({**group, "decoupled_weight_decay": True}, p, state)  # which it was before it said so


def _adam(group: _Group, p: Tensor, state: dict[str, Any]) -> Formula | None:
    if "exp_avg" not in state or "exp_avg_sq" not in state:
        return None
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    beta1, beta2 = map(_scalar, group["betas"])
    step, lr, eps = _scalar(state["step"]), _scalar(group["lr"]), group["eps"]
    size = lr / (1 - beta1**step)
    root = (1 - beta2**step) ** 0.5
    decay = group["weight_decay"]

    def moved(m: Tensor, v: Tensor) -> Tensor:
        return (m * size).div_(v.sqrt().div_(root).add_(eps))

    if decay and _is_decoupled(group):
        return Formula((p, state["exp_avg"], second), lambda w, m, v: _with_decay(w, moved(m, v), lr * decay))
    return Formula((state["exp_avg"], second), moved)


def _adamax(group: _Group, p: Tensor, state: dict[str, Any]) -> Formula | None:
    if "exp_avg" not in state:
        return None
    beta1, step, lr = _scalar(group["betas"][0]), _scalar(state["step"]), _scalar(group["lr"])
    size = lr / (1 - beta1**step)
    return Formula((state["exp_avg"], state["exp_inf"]), lambda m, u: m * size / u)


def _rmsprop(group: _Group, p: Tensor, state: dict[str, Any]) -> Formula | None:
    lr, eps = _scalar(group["lr"]), group["eps"]
    if group["momentum"] > 0:
        buffer = state.get("momentum_buffer")
        return None if buffer is None else Formula((buffer,), None, lr)
    if p.grad is None or "square_avg" not in state:
        return None
    if group["centered"]:
        sources = (p.grad, state["square_avg"], state["grad_avg"])
        return Formula(sources, lambda g, s, a: g * lr / ((s - a * a).sqrt() + eps))
    return Formula((p.grad, state["square_avg"]), lambda g, s: g * lr / (s.sqrt() + eps))


def _adagrad(group: _Group, p: Tensor, state: dict[str, Any]) -> Formula | None:
    if p.grad is None or "sum" not in state:
        return None
    lr, eps = _scalar(group["lr"]), group["eps"]
    size = lr / (1 + (_scalar(state["step"]) - 1) * group["lr_decay"])
    return Formula((p.grad, state["sum"]), lambda g, s: g * size / (s.sqrt() + eps))


def _no_singular_decay(group: _Group) -> bool:
    return abs(1 - float(group["lr"]) * float(group["weight_decay"])) >= _SINGULAR


def _sgd_fits(group: _Group) -> bool:
    # Nesterov's foreach way leaves its own sum where the gradient was.
    if group["momentum"]:
        return not group["nesterov"]
    return not group["weight_decay"] or _no_singular_decay(group)


def _adam_fits(group: _Group) -> bool:
    return not (_is_decoupled(group) and group["weight_decay"]) or _no_singular_decay(group)


# Exactly these classes: what a subclass's step does is its own affair. Each with when its formula holds.
_FORMULAS: dict[type, tuple[_Maker, Callable[[_Group], bool]]] = {
    optim.SGD: (_sgd, _sgd_fits),
    optim.Adam: (_adam, _adam_fits),
    optim.AdamW: (_adamw, lambda group: not group["weight_decay"] or _no_singular_decay(group)),
    optim.Adamax: (_adamax, lambda group: True),
    # Weight decay is divided by the root of each element's history here, and cannot be solved for.
    optim.RMSprop: (_rmsprop, lambda group: group["momentum"] > 0 or not group["weight_decay"]),
    optim.Adagrad: (_adagrad, lambda group: not group["weight_decay"]),
}


def group_has_formula(optimizer: optim.Optimizer, group: _Group) -> bool:
    """Whether updates of the parameters of `group` can be told after the step, without copies from before it.

    They can for SGD (not Nesterov's), Adam and AdamW (amsgrad too), Adamax, Adagrad without weight decay and RMSprop
    without weight decay or with momentum, whether single, foreach, fused or capturable. Synchronises if the learning
    rate is a tensor on an accelerator and weights decay.
    """
    entry = _FORMULAS.get(type(optimizer))
    return entry is not None and entry[1](group)


def suits_formula(parameter: Tensor) -> bool:
    """Whether `parameter` is dense, and float32, float64 or complex.

    Half precision rounds away a good part of what a formula asks for: there a copy tells the truth.
    """
    gradient = parameter.grad
    return (
        parameter.dtype in _PRECISE
        and parameter.layout is torch.strided
        and (gradient is None or gradient.layout is torch.strided)
    )


def formula(optimizer: optim.Optimizer, group: _Group, parameter: Tensor) -> Formula | None:
    """The formula for the update that the step just taken made, or None if its ingredients are not there."""
    made = _FORMULAS[type(optimizer)][0](group, parameter, dict(optimizer.state.get(parameter, {})))
    if made is None or any(s.shape != parameter.shape or s.layout is not torch.strided for s in made.sources):
        return None
    return made


def _parts(tensors: Sequence[Tensor], most: int) -> Iterator[Sequence[Tensor]]:
    """The same part of each tensor, of at most `most` elements, until these are all: views, however the tensors lie."""
    if tensors[0].numel() <= most:
        yield tensors
    elif all(t.is_contiguous() for t in tensors):
        yield from zip(*(t.view(-1).split(most) for t in tensors))
    else:
        shape = tensors[0].shape
        dim = max(range(len(shape)), key=lambda d: shape[d])
        size = max(1, most * shape[dim] // tensors[0].numel())
        for part in zip(*(t.split(size, dim) for t in tensors)):
            yield from _parts(part, most)


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As real numbers, with the dimensions as the first lies in memory."""
    real = [torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach() for t in tensors]
    strides = real[0].stride()
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    return [t.permute(order) for t in real]


def chunked_norm(made: Formula, backend: str) -> Tensor | float:
    """2-norm of an update that is no plain multiple: a number, or on an accelerator a tensor that nothing waits for.

    Cost: one read of every source, in chunks; a few chunks' memory.
    """
    assert made.update is not None
    sources = _real(made.sources)
    # Not in half precision, which some keep their state in, and float64 stays what it is.
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    on_cpu = _may_wait(sources[0])
    size = _CHUNK_CPU if on_cpu else _CHUNK_DEVICE
    rows: list[TensorRow] = []
    total = torch.zeros((), dtype=torch.float64, device=sources[0].device)
    for part in _parts(sources, size):
        chunk = made.update(*(s.to(dtype) for s in part))
        if on_cpu:
            rows += TensorStats(kernels.run_stats([chunk], backend)[0])
        else:
            total += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
    return GradientStats.from_row(fold_rows(iter(rows))).norm if on_cpu else total.sqrt()
