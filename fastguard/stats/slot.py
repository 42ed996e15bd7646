"""A step as bytes: a header of sixteen numbers, and a row of `COLUMNS` for each tensor. The same on every device.

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

import itertools
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

_Kind = TypeVar("_Kind")

HEADER_WORDS = 16
HEADER_BYTES = 8 * HEADER_WORDS
NORM_SQ, NORM, CLIP_COEF, FACTOR, LOSS_SCALE, NARROW, STEP, TRIGGER = range(8)
LOSS, VAL_LOSS, LR, OVERHEAD_S, BROUGHT = range(8, 13)
NUM_ROWS, FLAGS = 14, 15

SKIPPED, HAS_LOSS, HAS_VAL_LOSS, HAS_LR, HAS_LOSS_SCALE, HAS_TRIGGER = (1 << bit for bit in range(6))
NOTES = {"loss": (LOSS, HAS_LOSS), "val_loss": (VAL_LOSS, HAS_VAL_LOSS), "lr": (LR, HAS_LR)}

_HEADER = struct.Struct(f"<{HEADER_WORDS}d")


class Header(NamedTuple):
    """What a slot's header says; None for what is not known.

    Attributes:
        step, norm, clip_coef, skipped, loss, val_loss, lr, loss_scale, overhead_s: as in the table above.
    """

    step: int
    norm: float
    clip_coef: float
    skipped: bool
    loss: float | None
    val_loss: float | None
    lr: float | None
    loss_scale: float | None
    overhead_s: float


def read_header(data: bytes | bytearray, offset: int = 0) -> Header:
    """The header at `offset` of `data`. Cost: 1 us."""
    _, norm, clip_coef, _, scale, _, step, _, loss, val_loss, lr, overhead_s, _, _, _, word = _HEADER.unpack_from(
        data, offset
    )
    flags = int(word)
    return Header(
        int(step),
        norm,
        clip_coef,
        bool(flags & SKIPPED),
        loss if flags & HAS_LOSS else None,
        val_loss if flags & HAS_VAL_LOSS else None,
        lr if flags & HAS_LR else None,
        scale if flags & HAS_LOSS_SCALE else None,
        overhead_s,
    )


def read_headers(words: memoryview[Any], count: int, kind: type[_Kind]) -> list[_Kind] | None:
    """The first `count` headers of `words`, float64, each as a `kind`, a tuple of the fields of `Header`.

    None where they do not all know the same things. Cost: 4 us, and 0.2 us each.
    """
    end = count * HEADER_WORDS
    flags = words[FLAGS:end:HEADER_WORDS].tolist()
    if flags.count(flags[0]) != count:
        return None
    bits = int(flags[0])
    known = ((LOSS, HAS_LOSS), (VAL_LOSS, HAS_VAL_LOSS), (LR, HAS_LR), (LOSS_SCALE, HAS_LOSS_SCALE))
    nothing = itertools.repeat(None)
    columns: list[Iterable[Any]] = [
        map(int, words[STEP:end:HEADER_WORDS].tolist()),
        words[NORM:end:HEADER_WORDS].tolist(),
        words[CLIP_COEF:end:HEADER_WORDS].tolist(),
        itertools.repeat(bool(bits & SKIPPED)),
        *(words[word:end:HEADER_WORDS].tolist() if bits & has else nothing for word, has in known),
        words[OVERHEAD_S:end:HEADER_WORDS].tolist(),
    ]
    return list(map(tuple.__new__, itertools.repeat(kind), zip(*columns)))  # type: ignore[arg-type]
