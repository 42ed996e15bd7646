"""What measures on a device, the steps that are on their way from there to the host, and the decisions on them. The
engine is Triton's kernels, or plain torch operations. The CPU's own way is `kernels`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from .. import kernels
from .._device import Courier
from ..clip import Limits
from ..clip.limits import factors_of
from ..errors import UnsupportedTensorError
from ..kernels import triton
from ..kernels.reference import scale_by_, tensor_columns, wide_dtype
from ..kernels.slots import Slot, StepOptions
from ..kernels.tensors import plain
from ..records.columns import INDEX, POWERS
from ..records.slot import NARROW, NORM
from .skip import ContiguousGrads

_GPUS = ("cuda", "xpu", "mps")
NUM_PENDING = 16


def brought(value: Any, word: torch.Tensor) -> torch.Tensor | None:
    """`value` as a float32 on the device of `word`: itself, or a copy in `word`. Does not synchronise."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or (value.is_cpu and not word.is_cpu):
        return word.fill_(float(value))
    if value.dtype is torch.float32 and value.device == word.device:
        return value
    return word.copy_(value.detach().reshape(()), non_blocking=True)


class PendingStep:
    """A slot on the device, and what the host knows about the step in it."""

    def __init__(self, slot: Slot, courier: Courier) -> None:
        self.slot, self.courier = slot, courier
        self.parcel = courier.parcel(slot.words)  # carries the slot to the host
        self.start(0, from_scaler=False, is_scaled=False)

    def start(self, step: int, *, from_scaler: bool, is_scaled: bool) -> None:
        """Forgets the step before. `is_scaled`: the gradients carry a loss scale; a scaler may have removed it."""
        self.step, self.from_scaler, self.is_scaled = step, from_scaler, is_scaled
        self.is_over = False  # neither another evaluation nor a loss comes to this step
        self.names: tuple[str, ...] = ()  # of all parameters
        self.positions: list[int] | None = None  # which of them had a gradient, None for all
        self.num_rows = 0
        self.limits: Limits | None = None  # of the clip policy, if it has any
        self.trigger: float | None = None  # that of all gradients, for the record
        self.known: dict[str, float | None] = {}  # losses and learning rate, as far as the host has them
        self.noted: set[str] = set()  # names of those in the slot
        self.overhead_s = 0.0
        self.keep: tuple[Any, ...] = ()  # what must live until the device is done
        if self.courier.has_streams:
            self.parcel.stream = self.courier.current_stream()

    def note(self, name: str, value: Any) -> None:
        """Adds a number. Copies a tensor on a device there, without a sync."""
        if isinstance(value, torch.Tensor) and (self.slot.words.is_cpu or not value.is_cpu):
            self.slot.notes[name].copy_(value.detach().reshape(()), non_blocking=True)
            self.noted.add(name)
        else:
            self.known[name] = None if value is None else float(value)
            self.noted.discard(name)


class PendingSteps:
    """Hands out pending steps, submits them when their step is over, and completes them in order."""

    def __init__(self, complete: Callable[[PendingStep], None]) -> None:
        self._complete = complete
        self.free: list[PendingStep] = []
        self.submitted: deque[PendingStep] = deque()
        self.current: PendingStep | None = None  # the step just taken, which may still be added to

    def begin_step(self) -> bool:
        """Submits the current step as another begins, and completes those that have arrived; whether all have."""
        if self.current is not None:
            self.current.is_over = True
        self._submit()
        while self.submitted and self.submitted[0].courier.has_arrived(self.submitted[0].parcel):
            self._pop()
        return not self.submitted

    def take(self) -> PendingStep:
        """A pending step to fill. Waits for the oldest one if all are in use."""
        while not self.free:
            self._wait_for_oldest()
        return self.free.pop()

    def complete_all(self) -> None:
        """Completes every step, the current one too. Waits."""
        self._submit()
        while self.submitted:
            self._wait_for_oldest()

    def _submit(self) -> None:
        pending, self.current = self.current, None
        if pending is not None:
            pending.courier.send(pending.parcel)
            self.submitted.append(pending)

    def _wait_for_oldest(self) -> None:
        self.submitted[0].courier.wait(self.submitted[0].parcel)
        self._pop()

    def _pop(self) -> None:
        pending = self.submitted.popleft()
        self._complete(pending)
        self.free.append(pending)


