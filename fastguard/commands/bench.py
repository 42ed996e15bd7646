"""`fastguard bench`: what fastguard costs, against torch's own functions, in turn with them as in training."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastguard

from .._text import duration
from .cli import Parser

NUM_SETS = 3  # of tensors: two rivals meet every set, and each set was last seen three calls ago
NO_CLIPPING = 1e9  # a max_norm that is never reached
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "ours": fastguard.clip_grad_norm_,
    "theirs": torch.nn.utils.clip_grad_norm_,
}
PLAIN, CLIP, GUARDED, OBSERVED, RECORDED = "plain", "clip", "guarded", "observed", "recorded"
_LR = 1e-6  # so small that the last step does the same work as the first
Shape = tuple[int, ...]
Measuring = Callable[["Settings"], dict[str, Any]]


class WrongResultError(RuntimeError):
    """Two norms differ by more than their rounding, or two runs by a bit; nothing is timed then."""


class Settings(NamedTuple):
    """How long to measure: about `budget_s`, in at most `num_rounds` rounds of at most `max_calls` calls each."""

    budget_s: float = 4.0
    num_rounds: int = 15
    max_calls: int = 100


QUICK = Settings(0.3, 3, 10)


class Spread(NamedTuple):
    """The median of several measurements, and how far they lie apart."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))


@contextmanager
def gc_off() -> Iterator[None]:
    """As timeit has it: a collection that one rival's garbage starts would be booked on another."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def call_ns(call: Callable[[], Any]) -> int:
    """How long one call takes."""
    started = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - started


def in_rounds(turn: Callable[[], dict[str, int]], settings: Settings, num_first: int = 2) -> list[list[dict[str, int]]]:
    """What each turn returns, round by round: as many as the budget allows, after `num_first` that do not count."""
    affordable = max(3, int(settings.budget_s * 1e9 / min(call_ns(turn) for _ in range(num_first))))
    num_rounds = min(settings.num_rounds, affordable)
    num_turns = min(settings.max_calls, affordable // num_rounds)
    return [[turn() for _ in range(num_turns)] for _ in range(num_rounds)]


def take_turns(
    calls: Mapping[str, Sequence[Callable[[], Any]]],
    settings: Settings,
    before: Callable[[str, int], None] | None = None,
) -> dict[str, list[float]]:
    """Times of every rival in µs, round by round: the median of its single calls in the round.

    `calls` has, by rival, its call on each set of tensors; rivals and sets alternate call by call. `before` is called
    before each, untimed, with the rival's name and the number of the set.
    """
    turns = itertools.count()

    def turn() -> dict[str, int]:
        times = {}
        for name, on_sets in calls.items():
            index = next(turns) % len(on_sets)
            if before is not None:
                before(name, index)
            times[name] = call_ns(on_sets[index])
        return times

    with gc_off():
        rounds = in_rounds(turn, settings)
    return {name: [statistics.median(t[name] for t in times) / 1e3 for times in rounds] for name in calls}


def compared(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Two rivals' times in µs and their ratio round by round; `ratio` is None where theirs took no time."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b > 0]
    return {
        "ours_us": Spread.of(ours)._asdict(),
        "theirs_us": Spread.of(theirs)._asdict(),
        "ratio": Spread.of(ratios)._asdict() if ratios else None,
    }


def gpt2_shapes(width: int = 768, depth: int = 12, vocabulary: int = 50257, context: int = 1024) -> tuple[Shape, ...]:
    """GPT-2's tensors; the head is the token embedding again, so it is not a tensor of its own."""
    attention = ((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,))
    mlp = ((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,))
    return ((vocabulary, width), (context, width), *((*attention, *mlp) * depth), (width,), (width,))


class Task(NamedTuple):
    """A model, and a function that runs it forward on the next of its batches and returns the loss."""

    model: nn.Module
    loss: Callable[[], Tensor]


class StepCase(NamedTuple):
    """A model and its batches; a whole step is zero_grad, forward, backward, clip if asked for, AdamW(fused=True)."""

    name: str
    title: str
    build: Callable[[], Task]


