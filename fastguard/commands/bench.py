"""`fastguard bench`: what fastguard costs, against torch's own functions, in turn with them as in training."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fastguard

from .._text import duration
from .cli import Parser

NO_CLIPPING = 1e9  # a max_norm that is never reached
PLAIN, OURS, THEIRS = "plain", "fastguard", "torch"
BUDGET_S, NUM_ROUNDS = 4.0, 15
Shape = tuple[int, ...]
Rounds = list[list[dict[str, int]]]  # of turns: times in ns by rival


class WrongResultError(RuntimeError):
    """Two norms differ by more than their rounding, or two runs by a bit."""


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


@contextmanager
def without_a_word() -> Iterator[None]:
    """Silences the diagnosis, which rightly finds that a model with such a learning rate does not learn."""
    log = logging.getLogger("fastguard")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def call_ns(call: Callable[[], Any]) -> int:
    """How long one call takes."""
    started = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - started


def in_turn(calls: Mapping[str, Callable[[], Any]], budget_s: float, num_first: int = 2) -> Rounds:
    """Times of the rivals, each called once a turn, in every order. The first turns do not count."""
    orders = itertools.cycle(itertools.permutations(calls))

    def turn() -> dict[str, int]:
        return {name: call_ns(calls[name]) for name in next(orders)}

    with gc_off():
        affordable = max(3, int(budget_s * 1e9 / min(call_ns(turn) for _ in range(num_first))))
        num_rounds = min(NUM_ROUNDS, affordable)
        return [[turn() for _ in range(affordable // num_rounds)] for _ in range(num_rounds)]


def gpt2_shapes() -> list[Shape]:
    """The tensors of GPT-2 124M; the head is the token embedding again, so it is not a tensor of its own."""
    width = 768
    attention = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *(attention + mlp) * 12, (width,), (width,)]


def mlp(width: int = 256) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """An MLP of three layers and its batches, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second, last = nn.Linear(128, width), nn.Linear(width, width), nn.Linear(width, 10)
        # several batches, so that the gradient norm is not the same at every step
        batches = [(torch.randn(32, 128), torch.randint(10, (32,))) for _ in range(8)]
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last), batches


class Training:
    """Trains the MLP plainly, with torch's `clip_grad_norm_`, or guarded."""

    def __init__(self, kind: str, width: int = 256) -> None:
        self._model, batches = mlp(width)
        self._kind, self._batches = kind, itertools.cycle(batches)
        self.parameters = list(self._model.parameters())
        # a rate so small that the last step does the same work as the first
        self.optimizer: Any = torch.optim.AdamW(self.parameters, lr=1e-6, fused=True)
        if kind == OURS:
            fastguard.wrap(self.optimizer, self._model, max_norm=NO_CLIPPING)

    def step(self) -> None:
        """Takes one step."""
        self.optimizer.zero_grad()
        inputs, targets = next(self._batches)
        nn.functional.cross_entropy(self._model(inputs), targets).backward()
        if self._kind == THEIRS:
            torch.nn.utils.clip_grad_norm_(self.parameters, NO_CLIPPING)
        self.optimizer.step()


def measure_steps(budget_s: float = BUDGET_S, width: int = 256) -> Rounds:
    """Whole steps of three trainings that begin alike and must stay so."""
    with without_a_word():
        runs = {kind: Training(kind, width) for kind in (PLAIN, OURS, THEIRS)}
        calls = {kind: run.step for kind, run in runs.items()}
        rounds = in_turn(calls, budget_s, num_first=100)  # a guard looks most often at first
        runs[OURS].optimizer.guard.close()
    require_equal({kind: run.parameters for kind, run in runs.items()})
    return rounds


def require_equal(runs: Mapping[str, Sequence[Tensor]]) -> None:
    """Raises WrongResultError where a run ended with other parameters than the plain one."""
    for kind, parameters in runs.items():
        if not all(map(torch.equal, runs[PLAIN], parameters)):
            raise WrongResultError(f"parameters of the {kind} run are not those of the plain one")


def measure_clipping(budget_s: float = BUDGET_S, shapes: Sequence[Shape] = ()) -> Rounds:
    """Both functions on three sets of tensors in turn, each call on another set than the one before."""
    sets = [[nn.Parameter(torch.zeros(()).expand(shape)) for shape in shapes or gpt2_shapes()] for _ in range(3)]
    for parameters in sets:
        for p in parameters:
            p.grad = torch.randn(p.shape) * 1e-3
    functions = {OURS: fastguard.clip_grad_norm_, THEIRS: torch.nn.utils.clip_grad_norm_}
    ours, theirs = (float(function(sets[0], NO_CLIPPING)) for function in functions.values())
    if not abs(ours - theirs) <= 7e-3 * ours:  # torch's rounding of float32
        raise WrongResultError(f"the norm is {ours!r}, and {theirs!r} by torch")
    turns = itertools.cycle(sets)

    def call(name: str) -> Callable[[], Any]:
        return lambda: functions[name](next(turns), NO_CLIPPING)

    return in_turn({name: call(name) for name in functions}, budget_s)


def row(title: str, rounds: Rounds) -> str:
    """Medians, and the ratio round by round; of whole steps, of what each adds to the plain step of its turn."""
    ours, theirs = (
        [statistics.median(turn[name] - turn.get(PLAIN, 0) for turn in turns) for turns in rounds]
        for name in (OURS, THEIRS)
    )
    times = [duration(1e-9 * statistics.median(some)) for some in (theirs, ours)]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b > 0]
    spread = f"{statistics.median(ratios):6.2f}   {min(ratios):.2f} – {max(ratios):.2f}" if ratios else ""
    return f"{title:45} {times[0]:>8} {times[1]:>8} {spread}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints. Cost: half a minute on two cores, 2 GB of memory."""
    Parser("fastguard bench", "Measures the cost of fastguard against torch's own functions, in turn.").parse_args(argv)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, fastguard {fastguard.__version__}"
    print(f"{machine}; {versions}. Figures of a busy machine are noisy.\n")
    print(f"{'median':45} {'torch':>8} {'ours':>8} {'ratio':>6}   min – max")
    print(row("added to a step, MLP of 101k parameters", measure_steps()), flush=True)
    print(row("clip, GPT-2 124M float32, limit not reached", measure_clipping()), flush=True)
    return 0
