"""Where the time of a step goes: each piece of it timed where it stands, after a backward pass.

`python -m benchmarks.speed.pieces [NUM_STEPS]` prints a table, and saves nothing. Six runs of the small MLP take a step
each in turn. What a piece takes at least is what the machine cannot add to; one in ten steps shows what is cold.
"""

from __future__ import annotations

import itertools
import logging
import random
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

import fastguard
from fastguard.commands import bench
from fastguard.commands.bench import NO_CLIPPING, gc_off

PIECES = ("forward", "clip", "step", "observe", "all")
KINDS = ("plain", "clip", "guarded", "with the model", "observed", "as JSON lines")  # each with what is before it
_QUANTILES = (0.0, 0.1, 0.5)


class _Run:
    def __init__(self, kind: str, folder: Path) -> None:
        self._task = bench.mlp()
        self._params = list(self._task.model.parameters())
        self._optimizer: Any = torch.optim.AdamW(self._params, lr=1e-6, fused=True)
        level = KINDS.index(kind)
        if level > 1:
            given = {"sinks": [fastguard.JsonlSink(folder / "log.jsonl")] if level > 4 else [], "max_norm": NO_CLIPPING}
            fastguard.wrap(self._optimizer, self._task.model if level > 2 else None, **given)
        self._clips, self._observes = kind == "clip", level > 3
        self.times: dict[str, list[int]] = {piece: [] for piece in PIECES}

    def step(self) -> None:
        """Takes a step, and notes how long its pieces took but for the backward pass, in ns."""
        begun = perf_counter_ns()
        self._optimizer.zero_grad()
        before = perf_counter_ns()
        loss = self._task.loss()
        forward = perf_counter_ns()
        loss.backward()
        backward = perf_counter_ns()
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self._params, NO_CLIPPING)
        clipped = perf_counter_ns()
        self._optimizer.step()
        stepped = perf_counter_ns()
        if self._observes:
            self._optimizer.guard.observe(loss=loss)
        ended = perf_counter_ns()
        pieces = forward - before, clipped - backward, stepped - clipped, ended - stepped
        for piece, ns in zip(PIECES, (*pieces, ended - begun - (backward - forward)), strict=True):
            self.times[piece].append(ns)


def measure(num_steps: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """By kind and piece: quantiles in us, 0, 0.1 and 0.5, but for the first tenth of the steps."""
    runs = {kind: _Run(kind, folder) for kind in KINDS}
    orders = list(itertools.permutations(KINDS))
    random.Random(0).shuffle(orders)
    with gc_off():
        for index in range(num_steps):
            for kind in orders[index % len(orders)]:
                runs[kind].step()
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for kind, run in runs.items():
        for piece, times in run.times.items():
            counted = sorted(times[num_steps // 10 :])
            found[kind][piece] = [counted[int(q * len(counted))] / 1e3 for q in _QUANTILES]
    return found


def main(num_steps: int = 3000) -> None:
    """Prints what each kind takes, and in parentheses what it takes more than a plain step."""
    torch.set_num_threads(1)
    logging.getLogger("fastguard").disabled = True
    with tempfile.TemporaryDirectory() as folder:
        found = measure(num_steps, Path(folder))
    for i, quantile in enumerate(_QUANTILES):
        print(f"quantile {quantile}, us" + "".join(f"{piece:>18}" for piece in PIECES))
        for kind, pieces in found.items():
            more = ((pieces[piece][i], pieces[piece][i] - found["plain"][piece][i]) for piece in PIECES)
            print(f"{kind:16}" + "".join(f"{us:9.1f} ({beyond:+6.1f})" for us, beyond in more))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
