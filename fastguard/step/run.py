"""What hooks, judge and ledger of one guard share. Plain state: it knows none of them."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .. import kernels
from ..clip import CheckedPolicy, ClipPolicy, Place
from ..kernels.cpu import RunState
from ..names import Namer
from ..observers.buffers import Buffers
from ..ranks import AlikeSettings, Ranks, refuse_shards
from ..records.failures import Failures
from .ring import Ring
from .settings import GuardSettings, texts, users_policy

# Their updates are orthogonalised, or signs. By name: they come from many packages.
_IGNORES_SCALE = frozenset(
    ("Muon", "DistMuon", "SingleDeviceMuon", "Lion", "Lion8bit", "Lion32bit", "SignSGD", "Signum", "Tiger", "Rprop")
)


class Member:
    """One optimizer under a guard. Refers to it weakly: the optimizer owns its hooks, which hold this."""

    def __init__(self, index: int, optimizer: Optimizer) -> None:
        self._ref = weakref.ref(optimizer)
        self.index = index
        # LBFGS evaluates its closure several times a step and has no step without gradients.
        self.can_skip = not isinstance(optimizer, torch.optim.LBFGS)
        # Clipped along with others', its gradients would do nothing but fill the norm.
        self.ignores_scale = any(cls.__name__ in _IGNORES_SCALE for cls in type(optimizer).__mro__)
        self.is_paused = False  # its steps are not part of the run

    is_alive = property(lambda self: self._ref() is not None)

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._ref()
        if optimizer is None:
            raise ReferenceError("the guarded optimizer no longer exists")
        return optimizer


class Run(RunState):
    def __init__(
        self, optimizers: Sequence[Optimizer], proxies: Sequence[Any], namer: Namer, settings: GuardSettings
    ) -> None:
        self.members = [Member(i, optimizer) for i, optimizer in enumerate(optimizers)]
        self.proxies = [weakref.ref(proxy) for proxy in proxies]  # they own the optimizer, which owns the guard
        self.clip: ClipPolicy | None = None  # set by `clip_by`, with `asks_clip`: whether it has limits for each step
        self.skip_nonfinite = settings.skip_nonfinite
        self.backend = kernels.resolve_backend(settings.backend)
        self.ring = Ring()
        self.step = 0  # number of the next step
        self.failures = Failures()
        # Whether to keep an error of the guard from the training, which then goes on unguarded; None to raise it.
        self.on_error: Callable[[Exception], bool] | None = None
        # Whether the host may wait for tensors that it reads, and whether it waits for the record before each step.
        self.may_wait = self.waits = True
        self.has_scaler = False  # whether a GradScaler has been seen at work
        self.wakes_at = self.ends_at = 0  # the next steps that observers look at before and after they are taken
        self.has_more_to_do = True  # something else is due after the next step
        self.marks_ends = False  # note what autograd had recorded when a step ended: losses come before their steps
        self.marked, self.mark = -1, 0  # the newest step whose end was noted, and what was recorded then
        self.is_short = False  # a step may go the short way, which asks nothing that was the same at the step before
        self.is_vetoed = False  # recovery skips the step under way
        self.ranks: Ranks | None = None  # that hold the gradients; None if this process holds all of them
        self.alike: AlikeSettings | None = None  # compares the ranks' settings; None if there is no other rank
        self.is_alike = True  # there is nothing left to compare
        self.buffers: Buffers | None = None  # of the model, with the next step at which to look at them
        self.buffers_at = math.inf
        self.copies: list[Any] = []  # of the buffers that are copied at every step, as `Buffers.copies`
        self.namer = namer
        self.known_names: tuple[str, ...] = ()  # of all parameters, as they were at the step just judged
        self.fingerprint: int | None = None  # of the parameters that these are the names of
        self.clip_by(settings.clip.value)

    def follow_buffers(self, step: int, skipped: bool | torch.Tensor) -> None:
        """A step was judged, whose forward passes are over. C++ does it for a clean step before `buffers_at`."""
        if self.buffers is not None and (skipped is not False or self.copies or step >= self.buffers_at):
            self.buffers_at = self.buffers.follow(step, skipped)

    def optimizers(self) -> list[Optimizer]:
        return [member.optimizer for member in self.members]

    def living_optimizers(self) -> list[Optimizer]:
        return [member.optimizer for member in self.members if member.is_alive]

    def params(self) -> list[torch.Tensor]:
        """All parameters of the optimizers that still exist."""
        return [p for one in self.living_optimizers() for group in one.param_groups for p in group["params"]]

    def names(self, fingerprint: int | None = None) -> tuple[str, ...]:
        """Names of all parameters; asked for again when the fingerprint says that these are other ones."""
        if fingerprint is not None and fingerprint != self.fingerprint:
            optimizers = self.optimizers()
            if self.ranks is None:
                refuse_shards(group["params"] for optimizer in optimizers for group in optimizer.param_groups)
            try:
                self.known_names = self.namer.names(optimizers)
            except Exception as error:  # a model may say what it likes
                self.failures.note("naming of the parameters", error, "They go by their numbers.")
                count = sum(len(group["params"]) for one in optimizers for group in one.param_groups)
                self.known_names = tuple(f"param{i}" for i in range(count))
            self.fingerprint = fingerprint
            if isinstance(self.clip, CheckedPolicy):
                self.clip.place_again(self._places(self.known_names))
        return self.known_names

    def names_now(self) -> tuple[str, ...]:
        """Names of all parameters, also before the first step."""
        return self.namer.names(self.optimizers())

    def clip_by(self, clip: ClipPolicy | None) -> None:
        """Takes another clip policy; raises its ValueError if it has no use for these parameters."""
        apart = frozenset(m.index for m in self.members if m.ignores_scale)
        if len(apart) == len(self.members):  # there is nobody else whose norm they would fill
            apart = frozenset()
        if apart and clip is not None and clip.scope == "model" and not isinstance(clip, CheckedPolicy):
            clip = CheckedPolicy(clip)
        if isinstance(clip, CheckedPolicy):
            clip.count_in(self.failures)
            clip.place(self._places(self.namer.names(self.optimizers())), apart)
        self.clip, self.asks_clip = clip, isinstance(clip, CheckedPolicy)
        self.ring.tell_of_parts = clip.record_fields if isinstance(clip, CheckedPolicy) else None
        self.ring.made = None

    @property
    def policy(self) -> Any:
        return users_policy(self.clip)

    def compare_changes(self) -> None:
        """Has ranks that gather at each step compare what was assigned to `guard.clip` and `guard.skip_nonfinite`."""
        if self.ranks is not None:
            changed = texts({"clip (max_norm)": self.policy, "skip_nonfinite": self.skip_nonfinite})
            self.ranks.changes = float(zlib.crc32(repr(changed).encode()))

    def _places(self, names: Sequence[str]) -> list[Place]:
        groups = [(member.index, group) for member in self.members for group in member.optimizer.param_groups]
        numbers = [(i, index) for i, (index, group) in enumerate(groups) for _ in group["params"]]
        return [Place(name, *number) for name, number in zip(names, numbers)]

    def pause(self, is_paused: bool) -> bool:
        """Whether steps to come are not part of the run; returns what was so before."""
        before, self.is_short = self.members[0].is_paused, False
        for member in self.members:
            member.is_paused = is_paused
        return before

    def start_of(self, member: Member) -> int:
        """Index of the first parameter of one optimizer among all parameters."""
        before = [one.optimizer.param_groups for one in self.members[: member.index]]
        return sum(len(group["params"]) for groups in before for group in groups)
