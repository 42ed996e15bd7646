"""One norm and one decision for a model whose gradients are on several ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from .. import kernels
from ..records.columns import INDEX
from ..records.events import MAX_RANKS, BadRank
from . import shards
from .exchange import NUM_COLUMNS, PieceReader, Wire, bytes_of, counted, divided

_log = logging.getLogger("fastguard")
TABLES_EVERY, FIRST_TABLES = 10, 10
_MAX_NAMED = 4  # tensors of a rank
_PARAMS = "numbers of parameters"
_ALIKE = (
    "steps",
    _PARAMS,
    "norms of the step before",
    "checksums of what was assigned to `guard.clip` and `guard.skip_nonfinite`",
)
_NANS, _INFS = INDEX["num_nans"], INDEX["num_infs"]
_ONE = 2.0**32  # rank whose loss was not finite; its number is added, which names one that is alone


class Shared(NamedTuple):
    """The gradients of a step over all ranks, the same bits on each."""

    table: bytearray  # rows of whole tensors; empty at a step without them
    total: tuple[float, ...]  # the fold of all gradients
    positions: list[int] | None  # of the rows among all parameters; None for all
    present: list[int] | None  # positions of the local gradients; None for all
    fingerprint: int  # of the local parameters
    loss: float | None  # mean of what the ranks observed at the step before; None where none did
    found_inf: bool  # whether a scaler on any rank saw a gradient that is not finite
    own: bytearray  # rows of the local parts, not divided
    # the rank whose loss at the step before was the only one that was not finite; None without such
    bad_loss: int | None


class Ranks:
    """Measures the gradients of a step over all ranks that hold parts of the model. All of them must step together.

    Raises:
        TypeError: the parameters lie on meshes of different ranks.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        beyond: dist.ProcessGroup | None = None,  # its ranks hold other tensors of the model: pipeline stages, experts
        flat: shards.FlatShards | None = None,  # the layout of FSDP1's parameters
        copies: Sequence[int] | None = None,  # number of ranks of `beyond` with the same parameter, for each
    ) -> None:
        # the collectives, with counts
        self.wire = Wire(
            shards.groups_of(one.mesh for one in shards.layouts_of(params)) if flat is None else flat.groups
        )
        self._flat = flat
        self._copies = None if copies is None else torch.tensor(copies, dtype=torch.float64, device="cpu").unsqueeze(1)
        self._reader = PieceReader()
        is_one = beyond is None or dist.get_world_size(beyond) == 1
        self._wires = [self.wire, *([] if is_one else [Wire([beyond])])]  # type: ignore[list-item]
        self.groups = [group for wire in self._wires for group in wire.groups]  # to reduce over, one after the other
        self.num_ranks = math.prod(wire.num_ranks for wire in self._wires)  # of all groups together
        self.is_alone = not self.groups  # there is no other rank
        self.wants_tables = False  # whether the clip policy wants norms of tensors
        # the last result of `find_trouble`: (rank, tensor, NaNs, Infs) each, in backward order, four a rank
        self.trouble: list[tuple[int, str, int, int]] = []
        self._unnamed: tuple[int, Any] = -2, ()  # step whose NaN came from a rank unknown, `bad_ranks` before it
        # checksum of the settings assigned after `wrap`, which must be the same on all ranks
        self._decided = self.changes = 0.0
        self._num_measured = 0

    def costs(self) -> dict[str, float]:
        """Collectives a step on average, and the bytes that each rank sent in them; empty without other ranks."""
        if self.is_alone:
            return {}
        steps = max(1, self._num_measured)
        return {
            "num_collectives_per_step": sum(wire.num_collectives for wire in self._wires) / steps,
            "collective_bytes_per_step": sum(wire.num_bytes for wire in self._wires) / steps,
        }

    def measure(
        self,
        groups: list[list[torch.Tensor]],
        backend: str,
        inverse: float,
        step: int,
        *,
        loss: float | None = None,
        found_inf: bool = False,
    ) -> Shared:
        """Statistics of the gradients of `groups`, times `inverse`, over all ranks.

        Raises:
            RuntimeError: the ranks are at different steps, hold different parameters, or decided differently before.
        """
        self._num_measured += 1
        pieces = self._reader.gradients(groups, backend, inverse)
        if self._flat is not None:
            counts = self._flat.num_shards
            pieces = pieces._replace(num_shards=counts if pieces.present is None else counts[pieces.present])
        times = pieces.replication(self.wire.num_ranks)
        own = pieces.table if times is None else divided(pieces.table, times)
        num_params = sum(map(len, groups))
        has_loss = loss is not None and math.isfinite(loss)
        bad_loss = _ONE + dist.get_rank() if loss is not None and not has_loss else 0.0
        total = pieces.total if times is None else kernels.fold_rows(own)
        if self._copies is not None:
            copies = self._copies if pieces.present is None else self._copies[pieces.present]
            total = kernels.fold_rows(divided(own, copies))
        compared = [float(step), float(num_params), self._decided, self.changes]
        added = [bad_loss, (loss or 0.0) if has_loss else 0.0, float(has_loss), float(found_inf)]
        for wire in self._wires:
            row, seen, added = wire.join(total, compared, added)
            total = tuple(row)
            for what, values in zip(_ALIKE, seen):
                if len({*values}) > 1 and (wire is self.wire or what is not _PARAMS):
                    raise RuntimeError(
                        "the ranks of a guarded optimizer must step together and alike, got different "
                        f"{what}: {values[:16]}. Have every rank call optimizer.step() as often, wrap and change "
                        "settings at the same step, and load the same state."
                    )
        total = counted(total)
        bad_losses, losses, num_losses, num_found_inf = added
        mean = losses / num_losses if num_losses else None
        is_bad = not math.isfinite(total[INDEX["finite_norm"]]) or total[_NANS] + total[_INFS] > 0
        rows, positions = bytearray(), cast("list[int] | None", [])
        if is_bad or self.wants_tables or self.is_alone or step < FIRST_TABLES or step % TABLES_EVERY == 0:
            rows, positions = self._whole_table(own, num_params, pieces.present)
        self._decided = total[INDEX["finite_norm"]] if math.isfinite(total[INDEX["finite_norm"]]) else -1.0
        num_bad, rank = divmod(bad_losses, _ONE)
        is_whose = num_bad == 1.0 and num_losses == self.num_ranks - 1.0 and len(self._wires) == 1
        found = pieces.present, pieces.fingerprint, mean, num_found_inf > 0.0, pieces.table
        return Shared(rows, total, positions, *found, int(rank) if is_whose else None)

    def find_trouble(self, step: int, shared: Shared, names: Sequence[str], history: Any) -> None:
        """Gathers into `trouble` which ranks hold NaN or Inf at a bad step; notes them in `history`, if given."""
        self.trouble = []
        rank, table = dist.get_rank(), shared.own
        places = range(len(names)) if shared.present is None else shared.present
        rows = torch.frombuffer(table, dtype=torch.float64).view(-1, NUM_COLUMNS).tolist() if table else []
        for place, row in reversed([*zip(places, rows)]):
            if len(self.trouble) < _MAX_NAMED and (row[_NANS] or row[_INFS]):
                self.trouble.append((rank, names[place], int(row[_NANS]), int(row[_INFS])))
        for wire in self._wires:
            self.trouble = wire.tell(self.trouble)
        if history is not None and not self.is_alone:
            self._unnamed = step, history.model.bad_ranks
            history.note_model(bad_ranks=with_bad_step(self._unnamed[1], step, self.num_ranks, self.trouble))

    def note_bad_loss(self, step: int, rank: int, history: Any) -> bool:
        """Notes that `rank` alone had a bad loss at a non-finite step; whether that is news."""
        if self._unnamed[0] != step or not self.trouble:
            return False
        held = next((one for one in self.trouble if one[0] == rank), self.trouble[0])
        bad = with_bad_step(self._unnamed[1], step, self.num_ranks, [(rank, *held[1:])])
        history.note_model(bad_ranks=bad)
        return True

    def describe_trouble(self) -> str:
        """`trouble` in words; empty where all ranks have it, or none."""
        ranks, num_ranks = sorted({rank for rank, *_ in self.trouble}), self.num_ranks
        if not ranks or len(ranks) == num_ranks:
            return ""
        first = next(one for one in self.trouble if one[0] == ranks[0])
        counts = ", ".join(f"{count} {what}" for count, what in zip(first[2:], ("NaN", "Inf")) if count)
        more = f"so are {len(ranks) - 1} of {num_ranks - 1} others"
        others = "the others were finite" if len(ranks) == 1 else more
        return f"rank {first[0]}, {first[1]}: {counts}; {others}"

    def _whole_table(
        self, own: bytearray, num_params: int, present: Sequence[int] | None
    ) -> tuple[bytearray, list[int] | None]:
        """Rows of whole tensors, and which parameters they are of."""
        rows = torch.zeros((num_params, NUM_COLUMNS), dtype=torch.float64, device="cpu")
        if own:
            found = torch.frombuffer(own, dtype=torch.float64).view(-1, NUM_COLUMNS)
            rows[slice(None) if present is None else present] = found
        if self.wire.groups:
            rows = self.wire.reduced(rows)
        there = (rows[:, INDEX["numel"]] > 0.0).nonzero()[:, 0].tolist()
        if len(there) == num_params:
            return bytes_of(rows), None
        return bytes_of(rows[there]), there


