"""The page of what the demo trained."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from ..._text import prose, shown


def told(log: Path, page: Path, *, opens: bool) -> str:
    """Writes the page of `log` to `page`; returns a line that names it, or says how to get it.

    Args:
        log: what the demo's guard wrote.
        page: where it goes; what is there is written over.
        opens: show it in a browser.
    """
    by_hand = f"fastguard report {shown(log)} makes a page of it"
    try:
        from ...page import build_page, save_page

        save_page(build_page(log, title="fastguard demo", command="fastguard demo"), page, force=True)
    except ImportError:
        return f"{by_hand}; it needs: pip install 'fastguard[report]'"
    except OSError as error:  # a full disk, a page that may not be written over
        return f"{by_hand}; here it could not be written: {prose(error)}"
    if opens and not webbrowser.open(page.resolve().as_uri()):
        return f"the page of it, which no browser here would open: {shown(page)}"
    return f"the page of it, to be opened in a browser: {shown(page)}"
