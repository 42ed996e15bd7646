"""Plain PyTorch: the definition of every column, and the fallback on any device. No compiled code of ours. Every
element is widened (see `wide_dtype`), non-finite ones are counted and replaced by zero, and the columns are what
torch's own reductions say of the rest. Elements are widened to be compared with thresholds; no threshold is rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import UnsupportedTensorError
from ..records.columns import POWERS, ROW_BYTES, TABLE
from ..records.samples import CHANNEL_COLUMNS, EMPTY_ACTIVATION_ROW
from .tensors import OVERLAP, float64_bytes, may_overlap, plain

Row = tuple[float, ...]
Limits = tuple[float, float, float]

# Elements widened at once: bounds the extra memory to a few tens of MiB however large a tensor is.
CHUNK = 1 << 20


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, but float32 on Apple's GPUs, which have no other. There a norm is within about 1e-5,
    squares overflow above 1e19, and counts above 2^24 lose their last bits."""
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
    **{"add": torch.sum, "deviations": torch.sum, "max": torch.max, "norm": safe_norm},
    "least_nonzero": lambda parts: parts.min().nan_to_num(posinf=0.0),
}


def tensor_columns(tensor: torch.Tensor) -> torch.Tensor:
    """One row, [columns], on the tensor's device; does not synchronise."""
    x = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if x.numel() == 0:
        return torch.zeros(len(TABLE), dtype=wide_dtype(x.device), device=x.device)
    chunks = [_chunk_columns(chunk) for chunk in x.reshape(-1).split(CHUNK)]
    parts = {column.name: torch.stack([chunk[column.name] for chunk in chunks]) for column in TABLE}
    row = {column.name: _FOLDS[column.fold](parts[column.name]) for column in TABLE}
    if len(chunks) > 1:  # squared deviations from the mean of all are more than those from the mean of each chunk
        counts = parts["numel"] - parts["num_nans"] - parts["num_infs"]
        mean = parts["sum"].sum() / counts.sum().clamp(min=1)
        away = parts["sum"] / counts.clamp(min=1) - mean
        between = (counts * away * away).sum()
        row["sum_sq_dev"] += torch.where(between.isnan(), torch.inf, between)  # NaN: sums overflowed
    return torch.stack([row[column.name] for column in TABLE])


def scale_by_(tensors: Sequence[Any], factor: torch.Tensor) -> None:
    """x *= factor, a 0-dim tensor, with one rounding; reads and writes the tensors also where the factor is 1."""
    views = [plain(t, i, writable=True) for i, t in enumerate(tensors)]
    for i, view in enumerate(views):
        if may_overlap(view):
            raise UnsupportedTensorError(i, OVERLAP)
    for view in views:
        # As real numbers: a complex product with factor + 0j has other zeros and NaNs.
        real = torch.view_as_real(view) if view.is_complex() else view
        if real.dtype in (torch.float32, torch.float64):
            real.mul_(factor.to(real.dtype))
        else:  # the product is rounded to half precision, the factor is not
            real.copy_(real.float() * factor.float())


