"""How findings put numbers and names into words."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "step"), count(3, "step")
    ('1 step', '3 steps')
    """
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str], most: int = 3) -> str:
    """
    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
