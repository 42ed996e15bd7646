"""What a guard was asked for, to be compared with what `wrap` is asked for when it meets it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .policies import GivenPolicy

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Asked:
    """Settings of one call of `wrap`, as they were: policies and monitors go on to change.

    Objects are alike if they are the same one, or of one class and show the same: their `repr`, if it is of their own,
    and their public attributes.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = {name: (_kept(value), _look(value)) for name, value in settings.items()}

    def differences(self, other: Asked) -> list[str]:
        """Names of the settings that are not alike."""
        mine, others = self._settings, other._settings
        return [
            name
            for name in dict.fromkeys((*mine, *others))
            if not _is_alike(mine.get(name, (None, None)), others.get(name, (None, None)))
        ]


def _kept(value: Any) -> Any:
    """What may be told by identity; tensors, as keys of names, are not kept alive."""
    return None if isinstance(value, (*_PLAIN, Mapping, list, tuple)) else value


def _is_alike(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return (one[0] is not None and one[0] is other[0]) or one[1] == other[1]


def _look(value: Any, depth: int = 4) -> Any:
    """A value that is equal for what is alike; what lies deeper is alike only if it is the same."""
    if isinstance(value, GivenPolicy):
        value = value.given
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping) and depth:
        return {key if isinstance(key, _PLAIN) else id(key): _look(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and depth:
        return [_look(item, depth - 1) for item in value]
    if not depth or isinstance(value, (torch.Tensor, torch.nn.Module)) or not hasattr(value, "__dict__"):
        return id(value)
    shows = "" if getattr(type(value), "__repr__", None) is object.__repr__ else repr(value)
    public = {name: _look(item, depth - 1) for name, item in vars(value).items() if not name.startswith("_")}
    return type(value), shows, public if public or shows else id(value)
