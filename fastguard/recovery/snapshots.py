"""Snapshots: copies of everything that training changes, in reused memory, restored in place."""

from __future__ import annotations

import copy
import functools
import math
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .. import kernels
from ..observers.buffers import BufferPlace, tensor_can_be_kept
from ..ranks.shards import locals_of

# Entries of param groups that schedulers and users set: a rollback leaves them alone.
_OF_SCHEDULES = {
    *("params", "param_names", "name", "lr", "initial_lr", "max_lr", "min_lr", "base_lr", "weight_decay"),
    *("momentum", "base_momentum", "max_momentum", "betas", "swa_lr", "lr_scale"),
}
# Attributes that torch, its schedulers and the guard set on an optimizer.
_OF_TORCH = frozenset({"defaults", "state", "param_groups", "grad_scale", "found_inf"})
_PREFIXES_OF_TORCH = ("_optimizer_", "_zero_grad", "_step_", "_opt_", "_warned_")
_KEPT = (bool, int, float, complex, torch.Tensor, dict, list, deque, random.Random, torch.Generator)
_ACCELERATORS = ("cuda", "xpu")
_GROWN, _LEAST = 16.0, 1e-2  # times the earlier size; below this size growth is learning
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def package(thing: Any) -> str:
    return type(thing).__module__.partition(".")[0]


def _is_part(thing: Any, owner: str) -> bool:
    """Whether `thing` is an object of the package `owner`, not torch's, with attributes of its own; not a module."""
    if isinstance(thing, torch.nn.Module) or callable(thing) or not hasattr(thing, "__dict__"):
        return False
    return package(thing) == owner and owner not in ("torch", "builtins")


class Kept:
    """Finds the tensors and containers in some objects, and the states of random generators, to restore in place. With
    a `package` it also walks through optimizers, and through other objects of that package but modules."""

    _keep_tensor: Callable[[torch.Tensor, str, list[tuple[Any, str]]], None]

    def __init__(self, package: str = "") -> None:
        self._package = package
        self._containers: list[tuple[Any, Any]] = []  # each with what it held
        self._setters: list[tuple[Callable[[Any], Any], Any]] = []  # a function that restores a state, and the state
        self._seen: dict[int, Any] = {}

    def _keep(self, waiting: list[tuple[Any, str]]) -> None:
        """Walks through objects, each with its label, from the last one on. The value under a text key has that key as
        its label, the other contents of a container have the container's."""
        while waiting:
            thing, label = waiting.pop()
            if isinstance(thing, _PLAIN) or id(thing) in self._seen:
                continue
            self._seen[id(thing)] = thing
            if isinstance(thing, torch.Tensor):
                self._keep_tensor(thing, label, waiting)
            elif isinstance(thing, dict):
                self._containers.append((thing, dict(thing)))
                waiting += [(value, key if isinstance(key, str) else label) for key, value in thing.items()]
            elif isinstance(thing, (list, deque, set)):
                self._containers.append((thing, set(thing) if isinstance(thing, set) else list(thing)))
                waiting += [(value, label) for value in thing]
            elif isinstance(thing, tuple):
                waiting += [(value, label) for value in thing]
            elif isinstance(thing, random.Random):
                self._setters.append((thing.setstate, thing.getstate()))
            elif isinstance(thing, torch.Generator):
                self._setters.append((thing.set_state, thing.get_state()))
            elif package(thing) == "numpy" and hasattr(thing, "__setitem__"):
                self._setters.append((functools.partial(thing.__setitem__, ...), thing.copy()))
            elif self._package and (isinstance(thing, torch.optim.Optimizer) or _is_part(thing, self._package)):
                waiting.append((vars(thing), label))

    def restore(self) -> None:
        """Restores everything in place. May be called again, also after it was interrupted."""
        for now, then in self._containers:
            if is_same(now, then):
                continue
            if isinstance(now, dict):  # never empty in between: it may be an object's own
                now.update(then)
                for key in [key for key in now if key not in then]:
                    del now[key]
            else:
                now.clear()
                (now.update if isinstance(now, set) else now.extend)(then)
        for set_state, state in self._setters:
            set_state(state)


def is_same(now: Any, then: Any) -> bool:
    """Whether a container has the same entries, object for object."""
    if len(now) != len(then):
        return False
    if isinstance(now, dict):
        return all(k in now and now[k] is value for k, value in then.items())
    return all(a is b for a, b in zip(now, then))


