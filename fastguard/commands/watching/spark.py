"""A series in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-~=+*#"
BAD, BACK = "x", "|"


def sparkline(
    values: Sequence[float | None], width: int, *, is_log: bool = False, ramp: str = BLOCKS, backs: Sequence[int] = ()
) -> str:
    """The values from left to right in at most `width` characters, the largest of those that share one.

    A value that is NaN or Inf is an x, as are all that share its place; one that is None is left out. In a logarithmic
    line what is not above 0 is at the bottom. `backs` are places among the values before which a run went back to an
    earlier step: a bar stands there.

    >>> sparkline([1.0, 2.0, 3.0, None, math.nan, 8.0, 1.0, 1.0], 8), sparkline(range(100), 4)
    ('▁▂▃ x█▁▁', '▃▄▆█')
    """
    num = min(width, len(values))
    if num <= 0:
        return ""
    cells = [values[i * len(values) // num : (i + 1) * len(values) // num] for i in range(num)]
    known = [_height(v, is_log) for v in values if v is not None and math.isfinite(v)]
    finite = [height for height in known if height > -math.inf]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    text = []
    for cell in cells:
        its = [v for v in cell if v is not None]
        if not all(map(math.isfinite, its)):
            text.append(BAD)
        elif not its:
            text.append(" ")
        else:
            above = _height(max(its), is_log) - low
            share = max(0.0, above / (high - low)) if high > low else 0.0
            text.append(ramp[round(share * (len(ramp) - 1))])
    for place in backs:
        at = place * num // len(values)
        if text[at] != BAD:
            text[at] = BACK
    return "".join(text)


def _height(value: float, is_log: bool) -> float:
    """Halved, so that no difference overflows."""
    if is_log:
        return math.log(value) if value > 0.0 else -math.inf
    return 0.5 * value
