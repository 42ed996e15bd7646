"""What values must be that come from outside: from a caller, from a saved state, from a log."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

from .strict_json import decode_float

_LARGEST = 2.0**1023


class MisfitError(ValueError):
    """A value in a saved state or a log that is not what stands there.

    Attributes:
        problem: what it must be and what it is, without the place.
        path: keys and indices that lead there, outermost first.
        remedy: what to do, in a sentence.
    """

    def __init__(self, problem: str, path: tuple[Any, ...] = (), root: str = "state", remedy: str = "") -> None:
        self.problem, self.path, self.remedy = problem, path, remedy
        where = f" - at `{root}{''.join(f'[{key!r}]' for key in path)}`" if path else ""
        super().__init__(f"`{root}` {problem}{where}{'. ' if remedy else ''}{remedy}")

    def under(self, *path: Any, root: str = "state") -> MisfitError:
        """The same, of a value that holds the one that was looked into."""
        return MisfitError(self.problem, (*path, *self.path), root, self.remedy)


def at(key: Any, read: Callable[[Any], Any], value: Any) -> Any:
    """`read(value)`; a MisfitError names `key` as well."""
    try:
        return read(value)
    except MisfitError as error:
        raise error.under(key) from None


def entry(plain: Any, key: str, read: Callable[[Any], Any]) -> Any:
    """`read(plain[key])`.

    Raises:
        MisfitError: `plain` is no dict or lacks the key, or what `read` raises; names the key.
    """
    if key not in mapping(plain):
        raise MisfitError("must be there, and is missing", (key,))
    return at(key, read, plain[key])


def _refused(what: str, value: Any) -> MisfitError:
    try:
        shown = repr(value)
    except Exception as error:  # an object of somebody else's
        shown = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return MisfitError(f"must be {what}, got {shown if len(shown) <= 60 else shown[:57] + '...'}")


def mapping(value: Any) -> Mapping[str, Any]:
    """A dict whose keys are text."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _refused("a dict with text for keys", value)
    return value


def row(value: Any) -> list[Any] | tuple[Any, ...]:
    """A list or a tuple."""
    if not isinstance(value, (list, tuple)):
        raise _refused("a list", value)
    return value


def each(read: Callable[[Any], Any], values: Any) -> list[Any]:
    """`read` of each of a list; a MisfitError names the index."""
    return [at(i, read, value) for i, value in enumerate(row(values))]


def by_name(read: Callable[[Any], Any], values: Any) -> dict[str, Any]:
    """`read` of each of a dict; a MisfitError names the key."""
    return {name: at(name, read, value) for name, value in mapping(values).items()}


def dicts(reads: Mapping[str, Callable[[Any], Any]], values: Any) -> tuple[dict[str, Any], ...]:
    """A list of dicts, of each of which the entries in `reads` are read; a MisfitError names index and key."""
    return tuple(each(lambda plain: {key: entry(plain, key, read) for key, read in reads.items()}, values))


def text(value: Any) -> str:
    """Text."""
    if not isinstance(value, str):
        raise _refused("text", value)
    return value


def truth(value: Any) -> bool:
    """True or False, or the same as a number."""
    if value is True or value is False or (isinstance(value, (int, float)) and value in (0, 1)):
        return bool(value)
    raise _refused("true or false", value)


def number(value: Any) -> float:
    """A float, or an int within its range; "NaN", "Infinity" and "-Infinity" as `strict_json` writes them."""
    if type(value) is float:
        return value
    value = decode_float(value)
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    size: Any = abs(value) if is_real and isinstance(value, numbers.Rational) else 0
    if not is_real or size > _LARGEST:
        raise _refused("a number", value)
    return value if isinstance(value, (int, float)) else float(value)


def spread(value: Any) -> float:
    """A number that is not below 0: a variance, a duration."""
    value = number(value)
    if value < 0.0:
        raise _refused("a number >= 0", value)
    return value


def whole(value: Any) -> int:
    """An int, or a float without a fraction."""
    if type(value) is int and -_LARGEST < value < _LARGEST:
        return value
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    found: Any = value
    if not is_real or not abs(found) < _LARGEST or found % 1:
        raise _refused("a whole number", value)
    return int(found)


