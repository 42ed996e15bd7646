"""What a browser makes of a page: its elements, and the words that a reader sees before any script has run."""

import base64
import gzip
import html.parser
import json


class Page(html.parser.HTMLParser):
    """A page, parsed.

    Attributes:
        elements: tags with their attributes.
        words: the visible text, with single blanks.
        charts: the figures.
    """

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.charts = []
        self._words = []
        self.feed(text)
        self.words = " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if attributes.get("id") == "packed-figures" and data.strip():
            self.charts = json.loads(gzip.decompress(base64.b64decode(data)))
        if tag not in ("script", "style", "title"):
            self._words.append(data)

    def handle_endtag(self, tag):
        self.elements.append(("", {}))

    def titles(self):
        """The titles of the charts."""
        return [chart["layout"]["title"]["text"] for chart in self.charts]
