"""Plain PyTorch: the definition of every column, and the fallback on any device. No compiled code of ours.

Every element is widened (see `wide_dtype`), non-finite ones are counted and replaced by zero, and the columns are what
torch's own reductions say of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import UnsupportedTensorError
from ..records.columns import POWERS, ROW_BYTES, TABLE
from . import reference_activations
from .backend import Backend
from .reference_activations import CHUNK
from .reference_activations import wide_dtype as wide_dtype
from .tensors import OVERLAP, may_overlap, plain


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


def _smallest(parts: torch.Tensor) -> torch.Tensor:
    least = parts.min()
    return torch.where(least < torch.inf, least, torch.zeros_like(least))


_FOLDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": torch.sum,
    "max": torch.max,
    "least_nonzero": _smallest,
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
    fingerprint of which parameters these were."""
    every = [p.grad for params in groups for p in params]
    positions = [i for i, g in enumerate(every) if g is not None]
    gradients = [g for g in every if g is not None]
    fingerprint = hash(tuple(tuple(map(id, params)) for params in groups))
    return gradients, None if len(gradients) == len(every) else positions, fingerprint


class ReferenceBackend(Backend):
    """Plain torch on any device, with about twenty passes where the others have one."""

    name = "reference"

    def detail(self) -> str:
        return f"plain PyTorch {torch.__version__}, any device"

    def accepts(self, device: torch.device) -> bool:
        return True

    def tensor_stats(self, tensors: Sequence[torch.Tensor], unscale: float = 1.0) -> tuple[bytearray, None]:
        """Rows of `tensors` times `unscale` as float64 bytes. Synchronises once, at the end.

        Cost: about twenty passes over each tensor, and a float64 copy of at most 2^20 elements at a time.
        """
        table = bytearray(ROW_BYTES * len(tensors))
        if not tensors:
            return table, None
        with torch.no_grad():
            rows = torch.stack([tensor_columns(plain(t, i)) for i, t in enumerate(tensors)]).cpu().double()
            powers = torch.tensor(POWERS, dtype=torch.float64, device="cpu")
            torch.frombuffer(table, dtype=torch.float64).view(rows.shape).copy_(rows * unscale**powers)
        return table, None

    def scale_(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        """x *= factor for every tensor; one read and one write of each. Does not synchronise."""
        views = [plain(t, i, writable=True) for i, t in enumerate(tensors)]
        for i, view in enumerate(views):
            if may_overlap(view):
                raise UnsupportedTensorError(i, OVERLAP)
        with torch.no_grad():
            for view in views:
                # As real numbers: a complex product with factor + 0j has other zeros and NaNs.
                (torch.view_as_real(view) if view.is_complex() else view).mul_(factor)

    activation = staticmethod(reference_activations.activation)
    activation_into = staticmethod(reference_activations.activation_into)
    magnitude_counts = staticmethod(reference_activations.magnitude_counts)
