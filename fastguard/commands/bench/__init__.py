"""`fastguard bench`: what fastguard costs, against torch's own functions, in turn with them as in training.

`clipping` says what is measured and how calls are compared, `harness` for how long and where.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastguard

from ..cli import Parser
from .clipping import CASES, NO_CLIPPING, STEP_MLP, Case, Clipping, StepCase, require_close
from .harness import (
    QUICK,
    TOO_NOISY,
    Machine,
    Settings,
    Spread,
    WrongResultError,
    call_ns,
    compared,
    duration,
    gc_off,
    line,
    number,
    overlap,
)

PLAIN, CLIP, GUARDED, OBSERVED, RECORDED = "plain", "clip", "guarded", "observed", "recorded"
NUM_REPETITIONS = 5
_MAX_WARM_UP = 100
_MIN_STEPS, _MAX_STEPS = 12, 3000
_LR = 1e-6  # so small that the last step does the same work as the first


class StepRun:
    """One of the runs that start alike: unguarded, with torch's `clip_grad_norm_`, guarded, guarded with each loss
    observed, or that with each record written to `log`."""

    def __init__(self, case: StepCase, kind: str, log: Path | None = None) -> None:
        task = case.build()
        self.loss = task.loss
        self.parameters = list(task.model.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.parameters, lr=_LR, fused=True)
        if kind in (GUARDED, OBSERVED, RECORDED):
            sinks = [fastguard.JsonlSink(log)] if log is not None else []
            fastguard.wrap(self.optimizer, task.model, max_norm=NO_CLIPPING, sinks=sinks)
        self._clips, self._observes = kind == CLIP, kind in (OBSERVED, RECORDED)

    def step(self) -> None:
        """Takes one step."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self.parameters, NO_CLIPPING)
        self.optimizer.step()
        if self._observes:
            self.optimizer.guard.observe(loss=loss)

    def norm(self) -> float:
        """Norm of the gradients of the last step, in float64."""
        return math.sqrt(
            math.fsum(float(p.grad.double().square().sum()) for p in self.parameters if p.grad is not None)
        )


@contextmanager
def without_a_word() -> Iterator[None]:
    """Silences the diagnosis, which rightly finds that a model with such a learning rate does not learn."""
    log = logging.getLogger("fastguard")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def check_runs(case: StepCase, runs: dict[str, StepRun], ours: str, num_steps: int, log: Path) -> None:
    for kind in (CLIP, ours):
        for a, b in zip(runs[PLAIN].parameters, runs[kind].parameters, strict=True):
            if not torch.equal(a, b):
                raise WrongResultError(f"{case.title}: parameters of the {kind} run are not those of the plain one")
    guard = runs[ours].optimizer.guard
    require_close(f"{case.title}: norm", guard.last.norm, runs[ours].norm(), 1e-6)
    guard.close()
    lines = log.read_text(encoding="utf-8").splitlines() if ours == RECORDED else []
    num_recorded = sum("step" in json.loads(line) for line in lines) if ours == RECORDED else guard.last.step + 1
    if num_recorded != num_steps:
        raise WrongResultError(f"{case.title}: of {num_steps} steps {num_recorded} were recorded")


