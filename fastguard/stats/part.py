"""What can be saved, read back, copied and shown by a list of its fields."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

from . import strict_json, values
from .values import MisfitError

_Self = TypeVar("_Self", bound="Part")


class Kind(NamedTuple):
    """How a field is saved, read back and copied.

    Attributes:
        dump: from its value to plain types that strict JSON can hold.
        load: from those, and the value that stands there now, to the value; a MisfitError for what can't be it.
        copy: another value that shares nothing that changes.
    """

    dump: Callable[[Any], Any] = strict_json.encode
    load: Callable[[Any, Any], Any] = lambda plain, now: strict_json.decode(plain)
    copy: Callable[[Any], Any] = copy.copy


def plain(read: Callable[[Any], Any]) -> Kind:
    """Plain types, which `read` checks."""
    return Kind(load=lambda plain, now: read(plain))


COUNT, WHOLE, NUMBER, SPREAD = map(plain, (values.count, values.whole, values.number, values.spread))
PART = Kind(lambda part: part.state(), lambda plain, part: part.loaded(plain), lambda part: part.copy())


def rows(make: Callable[[Any], Any]) -> Kind:
    """A list or deque of tuples, each of which `make` makes from the list that it was saved as."""

    def load(plain: list[Any], now: Any) -> Any:
        made = values.each(make, plain)
        return deque(made, now.maxlen) if isinstance(now, deque) else made

    return Kind(lambda items: strict_json.encode(list(items)), load)


def dump(owner: object, fields: Mapping[str, Kind]) -> dict[str, Any]:
    """The fields of `owner` as plain types, by name."""
    return {name: kind.dump(getattr(owner, name)) for name, kind in fields.items()}


def load(owner: object, fields: Mapping[str, Kind], plain: Mapping[str, Any]) -> None:
    """Gives `owner` the fields that `dump` gave; a MisfitError leaves those before it."""
    for name, kind in fields.items():
        setattr(owner, name, values.entry(plain, name, partial(_loaded, kind, getattr(owner, name))))


def _loaded(kind: Kind, now: Any, plain: Any) -> Any:
    return kind.load(plain, now)


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

    def load(self, state: Any) -> None:
        """Takes back what `state` gave.

        Raises:
            MisfitError: for anything else; this is then of no use any more.
        """
        if len(values.row(state)) != len(self._fields):
            raise MisfitError(f"must have {len(self._fields)} entries, got {len(state)}")
        load(self, self._fields, dict(zip(self._fields, state)))

    def loaded(self: _Self, state: Any) -> _Self:
        """Itself, after `load`."""
        self.load(state)
        return self

    def copy(self: _Self) -> _Self:
        """Another one that shares nothing that changes."""
        twin = copy.copy(self)
        copy_fields(self, self._fields, twin)
        return twin

    def twin(self: _Self) -> _Self:
        """Another one that holds the same objects. Cost: 0.1 us a slot."""
        twin = object.__new__(type(self))
        names: tuple[str, ...] = self.__slots__
        for name in names:
            setattr(twin, name, getattr(self, name))
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.state()})"
