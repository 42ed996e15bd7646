"""Where the statistics of a step end up: slots on the device, a header and a row for each tensor."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch

from ...stats import COLUMNS

HEADER_WORDS = 8  # of 8 bytes each; see finalise.py
ROW_WORDS = len(COLUMNS)
_HEADER = struct.Struct("<5d2f2d")


class Header(NamedTuple):
    """What was decided for one step.

    Attributes:
        norm_sq: sum of squares of the unscaled elements; NaN if one is NaN, else Inf if one is Inf.
        norm: its root.
        clip_coef: what clipping multiplies by; 1.0 when skipping.
        factor: what `Workspace.scale` multiplies by: the coefficient, and the unscaling unless the optimizer does it.
        loss_scale: what the gradients were scaled by; 1.0 if by nothing.
        skipped: the flag.
        step: the number that was passed to `Workspace.measure`.
    """

    norm_sq: float
    norm: float
    clip_coef: float
    factor: float
    loss_scale: float
    skipped: bool
    step: int


class Slots:
    """A ring's worth of slots for up to `num_rows` tensors, in one piece of memory.

    Everything that an optimizer is handed is a view that is made here, once. Addresses stay valid as long as this
    object lives.

    Attributes:
        table: float64 [count, HEADER_WORDS + ROW_WORDS * num_rows], on the device.
        skip_flags: 0-dim float32, exactly 0.0 or 1.0: `optimizer.found_inf`.
        divisors: 0-dim float32, loss scale / clip coefficient: `optimizer.grad_scale`, to clip without a pass.
        totals: 0-dim float64, `Header.norm_sq`; what to add up over devices or ranks before a decision.
        factors: 0-dim float64, `Header.factor`.
    """

    def __init__(self, device: torch.device, num_rows: int, count: int = 1) -> None:
        self.num_rows = num_rows
        self.table = torch.zeros(count, HEADER_WORDS + ROW_WORDS * num_rows, dtype=torch.float64, device=device)
        narrow = self.table.view(torch.float32)
        self.skip_flags = [narrow[i, 10] for i in range(count)]
        self.divisors = [narrow[i, 11] for i in range(count)]
        self.totals = [self.table[i, 0] for i in range(count)]
        self.factors = [self.table[i, 3] for i in range(count)]
        start, stride = self.table.data_ptr(), 8 * self.table.shape[1]
        self.addresses = [start + i * stride for i in range(count)]
        self.factor_addresses = [address + 24 for address in self.addresses]


def read_slot(slot: torch.Tensor, num_rows: int) -> tuple[Header, bytearray]:
    """Header and rows (float64 bytes, as `TensorStats` takes them) of one slot that was copied to the host.

    Args:
        slot: float64 [>= HEADER_WORDS + ROW_WORDS * num_rows], contiguous, on the CPU.
    """
    address = slot.data_ptr()
    norm_sq, norm, clip_coef, factor, loss_scale, flag, _, step, _ = _HEADER.unpack(
        ctypes.string_at(address, 8 * HEADER_WORDS)
    )
    rows = bytearray(8 * ROW_WORDS * num_rows)
    if rows:
        source = ctypes.c_char * len(rows)
        rows[:] = source.from_address(address + 8 * HEADER_WORDS)
    return Header(norm_sq, norm, clip_coef, factor, loss_scale, flag != 0.0, int(step)), rows
