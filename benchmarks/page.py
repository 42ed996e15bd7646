"""What the page of a run costs: to build it from long logs, to carry it, to see it.

    python -m benchmarks.page                          # all of it; 10^6 steps make a log of 370 MB in --folder
    python -m benchmarks.page --log runs/demo/run.jsonl --screenshots docs/images

Each page is built by `fastguard report` in a process of its own, with the log in the page cache, once with orjson and
once without. Where Chromium and playwright are, it is opened as many times as --rounds says, offline, in a fresh
profile: the first contentful paint as the browser has it, and all charts drawn as the page itself marks it.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.metadata
import json
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_TABLES = 20
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
_BUILD = """
import resource, sys, time
if sys.argv[1] == "json":
    sys.modules["orjson"] = None
started = time.perf_counter()
from fastguard.commands import cli
code = cli.main(["report", sys.argv[2], "-f", "-o", sys.argv[3]])
print(code, time.perf_counter() - started, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def lines(num_steps: int, num_tensors: int, seed: int = 0) -> Iterator[str]:
    """A log as a `JsonlSink` writes it: noise around a falling loss, some steps clipped, three not finite, a spike of
    one step; a table of all tensors at twenty of the steps."""
    rng = random.Random(seed)
    names = [f"layers.{i // 8}.block.{i % 8}.weight" for i in range(num_tensors)]
    shares = [rng.lognormvariate(0, 1) for _ in names]
    whole = math.hypot(*shares)
    yield json.dumps({"time": 1.7e9, "model": {"names": names, "clip_limit": 1.5}})
    bad = {num_steps // 3, num_steps // 2, num_steps // 2 + 1}
    for step in range(num_steps):
        norm = rng.lognormvariate(0, 0.3) * (1e4 if step == num_steps // 5 else 1.0)
        is_bad = step in bad
        loss = 2.5 * math.exp(-3 * step / num_steps) + 0.1 * rng.random()
        line: dict[str, Any] = {"step": step, "time": 1.7e9 + 0.05 * step, "loss": loss}
        line.update(
            {"lr": 3e-4, "grad/norm": "NaN" if is_bad else norm, "grad/max": norm / 10, "grad/min": norm * 1e-9}
        )
        line.update(
            {"grad/mean": norm * 1e-7, "grad/std": norm * 1e-4, "grad/num_zeros": 3, "grad/num_nans": int(is_bad)}
        )
        line.update({"grad/num_infs": 0, "grad/num_elements": 1_000_000, "clip/coef": min(1.0, 1.5 / norm)})
        if norm > 1.5:
            line["grad/clipped_norm"] = 1.5
        line.update({"clipped": norm > 1.5, "skipped": is_bad})
        if is_bad:
            line["nonfinite"] = names[-3:]
        if num_tensors and (is_bad or step % max(1, num_steps // NUM_TABLES) == 0):
            bad_from = num_tensors - 3 if is_bad else num_tensors
            rows = (_row(rng, norm * share / whole, place >= bad_from) for place, share in enumerate(shares))
            line["tensors"] = dict(zip(names, rows))
        yield json.dumps(line, separators=(",", ":"))


def _row(rng: random.Random, norm: float, is_bad: bool) -> list[float]:
    return [1024, norm * norm, norm / 100, norm / 5, norm * 1e-8, rng.randrange(8), int(is_bad), 0, norm * norm, norm]


def write_log(path: Path, num_steps: int, num_tensors: int) -> Path:
    """The log at `path`, which is kept for the next time."""
    if not path.exists():
        unfinished = path.with_suffix(".part")
        with unfinished.open("w") as file:
            file.writelines(line + "\n" for line in lines(num_steps, num_tensors))
        unfinished.rename(path)
    return path


def build(log: Path, page: Path, parser: str) -> dict[str, float]:
    """Seconds, memory and size of building `page` in a process of its own."""
    with log.open("rb") as file:  # into the page cache
        while file.read(1 << 24):
            pass
    done = subprocess.run([sys.executable, "-c", _BUILD, parser, str(log), str(page)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    code, wall, cpu, rss = done.stdout.split()[-4:]
    if code != "0":
        raise RuntimeError(done.stderr)
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "wall_s": float(wall),
        "cpu_s": float(cpu),
        "rss_mb": int(rss) * unit / 1e6,
        "page_mb": page.stat().st_size / 1e6,
    }


@contextlib.contextmanager
def opened(page: Path, **settings: Any) -> Iterator[Any]:
    """`page` in a fresh Chromium without network, when all is drawn."""
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        tab = browser.new_context(offline=True, **settings).new_page()
        tab.goto(page.as_uri())
        tab.locator("html[data-drawn=yes]").wait_for(state="attached", timeout=120_000)
        yield tab
        browser.close()


def paint(page: Path, rounds: int) -> dict[str, list[float]]:
    """Milliseconds from navigation to the first contentful paint and to the last chart, least first."""
    found: dict[str, list[float]] = {"first_paint_ms": [], "drawn_ms": []}
    for _ in range(rounds):
        with opened(page, viewport={"width": 1280, "height": 900}) as tab:
            first = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            found["first_paint_ms"].append(tab.evaluate(first))
            found["drawn_ms"].append(tab.evaluate("performance.getEntriesByName('drawn')[0].startTime"))
    return {key: sorted(values) for key, values in found.items()}


def screenshots(page: Path, folder: Path) -> list[Path]:
    """The top of `page` by day, and its heat map of layers by night."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / "report.png", folder / "layers.png"]
    with opened(page, viewport={"width": 1100, "height": 1180}) as tab:
        tab.screenshot(path=made[0])
    with opened(page, viewport={"width": 1100, "height": 1000}, color_scheme="dark") as tab:
        box = tab.locator(".wide").bounding_box()
        clip = {"x": 0, "y": box["y"] - 8, "width": 1100, "height": box["height"] + 16}
        tab.screenshot(path=made[1], clip=clip, full_page=True)
    return made


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    versions = {name: importlib.metadata.version(name) for name in ("plotly", "orjson")}
    browser = (
        subprocess.run([str(BROWSER), "--version"], capture_output=True, text=True).stdout.strip() if BROWSER else ""
    )
    load = os.getloadavg()[0]
    return {"cpus": os.cpu_count(), "python": platform.python_version(), **versions, "browser": browser, "load": load}


def main() -> None:
    """Measures, prints, and with --json saves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    folder = Path(tempfile.gettempdir()) / "fastguard-page"
    parser.add_argument("--folder", type=Path, default=folder, help="of the logs")
    parser.add_argument("--log", type=Path, help="instead of made ones: this log")
    parser.add_argument("--steps", type=int, nargs="*", default=[10**5, 10**6], help="lengths of the logs made")
    parser.add_argument("--tensors", type=int, default=10**4, help="in the tables of the longest (default: 10^4)")
    parser.add_argument("--rounds", type=int, default=5, help="how often a page is opened (0: not at all)")
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="also make the pictures of the README there")
    parser.add_argument("--json", type=Path, help="save the figures there")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    logs = {str(arguments.log): arguments.log} if arguments.log else {}
    for num in () if arguments.log else arguments.steps:
        num_tensors = arguments.tensors if num == max(arguments.steps) else 100
        path = arguments.folder / f"{num}-{num_tensors}.jsonl"
        logs[f"{num} steps, {num_tensors} tensors"] = write_log(path, num, num_tensors)
    import plotly

    library = (Path(plotly.__file__).parent / "package_data" / "plotly.min.js").read_bytes()
    library_mb = len(gzip.compress(library, 6)) * 4 / 3 / 1e6  # as a page holds it
    figures: dict[str, Any] = {"machine": machine(), "plotly_js_mb": library_mb}
    for name, log in logs.items():
        page = arguments.folder / "page.html"
        for kind in ("orjson", "json"):
            found = build(log, page, kind)
            figures[f"{name}, {kind}"] = found
            extra = found["page_mb"] - library_mb
            told = f"{found['wall_s']:.1f} s ({found['cpu_s']:.1f} s of CPU), {found['rss_mb']:.0f} MB resident"
            print(f"{name}, {kind}: built in {told}, page of plotly.js + {extra:.2f} MB", flush=True)
        if BROWSER and arguments.rounds:
            seen = paint(page, arguments.rounds)
            figures[f"{name}, paint"] = seen
            told = "; ".join(f"{k} {statistics.median(v):.0f} ({v[0]:.0f}-{v[-1]:.0f})" for k, v in seen.items())
            print(f"{name}: {told}", flush=True)
        if arguments.screenshots:
            for path in screenshots(page, arguments.screenshots):
                print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
