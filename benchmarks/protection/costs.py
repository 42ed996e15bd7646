"""What recovery and a policy of each tensor cost: snapshots, a rollback, and a step with 300 tensors."""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
import unittest.mock
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import fastguard
from fastguard.commands.bench import call_ns, gc_off
from fastguard.commands.demo.training import TransformerBlock
from fastguard.recovery.rescue import Rescue

from ..speed.cases import STEP_CASES
from ..speed.timing import QUICK, Settings, Spread, compared, take_turns
from . import criteria

Loss = Callable[[], torch.Tensor]
GPT2_BYTES = 10e9  # parameters, gradients, Adam's state, and two snapshots of all but the gradients
EVERY = 50
_BUDGET_S = 40.0  # of a loop over steps, some of which take seconds
_NUM_PROFILED = 2  # rollbacks: the first makes what it needs
_MARK = "recovery acts"


class GPT2(nn.Module):
    """124M parameters: twelve blocks of width 768, the head is the token embedding again."""

    def __init__(self, width: int = 768, depth: int = 12, vocabulary: int = 50257, context: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, width // 64) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.positions.weight[: text.shape[1]]
        return nn.functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


def gpt2(num_tokens: int = 512) -> tuple[nn.Module, Loss]:
    """The model, and its loss on one text of `num_tokens`."""
    torch.manual_seed(0)
    model, text = GPT2(), torch.randint(50257, (1, num_tokens + 1))
    return model, lambda: nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def transformer() -> tuple[nn.Module, Loss]:
    """The transformer of 4.8M parameters that `benchmarks.speed` times steps with."""
    task = STEP_CASES["step-transformer"].build()
    return task.model, task.loss


class Run:
    """A training under recovery, whose steps are timed."""

    def __init__(self, build: Callable[[], tuple[nn.Module, Loss]], **recovery: Any) -> None:
        self.model, self.loss = build()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        fastguard.wrap(self.optimizer, self.model, max_norm=1.0, recovery=fastguard.Recovery(**recovery))
        self.guard: fastguard.Guard = self.optimizer.guard
        self.cpu_us = 0.0  # of the newest step of the optimizer, all threads together

    def step(self) -> tuple[int, int]:
        """Nanoseconds of the optimizer's step, and of the whole."""
        losses: list[torch.Tensor] = []

        def backward() -> None:
            self.optimizer.zero_grad()
            losses.append(self.loss())
            losses[0].backward()

        rest = call_ns(backward)
        began = time.process_time()
        own = call_ns(self.optimizer.step)
        self.cpu_us = 1e6 * (time.process_time() - began)
        self.guard.observe(loss=losses[0])
        return own, own + rest

    @property
    def num_rollbacks(self) -> int:
        return sum(one["kind"] == "rollback" for one in self.guard.history.model.recoveries)


def snapshot(build: Callable[[], tuple[nn.Module, Loss]], every: int, num_snapshots: int, keep: int) -> dict[str, Any]:
    """What a snapshot adds to the optimizer's step, as a share of `EVERY` whole steps.

    Taken every `every` steps here, to have more of them: the steps with one are those whose number leaves the same
    remainder and take the longest; what they take more than their neighbours' median is the snapshot. The first
    `keep` of them, which make their memory, are left out. Two are enough where more would take over `_BUDGET_S`.
    """
    run, ends = Run(build, every=every, keep=keep), time.monotonic() + _BUDGET_S
    steps: list[tuple[int, int]] = []
    with gc_off():
        while len(steps) < every * (num_snapshots + keep + 1):
            if time.monotonic() > ends and len(steps) >= every * (keep + 3):
                break
            steps.append(run.step())
    counted = range(every * (keep + 1), len(steps))
    own = {r: statistics.median(steps[i][0] for i in counted if i % every == r) for r in range(every)}
    remainder = max(own, key=lambda r: own[r])
    usual = statistics.median(steps[i][0] for i in counted if i % every != remainder)
    whole = statistics.median(steps[i][1] for i in counted if i % every != remainder) / 1e3
    extra = [max(0.0, steps[i][0] - usual) / 1e3 for i in counted if i % every == remainder]
    share = Spread.of(criteria.snapshot_share(one, whole, EVERY) for one in extra)
    return {
        "figure": share.median,
        "share": share.to_dict(),
        "snapshot_us": Spread.of(extra)._asdict(),
        "step_us": whole,
        "num_parameters": sum(p.numel() for p in run.model.parameters()),
    }


def rollback(build: Callable[[], tuple[nn.Module, Loss]], num_rollbacks: int) -> dict[str, Any]:
    """The step of the optimizer in which a rollback happens, in steps of the same optimizer without a guard, and of the
    one that `torch.optim.AdamW` is where nothing is asked for, which takes some three times as long.

    One parameter is made NaN when a snapshot counts; the step that goes back is the one after which the history has one
    rollback more. Steps of the other two are taken before and after each rollback, and it is held against the median of
    those next to it: what else the machine does is the same for all. "cpu_steps" is the least CPU time of a rollback,
    of all threads, over the least of a fused step: for OMP_NUM_THREADS=1, since a thread that waits takes time, too.
    """
    plain_model, plain_loss = build()
    fused, default = (torch.optim.AdamW(plain_model.parameters(), lr=1e-6, fused=kind) for kind in (True, None))

    def alone(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        optimizer.zero_grad()
        plain_loss().backward()
        began = time.process_time()
        us = call_ns(optimizer.step) / 1e3
        return us, 1e6 * (time.process_time() - began)

    run = Run(build, every=4, quarantine=4, attempts=10**6, window=1)
    taken: list[float] = []
    allocated: list[int] = []
    cpu: list[float] = []
    beside: dict[str, list[list[tuple[float, float]]]] = {"steps": [], "default_steps": []}
    with gc_off():
        for number in range(num_rollbacks + _NUM_PROFILED):
            for name, one in (("default_steps", default), ("steps", fused)):
                beside[name].append([alone(one) for _ in range(5)][1:])
            for _ in range(12):
                run.step()
            with torch.no_grad():
                next(run.model.parameters()).view(-1)[0] = float("nan")
            before = run.num_rollbacks
            for _ in range(200):
                is_profiled = number < _NUM_PROFILED
                found, own = (num_allocations(run.step), 0) if is_profiled else (0, run.step()[0])
                run.guard.flush()
                if run.num_rollbacks > before:
                    break
            else:
                raise RuntimeError("a run with a NaN among its parameters was not rolled back within 200 steps")
            if is_profiled:
                allocated.append(found)
            else:
                taken.append(own / 1e3)
                cpu.append(run.cpu_us)
        for name, one in (("default_steps", default), ("steps", fused)):
            beside[name].append([alone(one) for _ in range(5)][1:])
    result: dict[str, Any] = {"allocated": allocated}
    for (name, rounds), us_of in zip(beside.items(), ("optimizer_us", "default_us"), strict=True):
        near = [[us for us, _ in [*a, *b]] for a, b in pairwise(rounds[_NUM_PROFILED:])]
        steps = [criteria.rollback_steps(one, statistics.median(us)) for one, us in zip(taken, near, strict=True)]
        result[name] = Spread.of(steps)._asdict()
        result[us_of] = statistics.median(us for round_ in near for us in round_)
    least = min(us for round_ in beside["steps"] for _, us in round_)
    result["cpu_steps"] = criteria.rollback_steps(min(cpu), least)
    return {"figure": result["steps"]["median"], **result}


def num_allocations(call: Callable[[], tuple[int, int]], least_bytes: int = 4096) -> int:
    """Tensors of `least_bytes` and more that torch allocates in `call` while recovery acts ahead of a step, by torch's
    profiler. What others allocate in the same step, who look at some gradients at one in five, is not among them."""
    begin_step = Rescue.begin_step

    def marked(*args: Any) -> bool:
        with torch.profiler.record_function(_MARK):
            return begin_step(*args)

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with unittest.mock.patch.object(Rescue, "begin_step", marked), profiler as profile:
        call()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == _MARK]
    if not spans:
        raise RuntimeError("torch's profiler has not seen recovery act")
    made = [e.start_ns() for e in events if e.name() == "[memory]" and e.nbytes() >= least_bytes]
    return sum(any(begin <= at <= end for begin, end in spans) for at in made)


def free_bytes() -> float:
    """Memory that this machine has free; Inf where nobody says."""
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


class Idle(torch.optim.Optimizer):
    """Does nothing, so that a step of it is what guarding takes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def per_tensor(settings: Settings, *, num_tensors: int = 300, size: int = 1000, num_sets: int = 3) -> dict[str, Any]:
    """Guarding a step with `AdaGC` against guarding it with `GlobalNorm`, neither of which has anything to clip."""
    policies = {"GlobalNorm": lambda: fastguard.GlobalNorm(1e6), "AdaGC": lambda: fastguard.AdaGC(max_norm=None)}
    generator = torch.Generator().manual_seed(0)
    calls: dict[str, list[Callable[[], Any]]] = {}
    for name, make in policies.items():
        calls[name] = []
        for _ in range(num_sets):
            parameters = [nn.Parameter(torch.zeros(size)) for _ in range(num_tensors)]
            optimizer: Any = fastguard.wrap(Idle(parameters), clip=make())
            for parameter in parameters:
                parameter.grad = torch.randn(size, generator=generator)
            for _ in range(150):  # the warm-up
                optimizer.step()
            if optimizer.guard.last.clipped:
                raise RuntimeError(f"{name} clipped gradients that were the same at every step")
            calls[name].append(optimizer.step)
    rounds = take_turns(calls, settings)
    found = compared(rounds["AdaGC"], rounds["GlobalNorm"])
    return {"figure": found["ratio"]["median"], **found}


def measure(*, quick: bool = False) -> dict[str, Any]:
    """All of them, one after the other, with as many threads as torch takes by itself."""
    level = logging.getLogger("fastguard").level
    logging.getLogger("fastguard").setLevel(logging.CRITICAL)  # a rate of 1e-6 does not learn, and it says so
    try:
        found = {
            "per-tensor": per_tensor(QUICK if quick else Settings()),
            "snapshot": snapshot(transformer, every=4, num_snapshots=3 if quick else 25, keep=3),
            "rollback": rollback(transformer, 2 if quick else 8),
        }
        allocated = found["rollback"].pop("allocated")
        found["allocations"] = {"figure": float(max(allocated)), "each": allocated}
        if not quick and free_bytes() > GPT2_BYTES:
            found["snapshot-gpt2"] = snapshot(gpt2, every=2, num_snapshots=4, keep=2)
    finally:
        logging.getLogger("fastguard").setLevel(level)
    return found
