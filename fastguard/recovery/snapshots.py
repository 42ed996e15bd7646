"""Snapshots: copies of everything that training changes, in reused memory, restored in place."""

from __future__ import annotations

import copy
import math
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import kernels
from ..observers.buffers import BufferPlace, tensor_can_be_kept
from ..ranks.shards import as_part_of, is_sharded, local_of, locals_of

# Entries of param groups that schedulers and users set: a rollback leaves them alone.
_OF_SCHEDULES = frozenset(
    {
        *("params", "param_names", "name", "lr", "initial_lr", "max_lr", "min_lr", "base_lr", "weight_decay"),
        *("momentum", "base_momentum", "max_momentum", "betas", "swa_lr", "lr_scale"),
    }
)
# Attributes that torch, its schedulers and the guard set on an optimizer.
_OF_TORCH = frozenset({"defaults", "state", "param_groups", "grad_scale", "found_inf"})
Targets = tuple[list[torch.Tensor], list[torch.Tensor]]  # tensors to write to, and their values
States = list[tuple[Callable[[Any], Any], Any]]  # a function that restores a state, and the state
_PREFIXES_OF_TORCH = ("_optimizer_", "_zero_grad", "_step_", "_opt_", "_warned_")
_KEPT = (bool, int, float, complex, torch.Tensor, dict, list, deque, random.Random, torch.Generator)
_ACCELERATORS = ("cuda", "xpu")
_GROWN, _LEAST = 16.0, 1e-2  # times the earlier size; below this size growth is learning
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _CopyAt(NamedTuple):
    """The place of a tensor of a copied object in the list of copies; and what makes a DTensor from its local part."""

    place: int
    rebuilt: Callable[[torch.Tensor], torch.Tensor] | None


