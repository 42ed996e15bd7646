"""What MkDocs needs beyond mkdocs.yml: pages from outside docs/, links as the repository has them, and colours.

Pages link to each other as files of the repository do. README.md is the site's first page.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[1]
# Files of the repository that are not in docs/, by their place on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.txt",
    **{path: path for path in ("benchmarks/README.md", "benchmarks/optimizers/README.md") if (ROOT / path).exists()},
    **{f"examples/{file.name}": f"examples/{file.name.replace('.py', '.txt')}" for file in ROOT.glob("examples/*.*")},
    **{path: path for path in (f"benchmarks/results/{file.name}" for file in ROOT.glob("benchmarks/results/*.png"))},
}
REPOSITORY = {site: path for path, site in OUTSIDE.items()}
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
# Wide tables scroll by themselves.
EXTRA = """table { display: block; overflow-x: auto; font-size: 0.9em; }
pre { line-height: 1.3; }
.doc-contents { margin-left: 1em; }
"""
log = logging.getLogger("mkdocs.hooks.fastguard")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what lies outside docs/."""
    for path, site in OUTSIDE.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / path)))
    styles = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs("[data-bs-theme=dark] .highlight")
    files.append(File.generated(config, "site.css", content=f"{styles}\n{dark}\n{EXTRA}"))
    return files


def site_of(path: str) -> str | None:
    """Where a file of the repository is on the site."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(REPOSITORY.get(here, f"docs/{here}"))

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        site = site_of(path)
        if site is None or files.get_file_from_path(site) is None:
            log.warning("%s links to %s, which is not on the site", here, path)
            return match[0]
        return f"{match[1]}{os.path.relpath(site, posixpath.dirname(here) or '.')}{match[3] or ''})"

    parts = _FENCED.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in parts)
