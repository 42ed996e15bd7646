"""One step's results on one device, as every backend leaves them there: a header, a row a tensor, and notes.

In words of float64 (of float32 where a device has no float64, and then the two narrow numbers have words of their own):

    0 … 7           header; see triton/finalise.py
    8 … 7 + C T     rows, in the order of the C `fastguard.stats.COLUMNS`
    then            notes that the host left: loss, validation loss, learning rate, and a loss scale and a flag that
                    had to be brought here from another device
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from .triton.slots import HEADER_WORDS, ROW_WORDS, Header, read_slot

NUM_NOTES = 8
NOTES = ("loss", "val_loss", "lr")


class Slot:
    """Views of one slot, made once, so that a step makes none.

    Attributes:
        words: the whole of it.
        address: of the first word.
        rows: [num_rows, columns].
        total: sum of squares of the unscaled elements; what is added up over devices.
        decided: the words that follow from the decision.
        factor: what gradients are to be multiplied by.
        skip_flag: 0-dim float32, exactly 0.0 or 1.0: `optimizer.found_inf`.
        divisor: 0-dim float32, loss scale / clip coefficient: `optimizer.grad_scale`.
        notes: 0-dim, by name: what the host may leave here to travel along.
        scale, found_inf: 0-dim float32, for what lies on another device.
    """

    def __init__(self, words: torch.Tensor, num_rows: int) -> None:
        self.words = words
        self.address = words.data_ptr()
        end = HEADER_WORDS + ROW_WORDS * num_rows
        self.rows = words[HEADER_WORDS:end].view(num_rows, ROW_WORDS)
        self.total, self.factor = words[0], words[3]
        self.decided = words[1:HEADER_WORDS]
        self.step = words[6]
        self.notes = {name: words[end + i] for i, name in enumerate(NOTES)}
        if words.dtype is torch.float64:
            narrow = words.view(torch.float32)
            self.skip_flag, self.divisor = narrow[10], narrow[11]
            self.scale, self.found_inf = narrow[2 * end + 6], narrow[2 * end + 7]
        else:
            self.skip_flag, self.divisor = words[5], words[7]
            self.scale, self.found_inf = words[end + 3], words[end + 4]


def num_words(num_rows: int) -> int:
    """Size of a slot for up to `num_rows` tensors."""
    return HEADER_WORDS + ROW_WORDS * num_rows + NUM_NOTES


def make_slots(device: torch.device, num_rows: int, count: int, dtype: torch.dtype) -> list[Slot]:
    """`count` slots for up to `num_rows` tensors each, in one piece of memory."""
    table = torch.zeros(count, num_words(num_rows), dtype=dtype, device=device)
    return [Slot(table[i], num_rows) for i in range(count)]


class Contents(NamedTuple):
    """A slot that has come to the host: its header, its rows as float64 bytes, and its notes."""

    header: Header
    rows: bytearray
    notes: dict[str, float]


def read(words: torch.Tensor, num_rows: int) -> Contents:
    """What is in the first `num_rows` rows of a slot that was copied to the host, with room for more.

    Cost: 2 us, and a copy of 64 bytes a tensor.
    """
    if words.dtype is torch.float32:
        flag, divisor = words[5].clone(), words[7].clone()
        words = words.double()
        words.view(torch.float32)[10], words.view(torch.float32)[11] = flag, divisor
    header, rows = read_slot(words, num_rows)
    left = (ctypes.c_double * len(NOTES)).from_address(words.data_ptr() + 8 * (words.numel() - NUM_NOTES))
    return Contents(header, rows, dict(zip(NOTES, left)))
