"""Patches: attributes of torch that were replaced, and what they were before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Replaces attributes, and puts back those that nobody else has replaced since."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Sets `owner.name` to `make(owner.name)`."""
        original = getattr(owner, name)
        made = make(original)
        setattr(owner, name, made)
        self._made.append((owner, name, original, made))

    def restore(self) -> None:
        """Puts the attributes back."""
        for owner, name, original, made in reversed(self._made):
            if getattr(owner, name) is made:
                setattr(owner, name, original)
        self._made = []
