"""The report on one or several runs as one HTML file, which opens offline and loads nothing from the network."""

from __future__ import annotations

from typing import Any

from ..report import build_report
from ..report.page import render
from ..report.page import save_page as save_page
from ..visualization.runs import runs_of

__all__ = ["build_page", "save_page"]


def build_page(source: Any, *, title: str = "", command: str = "") -> str:
    """The page, as text.

    Args:
        source: as for the figures: a guard, a history, the path of a log, or up to eight in a list, or in a dict by
            name.
        title: title of the page; by default the names of the runs.
        command: the command that made the page, for the footer.

    Raises:
        ImportError: plotly is missing.
        TypeError, ValueError, OSError: as for the figures.

    Cost: for a log, one pass over it. The page contains plotly, compressed to 2 MB.
    """
    runs = runs_of(source)
    reports = [build_report(run.history) if run.guard is None else run.guard.report() for run in runs]
    return render(runs, reports, title, command)
