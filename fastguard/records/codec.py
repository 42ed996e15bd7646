"""The one codec: from values to plain data that strict JSON can hold, and back. The types of fields say how.

str, bool, int, float, X | None                 themselves; NaN and Inf as `strict_json` writes them
list[X], deque[X], tuple[X, ...], tuple[X, Y]   a list
dict[str, X]                                    a dict
a NamedTuple, a `Part`                          a list of the fields
a `Plain` dataclass, a TypedDict                a dict of the fields; unknown keys are ignored
Annotated[X, read]                              read by `read`, such as `values.count`
Annotated[X, Kind(...)]                         as the `Kind` says
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
from typing import Annotated, Any, NamedTuple, TypeVar

from . import strict_json, values
from .values import MisfitError

_PlainT = TypeVar("_PlainT", bound="Plain")
_PartT = TypeVar("_PartT", bound="Part")

Count = Annotated[int, values.count]
Spread = Annotated[float, values.spread]
Length = Annotated[int, values.length]


class Kind(NamedTuple):
    """How a field is read from plain data, and written as such; `read` raises MisfitError if the data does not fit."""

    read: Callable[[Any], Any]
    dump: Callable[[Any], Any] = strict_json.encode


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
        """The inverse of `to_dict`, also after JSON; unknown keys are ignored.

        Raises:
            MisfitError: a key is missing, or its value does not fit.
        """
        return cls(**read_fields(cls, plain))


class Part:
    """A base for the parts of a history. The annotated attributes are saved, as a list."""

    __slots__ = ()

    def _kinds(self) -> dict[str, Kind]:
        owner: Any = type(self)
        return kinds_of(owner)

    def state(self) -> list[Any]:
        """Every saved attribute as plain types."""
        return list(dump_fields(self, self._kinds()).values())

    def load(self, state: Any) -> None:
        """Restores what `state` returned.

        Raises:
            MisfitError: `state` is not of this form. The object is then unusable.
        """
        kinds = self._kinds()
        if len(values.row(state)) != len(kinds):
            raise MisfitError(f"must have {len(kinds)} entries, got {len(state)}")
        load_fields(self, kinds, dict(zip(kinds, state)))

    @classmethod
    def loaded(cls: type[_PartT], state: Any) -> _PartT:
        """A new part from what `state` returned."""
        part = cls()
        part.load(state)
        return part

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.state()})"


def dump_fields(owner: object, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Attributes of `owner` as plain types, by name."""
    return {name: kind.dump(getattr(owner, name)) for name, kind in kinds.items()}


def load_fields(owner: object, kinds: Mapping[str, Kind], plain: Mapping[str, Any]) -> None:
    """Sets the attributes that `dump_fields` returned; a MisfitError leaves earlier ones set."""
    for name, kind in kinds.items():
        now = getattr(owner, name)
        if isinstance(now, Part):
            values.entry(plain, name, now.load)
            continue
        value = values.entry(plain, name, kind.read)
        setattr(owner, name, deque(value, now.maxlen) if isinstance(now, deque) else value)


def copied(value: Any) -> Any:
    """A copy of the value of a field that shares nothing mutable with it."""
    if isinstance(value, Part):
        twin = copy.copy(value)
        for name in value._kinds():
            setattr(twin, name, copied(getattr(value, name)))
        return twin
    if type(value) is tuple:
        return tuple(map(copied, value))
    return {name: copied(item) for name, item in value.items()} if type(value) is dict else copy.copy(value)


@functools.cache
def kinds_of(owner: Any) -> dict[str, Kind]:
    """The kinds of the annotated attributes of a class, in order, those of its bases first."""
    hints = typing.get_type_hints(owner, include_extras=True)
    return {name: kind_of(hint) for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}


def read_fields(owner: Any, plain: Any, **known: Any) -> dict[str, Any]:
    """The fields of a dataclass or a TypedDict that are in the dict `plain`, and those that are `known`.

    Raises:
        MisfitError: `plain` is not a dict, lacks a field that has no default, or has a value that does not fit.
    """
    given, needed = values.mapping(plain), _needed(owner)
    wanted = {name: kind for name, kind in kinds_of(owner).items() if name in given or name in needed}
    return {
        **{name: values.entry(given, name, kind.read) for name, kind in wanted.items() if name not in known},
        **known,
    }


@functools.cache
def _needed(owner: Any) -> frozenset[str]:
    if typing.is_typeddict(owner):
        return frozenset(owner.__required_keys__)
    nothing = dataclasses.MISSING
    fields = dataclasses.fields(owner)
    return frozenset(f.name for f in fields if f.default is nothing and f.default_factory is nothing)


_SCALARS = {str: values.text, bool: values.truth, int: values.whole, float: values.number}


@functools.cache
def kind_of(hint: Any) -> Kind:
    """The kind of a type.

    >>> kind_of(tuple[float, ...]).read([1, "Infinity"])
    (1.0, inf)
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return Kind(_SCALARS[hint])
    if origin is Annotated:
        how = arguments[1]
        return how if isinstance(how, Kind) else Kind(how)
    if origin in (typing.Union, types.UnionType):
        (known,) = (one for one in arguments if one is not types.NoneType)
        return Kind(values.maybe(kind_of(known).read))
    if origin is dict:
        return Kind(partial(values.by_name, kind_of(arguments[1]).read))
    if origin in (list, deque) or arguments[1:] == (...,):
        return list_kind(origin, kind_of(arguments[0]))
    if origin is tuple:
        return row_kind(range(len(arguments)), map(kind_of, arguments), tuple)
    made = origin or hint
    if issubclass(made, Part):
        return Kind(made.loaded, made.state)
    if dataclasses.is_dataclass(made):
        build: Any = made
        return Kind(
            lambda plain: build(**read_fields(made, plain)), lambda value: strict_json.encode(plain_fields(value))
        )
    if typing.is_typeddict(made):
        return Kind(partial(read_fields, made))
    return row_kind(kinds_of(made), kinds_of(made).values(), made._make)


def list_kind(make: Callable[[Any], Any], item: Kind) -> Kind:
    """The kind of a list, deque or tuple of items of one kind."""
    # One call for all items if they need no conversion of their own: a window has 512 of them.
    dump_each = strict_json.encode if item.dump is strict_json.encode else partial(map, item.dump)
    return Kind(lambda plain: make(values.each(item.read, plain)), lambda items: list(dump_each(list(items))))


def row_kind(keys: Iterable[Any], kinds: Iterable[Kind], make: Callable[[Any], Any]) -> Kind:
    """The kind of a tuple whose entries each have a kind of their own; errors name them by `keys`."""
    named = list(zip(keys, kinds))

    def read(plain: Any) -> Any:
        if len(values.row(plain)) != len(named):
            raise MisfitError(f"must have {len(named)} entries, got {len(plain)}")
        return make([values.at(key, kind.read, value) for (key, kind), value in zip(named, plain)])

    if all(kind.dump is strict_json.encode for _, kind in named):
        return Kind(read)
    return Kind(read, lambda items: [kind.dump(item) for (_, kind), item in zip(named, items)])
