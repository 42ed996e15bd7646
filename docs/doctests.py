"""Examples in docstrings, as code: an extension of griffe, which reads docstrings for the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From the first prompt to the next empty line.
_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)


class Fenced(griffe.Extension):
    """Puts fences around what follows `>>>`, which Markdown takes for quotations."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring before it is parsed."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = text
