"""Reads each rank's own gradients under DistributedDataParallel and `fully_shard`, before they are averaged."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.hooks import unserializable_hook

from .. import kernels
from ..observers.observer import ObservedRun, Observer
from ..records import TrainingHistory
from ..records.columns import COLUMNS, INDEX, norm_of, norm_parts
from ..records.events import MAX_RANKS, BadRank
from . import shards
from .parity import NoiseScale, OddRanks
from .ranks import describe
from .shards import Unsharded, compares_ranks, num_averaged, ranks_of

EVERY = 10  # steps
_MAX_HELD = 4  # tensors of a rank
_TIMEOUT = datetime.timedelta(seconds=60)
_task_now: Callable[[], int] = torch._C._current_graph_task_id
_NANS, _INFS = INDEX["num_nans"], INDEX["num_infs"]
_WHAT, _SO = "comparison of the ranks' own gradients", "Nothing more is said of single ranks."


class _OwnGradients(NamedTuple):
    """This rank's own gradients at a step.

    Attributes:
        sum_sq: squared norm; NaN if it is not finite, or if ranks have different tensors.
        num_passes: number of averaged backward passes; these gradients are the newest one's.
        held: index, NaNs and Infs of the first four bad parameters in backward order.
    """

    sum_sq: float
    num_passes: int
    held: list[tuple[int, int, int]]


class _Arrived:
    """The hook on a parameter after its gradient was accumulated, before that of DistributedDataParallel."""

    def __init__(self, local: weakref.ref[LocalGradients], index: int) -> None:
        self._local, self._index = local, index
        unserializable_hook(self)

    def __call__(self, parameter: torch.Tensor) -> None:
        local = self._local()
        if local is None:
            return
        if local._task == _task_now():
            local._fired[self._index] = parameter  # the first one of this pass has queued the callback
        else:
            local._arrived(self._index, parameter)


def _hooked(local: weakref.ref[LocalGradients], index: int, parameter: torch.Tensor) -> Any:
    return parameter.register_post_accumulate_grad_hook(_Arrived(local, index))


class LocalGradients(Observer):
    """Reads each rank's gradients before they are averaged: which are not finite, which are odd, how noisy they are.

    It reads them at the end of the backward pass, or as they arrive if they are views into buckets or under
    `fully_shard`. Every `every` steps, and after a non-finite one, the ranks exchange results over a gloo group.
    The training and the wrapper's collectives do not change. The history gets `bad_ranks`, `odd_ranks` and
    `noise_scale`; under tensor parallelism only `bad_ranks`.

    All ranks must have one, made at the same time, and step together. They stop asking a rank that does not answer
    within a minute.

    Args:
        model: the DistributedDataParallel or `fully_shard` model.
        params: of all optimizers, in order.

    Cost: one read of the gradients, 1 us a parameter, and on a GPU a sync; 224 bytes from each rank and some 0.3 ms at
    each exchange. Under `fully_shard` one kernel call a parameter.
    """

    def __init__(self, model: torch.nn.Module, params: Sequence[torch.Tensor], every: int = EVERY) -> None:
        self._every = every
        self._model = weakref.ref(model)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            members = dist.get_process_group_ranks(model.process_group)
            averaged = {id(p) for p in model.module.parameters() if p.requires_grad}
            watched = {i for i, p in enumerate(params) if id(p) in averaged}
            self.hold(*(_hooked(weakref.ref(self), i, params[i]) for i in sorted(watched)))
            self._is_ddp = True
        else:
            members = ranks_of(params)
            unsharded = Unsharded(model, params, functools.partial(_hooked, weakref.ref(self)))
            self.hold(unsharded)
            watched = unsharded.places
            self._is_ddp = False
        self._members, self.num_ranks = members, len(members)
        self._group: Any = None  # made once the settings of the ranks were compared, because that waits for all of them
        self._num_params = len(params)
        self._is_whole = all(i in watched for i, p in enumerate(params) if p.requires_grad)
        self._fired: dict[int, torch.Tensor] = {}
        self._task, self._num_passes = -1, 0
        self._seen: set[int] = set()
        self._read: dict[int, _OwnGradients] = {}
        self._next = 0  # the first step that was not sent yet
        self._awaited: tuple[Any, list[torch.Tensor]] | None = None
        self._odd, self._noise = OddRanks(members), NoiseScale(self.num_ranks)
        self._means: dict[int, float] = {}  # of each rank's squared norms, at steps that the history does not have yet
        self._trouble: tuple[int, list[tuple[int, str, int, int]]] = -1, []
        self._num_exchanges = 0

    def start(self, run: ObservedRun, history: Callable[[], TrainingHistory]) -> None:
        """Connects to a guard, before the first backward pass."""
        self._run, self._history = run, history
        self._next = run.step

    def next_after(self, step: int) -> float:
        if not self._handles:
            return math.inf
        return step + 1 if self._group is None else (step // self._every + 1) * self._every

    def before(self, step: int) -> None:
        """Sends the results of this rank, and receives the last exchange; at the first step, makes the group."""
        if self._handles and self._group is None:
            with self._kept():
                self._group = dist.new_group(self._members, _TIMEOUT, "gloo", use_local_synchronization=True)
        if self._handles and step and step % self._every == 0:
            with self._kept():
                self._hear()
                self._tell(step)

    def find_trouble(self, step: int) -> list[tuple[int, str, int, int]]:
        """The ranks and tensors that made the average of `step` non-finite, as in `Ranks.trouble`. Waits for all ranks.

        Empty on a device that the host does not wait for; the history then learns of it at the next exchange.
        """
        if self._handles and self._run.may_wait:
            with self._kept():
                self._hear()
                if self._next <= step:
                    self._tell(step)
                    self._hear()
        return self._trouble[1] if self._trouble[0] == step else []

    def describe_trouble(self) -> str:
        """The same for the step that was just judged, in words."""
        return describe(self.find_trouble(self._run.step - 1), self.num_ranks)

    def facts(self) -> dict[str, Any]:
        """The noise scale. Findings about single ranks are noted when they arrive."""
        self._add_noise()
        return {"noise_scale": self._noise.value}

    def costs(self) -> dict[str, float]:
        """Collectives per step on average, and bytes that each rank sent in them."""
        each = self._num_exchanges / max(1, self._run.step)
        num_words = 2 + self._every + 4 * _MAX_HELD
        return {"num_collectives_per_step": each, "collective_bytes_per_step": 8.0 * each * num_words}

    def close(self) -> None:
        super().close()
        self._fired, self._awaited = {}, None

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Keeps errors out of the training, and stops after one: the groups may be out of order then."""
        try:
            yield
        except Exception as error:
            self._run.failures.note(_WHAT, error, _SO)
            self.close()

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        model: Any = self._model()
        if model is None or (self._is_ddp and not model.require_backward_grad_sync):
            return
        self._fired[index] = parameter
        if not self._is_ddp:
            self._measure()
            return
        if model.gradient_as_bucket_view or (model.static_graph and self._num_passes < 2):
            self._measure()  # written over while the pass goes on, as all are in the first one of a static graph
            return
        self._task = _task_now()
        # Callbacks run in the order of queueing; the one that writes the averages comes with the last bucket.
        torch.autograd.Variable._execution_engine.queue_callback(self._measure)

    def _measure(self) -> None:
        """Reads the gradients that have arrived."""
        fired, self._fired = self._fired, {}
        if not fired:
            return
        with self._kept(), torch.no_grad():
            step = self._run.step
            known = self._read.get(step, _OwnGradients(0.0, 0, []))
            if not known.num_passes or not self._seen.isdisjoint(fired):
                self._seen = set()  # another pass, which has added to the gradients of the last one
                self._num_passes += 1
                # fully_shard may have reduced the gradients between the passes, and started again
                known = _OwnGradients(0.0, known.num_passes + 1, [] if self._is_ddp else known.held)
            self._seen.update(fired)
            gradients: list[Any] = [parameter.grad for parameter in fired.values()]
            is_part = any(map(shards.is_sharded, gradients))
            table, fold = kernels.run_stats(shards.locals_of(gradients), self._run.backend)
            norm = norm_of(*norm_parts(kernels.fold_rows(table) if fold is None else fold))
            held = known.held
            if not math.isfinite(norm):
                rows = torch.frombuffer(table, dtype=torch.float64).view(-1, len(COLUMNS))[:, [_NANS, _INFS]].tolist()
                bad = [(index, int(nans), int(infs)) for index, (nans, infs) in zip(fired, rows) if nans or infs]
                held = sorted({one[0]: one for one in [*held, *bad]}.values(), reverse=True)[:_MAX_HELD]
            sum_sq = math.nan if is_part else known.sum_sq + norm * norm
            self._read[step] = _OwnGradients(sum_sq if math.isfinite(sum_sq) else math.nan, known.num_passes, held)

    def _tell(self, step: int) -> None:
        """Sends the results since the last exchange, up to `step`; does not wait."""
        first = self._next if step - self._every < self._next <= step else max(0, step - self._every + 1)
        steps = range(first, first + self._every)
        words = [float(first), float(step), *(self._read[i].sum_sq if i in self._read else math.nan for i in steps)]
        held = [(i, *one) for i in steps if i in self._read for one in self._read[i].held][:_MAX_HELD]
        words += [float(word) for one in held for word in one] + [-1.0] * (4 * (_MAX_HELD - len(held)))
        own = torch.tensor(words, dtype=torch.float64, device="cpu")
        everyone = [torch.empty_like(own) for _ in self._members]
        work = dist.all_gather(everyone, own, group=self._group, async_op=True)
        self._awaited = work, everyone
        self._next = step + 1
        self._num_exchanges += 1

    def _hear(self) -> None:
        """Receives the last exchange, and notes the findings."""
        if self._awaited is None:
            return
        (work, parts), self._awaited = self._awaited, None
        work.wait()
        everyone = torch.stack(parts)
        heads = everyone[:, :2].tolist()
        if any(head != heads[0] for head in heads):
            raise RuntimeError(f"the ranks are at different steps: {[int(head[1]) for head in heads[:16]]}")
        first, last = map(int, heads[0])
        sums = everyone[:, 2 : 3 + last - first]
        self._note_trouble(everyone[:, 2 + self._every :].view(self.num_ranks, _MAX_HELD, 4).tolist())
        history = self._history()
        odd = self._odd.add(first, sums.sqrt())
        if odd is not None:
            history.note_model(odd_ranks=odd)
        self._keep_means(first, sums.mean(dim=0).tolist())
        self._add_noise()
        if self._noise.value is not None:
            self._run.ring.attach(last, noise_scale=self._noise.value)
        for step in [step for step in self._read if step <= last]:
            del self._read[step]

    def _note_trouble(self, everyone: list[list[list[float]]]) -> None:
        names, history = self._run.known_names or self._run.names_now(), self._history()
        by_step: dict[int, list[tuple[int, str, int, int]]] = {}
        for rank, held in zip(self._members, everyone):
            for step, index, *counts in (map(int, one) for one in held if one[0] >= 0.0):
                by_step.setdefault(step, []).append((rank, names[index], counts[0], counts[1]))
        for step in sorted(by_step):
            history.note_model(bad_ranks=with_bad_step(history.model.bad_ranks, step, self.num_ranks, by_step[step]))
            self._trouble = step, by_step[step]

    def _keep_means(self, first: int, means: list[float]) -> None:
        """Keeps the means of completely known steps, with all tensors and one backward pass, for `_add_noise`."""
        if not self._is_whole or len(self._run.known_names) != self._num_params:
            return
        for step, mean in enumerate(means, first):
            read = self._read.get(step)
            if read is not None and read.num_passes == 1:
                self._means[step] = mean

    def _add_noise(self) -> None:
        """Adds the steps that have reached the history, if they are finite; the others wait."""
        recent = self._history().recent
        arrived = [step for step in self._means if recent and step <= recent[-1].step]
        entries = {entry.step: entry for entry in recent} if arrived else {}
        for step in arrived:
            mean, entry = self._means.pop(step), entries.get(step)
            if entry is None or not math.isfinite(mean + entry.norm):
                continue
            if not self._run.has_scaler or entry.loss_scale is not None:  # otherwise only the averages were unscaled
                self._noise.add(mean / (entry.loss_scale or 1.0) ** 2, entry.norm**2)


def local_gradients(
    model: torch.nn.Module | None, groups: Sequence[Sequence[torch.Tensor]], every: bool | int | None
) -> LocalGradients | None:
    """The reader of each rank's own gradients; None if `every` does not ask for it, or there is only one rank."""
    if not compares_ranks("watch_ranks", every):
        return None
    params = [p for group in groups for p in group]
    num_ranks = num_averaged(model, params)
    if model is None or num_ranks is None:
        raise TypeError(
            "`watch_ranks` must come with a model under DistributedDataParallel or fully_shard, got "
            f"{'none' if model is None else type(model).__name__}. Pass the wrapped model: wrap(optimizer, ddp_model, "
            "watch_ranks=True)."
        )
    return None if num_ranks == 1 else LocalGradients(model, params, EVERY if every is True else int(every or EVERY))


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
