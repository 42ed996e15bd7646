"""From runs to the text of a page."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.resources
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import Report, build_report
from ..visualization.runs import DrawnRun, runs_of
from .charts import charts_of
from .comparing import differences, parting
from .parts import LOOKS, cards_of, cost_rows, infection, module_rows, ribbon_svg, tensor_lines, tensor_rows

_ASSETS = importlib.resources.files(__name__.rpartition(".")[0]) / "assets"
_NUM_STATIC_ROWS = 100


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
    _needed()
    runs = runs_of(source)
    reports = [build_report(run.history) if run.guard is None else run.guard.report() for run in runs]
    return render(runs, reports, title or ", ".join(run.name for run in runs), command)


def page_of(report: Report, source: Any, title: str = "") -> str:
    """The page of a report that is there already, with figures of `source`; raises as `build_page`."""
    _needed()
    (run,) = runs_of(source)
    return render([run], [report], title or run.name, "")


def _needed() -> tuple[Any, Any]:
    """Jinja2 and plotly; an ImportError says how to get them."""
    try:
        import jinja2
        from plotly import offline
    except ImportError as error:
        raise ImportError("the page of a run needs plotly and Jinja2: pip install fastguard[report]") from error
    return jinja2, offline


def render(runs: Sequence[DrawnRun], reports: Sequence[Report], title: str, command: str) -> str:
    """The page of these runs and of what is to be said of each."""
    jinja2, offline = _needed()
    plotly, early, late = offline.get_plotlyjs(), _asset("early.js"), _asset("page.js")
    # Scripts by their hashes. plotly styles its elements where they stand; a style has nowhere to load anything from.
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, (early, plotly, late)))}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    cards = [cards_of(report) for report in reports]
    charts, left_out = charts_of(runs, cards[0])
    tensors, modules = tensor_rows(runs[0]), module_rows(reports[0])
    # What follows the first paint. One packed text each, so that a chart costs nothing before it is drawn.
    packed = {f"chart-{chart.name}": _packed(_json(chart.figure).encode()) for chart in charts}
    packed["ribbon"] = _packed(bytes(runs[0].ribbon.states))
    packed["tensors"] = _packed(_json(tensors["rows"]).encode())
    lines, values = tensor_lines(runs[0])
    packed["lines"] = _packed(values)
    data = {
        "ribbon": {"first": runs[0].ribbon.first_step, "width": runs[0].ribbon.width, "looks": list(LOOKS.values())},
        "lines": lines,
        "charts": [{"name": chart.name, "height": chart.height, "group": chart.group} for chart in charts],
    }
    neat: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, **neat)
    return str(
        environment.from_string(_asset("page.html")).render(
            title=title,
            command=command,
            policy=policy,
            style=_trusted(_asset("page.css")),
            early=_trusted(early),
            late=_trusted(late),
            plotly=_trusted(plotly),
            data=_trusted(_json(data)),
            packed=packed,
            runs=[
                {
                    "run": run,
                    "report": report,
                    "cards": its,
                    "lines": str(report).splitlines(),
                    "ribbon": ribbon_svg(run),
                }
                for run, report, its in zip(runs, reports, cards)
            ],
            charts=[chart for chart in charts if not chart.group],
            maps=[chart for chart in charts if chart.group],
            left_out=left_out,
            infections=infection(runs[0]),
            tensors=sorted(tensors["rows"], key=_badness)[:_NUM_STATIC_ROWS],
            num_tensors=len(tensors["rows"]),
            columns=tensors["columns"],
            modules=modules,
            costs=cost_rows(reports[0]),
            parting=parting(runs),
            differences=differences(runs, reports),
            looks=LOOKS,
            logs=[log for log in map(_log_of, runs) if log],
        )
    )


def _log_of(run: DrawnRun) -> dict[str, str] | None:
    """By what a run's log can be told from others, if it is a file."""
    if run.path is None or not os.path.isfile(run.path):
        return None
    digest = hashlib.sha256()
    with open(run.path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        size = file.tell()
    return {"name": run.name, "size": f"{size:,}", "digest": digest.hexdigest()}


def save_page(page: str, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Writes `page` as a whole or not at all; into a link's target, and a device or pipe as into any.

    Raises:
        FileExistsError: there is something at `path`, and not `force`.
        OSError: it cannot be written.
    """
    path = Path(path)
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already; --force writes over it")
    if path.exists() and not path.is_file():  # which a rename would put a file in the place of: /dev/null, as root
        path.write_text(page, encoding="utf-8", newline="\n")
        return path
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(page)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(unfinished, 0o666 & ~umask)
        os.replace(unfinished, target)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return path


def _badness(row: Sequence[Any]) -> tuple[int, float]:
    """Not finite first, then the largest norm."""
    return (0 if row[-1] else 1, -(row[1] or 0.0))


def _packed(data: bytes) -> str:
    """In as few characters as a page can hold without more; the same for the same data."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


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
