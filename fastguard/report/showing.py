"""A report as HTML: a page of its own, or what a notebook shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def save(report: Any, path: str | os.PathLike[str], title: str) -> Path:
    """Writes the page of `report`; see `Report.save`."""
    from ..page.build import page_of, save_page

    if report.source is None:
        raise ValueError("this report is of no run of which anything could be drawn: print it")
    return save_page(page_of(report, report.source(), title), path, force=True)


def to_html(report: Any) -> str | None:
    """What a notebook shows: small, without plotly and scripts; None without Jinja2."""
    from ..page.build import overview

    return overview(report, report.source() if report.source else None)


def steps_of(finding: Any) -> str:
    """ "step 3" or "steps 3 to 5"; empty where the finding has none."""
    if finding.first_step is None:
        return ""
    is_one = finding.last_step in (None, finding.first_step)
    return f"step {finding.first_step}" if is_one else f"steps {finding.first_step} to {finding.last_step}"
