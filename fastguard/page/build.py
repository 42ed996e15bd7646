"""From runs to the text of a page."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.resources
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import Report, build_report
from ..visualization import (
    plot_activations,
    plot_gradient_norm,
    plot_layers,
    plot_learning_rate,
    plot_loss,
    plot_updates,
)
from ..visualization.ribbon import STATES
from ..visualization.runs import DrawnRun, runs_of
from .parts import Card, cards_of, differences, infection, parting, ribbon_svg, tensor_rows

_ASSETS = importlib.resources.files(__name__.rpartition(".")[0]) / "assets"
_DIGITS = 5
_NUM_STATIC_ROWS = 100
_MAX_CELLS = 256
_CHARTS = (
    ("loss", "Loss", plot_loss),
    ("norm", "Gradient norm", plot_gradient_norm),
    ("lr", "Learning rate", plot_learning_rate),
    ("updates", "Updates", plot_updates),
)
_MAPS = ("norm", "update", "zeros", "saturation")
Chart = dict[str, Any]


def build_page(source: Any, *, title: str = "", command: str = "") -> str:
    """The page, as text.

    Args:
        source: as for the figures: a guard, a history, the path of a log, or up to eight in a list or a dict by names;
            the first is the one that the others are compared with.
        title: of the page; the runs' names where there is none.
        command: what made it, for the footer.

    Raises:
        ImportError: plotly or Jinja2 is missing.
        TypeError, ValueError, OSError: as for the figures.

    Cost: of a log, one pass over it. The page has plotly's 4.8 MB in it, and at most about 2 MB more.
    """
    runs = runs_of(source)
    reports = [build_report(run.history) for run in runs]
    return render(runs, reports, title or ", ".join(run.name for run in runs), command)


def render(runs: Sequence[DrawnRun], reports: Sequence[Report], title: str, command: str) -> str:
    """The page of these runs and of what is to be said of each."""
    import jinja2
    from plotly import offline

    scripts = [offline.get_plotlyjs(), _asset("page.js")]
    style = _asset("page.css")
    # Scripts by their hashes. plotly styles its elements where they stand; a style has nowhere to load anything from.
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    cards = [cards_of(report) for report in reports]
    charts, skipped = _charts(runs, cards[0])
    tensors = tensor_rows(runs[0])
    neat: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, **neat)
    template = environment.from_string(_asset("page.html"))
    data = {
        "charts": [{"id": chart["id"], "figure": chart["figure"]} for chart in charts],
        "ribbon": _packed(runs[0]),
        "tensors": tensors,
        "cards": [{"number": c.number, "first": c.first_step, "last": c.last_step} for c in cards[0]],
    }
    return template.render(
        title=title,
        command=command,
        policy=policy,
        style=_trusted(style),
        scripts=[_trusted(text) for text in scripts],
        data=_trusted(_json(data)),
        runs=[
            {"run": run, "report": report, "cards": its, "lines": str(report).splitlines(), "ribbon": ribbon_svg(run)}
            for run, report, its in zip(runs, reports, cards)
        ],
        charts=charts,
        left_out=skipped,
        infections=infection(runs[0]),
        tensors=sorted(tensors["rows"], key=_badness)[:_NUM_STATIC_ROWS],
        num_tensors=len(tensors["rows"]),
        columns=tensors["columns"],
        parting=parting(runs),
        differences=differences(runs, reports),
        states=STATES[1:],
    )


def save_page(page: str, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Writes `page` as a whole or not at all.

    Raises:
        FileExistsError: there is something at `path`, and not `force`.
        OSError: it cannot be written.
    """
    path = Path(path)
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already; --force writes over it")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(page)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(unfinished, 0o666 & ~umask)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return path


def _charts(runs: Sequence[DrawnRun], cards: Sequence[Card]) -> tuple[list[Chart], list[str]]:
    """The charts that there is something to draw of, and why the others are not there."""
    charts: list[Chart] = []
    left_out: list[str] = []
    for name, title, plot in _CHARTS:
        try:
            figure = plot(list(runs))
        except ValueError as error:
            left_out.append(f"{title}: {error}.")
            continue
        _flag(figure, cards)
        charts.append(_chart(name, title, figure, is_wide=False))
    for value in _MAPS:
        try:
            figure = plot_layers(runs[0], value, max_rows=_MAX_CELLS)
        except ValueError as error:
            left_out.append(f"layers by {value}: {error}.")
            continue
        charts.append(_chart(f"layers-{value}", f"Layers: {figure.layout.title.text}", figure, is_wide=True))
    try:
        figure = plot_activations(runs[0])
        charts.append(_chart("dead", f"Modules: {figure.layout.title.text}", figure, is_wide=True))
    except ValueError as error:
        left_out.append(f"dead units: {error}.")
    return charts, left_out


def _chart(name: str, title: str, figure: Any, *, is_wide: bool) -> Chart:
    plain = _rounded(figure.to_plotly_json())
    plain["layout"].pop("template", None)
    plain["layout"].pop("title", None)
    for trace in plain["data"]:
        if trace.get("type") == "heatmap" and sum(map(len, trace.get("text") or ())) > 4 * _MAX_CELLS * 16:
            trace.pop("text")
            trace["hovertemplate"] = "step %{x}<br>%{y}: %{z}<extra></extra>"
    told = [_told(trace) for trace in figure.data]
    return {"id": name, "title": title, "figure": plain, "told": [line for line in told if line], "is_wide": is_wide}


def _told(trace: Any) -> str:
    """A trace in words: the chart for those who do not see it."""
    values = [y for y in (trace.y if trace.type != "heatmap" else ()) if isinstance(y, (int, float))]
    if trace.type == "heatmap":
        return f"{trace.name}: {len(trace.y)} rows by {len(trace.x)} sampled steps"
    if trace.mode == "markers" and trace.yaxis == "y2":
        steps = ", ".join(str(x) for x in trace.x[:8]) + (", ..." if len(trace.x) > 8 else "")
        return f"{trace.name}: at step {steps}"
    if not values or (trace.name or "").endswith("least to largest"):
        return ""
    return f"{trace.name}: from {values[0]:.4g} to {values[-1]:.4g}; least {min(values):.4g}, largest {max(values):.4g}"


def _flag(figure: Any, cards: Sequence[Card]) -> None:
    """The findings' numbers, at their steps."""
    for card in cards:
        if card.first_step is not None:
            look = {"yref": "paper", "yshift": 8, "showarrow": False, "bordercolor": "#888888"}
            figure.add_annotation(x=card.first_step, y=1.0, text=str(card.number), **look)


def _rounded(value: Any) -> Any:
    """Plain data with as many digits as a chart can show; what is not finite is None."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def _badness(row: Sequence[Any]) -> tuple[int, float]:
    """Not finite first, then the largest norm."""
    return (0 if row[-1] else 1, -(row[1] or 0.0))


def _packed(run: DrawnRun) -> dict[str, Any]:
    ribbon = run.ribbon
    states = base64.b64encode(gzip.compress(bytes(ribbon.states), mtime=0)).decode("ascii")
    return {"first": ribbon.first_step, "width": ribbon.width, "states": states, "names": STATES}


def _json(value: Any) -> str:
    """JSON that may stand inside a script element, whatever names are in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _trusted(text: str) -> Any:
    """Text of ours, which is not to be escaped."""
    import markupsafe

    return markupsafe.Markup(text)
