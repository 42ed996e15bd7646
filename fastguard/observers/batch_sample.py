"""A strided sample of what goes into a model and of what comes out: one bounded pass over each."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from ..kernels import cpu
from ..records.batches import BatchSample
from .tensors import Call, can_be_read, inputs_of, leaves, thinned

_MAX_ELEMENTS = 4096
_MAX_FEATURES = 2048
_MIN_ROWS = 32
_MAX_ROW = 65536  # elements of one row of the output, which is to be seen whole
_NUM_DIGESTED = 512
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the sum of a row
_IN_HALVES = 2e-2
_MASKED = -1e3


class Figures(NamedTuple):
    """What a sample of one tensor shows; NaN where the sample has no such figure.

    Attributes:
        abs_max, mean, std, min, max: of the finite elements; the population's standard deviation.
        num_nonfinite: NaN and Inf.
        constant_share: share of the columns that have one value.
        spread: mean over the finite columns of their standard deviations.
        digest: 63 bits of some of the elements and of the tensor's shape.
        away_from_one: the largest distance of a row's sum from 1, where all elements lie within [0, 1].
    """

    abs_max: float
    mean: float
    std: float
    min: float
    max: float
    num_nonfinite: int
    constant_share: float
    spread: float
    digest: int
    away_from_one: float


def sample_of(args: Any, kwargs: dict[str, Any], output: Any, training: bool, with_grad: bool) -> BatchSample | None:
    """What one pass was given and returned; None where no tensors are found that can be read here."""
    given = data_of(args, kwargs)
    given = [x for x in given if x.dim()] or given  # a number beside them is none of the data
    returned = [x for _, x in leaves(output) if can_be_read(x) and (x.is_floating_point() or x.is_complex())]
    if not given or not returned:
        return None
    x = next((x for x in given if x.is_floating_point() or x.is_complex()), given[0])
    y = next((y for y in returned if y.dim()), returned[0])
    if not x.numel() or not y.numel():
        return None
    of_input, of_output = figures_of(x), figures_of(y)
    is_finite = not of_output.num_nonfinite
    return BatchSample(
        training=training,
        with_grad=with_grad,
        num_samples=given[0].shape[0] if given[0].dim() else 1,
        input_abs_max=of_input.abs_max,
        input_mean=of_input.mean,
        input_std=of_input.std,
        input_num_nonfinite=of_input.num_nonfinite,
        input_is_integer=not (x.is_floating_point() or x.is_complex()),
        input_constant_share=of_input.constant_share,
        input_digest=of_input.digest,
        output_abs_max=of_output.abs_max,
        output_min=of_output.min,
        output_max=of_output.max,
        output_mean=of_output.mean,
        output_std=of_output.std,
        output_num_nonfinite=of_output.num_nonfinite,
        output_width=y.shape[-1] if y.dim() > 1 else 1,
        output_spread=of_output.spread,
        output_is_unit=is_finite and of_output.min >= 0.0 and of_output.max <= 1.0,
        output_rows_sum_to_one=of_output.away_from_one <= _ROUNDING.get(y.dtype, _IN_HALVES),
    )


def data_of(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a pass was given and that can be read here, without masks."""
    return [x for x in inputs_of(Call(args, kwargs)) if can_be_read(x) and not is_mask(x)]


def is_mask(x: torch.Tensor) -> bool:
    """Whether `x` holds 0 and one number below -1000, or -Inf, and nothing else: it is added to attention scores."""
    if not x.is_floating_point() or not x.numel():
        return False
    values = _table(x.detach().as_subclass(torch.Tensor)).double()
    low, high = values.aminmax()
    return bool(high == 0.0 and low < _MASKED and ((values == low) | (values == high)).all())


def figures_of(x: torch.Tensor) -> Figures:
    """The figures of a tensor with elements, whose first dimension is that of the samples.

    Cost: 30 us; at most some 4096 elements are read, and 65,536 of a row that is to add up to 1.
    """
    found = None if cpu.sample is None else cpu.sample(x)
    return reference(x) if found is None else Figures._make(found)


def reference(x: torch.Tensor) -> Figures:
    """The same in plain torch."""
    x = x.detach().as_subclass(torch.Tensor)
    table = _table(x)
    values = table.double()
    finite = values[values.isfinite()]
    low, high = (float(end) for end in finite.aminmax()) if len(finite) else (math.nan, math.nan)
    is_unit = len(finite) == values.numel() and low >= 0.0 and high <= 1.0 and not x.is_complex()
    is_row = x.dim() > 1 and 1 < x.shape[-1] <= _MAX_ROW
    return Figures(
        abs_max=max(high, -low),
        mean=float((finite / len(finite)).sum()) if len(finite) else math.nan,
        std=float(finite.std(correction=0)) if len(finite) else math.nan,
        min=low,
        max=high,
        num_nonfinite=values.numel() - len(finite),
        constant_share=float((values == values[:1]).all(0).double().mean()) if len(values) > 1 else math.nan,
        spread=_spread(values) if len(values) > 1 else math.nan,
        digest=_digest(table, x),
        away_from_one=_away_from_one(x) if is_unit and is_row else math.nan,
    )


def _table(x: torch.Tensor) -> torch.Tensor:
    """Samples by features, [n, f], of at most some 4096 elements. One sample counts as its rows."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.dim() > 2 and x.shape[0] == 1:
        x = x[0]
    if x.dim() < 2:
        x = x.reshape(-1, 1)
    num_features = math.prod(x.shape[1:])
    if x.numel() > _MAX_ELEMENTS or num_features > _MAX_FEATURES:
        x = x[:: -(-x.shape[0] // max(_MIN_ROWS, _MAX_ELEMENTS // num_features))]
        most = x.shape[0] * min(_MAX_FEATURES, _MAX_ELEMENTS // x.shape[0])
        x = thinned(x, most, range(x.dim() - 1, 0, -1))
    return x.flatten(1)


def _spread(values: torch.Tensor) -> float:
    away = values - values[:1]  # exactly zero where all rows are the same
    away = away[:, away.isfinite().all(0)]
    lengths = torch.linalg.vector_norm(away - away.mean(0), dim=0)
    return float(lengths.mean()) / math.sqrt(len(values)) if len(lengths) else math.nan


def _away_from_one(x: torch.Tensor) -> float:
    """Of at most 4096 elements, or one row."""
    x = thinned(x, max(1, _MAX_ELEMENTS // x.shape[-1]) * x.shape[-1], range(x.dim() - 1))
    return float((x.double().sum(-1) - 1.0).abs().max())


def _digest(table: torch.Tensor, x: torch.Tensor) -> int:
    """Of elements of all features in turn, and of the shape of `x`."""
    flat = table.reshape(-1)
    stride = -(-len(flat) // _NUM_DIGESTED)
    while math.gcd(stride, table.shape[-1]) > 1:  # else the same few features of each sample, which may be constant
        stride += 1
    flat = flat[::stride].contiguous()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(whole).to(torch.int64)
    found = int((bits * _factors()[: len(bits)]).sum())
    for size in x.shape:
        found = found * 1_000_003 + size
    return found & (2**63 - 1)


@functools.cache
def _factors() -> torch.Tensor:
    """Odd numbers of 64 bits that follow no pattern: Weyl's sequence through a mixing function."""
    mask = 2**64 - 1
    numbers = []
    for i in range(1, _NUM_DIGESTED + 1):
        z = i * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z = (z ^ z >> 31) | 1
        numbers.append(z - 2**64 if z >= 2**63 else z)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
