"""Compares the settings of ranks at the first step."""

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

from .shards import has_other_ranks, is_under_fully_shard, ranks_of

_NUM_LOOKS, _SOON = 10, datetime.timedelta(seconds=60)
_log = logging.getLogger("fastguard")
_num_guards: Counter[int] = Counter()  # that this process has made, by ranks and shapes


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
