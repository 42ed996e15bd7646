"""Plain PyTorch: the definition of every column, and the fallback on any device. No compiled code of ours.

Every element is widened (see `wide_dtype`), non-finite ones are counted and replaced by zero, and the columns are what
torch's own reductions say of the rest. Elements are widened to be compared with thresholds; no threshold is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import UnsupportedTensorError
from ..records.columns import POWERS, ROW_BYTES, TABLE
from ..records.samples import CHANNEL_COLUMNS, EMPTY_ACTIVATION_ROW
from .backend import Backend, Limits, Row
from .tensors import OVERLAP, float64_bytes, may_overlap, plain

# Elements widened at once: bounds the extra memory to a few tens of MiB however large a tensor is.
CHUNK = 1 << 20


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, but float32 on Apple's GPUs, which have no other.

    There a norm is within about 1e-5, squares overflow above 1e19, and counts above 2^24 lose their last bits.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def _chunk_columns(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every column of a chunk that is not empty; the smallest magnitude is Inf where nothing is finite and not zero."""
    wide = wide_dtype(x.device)
    nans, infs = torch.isnan(x), torch.isinf(x)
    values = torch.where(nans | infs, torch.zeros((), dtype=wide, device=x.device), x.to(wide))
    magnitude = values.abs()
    # A float32 subnormal is a normal float64, so nothing is lost to flushing after the widening.
    zeros = magnitude == 0
    count = torch.full((), x.numel(), dtype=wide, device=x.device) - (nans | infs).sum()
    deviations = torch.where(nans | infs, 0.0, values - values.sum() / count.clamp(min=1))
    none = torch.full((), torch.inf, dtype=wide, device=x.device)
    return {
        "numel": torch.full_like(none, x.numel()),
        "sum_sq": (values * values).sum(),
        "sum": values.sum(),
        "abs_max": magnitude.max(),
        "abs_min_nonzero": torch.where(zeros, none, magnitude).min(),
        "num_zeros": (zeros & ~(nans | infs)).sum().to(wide),
        "num_nans": nans.sum().to(wide),
        "num_infs": infs.sum().to(wide),
        "sum_sq_dev": (deviations * deviations).sum(),
        "finite_norm": safe_norm(magnitude),
    }


def safe_norm(magnitudes: torch.Tensor) -> torch.Tensor:
    """The 2-norm of numbers that are not negative, where squares have left the range of float64 of their shares of the
    largest; does not synchronise."""
    squares = (magnitudes * magnitudes).sum()
    largest = magnitudes.max()
    shares = magnitudes / torch.where(largest > 0, largest, torch.ones_like(largest))
    in_range = (squares >= torch.finfo(squares.dtype).tiny * 2.0**62) & (squares < torch.inf)
    rescued = torch.where(largest < torch.inf, largest * (shares * shares).sum().sqrt(), largest)
    return torch.where(in_range, squares.sqrt(), rescued)


_FOLDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": torch.sum,
    "max": torch.max,
    "least_nonzero": lambda parts: parts.min().nan_to_num(posinf=0.0),
    "deviations": torch.sum,
    "norm": safe_norm,
}


