"""The page of `fastguard try`: the table and the curves of the losses, as one HTML file without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..page.build import save_page

_COLOURS = ("#222222", "#999999", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _HEIGHT = 860, 300
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}h1{font-size:1.3rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #ddd}"
    "svg{width:100%;border:1px solid #ddd}"
)


def write_page(
    outcome: Any, verdict: str, rows: Sequence[Sequence[str]], notes: Sequence[str], path: Path, title: str
) -> None:
    """Writes it; makes the folder if there is none.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    head, *body = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    curves = {"as it is": outcome.base, "second seed": outcome.other}
    curves |= {row.arm.name: row.run for row in outcome.rows if row.comparison is not None}
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>fastguard try {html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(verdict)}</h1><table><tr>{head.replace('td>', 'th>')}</tr>",
        *(f"<tr>{row}</tr>" for row in body),
        "</table><h2>Training loss, mean of each twentieth</h2>",
        _svg({name: _smooth(run.losses) for name, run in list(curves.items())[: len(_COLOURS)]}),
        *(f"<p>{html.escape(note)}</p>" for note in notes),
    ]
    save_page("\n".join(parts), path)


def _smooth(losses: Sequence[float]) -> list[tuple[float, float]]:
    """Means of twentieths, each with the step in its middle; up to the first loss that is not finite."""
    width = max(len(losses) // 20, 1)
    points = []
    for start in range(0, len(losses), width):
        part = losses[start : start + width]
        if not all(map(math.isfinite, part)):
            break
        points.append((start + 0.5 * len(part), sum(part) / len(part)))
    return points


def _svg(curves: dict[str, list[tuple[float, float]]]) -> str:
    """Lines from the lowest value to the 95th percentile, so that one that diverges does not flatten the others."""
    values = sorted(y for points in curves.values() for _, y in points)
    if not values:
        return ""
    low, high = values[0], values[min(len(values) - 1, int(0.95 * len(values)))]
    last = max(x for points in curves.values() for x, _ in points)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for place, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[place]
        scale = (_HEIGHT - 30) / (high - low or 1.0)
        at = (f"{x / last * (_WIDTH - 160):.1f},{_HEIGHT - 15 - (min(y, high) - low) * scale:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(at)}"/>')
        parts.append(f'<text x="{_WIDTH - 150}" y="{20 + 18 * place}" fill="{colour}">{html.escape(name)}</text>')
    return "\n".join(
        [*parts, f'<text x="4" y="14">{high:.4g}</text><text x="4" y="{_HEIGHT - 2}">{low:.4g}</text></svg>']
    )
