"""Whether replicas hold the same bits: a checksum of each tensor, compared over the ranks now and then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import kernels
from ..observers.observer import ObservedRun, Observer
from . import shards
from .exchange import device_of

GRADIENTS_EVERY, WEIGHTS_EVERY = 20, 100  # steps
_MISSING = -1
_MAX_EVENTS = 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits, taken as whole numbers of its elements' width, modulo 2^64: 0-dim int64, where it is.

    In whatever order they are added it is the same, so it does not hang on threads or strides. Any single change of a
    bit changes it; several that cancel are not seen. Cost: one read.
    """
    values = shards.local_of(tensor.detach())
    values = values.coalesce().values() if values.layout is torch.sparse_coo else values
    values = (values.resolve_conj() if values.is_complex() else values).resolve_neg()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)


def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`checksum` of each: int64, [T], on the CPU.

    Cost: one read, by the kernels' pass of statistics with the checksum as one more column where all are plain CPU
    memory, a few torch operations a tensor elsewhere, as on a GPU.
    """
    local = shards.locals_of(tensors)
    found = kernels.stats_and_checksums(local)
    if found is not None:
        return torch.frombuffer(found[2], dtype=torch.int64)
    return torch.stack([checksum(tensor).cpu() for tensor in local])


class Parity(Observer):
    """Compares gradients and weights of replicas: of DDP's ranks, and of what meshes of DTensors have in copies.

    Gradients are compared at every 20th step, ahead of it, when they were reduced; weights at every 100th. All ranks
    have to come to the same steps.

    Args:
        model: whose process group plain parameters are replicated over, if it is under DistributedDataParallel; else
            they are over all ranks.
        every: steps from one comparison to the next, of both; None: as above.

    Attributes:
        events: what differed, as `fastguard.records.events.ReplicaDifference` has it, sixteen at most.

    Cost of a comparison: one read of the tensors, and one reduction of 16 bytes a tensor and group; a gather more where
    something differs. On a GPU it syncs.
    """

    def __init__(self, model: torch.nn.Module | None, every: int | None = None) -> None:
        self._every = (every or GRADIENTS_EVERY, every or WEIGHTS_EVERY)
        is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self._group: Any = model.process_group if is_ddp else dist.group.WORLD  # type: ignore[union-attr]
        self.events: list[dict[str, Any]] = []

    what = "comparison of replicas"
    _run: ObservedRun

    def start(self, run: ObservedRun) -> None:
        """Goes with the steps of a guard."""
        self._run = run

    def next_after(self, step: int) -> float:
        return min((step // every + 1) * every for every in self._every)

    def before(self, step: int) -> None:
        self.compare(step, self._run.params(), self._run.known_names or self._run.names_now())

    def compare(self, step: int, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Compares what is due at `step`."""
        for what, every in zip(("gradients", "weights"), self._every):
            if step % every == 0:
                tensors = [p if what == "weights" else p.grad for p in params]
                for group, places in self._replicated(params).items():
                    self._compare(step, what, group, [tensors[i] for i in places], [names[i] for i in places])

    def facts(self) -> dict[str, Any]:
        return {"replica_differences": list(self.events)} if self.events else {}

    def _replicated(self, params: Sequence[torch.Tensor]) -> dict[dist.ProcessGroup, list[int]]:
        """Places of the parameters by the groups over which they are copies of each other."""
        found: dict[dist.ProcessGroup, list[int]] = {}
        for place, p in enumerate(params):
            for group in shards.replica_groups(p) if shards.is_sharded(p) else [self._group]:
                if dist.get_world_size(group) > 1:
                    found.setdefault(group, []).append(place)
        return found

    def _compare(
        self,
        step: int,
        what: str,
        group: dist.ProcessGroup,
        tensors: Sequence[torch.Tensor | None],
        names: Sequence[str],
    ) -> None:
        sums = torch.full((len(tensors),), _MISSING, dtype=torch.int64, device="cpu")
        there = [i for i, tensor in enumerate(tensors) if tensor is not None]
        if there:
            sums[there] = checksums([tensor for tensor in tensors if tensor is not None])
        sums = sums.to(device_of(group))
        both = torch.cat([sums, ~sums])  # the largest of the complements is the complement of the least
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        highest, lowest = both.view(2, -1)
        places = (highest != ~lowest).nonzero()[:, 0].tolist()
        if not places:
            return
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, sums[places].tolist(), group=group)
        members = dist.get_process_group_ranks(group)
        first = [rank_sums[0] for rank_sums in told]
        usual, count = Counter(first).most_common(1)[0]
        odd = [rank for rank, value in zip(members, first) if value != usual]
        event = {
            "step": step,
            "what": what,
            "name": names[places[0]],
            "num_tensors": len(places),
            "num_ranks": len(told),
        }
        event["ranks"] = odd if count > len(told) - count else []  # of two nobody knows which is odd
        if len(self.events) < _MAX_EVENTS:
            self.events.append(event)
