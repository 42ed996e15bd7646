"""Whether the kernels for activations do on this very device what they are meant to, held against plain torch.

"auto" takes them on a device only after a trial there; asked for by name they run without one.
"""

from __future__ import annotations

import functools
import math

import torch

from ...stats.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS
from .. import reference_activations
from . import activations

_LIMITS = (-0.99, 0.75, 1e-3)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A row; channels side by side, in long runs and in short ones.
_CASES: tuple[tuple[tuple[int, ...], int | None], ...] = (((9001,), None), ((70, 140), 1), ((2, 3, 45, 40), 1))
_TOLERANCE = 1e-5  # of the mean in standard deviations, of the variance and of sums of magnitudes


def problem_on(device: torch.device) -> str | None:
    """What went wrong in a trial on `device`; None if nothing did. There is one trial a device and process.

    Cost: once, the kernels' compilation (some seconds, kept by Triton on disk), and some syncs. None while a CUDA graph
    is being captured, when nothing may sync.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return _problem_on(device)


@functools.cache
def _problem_on(device: torch.device) -> str | None:
    try:
        return _try(device)
    except Exception as error:  # whatever a compiler, a driver or a launch may raise: the reason is passed on
        return f"a trial on {device} raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _try(device: torch.device) -> str | None:
    for dtype in _DTYPES:
        for shape, dim in _CASES:
            x = torch.sin(torch.arange(math.prod(shape), dtype=torch.float32, device=device) * 0.37).to(dtype)
            x[:: len(x) // 7] = 0.0
            for values in ((), (math.nan, math.inf, -math.inf)):
                for i, value in enumerate(values):
                    x[1000 + 1500 * i] = value
                wrong = _difference(x.view(shape), dim)
                if wrong is not None:
                    return f"a trial on {device} gave wrong figures for {dtype} of shape {shape}: {wrong}"
            if activations.magnitude_counts([x]) != reference_activations.magnitude_counts([x]):
                return f"a trial on {device} counted the magnitudes of {dtype} wrongly"
    return None


def _difference(x: torch.Tensor, dim: int | None) -> str | None:
    if dim is None:
        return _row_difference(
            activations.activation_row(x, *_LIMITS), reference_activations.activation_row(x, *_LIMITS)
        )
    row, table = activations.channel_table(x, dim, *_LIMITS)
    true_row, true_table = reference_activations.channel_table(x, dim, *_LIMITS)
    for place, (a, b) in enumerate(zip(memoryview(table).cast("d"), memoryview(true_table).cast("d"), strict=True)):
        column = CHANNEL_COLUMNS[place % len(CHANNEL_COLUMNS)]
        if not abs(a - b) <= (_TOLERANCE * b if column == "sum_abs" else 0.0):
            return f"{column} of channel {place // len(CHANNEL_COLUMNS)} is {a!r} where torch says {b!r}"
    return _row_difference(row, true_row)


def _row_difference(got: tuple[float, ...], expected: tuple[float, ...]) -> str | None:
    numel, _, m2 = expected[:3]
    tolerances = {"mean": _TOLERANCE * math.sqrt(m2 / numel), "m2": _TOLERANCE * m2}
    for column, a, b in zip(ACTIVATION_COLUMNS, got, expected, strict=True):
        if not abs(a - b) <= tolerances.get(column, 0.0):
            return f"{column} is {a!r} where torch says {b!r}"
    return None
