"""What sampling weights and updates costs: `python -m benchmarks.weights [--rounds N] [--json FILE]`; about 30 s.

With `--cpu-time`, one thread and its CPU time, for a machine that does other things as well.

Two guarded runs from the same weights take one step each in turn: without sampling, and with a sample at every step.
What a sampled step adds is the median of the differences in the same round. What a step adds that is not due is the
pair of calls around it, in a loop: it would drown in the noise of whole steps. The memory held from before a step until
after it is counted from the copies themselves. Correct first: after the rounds both must have the same parameters, bit
for bit, and the last sample's update norms must be those of the exact differences.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import fastguard
from benchmarks.clocks import keep, make_clock, make_parser
from fastguard.commands.bench.cases import STEP_CASES
from fastguard.commands.bench.harness import garbage_collector_off
from fastguard.observers.weights import WeightSampler

EVERY = 100
NEVER = 10**9
KINDS: dict[str, Any] = {"guarded": None, "sampled": 1}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW(fused=True), from its state": lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True),
    "SGD with momentum, from its state": lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9),
    "NAdam, by copies": lambda p: torch.optim.NAdam(p, lr=1e-6),
}
NUM_ROUNDS = {"step-mlp": 600, "step-transformer": 30}


class Run:
    """One guarded run of a case."""

    def __init__(self, case: str, make: Callable[[Any], torch.optim.Optimizer], weights: Any) -> None:
        task = STEP_CASES[case].build()
        self.model, self.loss = task.model, task.loss
        self.optimizer = fastguard.wrap(make(self.model.parameters()), self.model, max_norm=1e9, weights=weights)

    def step(self, clock: Callable[[], float] = time.perf_counter) -> float:
        started = clock()
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        return clock() - started


def check(runs: dict[str, Run]) -> None:
    """Raises unless sampling changed no bit, and the samples are right."""
    first, *others = [list(run.model.parameters()) for run in runs.values()]
    if not all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)):
        raise RuntimeError("sampling changed the training")
    run = runs["sampled"]
    before = [p.detach().double() for p in run.model.parameters()]
    run.step()
    for w, p, b in zip(run.optimizer.guard.last.weights, run.model.parameters(), before, strict=True):
        true, rounding = float((p.detach().double() - b).norm()), 2e-7 * float(b.norm())
        if w.update_norm is None or abs(w.update_norm - true) > 1e-3 * true + rounding:
            raise RuntimeError(f"update of {w.name}: {w.update_norm} where {true} is true")


def bytes_held(run: Run) -> int:
    """What a sample holds beside the parameters."""
    return sum(c.numel() * c.element_size() for c in WeightSampler().before(run.optimizer).copies.values())


def off_step_seconds(case: str, name: str, clock: Callable[[], float], num_calls: int = 2000) -> float:
    """What sampling adds to a step that is not due."""
    run = Run(case, OPTIMIZERS[name], NEVER)
    run.step()  # step 0 is always due
    guard = run.optimizer.guard
    sampling = guard.sampling.weights_of(guard.run.members[0])
    started = clock()
    for _ in range(num_calls):
        sampling.before(run.optimizer)
        sampling.after(run.optimizer)
    return (clock() - started) / num_calls


def measure(case: str, name: str, num_rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    runs = {kind: Run(case, OPTIMIZERS[name], weights) for kind, weights in KINDS.items()}
    kinds, times = list(runs), {kind: [] for kind in runs}
    with garbage_collector_off():
        for index in range(-5, num_rounds):
            for kind in kinds if index % 2 else reversed(kinds):
                seconds = runs[kind].step(clock)
                if index >= 0:
                    times[kind].append(seconds)
    check(runs)
    step = statistics.median(times["guarded"])
    sampled = statistics.median(b - a for a, b in zip(times["guarded"], times["sampled"], strict=True))
    off = off_step_seconds(case, name, clock)
    return {
        "case": STEP_CASES[case].title,
        "optimizer": name,
        "step_ms": step * 1e3,
        "off_step_adds_us": off * 1e6,
        "sampled_step_adds_ms": sampled * 1e3,
        f"ratio_every_{EVERY}": 1 + (off + sampled / EVERY) / step,
        "copied_MiB": bytes_held(runs["sampled"]) / 2**20,
    }


def main() -> None:
    arguments = make_parser("benchmarks.weights", __doc__, 1.0, "times as many rounds as usual").parse_args()
    clock = make_clock(arguments)
    results = []
    for case, rounds in NUM_ROUNDS.items():
        print(f"\n{STEP_CASES[case].title}")
        for name in OPTIMIZERS:
            r = measure(case, name, max(3, round(rounds * arguments.rounds)), clock)
            results.append(r)
            print(
                f"  {name:36} step {r['step_ms']:8.3f} ms, off-step {r['off_step_adds_us']:+7.1f} us, "
                f"sampled step {r['sampled_step_adds_ms']:+8.3f} ms, copies {r['copied_MiB']:5.1f} MiB: "
                f"× {r[f'ratio_every_{EVERY}']:.4f} at every={EVERY}"
            )
    keep(arguments, results)


if __name__ == "__main__":
    main()
