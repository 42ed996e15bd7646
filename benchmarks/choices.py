"""What watching attention and routers costs a sampled step: `python -m benchmarks.choices [--rounds N] [--json FILE]`.

With `--cpu-time`, one thread and its CPU time, for a machine that does other things as well; about a minute.

Two guarded runs from the same weights take one step each in turn, with a sample at every step and no budget:
activations alone, and attention (or routers) as well. What these add to a sampled step is the median of the
differences in the same round. Correct first: both must end with the same parameters, bit for bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fastguard
from benchmarks.clocks import keep, make_clock, make_parser
from fastguard.commands.bench.harness import gc_off

WIDTH, LENGTH, BATCH, NUM_BLOCKS, NUM_EXPERTS = 256, 256, 4, 4, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1, keepdim=True)
        return sum((weight * (chosen == i) * one(x) for i, one in enumerate(self.experts)), torch.zeros_like(x))


class Block(nn.Module):
    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.attn, self.ln1, self.ln2 = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.mlp: nn.Module = Experts() if has_experts else mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Run:
    """One guarded run."""

    def __init__(self, has_experts: bool, **activations: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(has_experts) for _ in range(NUM_BLOCKS)))
        self.x = torch.randn(BATCH, LENGTH, WIDTH)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        settings = {"every": 1, "overhead_budget": None, **activations}
        self.optimizer = fastguard.wrap(optimizer, self.model, max_norm=1e9, activations=settings)

    def step(self, clock: Callable[[], float]) -> float:
        started = clock()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return clock() - started


CASES: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    "attention": (False, {"attention": False}, {}),
    "routers": (True, {"attention": False, "routers": None}, {"attention": False}),
}


def measure(case: str, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    has_experts, without, along = CASES[case]
    runs = [Run(has_experts, **without), Run(has_experts, **along)]
    times: list[list[float]] = [[], []]
    with gc_off():
        for index in range(-3, rounds):
            for place in (0, 1) if index % 2 else (1, 0):
                seconds = runs[place].step(clock)
                if index >= 0:
                    times[place].append(seconds)
    if not all(torch.equal(a, b) for a, b in zip(*(run.model.parameters() for run in runs), strict=True)):
        raise RuntimeError("watching changed the training")
    seen = sum(one.is_choice for one in runs[1].optimizer.guard.last.activations)
    adds = statistics.median(b - a for a, b in zip(*times, strict=True))
    step = statistics.median(times[0])
    return {
        "step_ms": 1e3 * step,
        "num_modules": seen,
        "sampled_step_adds_ms": 1e3 * adds,
        "adds_us_per_module": 1e6 * adds / seen,
        "share_of_a_sampled_step": adds / step,
    }


def main() -> None:
    arguments = make_parser("benchmarks.choices", __doc__, 40, "steps of each run").parse_args()
    clock = make_clock(arguments)
    print(f"{NUM_BLOCKS} blocks {WIDTH} wide, {BATCH} sequences of {LENGTH}, 8 heads, {NUM_EXPERTS} experts")
    results = {case: measure(case, arguments.rounds, clock) for case in CASES}
    for case, r in results.items():
        print(
            f"  {case:10} sampled step {r['step_ms']:8.2f} ms, {r['num_modules']} modules watched besides: "
            f"{r['sampled_step_adds_ms']:+7.2f} ms, {r['adds_us_per_module']:.0f} us a module, "
            f"{r['share_of_a_sampled_step']:.1%} of that step"
        )
    keep(arguments, results)


if __name__ == "__main__":
    main()