def _chunk_figures(x: torch.Tensor, limits: Limits, by_channel: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of a chunk [channels, elements] that is not empty: (finite elements, mean, m2, min, max, zeros, near-zero,
    saturated, NaNs, Infs), and CHANNEL_COLUMNS as [channels, 4]."""
    low, high, near_zero = limits
    values, finite = x.to(wide_dtype(x.device)), torch.isfinite(x)
    magnitude = values.abs()
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


class ReferenceBackend:
    """Plain torch on any device, with about twenty passes where the others have one. It defines what every figure
    means, and is the base of the others, which give the same, faster: what they do not override is done by plain torch.
    A subclass with a `name`, entered in `registry.BACKENDS`, is all that a backend takes. A constructor must not fail
    where the backend cannot run: `unavailable` says why."""

    name = "reference"

    def unavailable(self) -> str | None:
        """Why this backend cannot run here, in one line; None if it can."""
        return None

    def detail(self) -> str:
        """What `fastguard info` says of it; asked only where it can run."""
        return f"plain PyTorch {torch.__version__}, any device"

    def accepts(self, device: torch.device) -> bool:
        """Whether it reads tensors on `device`."""
        return True

    def problem_on(self, device: torch.device, operation: str) -> str | None:
        """What speaks against `operation` on this very device, as a trial that failed; only "auto" asks."""
        return None

    def tensor_stats(self, tensors: Sequence[Any], unscale: float = 1.0) -> tuple[bytearray, Row | None]:
        """Rows of `tensors` times `unscale`, as float64 in bytes in the order of `fastguard.records.COLUMNS`, and their
        fold; None for the fold leaves it to others. The tensors, at least one, are whatever users pass, all on one
        device that it accepts. `tensors.plain` makes strided tensors of sparse, lazy and distributed ones, or raises
        the error for the user.

        Cost: about twenty passes over each tensor, a float64 copy of at most 2^20 elements at a time; a sync.
        """
        table = bytearray(ROW_BYTES * len(tensors))
        rows = torch.stack([tensor_columns(plain(t, i)) for i, t in enumerate(tensors)]).cpu().double()
        powers = torch.tensor(POWERS, dtype=torch.float64, device="cpu")
        torch.frombuffer(table, dtype=torch.float64).view(rows.shape).copy_(rows * unscale**powers)
        return table, None

    def scale_(self, tensors: Sequence[Any], factor: float) -> None:
        """x *= factor in place, with one rounding, or UnsupportedTensorError: none is written to unless all can be.
        Cost: one read and one write of each; no sync."""
        scale_by_(tensors, torch.tensor(factor, dtype=torch.float64, device="cpu"))

    def activation(self, x: torch.Tensor, dim: int | None, limits: Limits) -> tuple[Row, bytes | None]:
        """One row of ACTIVATION_COLUMNS of a real tensor and, with a `dim` counted from the front, CHANNEL_COLUMNS of
        each of its indices as float64 [C, 4] in bytes. `limits`: low, high, near-zero threshold, which is above 0.
        Cost: that of `activation_into`, and one sync. A copy of `x` where its elements do not fill a stretch of
        memory."""
        x = plain(x, 0)
        num_channels = 0 if dim is None else x.shape[dim] if x.dim() else 1
        size, width = len(EMPTY_ACTIVATION_ROW), len(CHANNEL_COLUMNS)
        figures = torch.empty(size + width * num_channels, dtype=wide_dtype(x.device), device=x.device)
        self.activation_into(x, dim, limits, figures[:size], figures[size:].view(num_channels, width))
        host = figures.cpu()
        return tuple(host[:size].tolist()), None if dim is None else float64_bytes(host[size:])

    @torch.no_grad()
    def activation_into(
        self, x: torch.Tensor, dim: int | None, limits: Limits, row: torch.Tensor, table: torch.Tensor | None
    ) -> None:
        """The same into `row`, float64 [10], and `table`, float64 [C, 4], on the device of `x`, in the order of its
        current stream, for an `x` that has been through `tensors.plain`. Does not synchronise. Cost: about two dozen
        passes, a dozen more for channels, float64 copies of at most 2^20 elements at a time."""
        channels = x.reshape(1, -1) if dim is None or x.dim() == 0 else x.movedim(dim, 0)
        count, by_channel = channels.shape[0], dim is not None
        if table is not None:
            table.zero_()
        if x.numel() == 0:
            row.copy_(torch.tensor(EMPTY_ACTIVATION_ROW, device="cpu"))
            return
        found = []
        for chunk in channels.reshape(count, -1).split(max(1, CHUNK // count), dim=1):
            part, entries = _chunk_figures(chunk, limits, by_channel)
            found.append(part)
            if table is not None and entries is not None:
                table += entries
        parts = torch.stack(found)
        counts = parts[:, 0]
        mean = (counts / counts.sum().clamp(min=1) * parts[:, 1]).sum()
        away = parts[:, 1] - mean
        m2 = (parts[:, 2] + counts * away * away).sum()
        extremes = (parts[:, 3].min() + 0.0, parts[:, 4].max() + 0.0)  # no negative zeros
        first = torch.stack([torch.full_like(mean, x.numel()), mean, m2, *extremes])
        row.copy_(torch.cat([first, parts[:, 5:].sum(0)]))
