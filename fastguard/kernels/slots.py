"""Slots in a device's memory: what an engine fills, and what the host reads. See `fastguard.records.slot`."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch

from ..records.columns import COLUMNS, ROW_BYTES
from ..records.slot import BROUGHT, FACTOR, HEADER_BYTES, HEADER_WORDS, NARROW, NORM, NORM_SQ, NOTES, STEP

ROW_WORDS = len(COLUMNS)


class Slot:
    """Views of one slot, made once, so that a step makes none. Addresses stay valid as long as this object lives.

    Attributes:
        words: the whole of it; for `total`, `norm`, `factor`, `step` and `notes` see `fastguard.records.slot`.
        skip_flag: 0-dim float32, exactly 0.0 or 1.0: `optimizer.found_inf`.
        divisor: 0-dim float32, loss scale / clip coefficient: `optimizer.grad_scale`, to clip without a pass.
        scale, found_inf: 0-dim float32, for copies of values on another device.
    """

    def __init__(self, words: torch.Tensor, num_rows: int) -> None:
        self.words = words
        self.address = words.data_ptr()
        self.factor_address = self.address + FACTOR * words.element_size()
        self.rows = words[HEADER_WORDS : HEADER_WORDS + ROW_WORDS * num_rows].view(num_rows, ROW_WORDS)
        self.total, self.norm, self.factor, self.step = words[NORM_SQ], words[NORM], words[FACTOR], words[STEP]
        self.notes = {name: words[word] for name, (word, _) in NOTES.items()}
        if words.dtype is torch.float64:
            narrow = words.view(torch.float32)
            self.skip_flag, self.divisor = narrow[2 * NARROW], narrow[2 * NARROW + 1]
            self.scale, self.found_inf = narrow[2 * BROUGHT], narrow[2 * BROUGHT + 1]
        else:
            self.skip_flag, self.divisor = words[NARROW], words[STEP + 1]
            self.scale, self.found_inf = words[BROUGHT], words[BROUGHT + 1]


def make_slots(device: torch.device, num_rows: int, count: int = 1, dtype: torch.dtype = torch.float64) -> list[Slot]:
    """`count` slots for up to `num_rows` tensors each, in one piece of memory."""
    table = torch.zeros(count, HEADER_WORDS + ROW_WORDS * num_rows, dtype=dtype, device=device)
    return [Slot(table[i], num_rows) for i in range(count)]


def copy_slot(words: torch.Tensor, num_rows: int, headers: bytearray, offset: int) -> tuple[bytearray, bool]:
    """Copies the header of a slot, contiguous words on the CPU, into `headers`, from `offset` on; returns its rows and
    the skip flag."""
    if words.dtype is torch.float64:
        address = words.data_ptr()
        skipped = ctypes.c_float.from_address(address + 8 * NARROW).value != 0.0
    else:
        words = words.double()
        address = words.data_ptr()
        skipped = float(words[NARROW]) != 0.0
    headers[offset : offset + HEADER_BYTES] = ctypes.string_at(address, HEADER_BYTES)
    return bytearray(ctypes.string_at(address + HEADER_BYTES, ROW_BYTES * num_rows)), skipped


class StepOptions(NamedTuple):
    """How an engine decides on a step. norm = sqrt(sum of squares); coefficient = min(1, max_norm / (norm + 1e-6)), 1
    if the norm is not finite or the step is skipped; skip = (skip_nonfinite and the norm is not finite) or found_inf.
    With a `trigger` >= 0 the coefficient is min(1, max_norm / norm) for a norm above it, else 1; with a `max_norm` of 0
    a norm above it is a skip."""

    step: int = 0
    scale: torch.Tensor | None = None  # 0-dim float32 on the device: what the gradients have to be divided by
    found_inf: torch.Tensor | None = None  # 0-dim float32 on the device: not 0 when the step must be skipped
    max_norm: float = math.inf
    skip_nonfinite: bool = True
    unscales_itself: bool = False  # the optimizer divides by the scale, so the factor leaves it out
    trigger: float = -1.0


DEFAULT_OPTIONS = StepOptions()
