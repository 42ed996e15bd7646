"""The one codec: `strict_json.encode` makes plain data of values, and the types of fields say how to read them back.

str, bool, int, float, X | None                 themselves; NaN and Inf as `strict_json` writes them
list[X], deque[X], tuple[X, ...], tuple[X, Y]   a list
dict[str, X]                                    a dict
a NamedTuple, a `Part`                          a list of the fields
a `Plain` dataclass, a TypedDict                a dict of the fields; unknown keys are ignored
Annotated[X, read]                              read by `read`, such as `values.count`
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

from . import strict_json, values

_PlainT = TypeVar("_PlainT", bound="Plain")

Count = Annotated[int, values.count]
Spread = Annotated[float, values.spread]
Length = Annotated[int, values.length]

Reader = Callable[[Any], Any]  # of plain data; raises MisfitError if it does not fit
_SCALARS = {str: values.text, bool: values.truth, int: values.whole, float: values.number}


def plain_fields(owner: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not None, tuples as lists."""
    found = {field.name: getattr(owner, field.name) for field in dataclasses.fields(owner)}
    items = ((name, list(value) if isinstance(value, tuple) else value) for name, value in found.items())
    return {name: value for name, value in items if value is not None}


class Plain:
    """A base for dataclasses that are saved as a dict."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain types; a field that is None has no key."""
        return plain_fields(self)

    @classmethod
    def from_dict(cls: type[_PlainT], plain: Mapping[str, Any]) -> _PlainT:
        """The inverse of `to_dict`, also after JSON; unknown keys are ignored. Raises MisfitError if one is wrong."""
        return cls(**read_fields(cls, plain))


@functools.cache
def readers_of(owner: Any) -> dict[str, Reader]:
    """The readers of the annotated attributes of a class, in order, those of its bases first."""
    hints = typing.get_type_hints(owner, include_extras=True)
    return {name: reader_of(hint) for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}


class Part:
    """A base for the parts of a history. The annotated attributes are saved, as a list."""

    __slots__ = ()
    _readers: typing.ClassVar[Any] = property(lambda self: readers_of(self.__class__))

    def state(self) -> list[Any]:
        """Every saved attribute as plain types."""
        return list(dump_fields(self, self._readers).values())

    def load(self, state: Any) -> None:
        """Restores what `state` returned; raises MisfitError for anything else, and is then unusable."""
        readers = self._readers
        load_fields(self, readers, dict(zip(readers, values.row(state, len(readers)))))

    @classmethod
    def loaded(cls, state: Any) -> Any:
        part = cls()
        part.load(state)
        return part

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.state()})"


def dump_fields(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """Attributes of `owner` as plain types, by name."""
    return {name: strict_json.encode(getattr(owner, name)) for name in names}


def load_fields(owner: object, readers: Mapping[str, Reader], plain: Mapping[str, Any]) -> None:
    """Sets the attributes that `dump_fields` returned; a MisfitError leaves earlier ones set."""
    for name, read in readers.items():
        now = getattr(owner, name)
        if isinstance(now, Part):
            values.entry(plain, name, now.load)
            continue
        value = values.entry(plain, name, read)
        setattr(owner, name, deque(value, now.maxlen) if isinstance(now, deque) else value)


def copied(value: Any) -> Any:
    """A copy of the value of a field that shares nothing mutable with it."""
    if isinstance(value, Part):
        twin = copy.copy(value)
        for name in value._readers:
            setattr(twin, name, copied(getattr(value, name)))
        return twin
    if type(value) is tuple:
        return tuple(map(copied, value))
    return {name: copied(item) for name, item in value.items()} if type(value) is dict else copy.copy(value)


def read_fields(owner: Any, plain: Any, **known: Any) -> dict[str, Any]:
    """The fields of a dataclass or a TypedDict that are in the dict `plain`, and those that are `known`. Raises
    MisfitError for a field that has no default and is missing, and for a value that does not fit."""
    given, needed = values.mapping(plain), _needed(owner)
    wanted = {name: read for name, read in readers_of(owner).items() if name in given or name in needed}
    return {**{name: values.entry(given, name, read) for name, read in wanted.items() if name not in known}, **known}


@functools.cache
def _needed(owner: Any) -> frozenset[str]:
    if typing.is_typeddict(owner):
        return frozenset(owner.__required_keys__)
    nothing = dataclasses.MISSING
    fields = dataclasses.fields(owner)
    return frozenset(f.name for f in fields if f.default is nothing and f.default_factory is nothing)


@functools.cache
def reader_of(hint: Any) -> Reader:
    """The reader of a type.

    >>> reader_of(tuple[float, ...])([1, "Infinity"])
    (1.0, inf)
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Annotated:
        read: Reader = arguments[1]
        return read
    if origin in (typing.Union, types.UnionType):
        (known,) = (one for one in arguments if one is not types.NoneType)
        return values.maybe(reader_of(known))
    if origin is dict:
        return partial(values.by_name, reader_of(arguments[1]))
    if origin in (list, deque) or arguments[1:] == (...,):
        item = reader_of(arguments[0])
        return lambda plain: origin(values.each(item, plain))
    if origin is tuple:
        return row_reader(range(len(arguments)), map(reader_of, arguments), tuple)
    made = origin or hint
    if issubclass(made, Part):
        return made.loaded
    if dataclasses.is_dataclass(made):
        build: Any = made
        return getattr(made, "from_dict", lambda plain: build(**read_fields(made, plain)))
    if typing.is_typeddict(made):
        return partial(read_fields, made)
    return row_reader(readers_of(made), readers_of(made).values(), made._make)


def row_reader(keys: Iterable[Any], readers: Iterable[Reader], make: Callable[[Any], Any]) -> Reader:
    """The reader of a tuple whose entries each have a reader of their own; errors name them by `keys`."""
    named = list(zip(keys, readers))

    def read(plain: Any) -> Any:
        row = values.row(plain, len(named))
        return make([values.at(key, read, value) for (key, read), value in zip(named, row)])

    return read