class Snapshot(Kept):
    """A copy of the state of training, with the local parts of DTensors. Later snapshots reuse its memory.

    Attributes:
        step: the number of the next step.
        loss: at that time; NaN if not known.
        since: the step since which the run has been healthy.
        is_proved: whether it is valid.
        is_spared: whether it is valid for now, because the loss has jumped after healthy steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest: torch.Tensor | None = None  # the largest element of each parameter, from `largest`
        self.step, self.loss, self.since, self.is_proved, self.is_spared = -1, float("nan"), 0, False, False
        self.baseline: dict[str, Any] = {}  # plain data to restore with it
        self._num_others = 0  # tensors that are no buffers
        self._copies: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []  # whose values are in `_copies`, those of buffers last
        self._buffers: list[tuple[BufferPlace, torch.Tensor | None]] = []
        # Weak references to optimizers: they hold their guard, which holds this.
        self._optimizers: list[tuple[Any, Any, list[dict[str, Any]], dict[str, Any]]] = []
        self._others: list[tuple[Any, Any]] = []  # objects given to `take`, with their states

    def take(
        self, optimizers: Sequence[torch.optim.Optimizer], places: Iterable[BufferPlace], state: Iterable[Any]
    ) -> None:
        """Copies everything, `state` through `state_dict`. On a GPU the copies are queued."""
        super().__init__()  # forgets the state before
        self.is_proved, self._tensors, self._optimizers = False, [], []
        self._others = [(one, copy.deepcopy(one.state_dict())) for one in state]
        self._keep([(tuple(parameters_of(optimizers)), "")])
        for optimizer in optimizers:
            self._keep_optimizer(optimizer)
        self._buffers = [(place, place.tensor) for place in places]
        self._num_others = len(self._tensors)
        self._keep([(tensor, "") for _, tensor in reversed(self._buffers)])
        local = locals_of(self._tensors)
        for index, tensor in enumerate(local):
            known = self._copies[index] if index < len(self._copies) else None
            form = tensor.shape, tensor.dtype, tensor.stride()
            if known is None or (known.shape, known.dtype, known.stride()) != form:
                room = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
                self._copies[index : index + 1] = [room]
        del self._copies[len(local) :]
        with torch.no_grad():
            kernels.run_copy(self._copies, local)
        self._seen = {}

    def restore(self) -> None:
        """Restores everything in place, and removes what was made since. You may call it again.

        Tensors stay the same objects at the same addresses, unless their shapes have changed.
        """
        super().restore()
        for ref, state, groups, attributes in self._optimizers:
            optimizer = ref()
            if optimizer is not None:
                optimizer.state = state
                for group, entries in zip(optimizer.param_groups, groups):
                    group.update(entries)
                    for key in group.keys() - entries.keys() - _OF_SCHEDULES:
                        if isinstance(group[key], (bool, int, float, torch.Tensor)):
                            del group[key]  # made by a step since
                optimizer.__dict__.update(attributes)
        for place, tensor in self._buffers:
            place.dict[place.key] = tensor
        here = locals_of(self._tensors)
        for index, (now, values) in enumerate(zip(here, self._copies)):
            if (now.shape, now.dtype) != (values.shape, values.dtype):
                self._tensors[index].data = here[index] = values.to(now.device, copy=True)
        with torch.no_grad():
            num = self._num_others  # no word about buffers: forward passes write to them, too
            kernels.tell_autograd([*self._tensors[:num], *here[:num]])
            kernels.run_copy(here, self._copies)
        for one, saved in self._others:
            one.load_state_dict(copy.deepcopy(saved))

    @property
    def counts(self) -> bool:
        """Whether it is valid now."""
        return self.is_proved or self.is_spared

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if any(optimizer is known() for known, *_ in self._optimizers):
            return
        groups = [{k: v for k, v in g.items() if k not in _OF_SCHEDULES} for g in optimizer.param_groups]
        attributes = {}
        own = package(optimizer)
        for key, value in () if own == "torch" else list(optimizer.__dict__.items()):
            inner = value if isinstance(value, (list, tuple)) else (value,)
            for one in (one for one in inner if isinstance(one, torch.optim.Optimizer)):
                self._keep_optimizer(one)
            if isinstance(value, torch.optim.Optimizer):
                continue
            if key not in _OF_TORCH and not key.startswith(_PREFIXES_OF_TORCH):
                if isinstance(value, _KEPT) and not isinstance(value, torch.nn.Parameter):
                    attributes[key] = value
                elif _is_part(value, own):
                    self._keep([(vars(value), "")])
        self._optimizers.append((weakref.ref(optimizer), optimizer.state, groups, attributes))
        self._keep([((optimizer.state, *(tuple(one.values()) for one in (*groups, attributes))), "")])

    def _keep_tensor(self, tensor: torch.Tensor, label: str, waiting: list[tuple[Any, str]]) -> None:
        self._tensors += [tensor] if tensor_can_be_kept(tensor) else []


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

    One is valid after `quarantine` healthy steps, or after `least` if the next loss jumps without warning.
    """

    def __init__(self, keep: int, quarantine: int, least: int) -> None:
        self._keep, self._quarantine, self._least = keep, quarantine, min(least, quarantine)
        self._all: list[Snapshot] = []
        self.free: list[Snapshot] = []  # whose memory is reused

    def take(self, step: int, fill: Callable[[Snapshot], None], *, is_proved: bool = False) -> Snapshot:
        """Fills one by `fill`, and returns it. If that raises, there is one less."""
        if len(self._all) < self._keep:
            snapshot = self.free.pop() if self.free else Snapshot()
        else:
            waiting = [one for one in self._all if not one.is_proved]
            snapshot = waiting[-1] if len(waiting) == len(self._all) - 1 else self._all[-1]
            self._all.remove(snapshot)
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
        self.forget(chosen.step)
        return chosen

    def spare(self, chosen: Snapshot) -> Snapshot:
        """A free snapshot, or the oldest, for the present state while `chosen` is tried."""
        others = [one for one in self._all if one is not chosen]
        if self.free or len(self._all) < self._keep or not others:
            return self.free.pop() if self.free else Snapshot()
        self._all.remove(others[-1])
        return others[-1]

    @property
    def proved(self) -> Snapshot | None:
        """The newest valid one."""
        return next((one for one in self._all if one.counts), None)

    def best(self) -> Snapshot | None:
        """The valid one with the lowest loss; the newest if no loss is known."""
        proved = [one for one in self._all if one.is_proved]
        known = [one for one in proved if one.loss == one.loss]
        return min(known, key=lambda one: one.loss) if known else next(iter(proved), None)

    def forget(self, after: float = -math.inf) -> None:
        """Gives up those after a step; by default all, because the run resumes elsewhere."""
        self.free += [one for one in self._all if one.step > after]
        self._all = [one for one in self._all if one.step <= after]


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
