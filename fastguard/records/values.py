"""Validation of values that come from a caller, from a saved state or from a log."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from ..errors import FastguardError
from .strict_json import decode_float

_LARGEST = 2.0**1023
_Real: Any = numbers.Real
_short = reprlib.Repr()  # a list of lists may be too long for memory as text
_short.maxstring = _short.maxother = _short.maxlong = 60


class MisfitError(FastguardError, ValueError):
    """A value in a saved state or a log does not fit."""

    def __init__(self, problem: str, path: tuple[Any, ...] = (), root: str = "state", remedy: str = "") -> None:
        self.problem, self.remedy = problem, remedy  # what the value must be and what it is; what to do
        self.path = path  # keys and indices that lead to it, outermost first
        where = f" - at `{root}{''.join(f'[{key!r}]' for key in path)}`" if path else ""
        super().__init__(f"`{root}` {problem}{where}{'. ' if remedy else ''}{remedy}")

    def under(self, *path: Any, root: str = "state") -> MisfitError:
        """The same error, at a path within an outer value."""
        return MisfitError(self.problem, (*path, *self.path), root, self.remedy)


def at(key: Any, read: Callable[[Any], Any], value: Any) -> Any:
    """`read(value)`; a MisfitError names `key` as well."""
    try:
        return read(value)
    except MisfitError as error:
        raise error.under(key) from None


def entry(plain: Any, key: str, read: Callable[[Any], Any]) -> Any:
    """`read(plain[key])`; a MisfitError names the key, also where it is missing or `plain` is not a dict."""
    if key not in mapping(plain):
        raise MisfitError("must be there, and is missing", (key,))
    return at(key, read, plain[key])


def refused(what: str, value: Any) -> MisfitError:
    """The error for a `value` that must be `what`; shows 60 characters of it."""
    try:
        text = _short.repr(value)
    except Exception as error:  # an int with too many digits
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return MisfitError(f"must be {what}, got {text if len(text) <= 60 else text[:57] + '...'}")


def mapping(value: Any) -> Mapping[str, Any]:
    """A dict whose keys are text."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refused("a dict with text for keys", value)
    return value


def row(value: Any, length: int | None = None) -> list[Any] | tuple[Any, ...]:
    """A list or a tuple, of that length if one is given."""
    if not isinstance(value, (list, tuple)):
        raise refused("a list", value)
    if length not in (None, len(value)):
        raise MisfitError(f"must have {length} entries, got {len(value)}")
    return value


def each(read: Callable[[Any], Any], values: Any) -> list[Any]:
    """`read` of each item of a list; a MisfitError names the index."""
    return [at(i, read, value) for i, value in enumerate(row(values))]


def by_name(read: Callable[[Any], Any], values: Any) -> dict[str, Any]:
    """`read` of each value of a dict; a MisfitError names the key."""
    return {name: at(name, read, value) for name, value in mapping(values).items()}


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise refused("text", value)
    return value


def truth(value: Any) -> bool:
    if value is True or value is False or (isinstance(value, (int, float)) and value in (0, 1)):
        return bool(value)
    raise refused("true or false", value)


def number(value: Any) -> float:
    """A float, or an int within its range; or "NaN", "Infinity" and "-Infinity" as `strict_json` writes them."""
    if type(value) is float:
        return value
    value = decode_float(value)
    is_exact = isinstance(value, numbers.Rational)  # an int or a Fraction, of any size
    if isinstance(value, bool) or not isinstance(value, _Real) or (is_exact and abs(value) > _LARGEST):
        raise refused("a number", value)
    return float(value)


def whole(value: Any) -> int:
    """An int, or a float without a fraction."""
    if type(value) is int and -_LARGEST < value < _LARGEST:
        return value
    if isinstance(value, bool) or not isinstance(value, _Real) or not abs(value) < _LARGEST or value % 1:
        raise refused("a whole number", value)
    return int(value)


def _from(least: int, read: Callable[[Any], Any], what: str) -> Callable[[Any], Any]:
    """`read`, for numbers >= `least` only."""

    def check(value: Any) -> Any:
        found = read(value)
        if found < least:
            raise refused(f"{what} >= {least}", found)
        return found

    return check


def maybe(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`read`, but None for None."""
    return lambda value: None if value is None else read(value)


spread = _from(0, number, "a number")  # a variance, a norm, a duration; or NaN
count = _from(0, whole, "a whole number")
length = _from(1, whole, "a whole number")


def real(value: Any) -> float:
    """One real number as a float: Python's, NumPy's, a Fraction, a Decimal, an array or tensor without dimensions.
    Raises TypeError for anything else, such as a bool, text, a complex number, or an array with dimensions, and
    OverflowError for a number too large for a float. Syncs for a tensor on an accelerator."""
    if type(value) is float:
        return value
    dtype = str(getattr(value, "dtype", ""))
    is_other = isinstance(value, (bool, str, bytes, bytearray)) or "bool" in dtype or "complex" in dtype
    is_other = is_other or (isinstance(value, numbers.Number) and not isinstance(value, (numbers.Real, Decimal)))
    if is_other or not hasattr(value, "__float__") or tuple(getattr(value, "shape", ())) != ():
        raise TypeError(f"must be one real number, got {type(value).__name__}")
    detach = getattr(value, "detach", None)  # torch warns if a tensor with a gradient becomes a number
    return float(detach() if callable(detach) else value)


def at_least(least: int, name: str, value: Any, remedy: str = "") -> int:
    """`value`, which must be an int >= `least` and not a bool; a ValueError names the argument and the remedy."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be an integer >= {least}, got {value!r}" + (f". {remedy}" if remedy else ""))
    return value


def positive(name: str, value: Any, remedy: str) -> float:
    """`value` as a float above 0; `inf` is allowed; a ValueError names the argument and the remedy."""
    found = real_or_nan(value)
    if not found > 0.0:
        raise ValueError(f"`{name}` must be a number > 0, got {value!r}. {remedy}".rstrip())
    return found


def between(low: float, high: float, name: str, value: Any) -> float:
    """`value` as a float above `low` and below `high`; raises ValueError as `positive` does."""
    found = real_or_nan(value)
    if not low < found < high:
        limits = f"> {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"`{name}` must be a number {limits}, got {value!r}")
    return found


def real_or_nan(value: Any) -> float:
    """As `real`, but NaN for anything else."""
    try:
        return real(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
