"""The demo from beginning to end."""

from __future__ import annotations

import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path

import torch

import fastguard

from ... import kernels
from ..._text import prose, shown
from ..cli import EXIT_FAILED, CommandError
from .model import write
from .plan import Pace
from .text import Corpus, library_text
from .training import Progress, train, warnings_printed

BATCH_SIZE = 16
_TRAINING = 0.85  # of the time: what is left is for loading torch and for the sample


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the command line said; `steps` is None if time decides, `opens` whether to show the page in a browser."""

    steps: int | None
    minutes: float
    quick: bool
    seed: int
    folder: Path
    device: str
    opens: bool


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: torch finds no CUDA device here. Leave it out, or take --device cpu.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def run(settings: DemoSettings) -> int:
    """Trains, reports, samples; the exit code."""
    started = time.perf_counter()
    try:
        kernels.resolve_backend("auto")
    except ValueError as error:
        raise CommandError(str(error)) from None
    device = _device(settings.device)
    seconds = 60 * settings.minutes
    text = library_text()
    corpus = Corpus(text, BATCH_SIZE, settings.seed, device)
    torch.manual_seed(settings.seed)
    wanted = settings.steps or (100 if settings.quick else 1000)
    plan = Pace(wanted, None if settings.steps else started + _TRAINING * seconds)
    log = settings.folder / "run.jsonl"
    print(f"data:   {len(text) / 1e6:.1f} MB of Python's standard library, as bytes; nothing is downloaded")
    print(f"log:    {shown(log)} (one line a step)")
    print(f"device: {device}, threads: {torch.get_num_threads()}; {wanted} steps of {BATCH_SIZE} texts\n", flush=True)

    with warnings_printed():
        sink = fastguard.JsonlSink(log, append=False, tensors_every=20)
        trained = train(corpus, plan, [sink], Progress())
    guard = fastguard.Guard.of(trained.optimizer)
    print(f"\ntrained {trained.num_steps} steps: loss {trained.first_loss:.2f} -> {trained.last_loss:.2f}")
    print("\n$ print(optimizer.guard.report())\n")
    print(guard.report())
    guard.close()
    if not trained.verdict.is_right:
        print(f"\nTHE DEMO FAILED at step {trained.verdict.step}: see above. The log is {shown(log)}")
        return EXIT_FAILED

    print("\na sample of what the model writes\n")
    generator = torch.Generator().manual_seed(settings.seed)
    sample = write(trained.model, "def ", 120 if settings.quick else 320, generator)
    print("\n".join(f"    {line[:96]}".rstrip() for line in sample.splitlines()))

    print("\nwhat guarding costs: `fastguard bench --quick` measures it beside clip_grad_norm_", flush=True)
    its_page = page_line(log, settings.folder / "run.html", opens=settings.opens)
    print(f"\ndone in {time.perf_counter() - started:.0f} s; the log is {shown(log)}\n{its_page}")
    return 0


def page_line(log: Path, page: Path, *, opens: bool) -> str:
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
