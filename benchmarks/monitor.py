"""Times whole training steps with every module of a transformer watched, against what people do today.

    python -m benchmarks.monitor        # about 40 s on two cores that do nothing else

Runs that start alike take one step each in turn; each run's time is set against that of the unguarded run with
`clip_grad_norm_` in the same iterations. A run that did not end with the same parameters, bit for bit, is an error.
Writes benchmarks/results/monitor.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

import fastguard
from fastguard.commands.bench import NO_CLIPPING, WrongResultError, gc_off

from .machine import Machine, line
from .speed.cases import transformer
from .speed.timing import Spread

RESULTS = Path(__file__).resolve().parent / "results" / "monitor.json"
EVERY = 10
NUM_CYCLES, NUM_WARM_UP = 20, 2  # of EVERY steps each
CLIP, GUARDED, WATCHED, HOOKS, HISTOGRAMS = "clip", "guarded", "watched", "hooks", "tensorboard"
TITLES = {
    CLIP: "unguarded, clip_grad_norm_",
    GUARDED: "guarded",
    WATCHED: f"guarded, every module watched every {EVERY} steps",
    HOOKS: f"clip_grad_norm_, hooks and .item() every {EVERY} steps",
}
if importlib.util.find_spec("tensorboard") is not None:
    TITLES[HISTOGRAMS] = f"clip_grad_norm_, TensorBoard histograms every {EVERY} steps"


class ItemMonitor:
    """What is written by hand: a hook on each module that asks torch for one figure after the other."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.step = 0
        self.figures: dict[str, dict[str, float]] = {}
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.ModuleList):
                module.register_forward_hook(lambda module, args, x, name=name: self._look(name, x))

    def _look(self, name: str, x: torch.Tensor) -> None:
        if self.step % EVERY:
            return
        x = x.detach()
        self.figures[name] = {
            "mean": x.mean().item(),
            "std": x.std().item(),
            "min": x.min().item(),
            "max": x.max().item(),
            "zero_ratio": (x == 0).float().mean().item(),
            "saturation_ratio": (x.abs() > 0.99).float().mean().item(),
            "num_nans": x.isnan().sum().item(),
            "num_infs": x.isinf().sum().item(),
        }


class HistogramMonitor:
    """A hook on each module that writes a TensorBoard histogram of its output."""

    def __init__(self, model: torch.nn.Module) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.step = 0
        self._folder = tempfile.TemporaryDirectory()
        self._writer = SummaryWriter(self._folder.name)
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.ModuleList):
                module.register_forward_hook(lambda module, args, x, name=name: self._look(name or "model", x))

    def _look(self, name: str, x: torch.Tensor) -> None:
        if self.step % EVERY == 0:
            self._writer.add_histogram(name, x.detach(), self.step)


class Run:
    """One of the runs; all start from the same weights, on the same batches."""

    def __init__(self, kind: str) -> None:
        task = transformer()
        self.kind = kind
        self.model, self.loss = task.model, task.loss
        self.parameters = list(task.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=True)
        monitors = {HOOKS: ItemMonitor, HISTOGRAMS: HistogramMonitor}
        self.rival = monitors[kind](task.model) if kind in monitors else None
        if kind in (GUARDED, WATCHED):
            watch = {"modules": "all", "every": EVERY, "overhead_budget": None}
            options = {"activations": watch} if kind == WATCHED else {}
            fastguard.wrap(self.optimizer, task.model, max_norm=NO_CLIPPING, **options)
        self.step: Callable[[], None] = self._step if kind in (GUARDED, WATCHED) else self._clip_and_step

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def _clip_and_step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, NO_CLIPPING)
        self.optimizer.step()
        if self.rival is not None:
            self.rival.step += 1


