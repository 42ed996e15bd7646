"""The variance of each layer's output on one batch, and how it changes from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import kernels
from ...observers.buffers import forward_undone


def output_variances(
    model: nn.Module, batch: Any, modules: Mapping[nn.Module, str], backend: str
) -> dict[str, tuple[float, float | None]]:
    """By the names of `modules`, in the order in which they run: the output's variance; its ratio to the one before.

    Of a module that runs several times the first counts. The ratio is None for the first module, and after an output
    that is constant. NaN and Inf are left out of a variance.
    """
    found: dict[str, float] = {}

    def look(name: str, output: Any) -> None:
        tensor = _first_tensor(output)
        if name not in found and tensor is not None and tensor.numel():
            found[name] = (
                kernels.tensor_stats([tensor.detach()], names=[f"output of {name}"], backend=backend)[0].std ** 2
            )

    handles = [m.register_forward_hook(lambda _m, _i, out, name=name: look(name, out)) for m, name in modules.items()]
    try:
        with torch.no_grad(), forward_undone(model):
            _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    result: dict[str, tuple[float, float | None]] = {}
    before = None
    for name, variance in found.items():
        result[name] = (variance, variance / before if before else None)
        before = variance
    return result


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() or output.is_complex() else None
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((t for t in map(_first_tensor, values) if t is not None), None)
