"""Steps as slots on the host, from the step that fills one to the ledger that delivers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import kernels
from ..kernels.cpu import RingState
from ..kernels.slots import copy_slot
from ..observers.coverage import SeenParameters
from ..records import BatchSample, Entry, StepStats, TensorStats, slot
from ..records.slot import HEADER_BYTES, HEADER_WORDS, NOTES, NUM_SLOTS, read_header
from .device import PendingStep

TABLE, POSITIONS, FINGERPRINT, WRITTEN, OVER, SEEN = range(6)  # places in `Ring.found`


@dataclass
class JudgedStep:
    """One step that was measured, and what was decided on it."""

    step: int
    table: bytearray  # rows of the gradients
    positions: Sequence[int] | None  # indices of their parameters; None for all
    names: tuple[str, ...]  # of all parameters
    norm: float
    clip_coef: float = 1.0
    skipped: bool = False
    loss_scale: float | None = None
    lr: float | None = None
    loss: float | None = None
    trigger: float | None = None  # the clip policy's, if it has one
    over: Sequence[int] = ()  # the groups or tensors above theirs
    total: tuple[float, ...] | None = None  # the fold of all gradients, if `table` does not have them all
    present: Sequence[int] | None = None  # where these are
    from_scaler: bool = False  # a scaler is at work


class Ring(RingState):
    """The headers of the newest steps, and the table of the newest one. A step is *taken* when it is measured,
    *arrives* here, and is *delivered* to history and sinks; on the CPU it arrives when it is taken. Slots 0 …
    `num_open` - 1 have arrived and are not delivered; the newest stays readable afterwards. When `num_open` is `limit`,
    deliver before you fill another."""

    def __init__(self) -> None:
        self.headers = bytearray(NUM_SLOTS * HEADER_BYTES)
        self.words = memoryview(self.headers).cast("d")  # the same memory
        # Of the newest slot: its rows as float64 bytes; flat positions of the parameters that had a gradient, None if
        # all had; the fingerprint of all parameters; scaled gradients that autograd does not know of; numbers of the
        # groups or tensors above the clip policy's triggers, None if there are none. And of all steps: a byte for each
        # parameter, 1 if it had a gradient; None while all had one. The next step's rows overwrite these, unless a
        # record holds them.
        self.found: list[Any] = [bytearray(), None, None, None, None, None]
        self.seen = SeenParameters(self.found, SEEN)
        # Makes the record's fields about groups and tensors from `found[OVER]`; None for other policies.
        self.tell_of_parts: Callable[[Any], dict[str, Any]] | None = None
        self.names: tuple[str, ...] = ()  # of all parameters
        self.newest = -1  # index of the newest slot; -1 before the first
        self.num_open = 0
        self.told: list[int | None] = [None]  # number of the newest step that the sinks have had; C++ writes it, too
        # The batch goes on beyond `limit`, up to `end`, by `stride` steps at a time while the mean of their losses is
        # at most `calm`.
        self.limit, self.end, self.calm, self.stride = NUM_SLOTS, 0, 0.0, NUM_SLOTS
        self.is_over = False  # neither another evaluation nor a loss can come to the newest slot
        self.closure_step = -1  # the newest step that has the loss of a closure
        # What was sampled beside the gradients, by step, until it is delivered. C++ leaves their lines to Python.
        self.samples: dict[int, dict[str, Any]] = {}
        self.made: StepStats | None = None  # the newest slot as a record; reset it to fill a slot without `arrive`
        self._total: tuple[float, ...] | None = None

    @property
    def is_held(self) -> bool:
        """Whether the newest slot is open and may still be added to."""
        return self.num_open > 0 and not self.is_over

    is_finite = property(lambda self: math.isfinite(self.words[HEADER_WORDS * self.newest + slot.NORM]))
    is_skipped = property(lambda self: bool(int(self.words[HEADER_WORDS * self.newest + slot.FLAGS]) & slot.SKIPPED))

    @property
    def step(self) -> int:
        """Number of the newest step; -1 before there was one."""
        return -1 if self.newest < 0 else int(self.words[HEADER_WORDS * self.newest + slot.STEP])

    def arrive(self, judged: JudgedStep, *, again: bool = False) -> None:
        """Takes a step into the next slot; with `again`, into the newest one, over what is there but for the notes."""
        newest = self.newest if again else self.num_open
        at = HEADER_WORDS * newest
        words = self.words
        if not again:
            self.headers[8 * at : 8 * at + HEADER_BYTES] = bytes(HEADER_BYTES)
        loss_scale, trigger = judged.loss_scale, judged.trigger
        words[at + slot.STEP] = judged.step
        words[at + slot.NORM] = judged.norm
        words[at + slot.CLIP_COEF] = judged.clip_coef
        words[at + slot.NUM_ROWS] = len(judged.table)
        words[at + slot.LOSS_SCALE] = 1.0 if loss_scale is None else loss_scale
        words[at + slot.TRIGGER] = 0.0 if trigger is None else trigger
        flags = int(words[at + slot.FLAGS]) & ~(slot.SKIPPED | slot.HAS_LOSS_SCALE | slot.HAS_TRIGGER)
        flags |= (slot.SKIPPED if judged.skipped else 0) | (0 if trigger is None else slot.HAS_TRIGGER)
        words[at + slot.FLAGS] = flags | (0 if loss_scale is None else slot.HAS_LOSS_SCALE)
        self.found[TABLE], self.found[POSITIONS], self.found[OVER] = judged.table, judged.positions, judged.over or None
        self.names, self._total = judged.names, judged.total
        self.seen.take(judged.positions if judged.total is None else judged.present, judged.names)
        self.made = None
        self.newest, self.num_open = newest, newest + 1

    def arrive_as_left(self, pending: PendingStep) -> tuple[bool, bool]:
        """Takes a step as a device left it into the next slot; returns whether its norm is finite, and it skipped."""
        index, self.made = self.num_open, None
        at, words_here, positions, names = HEADER_WORDS * index, self.words, pending.positions, pending.names
        num_rows = pending.num_rows
        rows, skipped = copy_slot(pending.parcel.copy, num_rows, self.headers, HEADER_BYTES * index)
        flags = (slot.SKIPPED if skipped else 0) | (slot.HAS_LOSS_SCALE if pending.is_scaled else 0)
        for name, (word, flag) in NOTES.items():
            value = pending.known.get(name)
            if name in pending.noted:
                flags |= flag
            elif value is not None:
                flags |= flag
                words_here[at + word] = value
        if pending.trigger is not None:
            words_here[at + slot.TRIGGER] = pending.trigger
            flags |= slot.HAS_TRIGGER
        words_here[at + slot.OVERHEAD_S] = pending.overhead_s
        words_here[at + slot.NUM_ROWS] = num_rows
        words_here[at + slot.FLAGS] = flags
        is_other = names is not self.names
        self.found[TABLE], self.found[POSITIONS], self.found[OVER], self.names = rows, positions, None, names
        if positions is not None or is_other or self.found[SEEN] is not None:
            self.seen.take(positions, names)
        self.newest, self.num_open = index, index + 1
        return math.isfinite(words_here[at + slot.NORM]), skipped

    def note(self, name: str, value: float | None) -> None:
        """Adds `loss`, `val_loss` or `lr` to the newest slot; None takes it out."""
        word, flag = NOTES[name]
        at = HEADER_WORDS * self.newest
        flags = int(self.words[at + slot.FLAGS])
        self.words[at + slot.FLAGS] = flags & ~flag if value is None else flags | flag
        self.words[at + word] = 0.0 if value is None else value
        self.made = None

    @property
    def has_loss(self) -> bool:
        return self.newest >= 0 and bool(int(self.words[HEADER_WORDS * self.newest + slot.FLAGS]) & slot.HAS_LOSS)

    @property
    def loss(self) -> float | None:
        """The loss of the newest slot, if it has one that is finite."""
        loss = self.words[HEADER_WORDS * self.newest + slot.LOSS]
        return loss if self.has_loss and math.isfinite(loss) else None

    @property
    def observed_loss(self) -> float | None:
        """The loss of the newest slot, if it was observed: what a closure returned gives way to it."""
        if not self.is_held or not self.has_loss or self.closure_step == self.step:
            return None
        return self.words[HEADER_WORDS * self.newest + slot.LOSS]

    def mark_skipped(self, skipped: bool) -> None:
        at = HEADER_WORDS * self.newest + slot.FLAGS
        self.words[at] = int(self.words[at]) & ~slot.SKIPPED | (slot.SKIPPED if skipped else 0)
        self.made = None

    def add_overhead(self, seconds: float) -> None:
        if self.newest >= 0:
            self.words[HEADER_WORDS * self.newest + slot.OVERHEAD_S] += seconds

    def header(self, index: int) -> Entry:
        return read_header(self.headers, HEADER_BYTES * index)

    def attach(self, step: int, **fields: Any) -> None:
        """Adds what was sampled at a step (`activations`, `weights`) to its record, which may still be on its way, or
        to the next one if it was delivered."""
        if self.newest >= 0 and self.step >= step:
            step = self.step + (not self.num_open)
        self.samples.setdefault(step, {}).update(fields)
        self.made = None

    def batches_at(self, step: int) -> tuple[BatchSample, ...]:
        """The passes that were sampled for a step."""
        return self.samples.get(step, {}).get("batches", ())

    def bring_forward(self, step: int) -> None:
        """Attaches the passes sampled for `step`, which is not taken yet, to the newest one, unless it is delivered."""
        if self.num_open and self.batches_at(step):
            self.attach(self.step, batches=self.batches_at(self.step) + self.samples.pop(step)["batches"])

    def latest(self) -> StepStats:
        """The newest slot as a record, which stays as it is whatever becomes of the ring."""
        if self.made is None:
            header = read_header(self.headers, HEADER_BYTES * self.newest)
            step, _, clip_coef, skipped, loss, val_loss, lr, loss_scale, _ = header
            if self.num_open and self.samples:
                first = int(self.words[slot.STEP])  # samples of steps before the open ones came too late
                for late in sorted(earlier for earlier in self.samples if earlier < first):
                    self.samples.setdefault(step, {}).update(self.samples[late])
                    del self.samples[late]  # not before: an interrupt may come in between
            names, rows, positions = self.names, self.found[TABLE], self.found[POSITIONS]
            some = names if positions is None else lambda: [names[i] for i in positions]
            tensors = TensorStats(rows, some, kernels.fold_rows(rows) if self._total is None else self._total)
            sampled = self.samples.get(step, {})
            if self.tell_of_parts is not None:
                sampled = {**sampled, **self.tell_of_parts(self.found[OVER])}
            at = HEADER_WORDS * self.newest
            if int(self.words[at + slot.FLAGS]) & slot.HAS_TRIGGER:
                sampled = {**sampled, "trigger": self.words[at + slot.TRIGGER]}
            self.made = StepStats(step, tensors, clip_coef, skipped, loss, val_loss, lr, loss_scale, **sampled)
        return self.made

    def keep_newest(self) -> None:
        """All open slots but the newest have been delivered."""
        if self.newest > 0:  # from here on no call is made, after which an interrupt could come
            start = HEADER_BYTES * self.newest
            self.headers[:HEADER_BYTES] = self.headers[start : start + HEADER_BYTES]
        self.newest, self.num_open = 0, 1

    def forget(self) -> None:
        """The open slots have been delivered, and the table of the newest is lost: there is no step to look at."""
        self.newest, self.num_open, self.made = -1, 0, None

    def close(self) -> None:
        if self.newest >= 0:
            self.latest()  # with its samples, before they go
            self.samples = {step: fields for step, fields in self.samples.items() if step > self.step}
        self.num_open = 0
