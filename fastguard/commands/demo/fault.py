"""`fastguard demo --fault NAME`: a small real training with that fault in it, and whether the report names it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

import fastguard

from ..._text import shown
from ...diagnosis import Finding, unexplained
from ...report import Report
from ..cli import EXIT_FAILED, CommandError
from . import page, trouble
from .lab.fault import Fault
from .lab.faults import FAULTS
from .lab.tasks import TASKS
from .lab.training import WATCHING, Outcome, Training
from .progress import Progress
from .trouble import TROUBLES


def listing() -> str:
    """Every fault that `--fault` takes, with what is done to the training."""
    known = {name: fault.title for name, fault in FAULTS.items()}
    known |= {name: f"{one.title}: without recovery, and with it" for name, one in TROUBLES.items()}
    width = max(map(len, known)) + 2
    return "\n".join(f"  {name:<{width}}{title}" for name, title in known.items())


def named_first(report: Report) -> Finding | None:
    """What the report blames before all else: its first cause, or the first finding that no cause explains."""
    told = [*report.causes, *unexplained(report.findings, report.causes)]
    return next((finding for finding in told if finding.severity != "info"), None)


def run(name: str, seed: int, folder: Path, *, opens: bool = False) -> int:
    """Plants the fault, trains, prints the report; 0 if the right cause comes first in it, and the right layer."""
    if name in TROUBLES:
        return trouble.run(name, seed, folder, opens=opens)
    if name not in FAULTS:
        known = ", ".join([*FAULTS, *TROUBLES])
        raise CommandError(f"--fault {name}: unknown. The faults are: {known}. `--fault list` tells what each does.")
    fault = FAULTS[name]
    torch.set_num_threads(1)
    setup = TASKS[fault.task](seed)
    planted = fault.plant(setup, random.Random(seed))
    where = f", in {planted.layers[0]}" if planted.layers else ""
    since = f"from step {planted.step} on" if planted.step else "from the start"
    print(f"fault:    {name}: {fault.title}")
    print(f"planted:  {since}{where}")
    print(f"training: {fault.task} on the text of Python's standard library, {setup.num_steps} steps, seed {seed}")
    log = folder / f"{name}.jsonl"
    print(f"log:      {shown(log)}\n", flush=True)

    started = time.perf_counter()
    with Progress(setup.num_steps) as progress:
        training = Training(setup, [fastguard.JsonlSink(log, append=False, tensors_every=10)], **WATCHING)
        outcome = training.run(progress)
    report = training.guard.report()
    print(f"\n{_ended(outcome, setup.num_steps)}, in {time.perf_counter() - started:.0f} s")
    print("\n$ print(optimizer.guard.report())\n")
    print(report)
    training.guard.close()
    code = _verdict(fault, report, planted.layers)
    print(f"\n{page.told(log, log.with_suffix('.html'), opens=opens)}")
    return code


def _ended(outcome: Outcome, num_steps: int) -> str:
    if outcome.stopped is not None:
        return f"stopped by the guard after {len(outcome.losses)} of {num_steps} steps: {outcome.stopped}"
    return f"trained {num_steps} steps: loss {outcome.losses[0]:.3f} -> {outcome.final_loss:.3f}"


def _verdict(fault: Fault, report: Report, layers: tuple[str, ...] | None) -> int:
    found = named_first(report)
    named = "nothing" if found is None else found.rule
    is_right = found is not None and found.rule in fault.causes
    print(f"\nplanted: {fault.title}\nnamed first: {named}" + (", which is right" if is_right else ""))
    if is_right and found is not None and layers is not None:
        blamed = found.layers[0] if found.layers else "none"
        is_right = any(blamed == layer or blamed.startswith(f"{layer}.") for layer in layers)
        print(f"in layer: {blamed}" + (", which is right" if is_right else f"; it is in {layers[0]}"))
    if not is_right:
        print(f"THE DEMO FAILED: right would have been {' or '.join(fault.causes)}")
        return EXIT_FAILED
    return 0