def count(value: Any) -> int:
    """A whole number that is not below 0."""
    value = whole(value)
    if value < 0:
        raise _refused("a whole number >= 0", value)
    return value


def length(value: Any) -> int:
    """A whole number from 1 on."""
    found = whole(value)
    if found < 1:
        raise MisfitError(f"must be at least 1, got {found}")
    return found


def counts(value: Any) -> dict[str, int]:
    """Whole numbers that are not below 0, by name."""
    return by_name(count, value)


def maybe(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`read`, and None for None."""
    return lambda value: None if value is None else read(value)


_TYPES: dict[str, Callable[[Any], Any]] = {
    "str": text,
    "bool": truth,
    "int": whole,
    "float": number,
    "bool | None": maybe(truth),
    "int | None": maybe(whole),
    "float | None": maybe(number),
    "tuple[int, ...]": lambda values: tuple(each(whole, values)),
    "tuple[float, ...] | None": maybe(lambda values: tuple(each(number, values))),
    "tuple[str, ...]": lambda values: tuple(each(text, values)),
}


@functools.cache
def fields_of(kind: type) -> dict[str, Callable[[Any], Any]]:
    """How each annotated field of a NamedTuple or dataclass is read, in their order; of the plain types only."""
    # A NamedTuple has its hints as `ForwardRef`s, a dataclass as they were written.
    hints = {name: getattr(hint, "__forward_arg__", hint) for name, hint in kind.__annotations__.items()}
    return {name: _TYPES[hint] for name, hint in hints.items() if hint in _TYPES}


def tuple_of(kind: Any) -> Callable[[Any], Any]:
    """Reads the NamedTuple `kind` from a list of its fields."""
    reads = list(fields_of(kind).items())

    def read(plain: Any) -> Any:
        if len(row(plain)) != len(reads):
            raise MisfitError(f"must have {len(reads)} entries, got {len(plain)}")
        return kind._make([at(name, one, value) for (name, one), value in zip(reads, plain)])

    return read


def named(kind: type, plain: Mapping[str, Any], needed: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of the dataclass `kind` that are in the dict `plain`; those that it does not know are left out."""
    for key in needed:
        if key not in plain:
            raise MisfitError("must be there, and is missing", (key,))
    return {key: at(key, read, plain[key]) for key, read in fields_of(kind).items() if key in plain}


def real(value: Any) -> float:
    """One real number as a float: Python's, NumPy's, a Fraction, a Decimal, an array or tensor without dimensions.

    Raises:
        TypeError: for anything else: a truth value, text, a complex number, an array with dimensions.
        OverflowError: for a number beyond the floats.

    Cost: a sync for a tensor on an accelerator.
    """
    if type(value) is float:
        return value
    dtype = str(getattr(value, "dtype", ""))
    is_other = isinstance(value, (bool, str, bytes, bytearray)) or "bool" in dtype or "complex" in dtype
    is_other = is_other or (isinstance(value, numbers.Number) and not isinstance(value, (numbers.Real, Decimal)))
    if is_other or not hasattr(value, "__float__") or tuple(getattr(value, "shape", ())) != ():
        raise TypeError(f"must be one real number, got {type(value).__name__}")
    detach = getattr(value, "detach", None)  # torch warns where what has a gradient becomes a number
    return float(detach() if callable(detach) else value)


def at_least(least: int, name: str, value: Any, remedy: str = "") -> int:
    """`value`, which must be an int from `least` on, and no truth value.

    Raises:
        ValueError: it is none; says what it is called, and the remedy.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be an integer >= {least}, got {value!r}" + (f". {remedy}" if remedy else ""))
    return value


def positive(name: str, value: Any, remedy: str) -> float:
    """`value` as a float above 0; `inf` is one.

    Raises:
        ValueError: it is none; says what it is called, and the remedy.
    """
    try:
        found = real(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found = math.nan
    if not found > 0.0:
        raise ValueError(f"`{name}` must be > 0, got {value!r}. {remedy}".rstrip())
    return found
