"""What a browser makes of a page: its elements, and the words that a reader sees before any script has run."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json


class Page(html.parser.HTMLParser):
    """A page, parsed.

    Attributes:
        elements: tags with their attributes.
        words: the visible text, with single blanks.
        cells: the rows of all tables.
        packed: what the page holds for its scripts, by name.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.packed: dict[str, str] = {}
        self._words: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.words = " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self._open.append((tag, attributes))
        if tag == "tr":
            self.cells.append([])
        if tag in ("th", "td"):
            self.cells[-1].append("")

    def handle_data(self, data):
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script" and str(attributes.get("id")).startswith("packed-"):
            self.packed[attributes["id"].removeprefix("packed-")] = data
        if tag not in ("script", "style", "title"):
            self._words.append(data)
        if tag in ("th", "td"):
            self.cells[-1][-1] += data

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def with_attribute(self, key: str) -> list[str]:
        """The values of an attribute."""
        return [str(attributes[key]) for _, attributes in self.elements if key in attributes]

    def unpacked(self, name: str):
        """The data of that name, as the scripts of the page get it."""
        return json.loads(gzip.decompress(base64.b64decode(self.packed[name])))

    @property
    def charts(self) -> list[str]:
        """The names of the charts."""
        return [name.removeprefix("chart-") for name in self.packed if name.startswith("chart-")]