def _between(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the squared deviations from the mean of all have more than those from the mean of each part."""
    counts = parts["numel"] - parts["num_nans"] - parts["num_infs"]
    mean = parts["sum"].sum() / counts.sum().clamp(min=1)
    away = parts["sum"] / counts.clamp(min=1) - mean
    squares = (counts * away * away).sum()
    return torch.where(squares.isnan(), torch.inf, squares)  # sums overflowed


def tensor_columns(tensor: torch.Tensor) -> torch.Tensor:
    """One row, [columns], on the tensor's device; does not synchronise."""
    x = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if x.numel() == 0:
        return torch.zeros(len(TABLE), dtype=wide_dtype(x.device), device=x.device)
    chunks = [_chunk_columns(chunk) for chunk in x.reshape(-1).split(CHUNK)]
    parts = {column.name: torch.stack([chunk[column.name] for chunk in chunks]) for column in TABLE}
    row = {column.name: _FOLDS[column.fold](parts[column.name]) for column in TABLE}
    if len(chunks) > 1:
        row["sum_sq_dev"] += _between(parts)
    return torch.stack([row[column.name] for column in TABLE])


def collect_gradients(groups: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[int] | None, int]:
    """Gradients that are not None, flat over `groups`; their flat positions, or None if none is missing; and a
    fingerprint of the parameters."""
    every = [p.grad for params in groups for p in params]
    positions = [i for i, g in enumerate(every) if g is not None]
    gradients = [g for g in every if g is not None]
    fingerprint = hash(tuple(tuple(map(id, params)) for params in groups))
    return gradients, None if len(gradients) == len(every) else positions, fingerprint


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(wide_dtype(x.device))


def _chunk_figures(x: torch.Tensor, limits: Limits, by_channel: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of a chunk [channels, elements] that is not empty: (finite elements, mean, m2, min, max, zeros, near-zero,
    saturated, NaNs, Infs), and CHANNEL_COLUMNS as [channels, 4]."""
    low, high, near_zero = limits
    values, magnitude, finite = _wide(x), _wide(x).abs(), torch.isfinite(x)
    near = (magnitude < near_zero) | (magnitude == 0)
    saturated = (values < low) | (values > high) | torch.isinf(x)
    num_finite = finite.sum()
    mean = torch.where(finite, values, 0.0).sum() / num_finite.clamp(min=1)
    deviations = torch.where(finite, values - mean, 0.0)
    least = torch.where(finite, values, torch.inf).min()
    most = torch.where(finite, values, -torch.inf).max()
    same = least == most  # of numbers whose sum was rounded or overflowed, perhaps
    moments = torch.where(same, least, mean), torch.where(same, 0.0, (deviations * deviations).sum())
    counts = [mask.sum() for mask in (magnitude == 0, near, saturated, torch.isnan(x), torch.isinf(x))]
    row = torch.stack([column.to(values.dtype) for column in (num_finite, *moments, least, most, *counts)])
    if not by_channel:
        return row, None
    columns = near.sum(1), saturated.sum(1), (~finite).sum(1), torch.where(finite, magnitude, 0.0).sum(1)
    return row, torch.stack([column.to(values.dtype) for column in columns], dim=1)


def figures(x: torch.Tensor, dim: int | None, limits: Limits) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ACTIVATION_COLUMNS of a strided real tensor, float64 [10] on its device; with a `dim`, CHANNEL_COLUMNS of each of
    its indices, float64 [C, 4]. Does not synchronise."""
    channels = x.reshape(1, -1) if dim is None or x.dim() == 0 else x.movedim(dim, 0)
    count = channels.shape[0]
    table = None if dim is None else _wide(torch.zeros(count, len(CHANNEL_COLUMNS), device=x.device))
    if x.numel() == 0:
        return _wide(torch.tensor(EMPTY_ACTIVATION_ROW, device=x.device)), table
    found = []
    for chunk in channels.reshape(count, -1).split(max(1, CHUNK // count), dim=1):
        part, entries = _chunk_figures(chunk, limits, table is not None)
        found.append(part)
        if table is not None and entries is not None:
            table += entries
    parts = torch.stack(found)
    counts = parts[:, 0]
    mean = (counts / counts.sum().clamp(min=1) * parts[:, 1]).sum()
    away = parts[:, 1] - mean
    m2 = (parts[:, 2] + counts * away * away).sum()
    extremes = (parts[:, 3].min() + 0.0, parts[:, 4].max() + 0.0)  # no negative zeros
    row = torch.stack([torch.full_like(mean, x.numel()), mean, m2, *extremes])
    return torch.cat([row, parts[:, 5:].sum(0)]), table


def activation_into(
    x: torch.Tensor, dim: int | None, limits: Limits, row: torch.Tensor, table: torch.Tensor | None
) -> None:
    """The figures of `activation` into `row` and `table`, float64 on the same device. Does not synchronise."""
    with torch.no_grad():
        found, channels = figures(x, dim, limits)
        row.copy_(found)
        if table is not None and channels is not None:
            table.copy_(channels)


def activation(x: torch.Tensor, dim: int | None, limits: Limits) -> tuple[Row, bytes | None]:
    """Cost: about two dozen passes, a dozen more for channels, and float64 copies of at most 2^20 elements at a time; a
    copy of `x` where its channels do not come first; one sync, two for channels."""
    with torch.no_grad():
        row, table = figures(plain(x, 0), dim, limits)
        return tuple(row.tolist()), None if table is None else float64_bytes(table.cpu())


class ReferenceBackend(Backend):
    """Plain torch on any device, with about twenty passes where the others have one."""

    name = "reference"

    def detail(self) -> str:
        return f"plain PyTorch {torch.__version__}, any device"

    def accepts(self, device: torch.device) -> bool:
        return True

    def tensor_stats(self, tensors: Sequence[torch.Tensor], unscale: float = 1.0) -> tuple[bytearray, None]:
        """Cost: about twenty passes over each tensor, a float64 copy of at most 2^20 elements at a time; a sync."""
        table = bytearray(ROW_BYTES * len(tensors))
        if not tensors:
            return table, None
        with torch.no_grad():
            rows = torch.stack([tensor_columns(plain(t, i)) for i, t in enumerate(tensors)]).cpu().double()
            powers = torch.tensor(POWERS, dtype=torch.float64, device="cpu")
            torch.frombuffer(table, dtype=torch.float64).view(rows.shape).copy_(rows * unscale**powers)
        return table, None

    def scale_(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        """Cost: one read and one write of each; no sync."""
        views = [plain(t, i, writable=True) for i, t in enumerate(tensors)]
        for i, view in enumerate(views):
            if may_overlap(view):
                raise UnsupportedTensorError(i, OVERLAP)
        with torch.no_grad():
            for view in views:
                # As real numbers: a complex product with factor + 0j has other zeros and NaNs.
                (torch.view_as_real(view) if view.is_complex() else view).mul_(factor)

    activation, activation_into = staticmethod(activation), staticmethod(activation_into)
