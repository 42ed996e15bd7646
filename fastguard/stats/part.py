"""What can be saved, read back, copied and shown by a list of its fields."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from . import strict_json

_Self = TypeVar("_Self", bound="Part")


class Kind(NamedTuple):
    """How a field is saved, read back and copied.

    Attributes:
        dump: from its value to plain types that strict JSON can hold.
        load: from those, and the value that stands there now, to the value.
        copy: another value that shares nothing that changes.
    """

    dump: Callable[[Any], Any] = strict_json.encode
    load: Callable[[Any, Any], Any] = lambda plain, now: strict_json.decode(plain)
    copy: Callable[[Any], Any] = copy.copy


PLAIN = Kind()  # a number, or a list of numbers
PART = Kind(lambda part: part.state(), lambda plain, part: part.loaded(plain), lambda part: part.copy())


def rows(make: Callable[[Any], Any]) -> Kind:
    """A list or deque of tuples, each of which `make` makes from the list that it was saved as."""

    def load(plain: list[Any], now: Any) -> Any:
        return deque(map(make, plain), now.maxlen) if isinstance(now, deque) else list(map(make, plain))

    return Kind(lambda items: strict_json.encode(list(items)), load)


def numbers(kind: Any) -> Callable[[list[Any]], Any]:
    """Makes the NamedTuple `kind` of what it was saved as, if it holds numbers only."""
    return lambda plain: kind._make(map(strict_json.decode_float, plain))


def dump(owner: object, fields: Mapping[str, Kind]) -> dict[str, Any]:
    """The fields of `owner` as plain types, by name."""
    return {name: kind.dump(getattr(owner, name)) for name, kind in fields.items()}


def load(owner: object, fields: Mapping[str, Kind], plain: Mapping[str, Any]) -> None:
    """Gives `owner` the fields that `dump` gave."""
    for name, kind in fields.items():
        setattr(owner, name, kind.load(plain[name], getattr(owner, name)))


def copy_fields(owner: object, fields: Mapping[str, Kind], twin: object) -> None:
    """Gives `twin` copies of the fields of `owner`."""
    for name, kind in fields.items():
        setattr(twin, name, kind.copy(getattr(owner, name)))


class Part:
    """A base for what is saved as the list of its `_fields`, in their order."""

    __slots__ = ()
    _fields: ClassVar[dict[str, Kind]] = {}

    def state(self) -> list[Any]:
        """Everything, as plain types that strict JSON can hold."""
        return list(dump(self, self._fields).values())

    def load(self, state: list[Any]) -> None:
        """Takes back what `state` gave."""
        load(self, self._fields, dict(zip(self._fields, state, strict=True)))

    def loaded(self: _Self, state: list[Any]) -> _Self:
        """Itself, after `load`."""
        self.load(state)
        return self

    def copy(self: _Self) -> _Self:
        """Another one that shares nothing that changes."""
        twin = copy.copy(self)
        copy_fields(self, self._fields, twin)
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.state()})"
