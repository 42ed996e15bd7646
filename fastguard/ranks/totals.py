"""The norm of sharded tensors by a function, without a guard."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .. import kernels
from ..records.columns import ROW, norm_of, norm_parts
from . import shards
from .exchange import Wire, counted, divided, fold
from .pieces import PieceReader, Pieces


class _Readers(threading.local):
    """Of each thread, for what it recognises of its last call; it holds no tensor and no process group."""

    def __init__(self) -> None:
        self.gradients, self.tensors = PieceReader(), PieceReader()
        self.norms: dict[torch.dtype, Any] = {}  # how a norm lies on the mesh of the last call


_readers = _Readers()


def gradients_over_ranks(parameters: list[torch.Tensor], backend: str) -> Pieces | None:
    """What is here of the gradients of `parameters`; None where none of these is sharded, or one is to be prepared."""
    found = _readers.gradients.quick_gradients([parameters], backend)
    return found if found is not None and found.layouts and found.local else None


def tensors_over_ranks(tensors: list[torch.Tensor], backend: str) -> Pieces | None:
    """The same of `tensors` themselves."""
    return _readers.tensors.quick_tensors(tensors, backend)


def norm_over_ranks(pieces: Pieces) -> float:
    """The 2-norm of the whole tensors, the same bits on every rank whose copies are alike.

    Those that are plain are the same on every rank. Cost: a gather of ten numbers a rank, over each dimension of the
    mesh along which tensors are cut, or over all ranks if that is each; among more than 64 two reductions of as many.
    """
    wire = Wire(shards.groups_across(pieces.layouts))
    row: Sequence[float] = pieces.total
    times = pieces.replication(wire.num_ranks)
    if times is not None and times.numel() == 1:
        row = ROW.unpack(divided(bytearray(ROW.pack(*row)), times))
    elif times is not None:
        row = kernels.fold_rows(divided(pieces.table, times))
    if wire.is_wide:
        row = wire.table(torch.tensor([row], dtype=torch.float64, device="cpu"))[0].tolist()
    for group in [] if wire.is_wide else wire.groups:
        row = fold(wire.gather(row, group))
    return norm_of(*norm_parts(counted(row)))


def as_everywhere(norm: torch.Tensor, mesh: Any) -> torch.Tensor:
    """`norm` as a DTensor that every rank of `mesh` holds, as torch returns it."""
    from torch.distributed.tensor import DTensor, Replicate

    known = _readers.norms.get(norm.dtype)
    if known is None or known.mesh is not mesh:
        first: Any = DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
        _readers.norms[norm.dtype] = first._spec
        return first
    return DTensor(norm, known, requires_grad=False)  # what from_local does, after it has found out all that is known
