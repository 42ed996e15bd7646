"""Text for people: names and messages from elsewhere are escaped, so that a terminal of any encoding can show them."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Collection, Iterable, Sequence

NAME_WIDTH = 80
_WORD_WIDTH = 200  # most paths stay whole
_PROSE_WIDTH = 1600
_ODD = re.compile(r"[^ -~]")
_CUT = "..."


def shown(text: object, width: int | None = None) -> str:
    r"""`text` in printable ASCII: every other character as Python writes it in a string literal.

    The result has nothing that a terminal interprets (control characters, escape sequences, line ends, changes of the
    writing direction) or that an encoding lacks. Escaped text stays as it is.

    Args:
        text: anything with a `str`.
        width: the largest number of characters; a longer text loses its middle. None is no limit.

    >>> print(shown("layers.0\x1b[2J\n"), shown("a" * 100_000, 12))
    layers.0\x1b[2J\n aaa...aaaaaa
    """
    text = str(text)
    if width is not None and len(text) > 2 * width:  # limits the work; the rest is still too long
        text = text[:width] + text[-width - 1 :]
    if not (text.isascii() and text.isprintable()):
        text = _ODD.sub(lambda match: ascii(match[0])[1:-1], text)
    if width is None or len(text) <= width:
        return text
    tail = (width - len(_CUT)) * 2 // 3  # the end of a name is more important than its beginning
    return text[: width - len(_CUT) - tail] + _CUT + text[len(text) - tail :]


def listed(names: Iterable[object], most: int = 3) -> str:
    """The first names, escaped, and the number of further ones.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    every = list(names)
    more = len(every) - most
    return ", ".join(shown(name, NAME_WIDTH) for name in every[:most]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(typed: object, known: Iterable[str], most: int = 20) -> str:
    """The end of a message about an unknown name: the nearest known one, or, if none is near, the known ones.

    >>> did_you_mean("max_gradnorm", ["max_grad_norm", "patience"]), did_you_mean("x", ["b", "a"])
    ('Did you mean `max_grad_norm`?', 'Known names: a, b.')
    """
    names = sorted(known)
    near = difflib.get_close_matches(shown(typed, NAME_WIDTH), names, 1)
    return f"Did you mean `{near[0]}`?" if near else f"Known names: {listed(names, most)}."


def ended(text: object) -> str:
    """`text` with one full stop at its end, unless it ends in a question or exclamation mark.

    >>> ended("Make a new one."), ended("no space left")
    ('Make a new one.', 'no space left.')
    """
    bare = str(text).rstrip(". ")
    return bare if bare.endswith(("?", "!")) else bare + "."


def in_columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Rows of cells as lines; columns in `left` are left-aligned, all others right-aligned.

    >>> print("\\n".join(in_columns([("layer", "norm"), ("a", "12")])))
    layer  norm
    a        12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))
        return "  ".join(cells).rstrip()

    return list(map(line, rows))


def count(number: float, noun: str) -> str:
    """A whole number of things.

    >>> count(1, "step"), count(1_000_000.0, "step"), count(2, "batch")
    ('1 step', '1000000 steps', '2 batches')
    """
    return f"{number:.0f} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def number(value: float | None) -> str:
    """A number as pages and reports show it: four significant digits, whole numbers in full.

    >>> number(0.123456), number(12345), number(None)
    ('0.1235', '12345', '-')
    """
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """A duration in a suitable unit.

    >>> duration(0.00053), duration(1.7), duration(75), duration(3 * 3600 + 120)
    ('530 us', '1.7 s', '1 min 15 s', '3 h 2 min')
    """
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (60.0, 1.0, "s")):
        if seconds < limit or not math.isfinite(seconds):
            return f"{seconds * scale:.3g} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def prose(text: object) -> str:
    """A message of several words, escaped; a word or message that is much too long loses its middle.

    >>> prose("first in " + "a" * 100_000).count("a")
    197
    """
    words = (shown(word, _WORD_WIDTH) for word in str(text).split(" "))
    return shown(" ".join(words), _PROSE_WIDTH)


class _Shown(logging.Filter):
    """Escapes every message of a logger, for all handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # the message cannot be formatted: the handler reports that
            return True
        record.msg, record.args = prose(message), None
        return True


_log = logging.getLogger("fastguard")
if not any(type(known).__name__ == _Shown.__name__ for known in _log.filters):  # it may be imported again
    _log.addFilter(_Shown())
