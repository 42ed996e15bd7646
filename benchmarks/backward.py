"""What `wrap_backward` costs: `python -m benchmarks.backward [--rounds N] [--json FILE] [--cpu-time]`; about a minute.

With `--cpu-time`, one thread and its CPU time, for a machine that does other things as well.

A transformer of 300 tensors, an AdamW for each, stepped within the backward pass: by torch's recipe (a hook that
steps and lets the gradient go), by `wrap_backward`, and by `wrap_backward` with a `max_norm` that is never reached.
One step of each in turn, forward and backward, from the same weights on the same batch. Correct first: the three must
end with the same parameters, bit for bit, and no gradient may be left. Then memory, in a pass that is not timed: at
each gradient that comes, how many bytes of gradients are alive, those included that only somebody else's reference
keeps.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fastguard
from benchmarks.clocks import keep, make_clock, make_parser
from fastguard.commands.bench.harness import gc_off

RECIPE, GUARDED, CLIPPING = "torch's recipe", "wrap_backward", "wrap_backward, max_norm"
SETTINGS: dict[str, dict[str, bool]] = {"foreach=False": {"foreach": False}, "fused=True": {"fused": True}}
WIDTH, NUM_BLOCKS, NUM_TOKENS, LENGTH, BATCH = 128, 24, 512, 32, 4


class Gpt(nn.Module):
    """24 blocks of 12 tensors, and 12 more around them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(NUM_TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer: dict[str, Any] = {"dropout": 0.0, "activation": F.gelu, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **layer) for _ in range(NUM_BLOCKS))
        self.head = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.LayerNorm(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            y = block(y, mask, is_causal=True)
        return self.head(y) @ self.tokens.weight.T


class Run:
    """One training; its gradients are stepped as they come."""

    def __init__(self, kind: str, settings: dict[str, bool]) -> None:
        torch.manual_seed(0)
        self.model = Gpt()
        self.batch = torch.randint(NUM_TOKENS, (BATCH, LENGTH))
        self.alive: list[int] = []
        self.grads: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.is_counting = False
        parameters = list(self.model.parameters())
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.count)
        optimizers = {p: torch.optim.AdamW([p], lr=1e-4, **settings) for p in parameters}
        if kind != RECIPE:
            fastguard.wrap_backward(self.model, optimizers, max_norm=1e9 if kind == CLIPPING else None)
            return

        def step(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in parameters:
            p.register_post_accumulate_grad_hook(step)

    def count(self, p: torch.Tensor) -> None:
        """What is alive as the gradient of `p` has come."""
        if self.is_counting and p.grad is not None:
            self.grads.append((weakref.ref(p.grad), p.grad.numel() * p.grad.element_size()))
            self.alive.append(sum(size for tensor, size in self.grads if tensor() is not None))

    def step(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Seconds of the whole step, and of its backward pass."""
        started = clock()
        loss = F.cross_entropy(self.model(self.batch).flatten(0, 1), self.batch.flatten())
        forward = clock()
        loss.backward()
        ended = clock()
        return ended - started, ended - forward

    def peak_bytes(self) -> int:
        """Most bytes of gradients that are alive at once."""
        self.is_counting = True
        self.step(time.perf_counter)
        self.is_counting = False
        return max(self.alive)


def check(runs: dict[str, Run]) -> None:
    """Raises unless guarding changed no bit, and no gradient is left."""
    first, *others = [list(run.model.parameters()) for run in runs.values()]
    if not all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)):
        raise RuntimeError("guarding changed the training")
    if any(p.grad is not None for run in runs.values() for p in run.model.parameters()):
        raise RuntimeError("a gradient is left after the pass")


def measure(settings: dict[str, bool], rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    runs = {kind: Run(kind, settings) for kind in (RECIPE, GUARDED, CLIPPING)}
    kinds = list(runs)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    with gc_off():
        for index in range(-3, rounds):
            for kind in kinds if index % 2 else reversed(kinds):
                found = runs[kind].step(clock)
                if index >= 0:
                    times[kind].append(found)
    check(runs)
    num = len(list(runs[RECIPE].model.parameters()))
    result: dict[str, Any] = {"num_tensors": num, "rounds": rounds}
    for kind in kinds:
        pairs = list(zip(times[kind], times[RECIPE], strict=True))
        result[kind] = {
            "step_ms": 1e3 * statistics.median(a[0] for a, _ in pairs),
            "backward_ms": 1e3 * statistics.median(a[1] for a, _ in pairs),
            "step_ratio": statistics.median(a[0] / b[0] for a, b in pairs),
            "backward_ratio": statistics.median(a[1] / b[1] for a, b in pairs),
            "adds_us_per_tensor": 1e6 * statistics.median(a[1] - b[1] for a, b in pairs) / num,
            "peak_gradient_bytes": runs[kind].peak_bytes(),
        }
    return result


def main() -> None:
    arguments = make_parser("benchmarks.backward", __doc__, 60, "steps of each kind").parse_args()
    clock = make_clock(arguments)
    results = {name: measure(settings, arguments.rounds, clock) for name, settings in SETTINGS.items()}
    for name, result in results.items():
        print(f"\nAdamW({name}), {result['num_tensors']} tensors, median of {result['rounds']} steps")
        for kind in (RECIPE, GUARDED, CLIPPING):
            r = result[kind]
            print(
                f"  {kind:26} step {r['step_ms']:7.2f} ms × {r['step_ratio']:.3f}, backward {r['backward_ms']:7.2f} ms "
                f"× {r['backward_ratio']:.3f} ({r['adds_us_per_tensor']:+.1f} us a tensor), "
                f"gradients at most {r['peak_gradient_bytes'] / 2**20:.2f} MiB"
            )
    keep(arguments, results)


if __name__ == "__main__":
    main()