def _times(num_cycles: int) -> tuple[dict[str, Run], dict[str, list[float]]]:
    """Microseconds of every step of every run, taken in turn, in every order."""
    runs = {kind: Run(kind) for kind in TITLES}
    times: dict[str, list[float]] = {kind: [] for kind in TITLES}
    orders = list(permutations(TITLES))
    with gc_off():
        for index in range(-NUM_WARM_UP * EVERY, num_cycles * EVERY):
            for kind in orders[index % len(orders)]:
                step = runs[kind].step
                started = time.perf_counter_ns()
                step()
                elapsed = time.perf_counter_ns() - started
                if index >= 0:
                    times[kind].append(elapsed / 1e3)
    return runs, times


def _check(runs: dict[str, Run], num_cycles: int) -> None:
    for kind, run in runs.items():
        for a, b in zip(runs[CLIP].parameters, run.parameters, strict=True):
            if not torch.equal(a, b):
                raise WrongResultError(f"parameters of the run {kind!r} are not those of the unguarded one")
    monitor = runs[WATCHED].optimizer.guard.activations  # type: ignore[attr-defined]
    rival = runs[HOOKS].rival
    assert isinstance(rival, ItemMonitor)
    if monitor.cost.num_samples != num_cycles + NUM_WARM_UP or len(monitor.activities) != len(rival.figures):
        raise WrongResultError(f"{monitor.cost} and {len(monitor.activities)} modules, against {len(rival.figures)}")
    for record in monitor.activities:
        theirs = rival.figures["" if record.name == "Transformer" else record.name]
        if abs(record.stats.mean - theirs["mean"]) > 1e-4 or abs(record.stats.max_val - theirs["max"]) > 1e-6:
            raise WrongResultError(f"{record.name}: {record.stats} against {theirs}")


def _spread(times: list[float], base: list[float], size: int, drop_sampled: bool = False) -> dict[str, float]:
    """Ratio of the times of `size` steps at a stretch."""
    ratios = []
    for start in range(0, len(times), size):
        if not (drop_sampled and start % EVERY == 0):
            ratios.append(sum(times[start : start + size]) / sum(base[start : start + size]))
    return Spread.of(ratios)._asdict()


def measure(num_cycles: int = NUM_CYCLES) -> dict[str, Any]:
    """Times of whole steps, and their ratios to the unguarded run's.

    Raises:
        WrongResultError: the runs differ, or the two monitors do not agree.
    """
    runs, times = _times(num_cycles)
    _check(runs, num_cycles)
    cycles = {kind: _spread(times[kind], times[CLIP], EVERY) for kind in TITLES if kind != CLIP}
    off = {kind: _spread(times[kind], times[CLIP], 1, drop_sampled=True) for kind in TITLES if kind != CLIP}
    monitor = runs[WATCHED].optimizer.guard.activations  # type: ignore[attr-defined]
    return {
        "num_parameters": sum(p.numel() for p in runs[CLIP].parameters),
        "num_modules": len(monitor.names),
        "num_steps": num_cycles * EVERY,
        "step_us": {kind: statistics.median(values) for kind, values in times.items()},
        "sampled_step_us": {kind: statistics.median(values[::EVERY]) for kind, values in times.items()},
        "monitor_s_a_sample": monitor.cost.seconds / monitor.cost.num_samples,
        "cycle_ratio": cycles,
        "off_step_ratio": off,
        "off_step_over_guarded": _spread(times[WATCHED], times[GUARDED], 1, drop_sampled=True),
    }


def _tell(found: dict[str, Any]) -> None:
    print(f"transformer of {found['num_parameters'] / 1e6:.1f}M parameters, {found['num_modules']} modules")
    print(f"{'':60} {'of ten steps':>14} {'off-steps':>10}")
    for kind, title in TITLES.items():
        if kind != CLIP:
            whole, off = found["cycle_ratio"][kind]["median"], found["off_step_ratio"][kind]["median"]
            print(f"{title:60} {whole:14.4f} {off:10.4f}")
    print(f"watched off-steps over guarded ones: {found['off_step_over_guarded']['median']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=NUM_CYCLES, help=f"of {EVERY} steps (default {NUM_CYCLES})")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    arguments = parser.parse_args()
    here = Machine()
    found = measure(arguments.cycles)
    machine = here.to_dict()
    print(line(machine))
    _tell(found)
    if not arguments.dry:
        RESULTS.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