def task(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Task:
    """Cross-entropy on the batches, in turn and for ever."""
    endless = itertools.cycle(list(batches))

    def loss() -> Tensor:
        x, y = next(endless)
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return Task(model, loss)


def mlp(width: int = 256, inputs: int = 128, classes: int = 10, batch: int = 32, seed: int = 0) -> Task:
    """An MLP of three layers; the same weights and batches for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second, last = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, classes)
        # several batches, so that the gradient norm is not the same at every step
        batches = [(torch.randn(batch, inputs), torch.randint(classes, (batch,))) for _ in range(8)]
    return task(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last), batches)


class StepRun:
    """One of the runs that start alike: unguarded, with torch's `clip_grad_norm_`, guarded, guarded with each loss
    observed, or that with each record written to `log`."""

    def __init__(self, case: StepCase, kind: str, log: Path) -> None:
        task = case.build()
        self.loss = task.loss
        self.parameters = list(task.model.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.parameters, lr=_LR, fused=True)
        if kind in (GUARDED, OBSERVED, RECORDED):
            sinks = [fastguard.JsonlSink(log)] if kind == RECORDED else []
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


@contextmanager
def without_a_word() -> Iterator[None]:
    """Silences the diagnosis, which rightly finds that a model with such a learning rate does not learn."""
    log = logging.getLogger("fastguard")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def measure_steps(case: StepCase, settings: Settings, ours: str = GUARDED) -> dict[str, Any]:
    """What guarding adds to a step, and what `clip_grad_norm_` adds: the median, over iterations in which runs from the
    same weights take one step each, of the difference from the plain step."""
    with tempfile.TemporaryDirectory() as folder, without_a_word(), gc_off():
        runs = {kind: StepRun(case, kind, Path(folder) / "log.jsonl") for kind in (PLAIN, CLIP, ours)}
        orders = itertools.cycle(itertools.permutations(runs))

        def turn() -> dict[str, int]:
            return {kind: call_ns(runs[kind].step) for kind in next(orders)}

        most = settings._replace(max_calls=6 * settings.max_calls)
        rounds = in_rounds(turn, most, num_first=settings.max_calls)  # a guard looks most often at first
        require_equal(case, runs, ours)
        runs[ours].optimizer.guard.close()
    added = ([statistics.median((t[kind] - t[PLAIN]) / 1e3 for t in some) for some in rounds] for kind in (ours, CLIP))
    return compared(*added)


def require_equal(case: StepCase, runs: Mapping[str, StepRun], ours: str) -> None:
    """Raises WrongResultError where a run ended with other parameters than the plain one."""
    for kind in (CLIP, ours):
        for a, b in zip(runs[PLAIN].parameters, runs[kind].parameters, strict=True):
            if not torch.equal(a, b):
                raise WrongResultError(f"{case.title}: parameters of the {kind} run are not those of the plain one")


STEP_MLP = StepCase("step-mlp", "MLP of 101k parameters", mlp)


def measure_clipping(shapes: Sequence[Shape], settings: Settings) -> dict[str, Any]:
    """Both functions on three sets of tensors in turn, each call on another set than the one before."""
    sets = [[nn.Parameter(torch.zeros(()).expand(shape)) for shape in shapes] for _ in range(NUM_SETS)]
    for parameters in sets:
        for p in parameters:
            p.grad = torch.randn(p.shape) * 1e-3
    ours, theirs = (float(function(sets[0], NO_CLIPPING)) for function in FUNCTIONS.values())
    if not abs(ours - theirs) <= 7e-3 * ours:  # torch's rounding of float32
        raise WrongResultError(f"the norm is {ours!r}, and {theirs!r} by torch")
    calls = {name: [partial(function, p, NO_CLIPPING) for p in sets] for name, function in FUNCTIONS.items()}
    rounds = take_turns(calls, settings)
    return compared(rounds["ours"], rounds["theirs"])


_STEP = f"added to a step, {STEP_MLP.title}"
# As in the README: a title, and what measures it.
PARTS: dict[str, Measuring] = {
    _STEP: lambda how: measure_steps(STEP_MLP, how),
    f"{_STEP}, loss and JSONL": lambda how: measure_steps(STEP_MLP, how, RECORDED),
    "clip, GPT-2 124M float32, limit not reached": lambda how: measure_clipping(gpt2_shapes(), how),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints. Cost: 2 minutes on two idle cores, 2 GB of memory."""
    parser = Parser("fastguard bench", "Measures the cost of fastguard against torch's own functions, in turn.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: 30 seconds, minutes on a busy machine")
    arguments = parser.parse_args(argv)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, fastguard {fastguard.__version__}"
    print(f"{machine}; {versions}. Figures of a busy machine are noisy.\n")
    print(f"{'median':56} {'torch':>8} {'ours':>8} {'ratio':>6}   min – max")
    for title, measure in PARTS.items():
        found = measure(QUICK if arguments.quick else Settings())
        theirs, ours = (duration(1e-6 * found[key]["median"]) for key in ("theirs_us", "ours_us"))
        ratio = "" if found["ratio"] is None else "{median:6.2f}   {min:.2f} – {max:.2f}".format(**found["ratio"])
        print(f"{title:56} {theirs:>8} {ours:>8} {ratio}".rstrip(), flush=True)
    return 0
