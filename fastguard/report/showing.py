"""A report as a page: the whole one with charts, or tables alone."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

from .._text import listed, shown

_HEIGHT_PX = 800


def save(report: Any, path: str | os.PathLike[str], title: str) -> Path:
    """Writes the page of `report`; see `Report.save`."""
    from ..page.build import save_page

    return save_page(_page(report, title), path, force=True)


def to_html(report: Any) -> str:
    """The page in a frame of its own, which can neither reach what is around it nor the network; else tables."""
    try:
        page = _page(report, "")
    except (ImportError, ValueError, OSError):  # no plotly, no step, a log that is gone: the findings are here
        return tables(report)
    return (
        f'<iframe sandbox="allow-scripts" title="report of a training run" style="width:100%;height:{_HEIGHT_PX}px;'
        f'border:0" srcdoc="{html.escape(page)}"></iframe>'
    )


def steps_of(finding: Any) -> str:
    """ "step 3" or "steps 3 to 5"; empty where the finding has none."""
    if finding.first_step is None:
        return ""
    is_one = finding.last_step in (None, finding.first_step)
    return f"step {finding.first_step}" if is_one else f"steps {finding.first_step} to {finding.last_step}"


def tables(report: Any) -> str:
    """Verdict, causes and findings as HTML without scripts or styles of its own."""
    rows = [("finding", "where", "what", "what to do")]
    for one in (*report.causes, *report.findings):
        kind = f"likely cause: {one.rule}" if one in report.causes else f"{one.severity}: {one.rule}"
        where = ", ".join(filter(None, (steps_of(one), listed(one.layers))))
        rows.append((kind, where, one.summary, one.recommendation))
    head, *body = [[html.escape(shown(cell, 2000)) for cell in row] for row in rows]
    lines = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body]
    verdict = f"<p><strong>{html.escape(str(report).splitlines()[0])}</strong></p>"
    if not lines:
        return verdict
    titles = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return f"{verdict}<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _page(report: Any, title: str) -> str:
    if report.source is None:
        raise ValueError("this report is of no run of which anything could be drawn: print it")
    from ..page.build import page_of

    return page_of(report, report.source(), title)
