"""Reads each rank's own gradients under DistributedDataParallel and `fully_shard`, before they are averaged."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import unserializable_hook

from .. import kernels
from ..observers.observer import Observer, while_alive
from ..records import TrainingHistory
from ..records.columns import COLUMNS, INDEX, norm_of, norm_parts
from ..records.events import MAX_RANKS
from . import shards
from .ranks import describe, with_bad_step
from .shards import Unsharded, compares_ranks, num_averaged, ranks_of

EVERY = 10  # steps
_MAX_HELD = 4  # tensors of a rank
_TIMEOUT = datetime.timedelta(seconds=60)
_task_now: Callable[[], int] = torch._C._current_graph_task_id
_NANS, _INFS = INDEX["num_nans"], INDEX["num_infs"]
_LIMIT = 5.0  # standard deviations
_OF_MAD, _OF_MEDIAN = 1.4826, 1.2533  # normal: deviation / MAD, error of a median / of a mean
_LEAST = math.log(1.25)  # also if the others are nearly equal
_WINDOW = 20  # steps
_LEAST_RANKS = 3  # of two, either may be the odd one


class LocalGradients(Observer):
    """Reads each rank's gradients before they are averaged: which are not finite, and which are odd.

    Every `every` steps, and after a non-finite one, the ranks exchange results over a gloo group of their own. All must
    have one, made at the same time, and step together; a rank that does not answer within a minute ends it.

    Cost: one read of the gradients, 1 us a parameter, and on a GPU a sync; 224 bytes from each rank and some 0.3 ms at
    each exchange. Under `fully_shard` one kernel call a parameter.
    """

    what, so = "comparison of the ranks' own gradients", "Nothing more is said of single ranks."

    def __init__(self, model: Any, params: Sequence[torch.Tensor], every: int = EVERY) -> None:
        self._every = every
        self._model = weakref.ref(model)
        self._is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        arrived = while_alive(self._arrived)

        def put(index: int, parameter: torch.Tensor) -> Any:  # before DistributedDataParallel does
            hook: Any = unserializable_hook(functools.partial(arrived, index))
            return parameter.register_post_accumulate_grad_hook(hook)

        if self._is_ddp:
            self._members = dist.get_process_group_ranks(model.process_group)
            averaged = {id(p) for p in model.module.parameters() if p.requires_grad}
            self.hold(*(put(i, p) for i, p in enumerate(params) if id(p) in averaged))
        else:
            self._members = ranks_of(params)
            self.hold(Unsharded(model, params, put))
        self.num_ranks = len(self._members)
        self._group: Any = None  # made once the settings of the ranks were compared, because that waits for all of them
        self._fired: dict[int, torch.Tensor] = {}
        self._task, self._num_passes = -1, 0
        self._seen: set[int] = set()
        # this rank's own gradients of the newest averaged backward pass of a step: their squared norm (NaN if it is not
        # finite, or if ranks have different tensors); index, NaNs and Infs of the first four bad ones in backward order
        self._read: dict[int, tuple[float, list[tuple[int, int, int]]]] = {}
        self._next = 0  # the first step that was not sent yet
        self._awaited: tuple[Any, list[torch.Tensor]] | None = None
        self._odd = OddRanks(self._members)
        self._trouble: tuple[int, list[tuple[int, str, int, int]]] = -1, []
        self._num_exchanges = 0

    def start(self, run: Any, history: Callable[[], TrainingHistory]) -> None:
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
            self._run.failures.note(self.what, error, self.so)
            self.close()

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        if self._task == _task_now():
            self._fired[index] = parameter  # the first one of this pass has queued the callback
            return
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
            known = self._read.get(step)
            if known is None or not self._seen.isdisjoint(fired):
                self._seen = set()  # another pass, which has added to the gradients of the last one
                self._num_passes += 1
                # fully_shard may have reduced the gradients between the passes, and started again
                known = 0.0, [] if known is None or self._is_ddp else known[1]
            sum_sq, held = known
            self._seen.update(fired)
            gradients: list[Any] = [parameter.grad for parameter in fired.values()]
            is_part = any(map(shards.is_sharded, gradients))
            table, fold = kernels.run_stats(shards.locals_of(gradients), self._run.backend)
            norm = norm_of(*norm_parts(kernels.fold_rows(table) if fold is None else fold))
            if not math.isfinite(norm):
                rows = torch.frombuffer(table, dtype=torch.float64).view(-1, len(COLUMNS))[:, [_NANS, _INFS]].tolist()
                bad = [(index, int(nans), int(infs)) for index, (nans, infs) in zip(fired, rows) if nans or infs]
                held = sorted({one[0]: one for one in [*held, *bad]}.values(), reverse=True)[:_MAX_HELD]
            sum_sq = math.nan if is_part else sum_sq + norm * norm
            self._read[step] = sum_sq if math.isfinite(sum_sq) else math.nan, held

    def _tell(self, step: int) -> None:
        """Sends the results since the last exchange, up to `step`; does not wait."""
        first = self._next if step - self._every < self._next <= step else max(0, step - self._every + 1)
        steps = range(first, first + self._every)
        words = [float(first), float(step), *(self._read.get(i, (math.nan,))[0] for i in steps)]
        held = [(i, *one) for i in steps if i in self._read for one in self._read[i][1]][:_MAX_HELD]
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
        odd = self._odd.add(first, sums.sqrt())
        if odd is not None:
            self._history().note_model(odd_ranks=odd)
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


class OddRanks:
    """Ranks whose own norms differ from the others', step after step.

    A rank's distance is log(norm) minus the ranks' median of it, as a median over the last twenty steps. A rank is odd
    if that is more than five standard deviations, both of the ranks' distances (by their MAD) and of the error of such
    a median, and if its norm is more than a quarter above or a fifth below.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._members = list(members)
        self._logs: deque[tuple[int, torch.Tensor]] = deque(maxlen=_WINDOW)
        self._since: dict[int, int] = {}  # the first step of those that are odd now
        self._known: dict[int, dict[str, Any]] = {}

    def add(self, first: int, norms: torch.Tensor) -> list[dict[str, Any]] | None:
        """Adds the norms of steps from `first` on (float64, [ranks, steps]); returns all odd ranks if there is news.

        It leaves out steps at which a norm is not finite, or all are 0.
        """
        if len(self._members) < _LEAST_RANKS:
            return None
        logs = norms.clamp_min(torch.finfo(torch.float64).tiny).log()
        says = (norms.isfinite().all(dim=0) & (norms > 0.0).any(dim=0)).tolist()
        self._logs.extend((first + i, logs[:, i]) for i, tells in enumerate(says) if tells)
        if len(self._logs) < _WINDOW:
            return None
        window = torch.stack([one for _, one in self._logs], dim=1)
        distance = (window - window.quantile(0.5, dim=0)).quantile(0.5, dim=1)
        # Of distances from the mean, since of those from the median one is always 0.
        away = window - window.mean(dim=0)
        away = (away - away.quantile(0.5, dim=1, keepdim=True)).abs() / math.sqrt(1.0 - 1.0 / len(self._members))
        error = _OF_MEDIAN * float(away.quantile(0.5, dim=1).quantile(0.5)) / math.sqrt(_WINDOW)
        limit = max(_LEAST, _LIMIT * _OF_MAD * max(float(distance.abs().quantile(0.5)), error))
        odd = [place for place, apart in enumerate(distance.abs().tolist()) if apart > limit]
        self._since = {place: self._since.get(place, self._logs[0][0]) for place in odd}
        news = [self._note(place, math.exp(float(distance[place]))) for place in odd]
        return list(self._known.values())[:MAX_RANKS] if any(news) else None

    def _note(self, place: int, ratio: float) -> bool:
        """Whether there is news about a rank: after twenty steps, and whenever their number has doubled."""
        rank, last = self._members[place], self._logs[-1][0]
        count = last + 1 - self._since[place]
        if rank in self._known and self._known[rank]["num_steps"] * 2 > count:
            return False
        known = {"rank": rank, "num_ranks": len(self._members), "step": self._since[place], "last_step": last}
        self._known[rank] = {**known, "num_steps": count, "ratio": ratio}
        return True


def local_gradients(
    model: nn.Module | None, groups: Sequence[Sequence[torch.Tensor]], every: bool | int | None
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