class Snapshot:
    """A copy of the state of training, with the local parts of DTensors. Later snapshots reuse its memory.

    Attributes:
        step: the number of the next step.
        loss: at that time; NaN if not known.
        since: the step since which the run has been healthy.
        is_proved: whether it is valid.
        is_spared: whether it is valid for now, because the loss has jumped after healthy steps.
    """

    def __init__(self) -> None:
        self.largest: torch.Tensor | None = None  # the largest element of each parameter, from `largest`
        self.step, self.loss, self.since, self.is_proved, self.is_spared = -1, float("nan"), 0, False, False
        self.baseline: dict[str, Any] = {}  # plain data to restore with it
        self._copies: list[torch.Tensor] = []
        self._pairs: list[tuple[torch.Tensor, int]] = []  # tensors, and the places of their copies
        self._seen: dict[int, Any] = {}
        self._params: list[tuple[torch.Tensor, _CopyAt]] = []
        self._buffers: list[tuple[BufferPlace, _CopyAt]] = []
        # Weak references to optimizers: they hold their guard, which holds this.
        self._optimizers: list[tuple[Any, Any, list[dict[str, Any]], dict[str, Any]]] = []
        self._parts: list[tuple[Any, dict[str, Any]]] = []  # objects that optimizers hold, of their own package
        self._others: States = []

    def take(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        places: Iterable[BufferPlace],
        state: Iterable[Any],
        *,
        with_random_state: bool,
    ) -> None:
        """Copies everything, `state` through `state_dict`. On a GPU the copies are queued."""
        self.is_proved = False
        self._pairs, self._seen = [], {}
        self._params = [(p, self._keep(p)) for p in parameters_of(optimizers) if tensor_can_be_kept(p)]
        self._buffers = [(place, self._keep(place.tensor)) for place in places]
        self._optimizers, self._parts = [], []
        self._others = [(one.load_state_dict, copy.deepcopy(one.state_dict())) for one in state]
        for optimizer in optimizers:
            self._keep_optimizer(optimizer)
        if with_random_state:
            self._others.append((load_random_state, random_state()))
        for tensor, index in self._pairs:
            known = self._copies[index] if index < len(self._copies) else None
            form = tensor.shape, tensor.dtype, tensor.stride()
            if known is None or (known.shape, known.dtype, known.stride()) != form:
                room = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
                self._copies[index : index + 1] = [room]
        del self._copies[len(self._pairs) :]
        with torch.no_grad():
            kernels.run_copy(self._copies, [tensor for tensor, _ in self._pairs])
        self._pairs, self._seen = [], {}

    def restore(self) -> None:
        """Restores everything in place, and removes what was made since. You may call it again.

        Tensors stay the same objects at the same addresses, unless their shapes have changed.
        """
        targets: Targets = [], []
        params = [p for p, _ in self._params]
        with torch.no_grad():
            for p, kept in self._params:
                here = local_of(p)
                if here.shape != self._copies[kept.place].shape:
                    p.data = self._fresh(kept, here)
                else:
                    targets[0].append(here)
                    targets[1].append(self._copies[kept.place])
            for ref, state, groups, attributes in self._optimizers:
                optimizer = ref()
                if optimizer is None:
                    continue
                optimizer.state = self._put(state, optimizer.state, targets)
                for group, entries in zip(optimizer.param_groups, groups):
                    self._put_entries(entries, group, targets, lambda key: key in _OF_SCHEDULES)
                self._put_entries(attributes, optimizer.__dict__, targets, lambda key: True)
            for part, entries in self._parts:
                self._put_entries(entries, part.__dict__, targets, lambda key: False)
            kernels.tell_autograd([*params, *targets[0]])  # not about buffers: forward passes write to them, too
            for place, kept in self._buffers:
                place.dict[place.key] = self._put(kept, place.dict.get(place.key), targets)
            kernels.run_copy(*targets)
        for put_back, saved in self._others:
            put_back(copy.deepcopy(saved))

    @property
    def counts(self) -> bool:
        """Whether it is valid now."""
        return self.is_proved or self.is_spared

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if any(optimizer is known() for known, *_ in self._optimizers):
            return
        groups = [{k: self._keep(v) for k, v in g.items() if k not in _OF_SCHEDULES} for g in optimizer.param_groups]
        attributes = {}
        package = type(optimizer).__module__.partition(".")[0]
        for key, value in () if package == "torch" else list(optimizer.__dict__.items()):
            inner = value if isinstance(value, (list, tuple)) else (value,)
            for one in (one for one in inner if isinstance(one, torch.optim.Optimizer)):
                self._keep_optimizer(one)
            if isinstance(value, torch.optim.Optimizer):
                continue
            if key not in _OF_TORCH and not key.startswith(_PREFIXES_OF_TORCH):
                if isinstance(value, _KEPT) and not isinstance(value, torch.nn.Parameter):
                    attributes[key] = self._keep(value)
                elif type(value).__module__.partition(".")[0] == package and _is_part(value):
                    self._parts.append((value, self._keep(dict(value.__dict__))))
        self._optimizers.append((weakref.ref(optimizer), self._keep(optimizer.state), groups, attributes))

    def _keep(self, value: Any) -> Any:
        """A description to restore `value` from: places of tensors, copies of containers, and other values."""
        if isinstance(value, _PLAIN):
            return value
        known = self._seen.get(id(value))
        if known is not None:
            return known[0]
        kept: Any = value
        if isinstance(value, torch.Tensor):
            if tensor_can_be_kept(value):
                kept = _CopyAt(len(self._pairs), as_part_of(value) if is_sharded(value) else None)
                self._pairs.append((local_of(value), kept.place))
        elif isinstance(value, random.Random):
            self._others.append((value.setstate, value.getstate()))
        elif isinstance(value, torch.Generator):
            self._others.append((value.set_state, value.get_state()))
        elif isinstance(value, dict) or type(value) in (list, tuple, deque):
            self._seen[id(value)] = (value, value)  # for a container that holds itself
            if isinstance(value, dict):
                kept = {key: self._keep(entry) for key, entry in value.items()}
            else:
                parts = [self._keep(entry) for entry in value]
                kept = deque(parts, value.maxlen) if isinstance(value, deque) else tuple(parts)
                kept = parts if type(value) is list else kept
        self._seen[id(value)] = (kept, value)
        return kept

    def _fresh(self, kept: _CopyAt, like: torch.Tensor) -> torch.Tensor:
        fresh = self._copies[kept.place].to(like.device, copy=True)
        return fresh if kept.rebuilt is None else kept.rebuilt(fresh)

    def _put(self, kept: Any, now: Any, targets: Targets) -> Any:
        """Restores `kept`, in place if `now` has its type."""
        if type(kept) is _CopyAt:
            values = self._copies[kept.place]
            if not isinstance(now, torch.Tensor):
                return self._fresh(kept, values)
            here = now if type(now) is torch.Tensor else local_of(now)
            if here.dtype is values.dtype and here.shape == values.shape:
                targets[0].append(here)
                targets[1].append(values)
                return now
            return self._fresh(kept, here)
        if isinstance(kept, dict):
            if not isinstance(now, dict):
                return {key: self._put(entry, None, targets) for key, entry in kept.items()}
            for key, entry in kept.items():  # the hash of a parameter is a call into Python: once for each
                there = now.get(key)
                made = self._put(entry, there, targets)
                if made is not there or made is None:
                    now[key] = made
            if len(now) != len(kept):
                for key in [key for key in now if key not in kept]:
                    del now[key]
            return now
        if isinstance(kept, (list, tuple, deque)):
            known = list(now) if isinstance(now, (list, tuple, deque)) and len(now) == len(kept) else [None] * len(kept)
            parts = [self._put(entry, there, targets) for entry, there in zip(kept, known)]
            if type(now) is list and type(kept) is list:
                now[:] = parts
                return now
            if isinstance(kept, deque):
                return deque(parts, kept.maxlen)
            return parts if type(kept) is list else tuple(parts)
        return kept

    def _put_entries(
        self, entries: dict[str, Any], now: dict[str, Any], targets: Any, is_left: Callable[[str], bool]
    ) -> None:
        for key, kept in entries.items():
            now[key] = self._put(kept, now.get(key), targets)
        for key in [key for key in now if key not in entries and not is_left(key)]:
            if isinstance(now[key], (bool, int, float, torch.Tensor)):
                del now[key]  # made by a step since


