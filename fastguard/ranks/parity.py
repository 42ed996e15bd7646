"""Compares ranks: their settings at the first step, and the bits of replicas."""

from __future__ import annotations

import datetime
import json
import logging
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import kernels
from ..observers.observer import Observer
from . import shards
from .exchange import device_of
from .shards import has_other_ranks, is_under_fully_shard, ranks_of

GRADIENTS_EVERY, WEIGHTS_EVERY = 20, 100  # steps
_MISSING = -1
_MAX_EVENTS = 16
_NUM_LOOKS, _SOON = 10, datetime.timedelta(seconds=60)
_log = logging.getLogger("fastguard")
_num_guards: Counter[int] = Counter()  # that this process has made, by ranks and shapes
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's elements, with their bits read as integers, modulo 2^64: 0-dim int64 on its device."""
    values = shards.local_of(tensor.detach())
    values = values.coalesce().values() if values.layout is torch.sparse_coo else values
    values = (values.resolve_conj() if values.is_complex() else values).resolve_neg()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)


def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`checksum` of each: int64, [T], on the CPU. Cost: one read, elsewhere than on the CPU by torch operations."""
    local = shards.locals_of(tensors)
    found = kernels.stats_and_checksums(local)
    if found is not None:
        return torch.frombuffer(found[2], dtype=torch.int64)
    return torch.stack([checksum(tensor).cpu() for tensor in local])


class Parity(Observer):
    """Compares reduced gradients and weights of replicas: of DDP's ranks, and of DTensors that are replicated.

    Cost of a comparison: one read of the tensors, and one reduction of 16 bytes a tensor and group; one more gather if
    something differs. On a GPU it syncs.
    """

    what = "comparison of replicas"

    def __init__(self, run: Any, model: torch.nn.Module | None, every: bool | int) -> None:
        self._run, self._every = run, (GRADIENTS_EVERY, WEIGHTS_EVERY) if every is True else (every, every)
        is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self._group: Any = model.process_group if is_ddp else dist.group.WORLD  # type: ignore[union-attr]
        # the first 16 differences, as `fastguard.records.events.ReplicaDifference`
        self.events: list[dict[str, Any]] = []

    def next_after(self, step: int) -> float:
        return min((step // every + 1) * every for every in self._every)

    def before(self, step: int) -> None:
        params, names = self._run.params(), self._run.known_names or self._run.names_now()
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
            groups, mesh = [self._group], getattr(p, "device_mesh", None)
            if mesh is not None:
                groups = [mesh.get_group(i) for i, how in enumerate(p.placements) if how.is_replicate()]  # type: ignore[attr-defined]
            for group in groups:
                if dist.get_world_size(group) > 1:
                    found.setdefault(group, []).append(place)
        return found

    def _compare(self, step: int, what: str, group: Any, tensors: Sequence[Any], names: Sequence[str]) -> None:
        sums = torch.full((len(tensors),), _MISSING, dtype=torch.int64, device="cpu")
        there = [i for i, tensor in enumerate(tensors) if tensor is not None]
        if there:
            sums[there] = checksums([tensor for tensor in tensors if tensor is not None])
        sums = sums.to(device_of(group))
        both = torch.cat([sums, ~sums])  # the maximum of the complements is the complement of the minimum
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        highest, lowest = both.view(2, -1)
        places = (highest != ~lowest).nonzero()[:, 0].tolist()
        if not places:
            return
        sums_by_rank: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(sums_by_rank, sums[places].tolist(), group=group)
        members = dist.get_process_group_ranks(group)
        first = [rank_sums[0] for rank_sums in sums_by_rank]
        usual, count = Counter(first).most_common(1)[0]
        odd = [rank for rank, value in zip(members, first) if value != usual]
        event = {"step": step, "what": what, "name": names[places[0]], "num_tensors": len(places)}
        has_majority = count > len(members) - count  # of two, either may be the odd one
        event |= {"num_ranks": len(members), "ranks": odd if has_majority else []}
        if len(self.events) < _MAX_EVENTS:
            self.events.append(event)


def alike_settings(
    settings: Mapping[str, str], model: Any, params: Sequence[torch.Tensor], over: Any, has_collectives: bool
) -> AlikeSettings | None:
    """Compares the settings of the ranks that train one model; None if no other rank is known to do so."""
    if not has_other_ranks():
        return None
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    groups = [] if over is None else [*over.groups]
    is_same = (is_ddp and not model.parameters_to_ignore) or is_under_fully_shard(model)
    if is_ddp:
        groups.append(model.process_group)
    if over is None and has_collectives:
        groups.append(dist.group.WORLD)
    elif over is not None:
        is_same = is_same and over.num_ranks == over.wire.num_ranks  # no stages or experts
    rooms = [ranks_of(params), *map(dist.get_process_group_ranks, groups)]
    rooms = [ranks for ranks in rooms if len(ranks) > 1]
    shapes = [p.shape for p in model.parameters()] if is_same else []
    return AlikeSettings(settings, rooms, shapes, has_collectives or over is not None) if rooms else None


class AlikeSettings:
    """Compares the settings of a guard over its ranks, before the first collective that depends on them.

    Each rank leaves its settings in the process group's store when its guard is made. So no collective hangs if one
    rank has `recovery=`, say, and the others have not, or are not guarded. `rooms` are groups of ranks that must agree,
    and `shapes` of the model's parameters tell guards apart. With `waits`, because collectives follow, it waits for
    ranks without a guard; otherwise it looks at ten steps, and warns then.

    Cost: four messages to the store when the guard is made, and two at its first step.
    """

    def __init__(self, settings: Mapping[str, str], rooms: Any, shapes: Any, waits: bool) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._waits, self._num_looks = waits, 0
        self._open: dict[str, tuple[int, ...]] = {}  # ranks by the prefix of their keys in the store
        store, said = self._store, json.dumps(settings)
        for ranks in sorted({tuple(sorted(room)) for room in rooms}, key=len, reverse=True):
            key = zlib.crc32(repr((ranks, shapes)).encode())
            room = f"fastguard/{key}/{_num_guards[key]}"
            _num_guards[key] += 1
            store.set(f"{room}/{dist.get_rank()}", said)
            store.add(f"{room}/{said}", 1)
            if store.add(f"{room}/all", 1) == len(ranks):  # the last one knows
                store.set(f"{room}/alike", str(store.add(f"{room}/{said}", 0) == len(ranks)))
            self._open[room] = ranks

    def are_compared(self) -> bool:
        """Whether all comparisons are done. Call it before a step.

        A RuntimeError if ranks have different settings, or some have no such guard when the store's timeout ends.
        """
        self._num_looks += 1
        for room, ranks in list(self._open.items()):
            if self._have_all(room):
                if self._store.get(f"{room}/alike") == b"False":
                    texts = {rank: self._store.get(f"{room}/{rank}") for rank in ranks}
                    raise RuntimeError(_differences({rank: json.loads(text) for rank, text in texts.items()}))
                del self._open[room]
            elif self._num_looks >= _NUM_LOOKS:
                del self._open[room]
                _log.warning("%s: what this one clips or skips, they do not", self._missing(room, ranks))
        return not self._open

    def _have_all(self, room: str) -> bool:
        """Whether all ranks have left their settings. Waits for them if collectives follow."""
        if self._store.check([f"{room}/alike"]):
            return True
        for time in [_SOON, self._store.timeout] if self._waits else []:
            try:
                self._store.wait([f"{room}/alike"], min(time, self._store.timeout))
                return True
            except RuntimeError as error:  # of the store, which names it DistStoreError, or not, by its kind
                missing = self._missing(room, self._open[room])
                if time is not _SOON:
                    remedy = "Wrap the optimizer on all, with the same settings (`recovery=`, `process_group=`)."
                    raise RuntimeError(f"{missing}, after the store's timeout. {remedy}") from error
                _log.warning("%s: waiting for them", missing)
        return False

    def _missing(self, room: str, ranks: Sequence[int]) -> str:
        missing = [rank for rank in ranks if not self._store.check([f"{room}/{rank}"])]
        return f"rank {dist.get_rank()} has a guard that ranks {missing[:16]} of {len(ranks)} lack"


def _differences(settings: Mapping[int, Mapping[str, str]]) -> str:
    differences = []
    for name in next(iter(settings.values())):
        ranks: dict[str, list[int]] = {}
        for rank, each in settings.items():
            ranks.setdefault(each[name], []).append(rank)
        if len(ranks) > 1:
            differences.append(
                f"`{name}`: " + ", ".join(f"{value} on ranks {those[:16]}" for value, those in ranks.items())
            )
    return (
        "the ranks of a guarded optimizer must have the same settings, got different "
        f"{'; '.join(differences)}. Give `fastguard.wrap`, and `optimizer.guard`, the same on each."
    )
