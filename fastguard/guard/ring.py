"""Steps as slots on the host, from the step that fills one to the ledger that delivers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import kernels
from ..kernels import cpu
from ..kernels.slots import copy_slot
from ..stats import StepStats, TensorStats
from ..stats.slot import (
    CLIP_COEF,
    FLAGS,
    HAS_LOSS,
    HAS_LOSS_SCALE,
    HAS_TRIGGER,
    HEADER_BYTES,
    HEADER_WORDS,
    LOSS,
    LOSS_SCALE,
    NORM,
    NOTES,
    NUM_ROWS,
    OVERHEAD_S,
    SKIPPED,
    STEP,
    TRIGGER,
    Header,
    read_header,
)
from .seen import SeenParameters

_note_loss: Any = cpu.note_loss
NUM_SLOTS = 32
TABLE, POSITIONS, FINGERPRINT, WRITTEN, OVER, SEEN = range(6)  # places in `Ring.found`


class Ring:
    """The headers of the newest steps, and the table of the newest one.

    A step is *taken* where it is measured, *arrives* here, and is *delivered* to history and sinks; on the CPU it has
    arrived when it is taken. Slots 0 … `num_open` - 1 have arrived and are not delivered; the newest stays readable
    after it was. Whoever fills the ring has to deliver first when `num_open` has come to `limit`.

    Attributes:
        headers, words: `NUM_SLOTS` headers as bytes, and the same memory as float64.
        found: of the newest slot: its rows as float64 bytes; flat positions of the parameters that had a gradient, None
            if all had; the fingerprint of all parameters; gradients that were scaled and autograd does not know of;
            numbers of the groups or tensors above the clip policy's triggers, None if there are none. And of all steps:
            a byte for each parameter, 1 where it had a gradient, as `seen` has it; None while all had one.
            The next step's rows are written over these unless a record holds them: what still wants a table is
            delivered before, as `limit` says.
        names: of all parameters.
        seen: which of them had a gradient at any step.
        newest: index of the newest slot; -1 before there was one.
        num_open, limit: as above.
        told: number of the newest step that the sinks have had, in a list of one, where C++ writes it too; None if they
            have had none since steps are numbered as they are.
        is_over: whether nothing more comes to the newest slot: neither another evaluation nor a loss.
        made: the newest slot as a record, if it was made. Whoever fills a slot without `arrive` sets it to None before.
        closure_step: number of the newest step that has the loss of a closure.
        samples: what was sampled beside the gradients, by step, until its record is made.
        tell_of_parts: gives the fields of a record that are about groups and tensors of the clip policy, from what
            `found` has at OVER; None without such a policy.
    """

    def __init__(self) -> None:
        self.headers = bytearray(NUM_SLOTS * HEADER_BYTES)
        self.words = memoryview(self.headers).cast("d")
        self.found: list[Any] = [bytearray(), None, None, None, None, None]
        self.seen = SeenParameters(self.found, SEEN)
        self.tell_of_parts: Callable[[Any], dict[str, Any]] | None = None
        self.names: tuple[str, ...] = ()
        self.newest = -1
        self.num_open = 0
        self.told: list[int | None] = [None]
        self.limit = NUM_SLOTS
        self.is_over = False
        self.closure_step = -1
        self.samples: dict[int, dict[str, Any]] = {}
        self.made: StepStats | None = None
        self._total: tuple[float, ...] | None = None

    @property
    def is_held(self) -> bool:
        """Whether the newest slot is open and may still be added to."""
        return self.num_open > 0 and not self.is_over

    @property
    def is_told(self) -> bool:
        """Whether the sinks have had the newest slot."""
        return self.told[0] == self.words[HEADER_WORDS * self.newest + STEP]

    @property
    def is_finite(self) -> bool:
        """Whether the norm of the newest slot is."""
        return math.isfinite(self.words[HEADER_WORDS * self.newest + NORM])

    @property
    def is_skipped(self) -> bool:
        """Whether the newest slot says that its step was skipped."""
        return bool(int(self.words[HEADER_WORDS * self.newest + FLAGS]) & SKIPPED)

    @property
    def step(self) -> int:
        """Number of the newest step; -1 before there was one."""
        return -1 if self.newest < 0 else int(self.words[HEADER_WORDS * self.newest + STEP])

    def arrive(
        self,
        step: int,
        norm: float,
        clip_coef: float,
        skipped: bool,
        loss_scale: float | None,
        rows: bytearray,
        positions: Sequence[int] | None,
        names: tuple[str, ...],
        *,
        again: bool = False,
        trigger: float | None = None,
        over: Sequence[int] | None = None,
        total: tuple[float, ...] | None = None,
        present: Sequence[int] | None = None,
    ) -> None:
        """Takes a step into the next slot; with `again`, into the newest one, over what is there but for the notes.
        `total` is the fold of all gradients, where `rows` do not have them all; `present` then says which there are."""
        newest = self.newest if again else self.num_open
        at = HEADER_WORDS * newest
        words = self.words
        if not again:
            for i in range(at, at + HEADER_WORDS):
                words[i] = 0.0
        words[at + STEP] = step
        words[at + NORM] = norm
        words[at + CLIP_COEF] = clip_coef
        words[at + NUM_ROWS] = len(rows)
        words[at + LOSS_SCALE] = 1.0 if loss_scale is None else loss_scale
        words[at + TRIGGER] = 0.0 if trigger is None else trigger
        words[at + FLAGS] = (
            (int(words[at + FLAGS]) & ~(SKIPPED | HAS_LOSS_SCALE | HAS_TRIGGER))
            | (SKIPPED if skipped else 0)
            | (0 if loss_scale is None else HAS_LOSS_SCALE)
            | (0 if trigger is None else HAS_TRIGGER)
        )
        self.found[TABLE], self.found[POSITIONS], self.found[OVER] = rows, positions, over
        self.names, self._total = names, total
        self.seen.take(positions if total is None else present, names)
        self.made = None
        self.newest, self.num_open = newest, newest + 1

    def arrive_as_left(
        self,
        words: torch.Tensor,
        num_rows: int,
        positions: Sequence[int] | None,
        names: tuple[str, ...],
        known: dict[str, float | None],
        noted: set[str],
        overhead_s: float,
        *,
        scaled: bool,
        clip_coef: float | None,
        trigger: float | None = None,
    ) -> tuple[bool, bool]:
        """Takes a step into the next slot as a device left it; returns whether its norm is finite, whether it skipped.

        Args:
            words: the slot, copied to the host.
            known, noted: notes that the host has, and names of those that are in the slot.
            scaled: whether the loss scale in the slot is one.
            clip_coef: the coefficient, where the host decided on it.
            trigger: of the clip policy, if it has one.
        """
        index, self.made = self.num_open, None
        at, words_here = HEADER_WORDS * index, self.words
        rows, skipped = copy_slot(words, num_rows, self.headers, HEADER_BYTES * index)
        flags = (SKIPPED if skipped else 0) | (HAS_LOSS_SCALE if scaled else 0)
        for name, (word, flag) in NOTES.items():
            value = known.get(name)
            if name in noted:
                flags |= flag
            elif value is not None:
                flags |= flag
                words_here[at + word] = value
        if clip_coef is not None:
            words_here[at + CLIP_COEF] = clip_coef
        if trigger is not None:
            words_here[at + TRIGGER] = trigger
            flags |= HAS_TRIGGER
        words_here[at + OVERHEAD_S] = overhead_s
        words_here[at + NUM_ROWS] = num_rows
        words_here[at + FLAGS] = flags
        is_other = names is not self.names
        self.found[TABLE], self.found[POSITIONS], self.found[OVER], self.names = rows, positions, None, names
        if positions is not None or is_other or self.found[SEEN] is not None:
            self.seen.take(positions, names)
        self.newest, self.num_open = index, index + 1
        return math.isfinite(words_here[at + NORM]), skipped

    def note(self, name: str, value: float | None) -> None:
        """Adds `loss`, `val_loss` or `lr` to the newest slot; None takes it out."""
        word, flag = NOTES[name]
        at = HEADER_WORDS * self.newest
        flags = int(self.words[at + FLAGS])
        self.words[at + FLAGS] = flags & ~flag if value is None else flags | flag
        self.words[at + word] = 0.0 if value is None else value
        self.made = None

    def note_loss(self, loss: Any) -> bool:
        """Adds a loss that is a number, or a tensor of one, to the newest slot; False if it is neither, or too late, or
        there is one already."""
        if not self.num_open or self.is_over:
            return False
        if _note_loss is not None and _note_loss(self.headers, self.newest, loss):
            self.made = None
            return True
        if type(loss) is not float:
            if type(loss) is not torch.Tensor or loss.dim():
                return False
            loss = loss.item()
        at = HEADER_WORDS * self.newest
        words = self.words
        flags = int(words[at + FLAGS])
        if flags & HAS_LOSS:
            return False
        try:
            words[at + LOSS] = loss
        except TypeError:  # a complex number
            return False
        words[at + FLAGS] = flags | HAS_LOSS
        self.made = None
        return True

    @property
    def loss(self) -> float | None:
        """The loss of the newest slot, if it has one that is finite."""
        at = HEADER_WORDS * self.newest
        if self.newest < 0 or not int(self.words[at + FLAGS]) & HAS_LOSS:
            return None
        loss = self.words[at + LOSS]
        return loss if math.isfinite(loss) else None

    @property
    def observed_loss(self) -> float | None:
        """What the newest slot has from `note_loss`; what a closure returned gives way to what is observed."""
        at = HEADER_WORDS * self.newest
        if not self.is_held or not int(self.words[at + FLAGS]) & HAS_LOSS or self.closure_step == self.step:
            return None
        return self.words[at + LOSS]

    def mark_skipped(self, skipped: bool) -> None:
        """Says of the newest slot whether the step was skipped in the end."""
        at = HEADER_WORDS * self.newest + FLAGS
        self.words[at] = int(self.words[at]) & ~SKIPPED | (SKIPPED if skipped else 0)
        self.made = None

    def add_overhead(self, seconds: float) -> None:
        """Adds time that guarding took to the newest slot."""
        if self.newest >= 0:
            self.words[HEADER_WORDS * self.newest + OVERHEAD_S] += seconds

    def header(self, index: int) -> Header:
        """What slot `index` says."""
        return read_header(self.headers, HEADER_BYTES * index)

    def attach(self, step: int, **fields: Any) -> None:
        """Adds what was sampled at a step (`activations`, `weights`) to its record, which may still be on its way.

        For a step whose record was delivered already, it goes to the next one.
        """
        if self.newest >= 0 and self.step >= step:
            step = self.step + (not self.num_open)
        self.samples.setdefault(step, {}).update(fields)
        self.limit = min(self.limit, self.num_open)  # a record with samples is made while its table is there
        self.made = None

    def latest(self) -> StepStats:
        """The newest slot as a record, which stays as it is whatever becomes of the ring."""
        if self.made is None:
            step, _, clip_coef, skipped, loss, val_loss, lr, loss_scale, _ = self.header(self.newest)
            if self.num_open:
                self._claim_samples(step)
            names, rows, positions = self.names, self.found[TABLE], self.found[POSITIONS]
            some = names if positions is None else lambda: [names[i] for i in positions]
            tensors = TensorStats(rows, some, kernels.fold_rows(rows) if self._total is None else self._total)
            sampled = self.samples.get(step, {})
            if self.tell_of_parts is not None:
                sampled = {**sampled, **self.tell_of_parts(self.found[OVER])}
            at = HEADER_WORDS * self.newest
            if int(self.words[at + FLAGS]) & HAS_TRIGGER:
                sampled = {**sampled, "trigger": self.words[at + TRIGGER]}
            self.made = StepStats(step, tensors, clip_coef, skipped, loss, val_loss, lr, loss_scale, **sampled)
        return self.made

    def _claim_samples(self, step: int) -> None:
        """Samples of steps up to `step` that came too late for a record of their own go to its record."""
        for late in sorted(earlier for earlier in self.samples if earlier < step):
            self.samples.setdefault(step, {}).update(self.samples[late])
            del self.samples[late]  # not before: an interrupt may come in between

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
        """The open slots have been delivered."""
        if self.newest >= 0:
            self.latest()  # with its samples, before they go
            self.samples = {step: fields for step, fields in self.samples.items() if step > self.step}
        self.num_open = 0
