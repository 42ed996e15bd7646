"""Text for people: names and messages from elsewhere are shown, not obeyed, on a terminal of any encoding."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence

NAME_WIDTH = 80
_WORD_WIDTH = 200  # most paths stay whole
_PROSE_WIDTH = 1600
_ODD = re.compile(r"[^ -~]")
_CUT = "..."


def shown(text: object, width: int | None = None) -> str:
    r"""`text` in printable ASCII: every other character as Python writes it in a string literal.

    That leaves nothing that a terminal obeys (controls, escape sequences, line ends, what turns the direction of
    writing) and nothing that an encoding lacks. A text that is shown already stays as it is.

    Args:
        text: anything with a `str`.
        width: the most characters; a longer text loses its middle. None: any number.

    >>> print(shown("layers.0\x1b[2J\n"), shown("a" * 100_000, 12))
    layers.0\x1b[2J\n aaa...aaaaaa
    """
    text = str(text)
    if width is not None and len(text) > 2 * width:  # a bound on the work; what is left is still too long
        text = text[:width] + text[-width - 1 :]
    if not (text.isascii() and text.isprintable()):
        text = _ODD.sub(lambda match: ascii(match[0])[1:-1], text)
    if width is None or len(text) <= width:
        return text
    tail = (width - len(_CUT)) * 2 // 3  # the end of a name says more than its beginning
    return text[: width - len(_CUT) - tail] + _CUT + text[len(text) - tail :]


def listed(names: Iterable[object], most: int = 3) -> str:
    """The first names, shown, and how many more there are.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    every = list(names)
    more = len(every) - most
    return ", ".join(shown(name, NAME_WIDTH) for name in every[:most]) + (f" and {more} more" if more > 0 else "")


def in_columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Rows of cells as lines; columns in `left` begin at the left, all others end at the right.

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

    >>> count(1, "step"), count(1_000_000.0, "step")
    ('1 step', '1000000 steps')
    """
    return f"{number:.0f} {noun}" + ("" if number == 1 else "s")


def prose(text: object) -> str:
    """A message of several words, shown; a word that is far too long, or a message, loses its middle.

    >>> prose("first in " + "a" * 100_000).count("a")
    197
    """
    words = (shown(word, _WORD_WIDTH) for word in str(text).split(" "))
    return shown(" ".join(words), _PROSE_WIDTH)


class _Shown(logging.Filter):
    """Has every message of a logger shown, whoever gives it, whatever handler takes it."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # a message that cannot be made: its handler says so, as logging has it
            return True
        record.msg, record.args = prose(message), None
        return True


def _show_what_is_logged() -> None:
    log = logging.getLogger("fastguard")
    if not any(type(known).__name__ == _Shown.__name__ for known in log.filters):  # as when this is imported anew
        log.addFilter(_Shown())


_show_what_is_logged()
