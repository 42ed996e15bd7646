"""The report on a run as one HTML file, which opens offline and loads nothing from the network."""

from __future__ import annotations

from typing import Any

from ..report import build_report
from ..report.page import render
from ..report.page import save_page as save_page
from ..visualization.runs import run_of

__all__ = ["build_page", "save_page"]


def build_page(source: Any, *, title: str = "") -> str:
    """The page, as text.

    Args:
        source: a guard, a history, or the path of a log.
        title: title of the page; by default the name of the run.

    Raises:
        ImportError: plotly is missing.
        TypeError, ValueError, OSError: as for the figures.

    Cost: for a log, one pass over it. The page contains plotly, compressed to 2 MB.
    """
    run = run_of(source)
    return render(run, build_report(run.history) if run.guard is None else run.guard.report(), title)
