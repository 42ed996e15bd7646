"""One norm and one decision for a model whose gradients are on several ranks: measures the local parts of sharded
tensors in one pass, and gathers or reduces a few numbers of each rank."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from .. import kernels
from ..kernels import cpu
from ..kernels.registry import CPU_NAMES
from ..records.columns import COLUMNS, INDEX, TABLE, norm_of, norm_parts
from ..records.events import MAX_RANKS, BadRank
from . import shards

NUM_COLUMNS = len(COLUMNS)
_ADDED = tuple(i for i, column in enumerate(TABLE) if column.fold == "add")
_COUNTS = tuple(i for i, column in enumerate(TABLE) if column.is_count)
_SUM, _DEVIATIONS, _NORM = (INDEX[name] for name in ("sum", "sum_sq_dev", "finite_norm"))
_MAX, _LEAST, _NUMEL = INDEX["abs_max"], INDEX["abs_min_nonzero"], INDEX["numel"]
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_CPU = torch.device("cpu")
_NANS, _INFS = INDEX["num_nans"], INDEX["num_infs"]
TABLES_EVERY, FIRST_TABLES = 10, 10
_MAX_NAMED = 4  # tensors of a rank
_PARAMS = "numbers of parameters"
_ALIKE = (
    "steps",
    _PARAMS,
    "norms of the step before",
    "checksums of what was assigned to `guard.clip` and `guard.skip_nonfinite`",
)
_ONE = 2.0**32  # rank whose loss was not finite; its number is added, which names one that is alone


def divided(table: bytearray, replication: torch.Tensor) -> bytearray:
    """Rows divided by the number of ranks that hold the same tensor: `replication`, float64, [T, 1] or [1, 1]."""
    if not table:
        return table
    whole = torch.frombuffer(table, dtype=torch.float64).view(-1, NUM_COLUMNS)
    rows = whole / replication
    rows[:, [_MAX, _LEAST]] = whole[:, [_MAX, _LEAST]]
    rows[:, _NORM] = whole[:, _NORM] / replication[:, 0].sqrt()
    return bytes_of(rows)


def bytes_of(rows: torch.Tensor) -> bytearray:
    """A table as bytes of float64."""
    copied = bytearray(8 * rows.numel())
    if copied:
        torch.frombuffer(copied, dtype=torch.float64).view(rows.shape).copy_(rows)
    return copied


def counted(row: Sequence[float]) -> tuple[float, ...]:
    """Rounds the counts of a row after shares of them were added."""
    return tuple(float(round(value)) if i in _COUNTS else value for i, value in enumerate(row))


class Wire:
    """Collectives over some groups, one after the other; each rank gets the same bits.

    It gathers rows and folds them in the order of the ranks. It reduces tables: an all-reduce gives the same result on
    all ranks.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = list(groups)
        sizes = [dist.get_world_size(group) for group in groups]
        self.num_ranks = math.prod(sizes)  # of all groups together
        # num_collectives, num_bytes: sent by this rank
        self.num_collectives = self.num_bytes = 0

    def join(
        self, row: Sequence[float], compared: Sequence[float] = (), added: Sequence[float] = ()
    ) -> tuple[Sequence[float], list[list[float]], list[float]]:
        """The fold of the rows of all ranks, what was seen of each of `compared`, and the sums of `added`."""
        seen: list[list[float]] = [[] for _ in compared]
        for group in self.groups:
            own = torch.tensor([*row, *compared, *added], dtype=torch.float64, device=device_of(group))
            found = own.new_empty(group.size() * len(own))
            self._count(8 * len(own))
            _gather(found, own, group=group)
            everyone = found.view(group.size(), -1)
            row = kernels.fold_rows(bytes_of(everyone[:, :NUM_COLUMNS]))  # in the order of the ranks
            heads = [*zip(*everyone[:, NUM_COLUMNS:].tolist())]
            for values, head in zip(seen, heads):
                values += head
            added = [sum(head) for head in heads[len(compared) :]]
        return row, seen, list(added)

    def tell(self, said: list[Any]) -> list[Any]:
        """The lists of all ranks as one, in the order of the ranks. It pickles them: for rare events only."""
        for group in self.groups:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, said, group=group)
            self._count(len(repr(found)) // len(found))
            said = [one for part in found for one in part]
        return said

    def reduced(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of whole tensors, from the shares of each rank (float64, [T, columns]): two reductions a group."""
        largest = torch.stack(
            [rows[:, _MAX], torch.where(rows[:, _LEAST] > 0.0, -rows[:, _LEAST], -torch.inf), rows[:, _NORM]], dim=1
        )
        largest = self._reduced(largest, dist.ReduceOp.MAX)
        scale = largest[:, 2].clamp_min(torch.finfo(torch.float64).tiny)
        count = rows[:, _NUMEL] - rows[:, _NANS] - rows[:, _INFS]
        own_mean = torch.where(count > 0.0, rows[:, _SUM] / count.clamp_min(1e-300), 0.0)
        shares = [rows[:, i] for i in _ADDED]
        parts = [*shares, rows[:, _DEVIATIONS], count * own_mean * own_mean, (rows[:, _NORM] / scale).square()]
        summed = self._reduced(torch.stack(parts, dim=1), dist.ReduceOp.SUM)
        whole = torch.zeros_like(rows)
        for place, i in enumerate(_ADDED):
            whole[:, i] = summed[:, place].round() if i in _COUNTS else summed[:, place]
        whole[:, _MAX] = largest[:, 0]
        whole[:, _LEAST] = torch.where(largest[:, 1] > -torch.inf, -largest[:, 1], 0.0)
        count = whole[:, _NUMEL] - whole[:, _NANS] - whole[:, _INFS]
        between = summed[:, -2] - whole[:, _SUM].square() / count.clamp_min(1.0)
        whole[:, _DEVIATIONS] = (summed[:, -3] + between.clamp_min(0.0)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        whole[:, _NORM] = scale * summed[:, -1].sqrt()
        return whole

    def _reduced(self, rows: torch.Tensor, how: Any) -> torch.Tensor:
        for _ in self.groups:
            self._count(8 * rows.numel())
        return all_reduced(rows, self.groups, how)

    def _count(self, num_bytes: int) -> None:
        self.num_collectives += 1
        self.num_bytes += num_bytes


def all_reduced(words: torch.Tensor, groups: Sequence[dist.ProcessGroup], how: Any) -> torch.Tensor:
    """`words`, on the CPU, reduced over one group after the other."""
    for group in groups:
        sent = words.contiguous().to(device_of(group))
        dist.all_reduce(sent, op=how, group=group)
        words = sent.cpu()
    return words


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device for collectives of a group: the CPU, or its current device if it has no backend for the CPU."""
    known = dist.get_backend_config(group) if hasattr(dist, "get_backend_config") else dist.get_backend(group)
    if "gloo" in str(known) or "mpi" in str(known):
        return _CPU
    kind = "cuda" if "nccl" in str(known) else torch._C._get_accelerator().type
    return torch.device(kind, torch.accelerator.current_device_index() if kind != "cpu" else 0)


class Pieces(NamedTuple):
    """The local parts of some tensors."""

    table: bytearray  # a row for each part
    total: tuple[float, ...]  # their fold
    present: list[int] | None  # positions of the gradients that exist; None for all
    fingerprint: int  # of the parameters
    dtypes: frozenset[torch.dtype]  # of the tensors
    local: list[torch.Tensor]  # the parts
    num_shards: float | torch.Tensor  # number of parts of each tensor over the ranks: one number, or float64 [T, 1]
    layouts: list[shards.ShardLayout]  # of the sharded tensors, and of parameters without a gradient here

    @property
    def mesh(self) -> Any:
        """The mesh of one of the tensors; None if all are plain."""
        return self.layouts[0].mesh if self.layouts else None

    def replication(self, num_ranks: int) -> torch.Tensor | None:
        """Number of ranks with the same part, of `num_ranks`: float64, [T, 1] or [1, 1]; None if it is always one."""
        if not isinstance(self.num_shards, torch.Tensor) and self.num_shards == num_ranks:
            return None  # the usual case, quickly found
        times = num_ranks / torch.as_tensor(self.num_shards, dtype=torch.float64, device="cpu").view(-1, 1)
        return None if bool((times == 1.0).all()) else times


class PieceReader:
    """Measures the local parts of tensors, and remembers the kinds of sharding of the last call."""

    def __init__(self) -> None:
        self._plan = None if cpu.ShardPlan is None else cpu.ShardPlan()
        self._layouts: dict[int, tuple[Any, shards.ShardLayout]] = {}

    def quick(self, what: str, held: list[Any], backend: str, *inverse: float) -> Pieces | None:
        """Measures "tensor"s, if not all are plain, or the "gradient"s of groups of parameters, times `inverse`.

        None if one must be prepared or summed first.
        """
        if self._plan is None or backend not in CPU_NAMES:
            return None
        result = getattr(self._plan, f"{what}_stats")(held, torch.get_num_threads(), *inverse)
        if result is None:
            return None
        table, total, present, fingerprint, dtypes, local, kinds, used = result
        known: dict[int, shards.ShardLayout] = {}
        for kind in (kind for kind in used if kind >= 0):
            how = self._plan.known[kind]
            if kind not in self._layouts or self._layouts[kind][0] is not how:  # numbers start again after many kinds
                self._layouts[kind] = how, shards.layout_of(*how)
            known[kind] = self._layouts[kind][1]
        if any(layout.is_partial for layout in known.values()):
            return None
        counts = {kind: known[kind].num_shards if kind >= 0 else 1 for kind in used}
        parts: float | torch.Tensor = max(counts.values(), default=1)
        if len({*counts.values()}) > 1:
            each = torch.zeros(max(counts) + 2, dtype=torch.float64, device="cpu")  # of -1 the last
            for kind, count in counts.items():
                each[kind] = count
            parts = each[torch.frombuffer(kinds, dtype=torch.int32).long()].unsqueeze(1)
        return Pieces(table, total, present, fingerprint, cpu.dtypes(dtypes), local, parts, [*known.values()])

    def gradients(self, groups: list[list[torch.Tensor]], backend: str, inverse: float) -> Pieces:
        """Measures the gradients of `groups`, times `inverse`. A collective sums Partial ones first."""
        found = self.quick("gradient", groups, backend, inverse)
        if found is not None:
            return found
        gradients, present, fingerprint = kernels.collect_gradients(groups)
        holders = [*gradients, *(p for group in groups for p in group)]
        return measured(gradients, holders, backend, inverse)._replace(present=present, fingerprint=fingerprint)


def measured(
    tensors: Sequence[torch.Tensor], holders: Sequence[torch.Tensor], backend: str, inverse: float = 1.0
) -> Pieces:
    """Measures the local parts of `tensors`, DTensors and plain ones, times `inverse`, on any device.

    The layouts of `holders` say which ranks take part. Cost: one read, and some microseconds a tensor.
    """
    wholes = [shards.whole(tensor) for tensor in tensors]
    local = shards.locals_of(wholes)
    table, total = kernels.run_stats(local, backend, inverse)
    counts = [shards.layout_of(*shards.laid_out(t)).num_shards for t in wholes]
    parts: float | torch.Tensor = max(counts, default=1)
    if len({*counts}) > 1:
        parts = torch.tensor(counts, dtype=torch.float64, device="cpu").unsqueeze(1)
    dtypes = frozenset(tensor.dtype for tensor in tensors)
    total = total or kernels.fold_rows(table)
    return Pieces(table, total, None, 0, dtypes, local, parts, shards.layouts_of(holders))


class _Readers(threading.local):
    """Readers of each thread, which remember its last call; they hold no tensor and no process group."""

    def __init__(self) -> None:
        self.gradients, self.tensors = PieceReader(), PieceReader()
        self.norms: dict[torch.dtype, Any] = {}  # how a norm lies on the mesh of the last call


_readers = _Readers()


def gradients_over_ranks(parameters: list[torch.Tensor], backend: str) -> Pieces | None:
    """The local parts of the gradients of `parameters`; None if none is sharded, or one must be prepared."""
    found = _readers.gradients.quick("gradient", [parameters], backend, 1.0)
    return found if found is not None and found.layouts and found.local else None


def tensors_over_ranks(tensors: list[torch.Tensor], backend: str) -> Pieces | None:
    """The local parts of `tensors`; None as above."""
    return _readers.tensors.quick("tensor", tensors, backend)


def norm_over_ranks(pieces: Pieces) -> float:
    """The 2-norm of the whole tensors, with the same bits on every rank if their copies are equal.

    Plain tensors must be the same on every rank. Cost: a gather of ten numbers a rank, over each dimension of the mesh
    that shards tensors, or over all ranks if these are all dimensions.
    """
    wire = Wire(shards.groups_across(pieces.layouts))
    row: Sequence[float] = pieces.total
    times = pieces.replication(wire.num_ranks)
    if times is not None:
        row = kernels.fold_rows(divided(pieces.table, times))
    return norm_of(*norm_parts(counted(wire.join(row)[0])))


def as_everywhere(norm: torch.Tensor, mesh: Any) -> torch.Tensor:
    """`norm` as a DTensor that every rank of `mesh` holds, as torch returns it."""
    from torch.distributed.tensor import DTensor, Replicate

    known = _readers.norms.get(norm.dtype)
    if known is None or known.mesh is not mesh:
        first: Any = DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
        _readers.norms[norm.dtype] = first._spec
        return first
    return DTensor(norm, known, requires_grad=False)  # as from_local does, without its checks


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
