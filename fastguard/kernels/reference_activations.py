"""Activations in plain PyTorch: the definition of every column, and the fallback on any device.

`figures` stay on the device and do not synchronise; `activation` and `magnitude_counts` do.
Thresholds are compared by value: an element is widened, never the threshold rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..records.magnitudes import HIGHEST_EXPONENT, LOWEST_EXPONENT, NUM_COUNTS
from ..records.samples import CHANNEL_COLUMNS, EMPTY_ACTIVATION_ROW
from .backend import Limits, Row
from .tensors import float64_bytes, plain

# Elements widened at once: bounds the extra memory to a few tens of MiB however large a tensor is.
CHUNK = 1 << 20


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, but float32 on Apple's GPUs, which have no other.

    There a norm is within about 1e-5, squares overflow above 1e19, and counts above 2^24 lose their last bits.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(wide_dtype(x.device))


def _chunk_columns(x: torch.Tensor, low: float, high: float, near_zero: float) -> torch.Tensor:
    """(finite elements, mean, m2, min, max, zeros, near-zero, saturated, NaNs, Infs) of a chunk that is not empty."""
    values, nans, infs = _wide(x), torch.isnan(x), torch.isinf(x)
    finite = ~(nans | infs)
    magnitude = values.abs()
    near = (magnitude < near_zero) | (magnitude == 0)
    saturated = (values < low) | (values > high) | infs
    num_finite = finite.sum()
    mean = torch.where(finite, values, 0.0).sum() / num_finite.clamp(min=1)
    deviations = torch.where(finite, values - mean, 0.0)
    least = torch.where(finite, values, torch.inf).min()
    most = torch.where(finite, values, -torch.inf).max()
    same = least == most  # of numbers whose sum was rounded or overflowed, perhaps
    columns = [
        num_finite,
        torch.where(same, least, mean),
        torch.where(same, 0.0, (deviations * deviations).sum()),
        least,
        most,
        *(mask.sum() for mask in (magnitude == 0, near, saturated, nans, infs)),
    ]
    return torch.stack([column.to(values.dtype) for column in columns])


def _merge(parts: torch.Tensor, numel: int) -> torch.Tensor:
    """The row of all chunks together; `parts` is [chunks, columns]."""
    counts = parts[:, 0]
    weights = counts / counts.sum().clamp(min=1)
    mean = (weights * parts[:, 1]).sum()
    away = parts[:, 1] - mean
    m2 = (parts[:, 2] + counts * away * away).sum()
    extremes = (parts[:, 3].min() + 0.0, parts[:, 4].max() + 0.0)  # no negative zeros
    return torch.cat([torch.stack([torch.full_like(mean, numel), mean, m2, *extremes]), parts[:, 5:].sum(0)])


def _chunk_table(x: torch.Tensor, low: float, high: float, near_zero: float) -> torch.Tensor:
    """CHANNEL_COLUMNS of [channels, elements] as [channels, 4]."""
    values, finite = _wide(x), torch.isfinite(x)
    magnitude = values.abs()
    near = (magnitude < near_zero) | (magnitude == 0)
    saturated = (values < low) | (values > high) | torch.isinf(x)
    columns = [near.sum(1), saturated.sum(1), (~finite).sum(1), torch.where(finite, magnitude, 0.0).sum(1)]
    return torch.stack([column.to(values.dtype) for column in columns], dim=1)


def figures(x: torch.Tensor, dim: int | None, limits: Limits) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ACTIVATION_COLUMNS of a strided real tensor, float64 [10] on its device; with a `dim`, CHANNEL_COLUMNS of each of
    its indices, float64 [C, 4]. Does not synchronise."""
    channels = x.reshape(1, -1) if dim is None or x.dim() == 0 else x.movedim(dim, 0)
    count = channels.shape[0]
    table = None if dim is None else _wide(torch.zeros(count, len(CHANNEL_COLUMNS), device=x.device))
    if x.numel() == 0:
        return _wide(torch.tensor(EMPTY_ACTIVATION_ROW, device=x.device)), table
    parts = []
    for chunk in channels.reshape(count, -1).split(max(1, CHUNK // count), dim=1):
        parts.append(_chunk_columns(chunk, *limits))
        if table is not None:
            table += _chunk_table(chunk, *limits)
    return _merge(torch.stack(parts), x.numel()), table


def activation_into(
    x: torch.Tensor, dim: int | None, limits: Limits, row: torch.Tensor, table: torch.Tensor | None
) -> None:
    """The figures of `activation` into `row` and `table`, float64 on the same device. Does not synchronise."""
    with torch.no_grad():
        found, channels = figures(plain(x, 0), dim, limits)
        row.copy_(found)
        if table is not None and channels is not None:
            table.copy_(channels)


def activation(x: torch.Tensor, dim: int | None, limits: Limits) -> tuple[Row, bytes | None]:
    """One row of ACTIVATION_COLUMNS and, with a `dim`, CHANNEL_COLUMNS of each of its indices as float64 bytes.

    Cost: about two dozen passes, a dozen more for channels, and float64 copies of at most 2^20 elements at a time; a
    copy of `x` where its channels do not come first; one sync, two for channels.
    """
    with torch.no_grad():
        row, table = figures(plain(x, 0), dim, limits)
        return tuple(row.tolist()), None if table is None else float64_bytes(table.cpu())


def _chunk_counts(x: torch.Tensor) -> torch.Tensor:
    """int64 [NUM_COUNTS]: zeros, NaNs, Infs, then each exponent."""
    nans, infs, zeros = torch.isnan(x), torch.isinf(x), x == 0
    # frexp has 0.5 <= |mantissa| < 1, so its exponent is one more than ours; it knows float64 subnormals.
    exponents = torch.frexp(_wide(x)).exponent.long() - 1
    counted = torch.where(nans | infs | zeros, HIGHEST_EXPONENT + 1, exponents) - LOWEST_EXPONENT
    histogram = torch.bincount(counted, minlength=NUM_COUNTS - 2)[:-1]
    return torch.cat([torch.stack([zeros.sum(), nans.sum(), infs.sum()]), histogram])


def magnitude_counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Counts over all elements of all tensors: zeros, NaNs, Infs, then floor(log2 |x|) from -1074 to 1023.

    Cost: a dozen passes; one sync a tensor, as `bincount` has it, and one at the end.
    """
    total = torch.zeros(NUM_COUNTS, dtype=torch.int64, device="cpu")
    with torch.no_grad():
        for i, tensor in enumerate(tensors):
            x = plain(tensor, i)
            x = torch.view_as_real(x) if x.is_complex() else x
            for chunk in x.reshape(-1).split(CHUNK):
                total += _chunk_counts(chunk).cpu()
    return total.tolist()