def _repetition(case: StepCase, ours: str, budget_ns: float, max_steps: int) -> dict[str, float]:
    """One step of each run in turn, in every order; medians of the steps and of their differences in one iteration."""
    with tempfile.TemporaryDirectory() as folder, without_a_word():
        log = Path(folder) / "log.jsonl"
        runs = {kind: StepRun(case, kind, log if kind == RECORDED else None) for kind in (PLAIN, CLIP, ours)}
        orders = list(permutations(runs))
        times: dict[str, list[int]] = {kind: [] for kind in runs}
        num_warm_up = num_steps = len(orders)
        with gc_off():
            index = 0
            while index < num_warm_up + num_steps:
                for kind in orders[index % len(orders)]:
                    times[kind].append(call_ns(runs[kind].step))
                index += 1
                if index == len(orders):
                    affordable = int(budget_ns / sum(statistics.median(values) for values in times.values()))
                    num_steps = min(max_steps, max(_MIN_STEPS, affordable))
                    num_warm_up = max(len(orders), min(_MAX_WARM_UP, num_steps // 4))
        check_runs(case, runs, ours, index, log)
    return added(times, ours, num_warm_up)


def added(times: dict[str, list[int]], ours: str, num_warm_up: int) -> dict[str, float]:
    """What the runs add to the plain one, in us: the median of the differences in one iteration, and the mean."""
    counted = {kind: values[num_warm_up:] for kind, values in times.items()}
    found = {f"{kind}_us": statistics.median(values) / 1e3 for kind, values in counted.items()}
    for key, kind in (("ours_us", ours), ("theirs_us", CLIP)):
        differences = [a - b for a, b in zip(counted[kind], counted[PLAIN], strict=True)]
        found[key] = statistics.median(differences) / 1e3
        found[f"{key}_mean"] = (_mean(counted[kind]) - _mean(counted[PLAIN])) / 1e3
    return {**found, "num_steps": len(counted[ours])}


def _mean(times: list[int]) -> float:
    """The mean without the slowest 1 %, in which another process had the core."""
    kept = sorted(times)[: math.ceil(0.99 * len(times))]
    return statistics.mean(kept)


def summary(repetitions: list[dict[str, float]]) -> dict[str, Any]:
    ours, theirs = ([r[f"{who}_us_mean"] for r in repetitions] for who in ("ours", "theirs"))
    return {
        **compared([r["ours_us"] for r in repetitions], [r["theirs_us"] for r in repetitions]),
        "mean": compared(ours, theirs),
        "plain_us": Spread.of(r["plain_us"] for r in repetitions).to_dict(),
        "repetitions": repetitions,
    }


def measure_steps(
    case: StepCase, settings: Settings, ours: str = GUARDED, *, max_steps: int = _MAX_STEPS
) -> dict[str, Any]:
    """What guarding adds to whole steps (zero_grad, forward, backward, clip if asked for, optimizer step), and what
    `clip_grad_norm_` adds.

    Three runs from the same weights on the same batch take one step each in turn. What is added is the median, over the
    iterations, of the difference from the plain step of the same iteration; under "mean", the difference of the means,
    which leave out the slowest 1 % of the steps.

    Raises:
        WrongResultError: the runs did not end with the same parameters, bit for bit; the guard's norm is not what
            float64 says; a record is missing.
    """
    budget_ns = 4e9 * settings.budget_s / NUM_REPETITIONS  # small differences of large times
    num_repetitions = min(NUM_REPETITIONS, settings.num_rounds)
    repetitions = [_repetition(case, ours, budget_ns, max_steps) for _ in range(num_repetitions)]
    return summary(repetitions)


Measuring = Callable[[Settings], dict[str, Any]]


class BenchPart(NamedTuple):
    """One thing that is measured, ours against theirs: `prepare` checks it and returns what times it."""

    title: str
    prepare: Callable[[], Measuring]


def _clip(case: Case, *, clips: bool = False) -> BenchPart:
    title = f"clip, {case.title}, " + ("clipping at every step" if clips else "limit not reached")
    return BenchPart(title, lambda: Clipping(case, clips=clips).measure)


def _step(ours: str = GUARDED) -> BenchPart:
    title = f"added to a step, {STEP_MLP.title}" + (", loss and JSONL" if ours == RECORDED else "")
    return BenchPart(title, lambda: lambda settings: measure_steps(STEP_MLP, settings, ours))


PARTS = {
    "step-mlp": _step(),
    "step-mlp-jsonl": _step(RECORDED),
    **{name: _clip(case) for name, case in CASES.items()},
    **{f"{name}-clipping": _clip(case, clips=True) for name, case in CASES.items()},
}


def save(results: dict[str, Any], path: Path) -> None:
    """Writes results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command `fastguard bench`; saves results only with `--json`.

    Raises:
        WrongResultError: a result is not what float64 says.

    Cost: 2 to 3 minutes on two idle cores, `--quick` about one; 2 GB of memory.
    """
    parser = Parser("fastguard bench", "Measures the cost of fastguard against torch's own functions, in turn.")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: about 30 seconds, minutes on a busy machine"
    )
    parser.add_argument("--only", action="append", metavar="PART", choices=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the results there")
    arguments = parser.parse_args(argv)
    settings = QUICK if arguments.quick else Settings()
    here = Machine()
    results: dict[str, Any] = {"quick": arguments.quick, "parts": {}}
    print(f"{line(here.to_dict())}\n\n{'median':71} {'torch':>8} {'ours':>8} {'ratio':>6}   min – max")
    for name in arguments.only or PARTS:
        found = results["parts"][name] = PARTS[name].prepare()(settings)
        theirs, ours = (duration(found[key]["median"]) for key in ("theirs_us", "ours_us"))
        ratio = found["ratio"] or dict.fromkeys(("median", "min", "max"))
        low, median, high = (number(ratio[key]) for key in ("min", "median", "max"))
        noisy = TOO_NOISY if overlap(found["ours_us"], found["theirs_us"]) else ""
        print(
            f"{PARTS[name].title:71} {theirs:>8} {ours:>8} {median:>6}   {low} – {high}   {noisy}".rstrip(), flush=True
        )
    results["machine"] = here.to_dict()
    if results["machine"]["is_busy"]:
        print("\n" + line(results["machine"]))
    if arguments.json is not None:
        save(results, arguments.json)
        print(f"\nresults: {arguments.json}")
    return 0