def _is_part(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.nn.Module)


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """All parameters, each once."""
    params = {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    return list(params.values())


def largest(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The largest absolute value of each tensor or local part; NaN or Inf if it holds some; None without tensors.

    Returns float64 [N] on the device of the first tensor. Cost: one read, no sync.
    """
    asked = [
        t.detach()
        for t in locals_of(tensors)
        if (t.is_floating_point() or t.is_complex()) and t.itemsize > 1 and t.layout is torch.strided
    ]
    asked = [t for t in asked if t.numel() and not t.is_meta]
    if not asked:
        return None
    if all(t.device.type == "cpu" for t in asked):  # a sixth of what torch takes
        rows = kernels.tensor_stats(asked)
        known = zip(*(rows.column(name).tolist() for name in ("abs_max", "num_nans", "num_infs")))
        sizes = [math.nan if num_nans else math.inf if num_infs else size for size, num_nans, num_infs in known]
        return torch.tensor(sizes, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        found = torch._foreach_norm(asked, math.inf)
        return torch.stack([x.to(asked[0].device, torch.float64) for x in found])


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all elements are. Cost: one read; on an accelerator a sync."""
    sizes = largest(tensors)
    return sizes is None or bool(sizes.isfinite().all())


def have_not_grown(now: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """Whether no largest element has grown sixteenfold; None if they do not belong to the same tensors."""
    if now is None or before is None or now.shape != before.shape or now.device != before.device:
        return None
    return (now <= _GROWN * before.clamp(min=_LEAST)).all()


class Snapshots:
    """The newest snapshots, newest first. At least one valid snapshot is never overwritten.

    Args:
        quarantine: healthy steps after which a snapshot is valid.
        least: number of healthy steps that is enough if the next loss jumps without warning.
    """

    def __init__(self, keep: int, quarantine: int, least: int) -> None:
        self._keep, self._quarantine, self._least = keep, quarantine, min(least, quarantine)
        self._all: list[Snapshot] = []
        self._free: list[Snapshot] = []

    def take(self, step: int, fill: Callable[[Snapshot], None], *, is_proved: bool = False) -> Snapshot:
        """Fills one by `fill`, and returns it. If that raises, there is one less."""
        if len(self._all) < self._keep:
            snapshot = self._free.pop() if self._free else Snapshot()
        else:
            waiting = [one for one in self._all if not one.is_proved]
            oldest = waiting[-1] if len(waiting) == len(self._all) - 1 else self._all[-1]
            self._all.remove(oldest)
            snapshot = oldest
        fill(snapshot)
        snapshot.step = snapshot.since = step
        snapshot.is_proved, snapshot.is_spared = is_proved, False
        self._all.insert(0, snapshot)
        return snapshot

    def prove(self, step: int, *, is_healthy: bool, is_blow: bool = False) -> None:
        """Makes snapshots valid that the run has outlived in health; with `is_blow` it was healthy until now."""
        for one in self._all:
            if is_healthy:
                one.is_spared = False
                one.is_proved = one.is_proved or step - one.since >= self._quarantine
            else:
                one.is_spared = one.is_spared or (is_blow and step - one.since >= self._least)
                one.since = step

    def choose(self, *, older: bool) -> Snapshot | None:
        """The newest valid one; with `older` the one before it, if there is one. Gives up later ones."""
        proved = [one for one in self._all if one.counts]
        if not proved:
            return None
        chosen = proved[1] if older and len(proved) > 1 else proved[0]
        self._give_up(lambda one: one.step > chosen.step)
        return chosen

    def spare(self, chosen: Snapshot) -> Snapshot:
        """A free snapshot, or the oldest, for the present state while `chosen` is tried."""
        others = [one for one in self._all if one is not chosen]
        if self._free or len(self._all) < self._keep or not others:
            return self._free.pop() if self._free else Snapshot()
        self._all.remove(others[-1])
        return others[-1]

    def take_back(self, spare: Snapshot) -> None:
        """Frees it for reuse."""
        self._free.append(spare)

    @property
    def proved(self) -> Snapshot | None:
        """The newest valid one."""
        return next((one for one in self._all if one.counts), None)

    def best(self) -> Snapshot | None:
        """The valid one with the lowest loss; the newest if no loss is known."""
        proved = [one for one in self._all if one.is_proved]
        known = [one for one in proved if one.loss == one.loss]
        return min(known, key=lambda one: one.loss) if known else next(iter(proved), None)

    def forget(self) -> None:
        """Drops all, because the run resumes elsewhere."""
        self._give_up(lambda one: True)

    def _give_up(self, is_lost: Callable[[Snapshot], bool]) -> None:
        self._free += [one for one in self._all if is_lost(one)]
        self._all = [one for one in self._all if not is_lost(one)]

    def __iter__(self) -> Any:
        return iter(self._all)


def random_state() -> dict[str, Any]:
    """States of all global generators, as numbers and CPU tensors that `torch.load(weights_only=True)` reads.

    Includes NumPy if it is imported, and the devices that are initialised. Cost: 0.1 ms.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _as_lists(numpy.random.get_state(legacy=False))
    for kind in _ACCELERATORS:
        device = getattr(torch, kind)
        if device.is_available() and device.is_initialized():
            state[kind] = device.get_rng_state_all()
    return state


def load_random_state(state: Mapping[str, Any]) -> None:
    """Restores what `random_state` returned, except for devices and packages that are missing here."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    for kind in _ACCELERATORS:
        device = getattr(torch, kind)
        if kind in state and device.is_available():
            for index, one in enumerate(state[kind][: device.device_count()]):
                device.set_rng_state(one, index)


def _as_lists(value: Any) -> Any:
    """NumPy's arrays as lists."""
    if isinstance(value, Mapping):
        return {key: _as_lists(part) for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
