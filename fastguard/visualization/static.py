"""Figures as SVG, without plotly: for notebooks, and for exports where no script runs."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

_DASHES = {"solid": "", "dot": "2 3", "dash": "7 4"}
_CIVIDIS = ((0, 32, 76), (124, 123, 120), (255, 234, 70))
_RED = "#c1121f"
_TEXT = 'fill="currentColor" font-family="sans-serif" font-size="11"'


class _Axis:
    """Data to pixels. What a logarithmic axis cannot show has no place; names stand one after the other."""

    def __init__(self, values: Sequence[Any], is_log: bool, begin: float, end: float) -> None:
        names = dict.fromkeys(values) if any(isinstance(value, str) for value in values) else {}
        self._names = {name: float(place) for place, name in enumerate(names)}
        self._is_log, self._begin, self._length = is_log, begin, end - begin
        places = {one: value for value in values if (one := self._scaled(value)) is not None} or {0.0: 0.0, 1.0: 1.0}
        self._low, self._high = min(places), max(places)
        self.ends = [
            f"{one:.4g}" if isinstance(one, float) else str(one)[:30] for one in (places[self._low], places[self._high])
        ]

    def _scaled(self, value: Any) -> float | None:
        if self._names or value is None or not math.isfinite(value) or (self._is_log and value <= 0.0):
            return self._names.get(value)
        return math.log10(value) if self._is_log else float(value)

    def __call__(self, value: Any) -> float | None:
        scaled = self._scaled(value)
        if scaled is None:
            return None
        share = (scaled - self._low) / (self._high - self._low) if self._high > self._low else 0.5
        return round(self._begin + share * self._length, 1)


def svg(figure: Mapping[str, Any], width: int = 720, height: int = 320) -> str:
    """An SVG of `figure.to_plotly_json()`, or of such data: lines, bands, markers, bars and heat maps."""
    layout, traces = figure["layout"], [trace for trace in figure["data"] if len(trace.get("x", ()))]
    left, top, right, bottom = 70.0, 24.0, width - 12.0, height - 46.0
    x_axis, y_axis = layout.get("xaxis", {}), layout.get("yaxis", {})
    xs = [x for trace in traces for x in trace["x"]]
    is_bars = any(trace["type"] == "bar" for trace in traces)
    half = 0.5 * (right - left) / max(1, len(set(xs))) if is_bars else 0.0  # of a bar's width
    on_axis = [trace for trace in traces if trace.get("yaxis") != "y2"]
    ys = [y for trace in on_axis for y in trace["y"]] + [0.0] * (is_bars and y_axis.get("type") != "log")
    x = _Axis(xs, x_axis.get("type") == "log", left + half, right - half)
    y = _Axis(ys, y_axis.get("type") == "log", bottom, top + 12.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'style="max-width:100%;height:auto"><title>{_safe(_title(layout))}</title>',
        f'<text x="{left}" y="14" {_TEXT} font-weight="bold">{_safe(_title(layout))}</text>',
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>',
    ]
    for trace in traces:
        parts += _drawn(trace, x, y, (left, top, right, bottom), half)
    (first, last), (low, high) = x.ends, y.ends
    what = x_axis.get("title", {}).get("text", "")
    parts += [
        _label(left, bottom + 13, first, "start"),
        _label(right, bottom + 13, last, "end"),
        _label((left + right) / 2, bottom + 13, what, "middle"),
    ]
    if not any(trace["type"] == "heatmap" for trace in traces):
        parts += [_label(left - 4, bottom, low, "end"), _label(left - 4, top + 18, high, "end")]
    bare = {"fill", "colorbar"}  # bands, and the values of a heat map
    named = [trace for trace in traces if trace.get("name") and not bare & trace.keys()]
    step = (right - left) / max(1, len(named))
    for place, trace in enumerate(named):
        at = left + place * step
        parts.append(f'<rect x="{at:.1f}" y="{height - 18}" width="9" height="9" fill="{_colour(trace)}"/>')
        parts.append(_label(at + 13, height - 10, str(trace["name"])[: max(4, int(step / 6.5) - 2)], "start"))
    return "".join(parts) + "</svg>"


def _drawn(trace: Mapping[str, Any], x: _Axis, y: _Axis, box: Sequence[float], half: float) -> list[str]:
    left, top, right, bottom = box
    if trace["type"] == "heatmap":
        size = f'x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"'
        look = 'preserveAspectRatio="none" style="image-rendering:pixelated"'
        return [f'<image {size} {look} href="data:image/png;base64,{_png(trace)}"/>']
    height = (lambda row: top + 4.0 + 5.0 * row) if trace.get("yaxis") == "y2" else y
    places = [(x(one), height(other)) for one, other in zip(trace["x"], trace["y"])]
    colour = _colour(trace)
    there = [(at, to) for at, to in places if at is not None and to is not None]
    if trace["type"] == "bar":
        look = f'width="{1.8 * half:.1f}" fill="{colour}" fill-opacity="{trace.get("opacity", 1.0)}"'
        return [
            f'<rect x="{at - 0.9 * half:.1f}" y="{to}" height="{max(0.0, bottom - to):.1f}" {look}/>'
            for at, to in there
        ]
    if "markers" in trace.get("mode", "lines"):
        return [f'<circle cx="{at}" cy="{to}" r="3" fill="{colour}"/>' for at, to in there]
    path, is_open = "", False
    for at, to in places:
        is_there = at is not None and to is not None
        path += f"{'L' if is_open else 'M'}{at:g} {to:g}" if is_there else ""
        is_open = is_there
    if trace.get("fill") == "toself":
        return [f'<path d="{path}Z" fill="{trace["fillcolor"]}"/>'] if path else []
    dash = _DASHES.get(trace.get("line", {}).get("dash", "solid"), "")
    return [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}"/>']


def _png(trace: Mapping[str, Any]) -> str:
    """A heat map as a PNG, a pixel a cell."""
    cells = trace["z"]
    known = [one for row in cells for one in row if one is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    is_red = trace.get("showscale") is False

    def pixel(value: float | None) -> bytes:
        if value is None:
            return b"\0\0\0\0"
        if is_red:
            return bytes.fromhex(_RED[1:] + "ff")
        share = 2.0 * (value - low) / (high - low) if high > low else 1.0
        begin, end = _CIVIDIS[min(1, int(share))], _CIVIDIS[min(1, int(share)) + 1]
        return bytes((*(round(a + (b - a) * (share - min(1, int(share)))) for a, b in zip(begin, end)), 255))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"".join(map(pixel, row)) for row in cells)
    head = struct.pack(">IIBBBBB", len(cells[0]), len(cells), 8, 6, 0, 0, 0)
    image = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + image).decode("ascii")


def _colour(trace: Mapping[str, Any]) -> str:
    look = trace.get("line") or {}
    known = (trace.get("marker") or {}).get("color") or look.get("color")
    return str(known or (_RED if trace["type"] == "heatmap" else "currentColor"))


def _title(layout: Mapping[str, Any]) -> str:
    return str((layout.get("title") or {}).get("text", ""))


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {_TEXT}>{_safe(text)}</text>'


def _safe(text: str) -> str:
    """Names in figures are escaped already, what a user has set there is not."""
    return html.escape(html.unescape(text))
