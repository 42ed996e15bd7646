"""Strided samples of the inputs and the output of a model: one bounded pass over each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.cpu import extension
from ..records.samples import BatchSample
from .tensors import can_be_read, inputs_of, leaves, strided

_MAX_ELEMENTS = 4096
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the sum of a row
_IN_HALVES = 2e-2
_MASKED = -1e3
_OF_INPUT = ("abs_max", "mean", "std", "num_nonfinite", "constant_share", "digest")  # figures in a `BatchSample`
_OF_OUTPUT = ("abs_max", "min", "max", "mean", "std", "num_nonfinite", "spread")


class Figures(NamedTuple):
    """Figures of a sample of one tensor; NaN if the sample has no such figure."""

    abs_max: float  # like the next four, of the finite elements
    mean: float
    std: float  # the population's
    min: float
    max: float
    num_nonfinite: int
    constant_share: float  # share of the columns that have one value
    spread: float  # mean over the finite columns of their standard deviations
    digest: int  # 63 bits of some of the elements and of the tensor's shape
    away_from_one: float  # the largest distance of the sum of a row from 1, if all elements are within [0, 1]


_UNKNOWN = Figures._make([*[math.nan] * 5, 0, math.nan, math.nan, 0, math.nan])  # of an output without tensors


class Given(NamedTuple):
    """An input of a pass, with its figures if it holds floating-point numbers."""

    tensor: torch.Tensor
    figures: Figures | None


def sample_of(data: Sequence[Given], output: Any, training: bool, with_grad: bool) -> BatchSample | None:
    """Figures of the inputs, from `data_of`, and the output of one pass; None if no inputs can be read here."""
    given = [x for x in data if x.tensor.dim()] or list(data)  # a single number next to tensors is not data
    returned = [x for _, x in leaves(output) if can_be_read(x) and (x.is_floating_point() or x.is_complex())]
    if not given:
        return None
    x, known = next((x for x in given if x.tensor.is_floating_point() or x.tensor.is_complex()), given[0])
    y = next((y for y in returned if y.dim()), returned[0] if returned else torch.empty(0))
    of_input, of_output = known or figures_of(x), figures_of(y) if returned else _UNKNOWN
    if of_input is None or of_output is None:
        return None
    is_finite = not of_output.num_nonfinite
    return BatchSample(
        training=training,
        with_grad=with_grad,
        num_samples=given[0].tensor.shape[0] if given[0].tensor.dim() else 1,
        input_is_integer=not (x.is_floating_point() or x.is_complex()),
        output_width=y.shape[-1] if y.dim() > 1 else 1,
        output_is_unit=is_finite and of_output.min >= 0.0 and of_output.max <= 1.0,
        output_rows_sum_to_one=of_output.away_from_one <= _ROUNDING.get(y.dtype, _IN_HALVES),
        **{f"input_{name}": getattr(of_input, name) for name in _OF_INPUT},
        **{f"output_{name}": getattr(of_output, name) for name in _OF_OUTPUT},
    )


def data_of(args: Any, kwargs: dict[str, Any]) -> list[Given]:
    """The inputs of a pass that can be read here, without masks."""
    readable = [x for x in inputs_of(args, kwargs) if can_be_read(x)]
    data = [Given(x, figures_of(x) if x.is_floating_point() else None) for x in readable]
    return [x for x in data if not is_mask(*x)]


def is_mask(x: torch.Tensor, known: Figures | None = None) -> bool:
    """Whether `x`, whose figures may be `known`, holds 0 and one number below -1000, and so is added to scores."""
    if (known is not None and abs(known.max) > 0.0) or not x.is_floating_point() or not x.numel():
        return False  # most tensors
    values = strided(x.detach().as_subclass(torch.Tensor), _MAX_ELEMENTS).double()
    low, high = values.aminmax()
    return bool(high == 0.0 and low < _MASKED and ((values == low) | (values == high)).all())


def figures_of(x: torch.Tensor) -> Figures | None:
    """The figures of a tensor whose first dimension is that of the samples; None if it is empty or cannot be read.

    Cost: 30 us; it reads at most some 4096 elements, and 65,536 of a row that may add up to 1.
    """
    if extension is None:
        return None
    if type(x) is not torch.Tensor or x.is_complex():
        x = x.detach().as_subclass(torch.Tensor)
    found = extension.sample(x.conj() if x.is_conj() else x)  # not resolved, which would copy it
    return None if found is None else Figures._make(found)
