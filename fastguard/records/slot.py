"""A step as bytes: a header of sixteen numbers, and a row of `COLUMNS` for each tensor, the same on every device.

    word  0  norm_sq     sum of squares of all unscaled elements; NaN if one is NaN, else Inf if one is Inf
          1  norm        its root
          2  clip_coef   what clipping multiplies by; 1 when skipping
          3  factor      what the gradients are multiplied by: clipping and, unless the optimizer does it, unscaling
          4  loss_scale  that the gradients carried; 1 without one
          5  two float32, for optimizers: the skip flag, exactly 0 or 1, and loss_scale / clip_coef
          6  step        its number
          7  trigger     the norm above which the clip policy acts, where `flags` says so
          8  loss        as observed, where `flags` has it; so the two that follow
          9  val_loss
         10  lr          of the first parameter group
         11  overhead_s  seconds that guarding took
         12  two float32: loss scale and skip flag that had to be brought here from another device
         14  num_rows    of the table
         15  flags       see below

Words are float64; float32 on a device that has nothing wider, where the second of two narrow numbers takes the next
word. Words 7, 11, 14 and 15 are written on the host.
"""

from __future__ import annotations

import struct
from typing import Any

from .events import Entry

try:
    from .. import _C
except ImportError:
    _C = None  # type: ignore[assignment]
extension: Any = _C

_LENGTHS = ((128, 16), (256, 32))  # batches of this length, a power of two, up to that step
NUM_SLOTS = 64  # the length of later batches, and the most steps that wait to be delivered
HEADER_WORDS = 16
HEADER_BYTES = 8 * HEADER_WORDS
NORM_SQ, NORM, CLIP_COEF, FACTOR, LOSS_SCALE, NARROW, STEP, TRIGGER = range(8)
LOSS, VAL_LOSS, LR, OVERHEAD_S, BROUGHT = range(8, 13)
NUM_ROWS, FLAGS = 14, 15

SKIPPED, HAS_LOSS, HAS_VAL_LOSS, HAS_LR, HAS_LOSS_SCALE, HAS_TRIGGER = (1 << bit for bit in range(6))
NOTES = {"loss": (LOSS, HAS_LOSS), "val_loss": (VAL_LOSS, HAS_VAL_LOSS), "lr": (LR, HAS_LR)}

_HEADER = struct.Struct(f"<{HEADER_WORDS}d")


def read_header(data: bytes | bytearray, offset: int = 0) -> Entry:
    """The header at `offset` of `data`. Cost: 1 us."""
    words = _HEADER.unpack_from(data, offset)
    flags = int(words[FLAGS])
    may_be = (*NOTES.values(), (LOSS_SCALE, HAS_LOSS_SCALE))  # in the order of `Entry`
    known = [words[word] if flags & flag else None for word, flag in may_be]
    fields: list[Any] = [int(words[STEP]), *words[NORM:FACTOR], bool(flags & SKIPPED), *known, words[OVERHEAD_S]]
    return Entry(*fields)


def read_headers(headers: bytearray, count: int) -> list[Entry]:
    """The first `count` headers. Cost: 0.2 us each in C++."""
    if extension is not None:
        return extension.read_headers(headers, count, Entry)
    return [read_header(headers, HEADER_BYTES * index) for index in range(count)]


def batch_end(step: int) -> int:
    """The first step from `step` on that ends a batch.

    Work for many steps at once, and occasional checks, wait for the end of a batch, so that most steps have no extra
    work. Batches are shorter in the first steps, where most things happen.

    >>> [batch_end(step) for step in (0, 15, 16, 128, 256)]
    [15, 15, 31, 159, 319]
    """
    return step | (next((length for end, length in _LENGTHS if step < end), NUM_SLOTS) - 1)
