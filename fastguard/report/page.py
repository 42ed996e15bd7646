"""A report as HTML: a fragment for a notebook, and a page with figures, which opens offline."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import html
import json
import os
import string
from importlib import resources
from pathlib import Path
from typing import Any

from .. import visualization as draw
from .._text import prose
from ..errors import missing_package
from ..visualization.runs import DrawnRun
from .tables import number_rows, sample_tables
from .text import blocks
from .whole_file import write_whole

_CHARTS = (draw.plot_loss, draw.plot_gradient_norm, draw.plot_clip_rate, draw.plot_learning_rate,
           draw.plot_loss_scale, draw.plot_updates, draw.plot_layers)  # fmt: skip
_MIN_SAMPLES = 3  # a chart of fewer shows less than the report says


def fragment(report: Any) -> str:
    """The report as HTML without scripts."""
    return _findings(report) + _numbers(report)


def render(run: DrawnRun, report: Any, title: str = "") -> str:
    """The page of a run and the report on it."""
    try:
        from plotly import offline
    except ImportError as error:
        raise missing_package("the page of a run", "plotly", error, "report") from error
    plotly, script = offline.get_plotlyjs(), _asset("page.js")
    figures = []
    for plot in _CHARTS:
        with contextlib.suppress(ValueError):  # the run has no such values
            figures.append(plot(run))
    figures = [one for one in figures if max((len(trace.x) for trace in one.data), default=0) >= _MIN_SAMPLES]
    charts = ""
    for figure in figures:
        is_wide, label = figure.data[0].type == "heatmap", _escaped(figure.layout.title.text)
        figure.update_layout(height=min(900, 120 + 15 * len(figure.data[0].y)) if is_wide else 360)
        charts += f'<div class="plot{" wide" * is_wide}" role="img" aria-label="{label}"></div>\n'
    return string.Template(_asset("page.html")).substitute(
        title=_escaped(title or run.name),
        hashes=" ".join(map(_hash, (plotly, script))),
        findings=_findings(report),
        charts=charts,
        numbers=_numbers(report),
        figures=_packed(json.dumps([json.loads(figure.to_json()) for figure in figures])),
        plotly=_packed(plotly),
        script=script,
    )


def save_page(page: str, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Writes `page` completely or not at all. Writes into the target of a link, and into a device or pipe directly."""
    path = Path(path)
    if os.path.lexists(path) and not force:
        raise FileExistsError(f"{path} exists already: use --force to overwrite it")
    if path.exists() and not path.is_file():  # a rename would replace it by a file, even /dev/null as root
        path.write_text(page, encoding="utf-8", newline="\n")
        return path
    write_whole(Path(os.path.realpath(path)), lambda file: file.write(page.encode()))
    return path


def _findings(report: Any) -> str:
    parts = [f'<p class="verdict {report.status}"><strong>{_escaped(report._verdict())}</strong></p>']
    for kind, head, paragraphs in blocks(report.causes, report.findings):
        told = "".join(f"<p>{_escaped(prose(one))}</p>" for one in paragraphs)
        parts.append(f'<article class="{kind}"><h3>{_escaped(prose(head))}</h3>{told}</article>')
    return "\n".join(parts)


def _numbers(report: Any) -> str:
    rows = number_rows(report.numbers, report.sinks)
    cells = "".join(f'<tr><th scope="row">{_escaped(n)}</th><td>{_escaped(prose(v))}</td></tr>\n' for n, v in rows)
    tables = (_escaped("\n".join(lines)) for lines in sample_tables(report.modules, report.weights))
    return (f"<table>{cells}</table>" if cells else "") + "".join(f"<pre>{table}</pre>" for table in tables)


def _escaped(text: str) -> str:
    """HTML, with control characters, surrogates and changes of writing direction as Python writes them."""
    return html.escape("".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text))


def _packed(text: str) -> str:
    """Compressed, as text; the same for the same text."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode("ascii")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")