@dataclass
class DeviceDecision:
    """A decision on a device, in `slot`. The host has not waited for it."""

    pending: PendingStep
    slot: Slot
    positions: Sequence[int] | None  # as in `clipping.HostDecision`, and `taken`
    plan: Any  # the engine's, of all gradients
    gradients: list[torch.Tensor] | None  # these, unless other optimizers have some of them
    scale: bool  # the gradients carried a loss scale; to compare the scales would take a sync
    may_skip: bool  # the skip flag has to be looked at
    fused: list[bool]  # for each member, whether it takes skip flag and divisor on the device
    contiguous: dict[int, ContiguousGrads]  # copies of gradients for fused optimizers, by the index of their member
    max_norm: float = math.inf  # as in `StepOptions`, and `trigger`
    trigger: float = -1.0
    factors: torch.Tensor | None = None  # one for each gradient on top, on the device
    taken: set[int] = field(default_factory=set)
    _skips: bool | None = None

    def skips(self) -> bool:
        """Whether the step is skipped. Synchronises, once."""
        if self._skips is None:
            self._skips = bool(self.slot.skip_flag)
        return self._skips


class NoEngineError(Exception):
    """No engine can read all of the gradients: some are on another device, say."""


def engine_for(device: torch.device, backend: str) -> type[Engine] | None:
    """What measures on `device` without waiting for it; None where the host may as well compute by itself. On the CPU
    only `backend` "triton" has an engine: interpreted."""
    if device.type == "cpu":
        return triton.Workspace if backend == "triton" else None
    if device.type not in _GPUS or backend == "cpu":
        return None
    chosen = kernels.registry.choose(device, backend)
    return triton.Workspace if chosen.name == "triton" and chosen.accepts(device) else TorchEngine


class TorchPlan(NamedTuple):
    """The tensors themselves: nothing is kept from step to step."""

    tensors: Sequence[torch.Tensor]
    is_plain: bool = True


class TorchEngine:
    """Measures, decides and scales on one device in plain torch operations: the definition of what `triton.Workspace`
    does. It serves devices that Triton does not: Apple's GPUs, old GPUs, and FASTGUARD_BACKEND=reference. Many small
    launches, temporary memory, but no sync."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = wide_dtype(device)
        # A list that became a tensor on the device at each step would be waited for.
        self._powers = torch.tensor(POWERS, dtype=self.dtype, device="cpu").to(device)

    def plan(self, tensors: Sequence[torch.Tensor], *, writable: bool = False) -> TorchPlan:
        """`tensors`, which must all be on this device."""
        for i, tensor in enumerate(tensors):
            if tensor.device != self.device:
                raise UnsupportedTensorError(i, f"must be on {self.device}, got {tensor.device}")
        return TorchPlan(tensors)

    def scale(self, plan: TorchPlan, slot: Slot) -> None:
        """x *= factor, with one rounding; reads and writes the tensors also where the factor is 1."""
        scale_by_(plan.tensors, slot.factor)

    def measure(self, plan: TorchPlan, slot: Slot, options: StepOptions) -> None:
        """Statistics, and a decision, into `slot`. Cost: about a dozen launches and passes a tensor, and a float64 copy
        of at most 2^20 elements at a time."""
        norm_sq = torch.zeros((), dtype=self.dtype, device=self.device)
        scale = inverse = torch.ones_like(norm_sq)
        if options.scale is not None:  # rounded as `GradScaler.unscale_` rounds it
            scale = options.scale.to(self.dtype)
            inverse = scale.reciprocal().float().to(self.dtype)
        if plan.tensors:
            rows = torch.stack([tensor_columns(plain(t, i)) for i, t in enumerate(plan.tensors)])
            rows = rows * inverse**self._powers
            slot.rows[: len(rows)].copy_(rows)
            sums = rows.sum(0)
            norm_sq = sums[INDEX["sum_sq"]].masked_fill(sums[INDEX["num_infs"]] > 0, math.inf)
            norm_sq = norm_sq.masked_fill(sums[INDEX["num_nans"]] > 0, math.nan)
        slot.step.fill_(options.step)
        slot.total.copy_(norm_sq)
        norm = norm_sq.sqrt()
        finite = norm.isfinite()
        coefficient = factors_of(norm, options.trigger, options.max_norm).masked_fill(~finite, 1.0)
        skip = ~finite if options.skip_nonfinite else torch.zeros_like(finite)
        if options.max_norm == 0.0:
            skip = skip | (finite & (norm > options.trigger))
        if options.found_inf is not None:
            skip = skip | (options.found_inf != 0)  # a NaN flag is a flag
        coefficient = coefficient.masked_fill(skip, 1.0)
        factor = coefficient
        if not options.unscales_itself:
            factor = torch.where(skip, coefficient, coefficient * inverse)
        slot.words[NORM:NARROW].copy_(torch.stack([norm, coefficient, factor, scale]))
        slot.skip_flag.copy_(skip)
        slot.divisor.copy_(scale / coefficient)


Engine: TypeAlias = TorchEngine | triton.Workspace
