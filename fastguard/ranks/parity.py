"""Compares ranks: their settings at the first step, and the bits of replicas."""

from __future__ import annotations

import datetime
import json
import logging
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import kernels
from ..observers.observer import ObservedRun, Observer
from . import shards
from .exchange import device_of
from .shards import has_other_ranks, is_under_fully_shard, ranks_of

GRADIENTS_EVERY, WEIGHTS_EVERY = 20, 100  # steps
_MISSING = -1
_MAX_EVENTS = 16
_NUM_LOOKS, _SOON, _BRIEF = 10, datetime.timedelta(seconds=60), datetime.timedelta(seconds=10)
_MAX_CHANGES = 20  # comparisons of later settings: a policy set at every step would cost a message each
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
    """Compares reduced gradients and weights of replicas: of DDP's ranks, and of DTensors that are replicated."""

    what = "comparison of replicas"
    _run: ObservedRun

    def __init__(self, model: torch.nn.Module | None, every: int | None = None) -> None:
        self._every = (every or GRADIENTS_EVERY, every or WEIGHTS_EVERY)
        is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self._group: Any = model.process_group if is_ddp else dist.group.WORLD  # type: ignore[union-attr]
        # the first 16 differences, as `fastguard.records.events.ReplicaDifference`
        self.events: list[dict[str, Any]] = []

    def start(self, run: ObservedRun) -> None:
        """Connects to a guard."""
        self._run = run

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
    groups, is_ddp = [] if over is None else over.groups, isinstance(model, torch.nn.parallel.DistributedDataParallel)
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


@dataclass
class _Comparison:
    """Settings that were published, and not compared yet."""

    ranks: tuple[int, ...]
    room: str
    waits: bool
    is_change: bool
    num_looks: int = 0


class AlikeSettings:
    """Compares the settings of a guard over its ranks, before the first collective that depends on them.

    Each rank leaves its settings in the process group's store when its guard is made, and those that change later. So
    no collective hangs if one rank has `recovery=`, say, and the others have not, or are not guarded.

    Args:
        settings: those that must be equal, as text.
        rooms: numbers of the ranks that must agree, for each group of them.
        shapes: of the model's parameters, to tell guards apart; empty if they differ between ranks.
        waits: wait for ranks without a guard, because collectives follow; otherwise look at ten steps, and warn then.

    Cost: four messages to the store when the guard is made, and two at its first step; as many for each change.
    """

    def __init__(self, settings: Mapping[str, str], rooms: Any, shapes: Any, waits: bool) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._places: dict[tuple[int, ...], str] = {}
        for ranks in sorted({tuple(sorted(room)) for room in rooms}, key=len, reverse=True):
            key = zlib.crc32(repr((ranks, shapes)).encode())
            self._places[ranks] = f"fastguard/{key}/{_num_guards[key]}"
            _num_guards[key] += 1
        self._num_published, self._open = 0, list[_Comparison]()
        self.publish(settings, waits)

    def publish(self, settings: Mapping[str, str], waits: bool = False) -> None:
        """Publishes settings for the other ranks, which must publish the same ones; does nothing after 20 changes."""
        if self._num_published > _MAX_CHANGES:
            return
        store, said = self._store, json.dumps(settings)
        for ranks, place in self._places.items():
            room = f"{place}/{self._num_published}"
            store.set(f"{room}/{dist.get_rank()}", said)
            store.add(f"{room}/{said}", 1)
            if store.add(f"{room}/all", 1) == len(ranks):  # the last one knows
                store.set(f"{room}/alike", str(store.add(f"{room}/{said}", 0) == len(ranks)))
            self._open.append(_Comparison(ranks, room, waits, self._num_published > 0))
        self._num_published += 1

    def are_compared(self) -> bool:
        """Whether all comparisons are done. Call it before a step.

        Raises:
            RuntimeError: the ranks have different settings, or some have no such guard when the store's timeout ends.
        """
        for one in self._open.copy():
            one.num_looks += 1
            if self._have_all(one):
                if self._store.get(f"{one.room}/alike") == b"False":
                    texts = {rank: self._store.get(f"{one.room}/{rank}") for rank in one.ranks}
                    raise RuntimeError(_differences({rank: json.loads(text) for rank, text in texts.items()}))
                self._open.remove(one)
            elif one.num_looks >= _NUM_LOOKS:
                self._open.remove(one)
                what = "a changed `guard.clip` or `guard.skip_nonfinite`" if one.is_change else "a guard"
                _log.warning("%s: what this one clips or skips, they do not", self._missing(one, what))
        return not self._open

    def _have_all(self, one: _Comparison) -> bool:
        """Whether all ranks have published. Waits for them if collectives follow, and briefly for a change."""
        if self._store.check([f"{one.room}/alike"]):
            return True
        brief = [_BRIEF] if one.is_change and one.num_looks == 1 else []
        for time in [_SOON, self._store.timeout] if one.waits else brief:
            try:
                self._store.wait([f"{one.room}/alike"], min(time, self._store.timeout))
                return True
            except RuntimeError as error:  # of the store, which names it DistStoreError, or not, by its kind
                if one.waits and time is not _SOON:
                    remedy = "Wrap the optimizer on all, with the same settings (`recovery=`, `process_group=`)."
                    raise RuntimeError(f"{self._missing(one)}, after the store's timeout. {remedy}") from error
                if one.waits:
                    _log.warning("%s: waiting for them", self._missing(one))
        return False

    def _missing(self, one: _Comparison, what: str = "a guard") -> str:
        missing = [rank for rank in one.ranks if not self._store.check([f"{one.room}/{rank}"])]
        return f"rank {dist.get_rank()} has {what} that ranks {missing[:16]} of {len(one.ranks)} lack"


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