def ranks_over(groups: Sequence[Sequence[torch.Tensor]], model: torch.nn.Module | None, settings: Any) -> Ranks | None:
    """The ranks that hold the parameters; None if this process holds all of them, and none is a DTensor. Raises
    TypeError for `settings` that need whole tensors, and for parameters that cannot be measured over ranks."""
    process_group, recovery = settings.process_group, settings.recovery
    if process_group is not None and not hasattr(process_group, "size"):
        raise TypeError(f"`process_group` must be a process group that this process is in, got {process_group!r}")
    params = [p for group in groups for p in group]
    flat = shards.flat_shards(model, params)
    if flat is None:
        shards.refuse_sharding_model(model)
    has_shards = flat is not None or any(map(shards.is_sharded, params))
    if process_group is None and not has_shards:
        return None
    over = Ranks(params, process_group, flat, shards.copies_of(params, model, process_group))
    if over.is_alone and not has_shards:
        return None
    scope = getattr(settings.clip.value, "scope", "model")
    for argument, is_given, reason in (
        ("recovery", recovery is not None and flat is not None, "FSDP1 keeps its parameters in storage of its own"),
        ("weights", settings.weights is not None, "rows of a weight lie on several ranks"),
        ("clip", scope in ("unit", "element"), f"{scope}s of a tensor lie on several ranks; clip the norm of tensors"),
    ):
        if is_given:
            raise TypeError(f"`{argument}` must be left out where parameters are sharded: {reason}.")
    return over


def with_bad_step(
    known: Sequence[BadRank], step: int, num_ranks: int, trouble: Iterable[tuple[int, str, int, int]]
) -> tuple[BadRank, ...]:
    """`known` after one more non-finite step; of `trouble` (rank, tensor, NaNs, Infs) it takes the first of each rank.

    >>> with_bad_step([], 12, 4, [(3, "w2", 5, 0), (3, "w1", 1, 0)])
    ({'rank': 3, 'num_ranks': 4, 'step': 12, 'num_nans': 5, 'num_infs': 0, 'num_steps': 1, 'name': 'w2'},)
    """
    found: dict[int, BadRank] = {one["rank"]: {**one} for one in known}
    first: dict[int, tuple[int, str, int, int]] = {}
    for one in trouble:
        first.setdefault(one[0], one)
    for rank, name, nans, infs in first.values():
        if rank in found:
            found[rank]["num_steps"] += 1
        elif len(found) < MAX_RANKS:
            found[rank] = BadRank(
                rank=rank, num_ranks=num_ranks, step=step, num_nans=nans, num_infs=infs, num_steps=1, name=name
            )
    return tuple(found.values())
