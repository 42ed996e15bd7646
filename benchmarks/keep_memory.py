"""What `fastguard.tools.keep_memory` saves: whole training steps with it and without, guarded and not.

    python -m benchmarks.keep_memory                     # every model: 25 minutes on an idle machine
    python -m benchmarks.keep_memory --only vocabulary   # one of them, put into the results
    python -m benchmarks.keep_memory --only vocabulary --losses 1000    # whether the losses are bit-equal

Each way of training runs in a process of its own, and the processes take turns: a few steps each, round by round. The
clipping limit is reached at every step. A ratio is of two ways in the same round; given are the median over the rounds,
and the smallest and the largest. The results go to benchmarks/results/keep-memory.json. Linux with glibc only.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import resource
import statistics
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import fastguard

RESULTS = Path(__file__).parent / "results" / "keep-memory.json"
WORDS = 50_257
WAYS = ("torch", "torch clips", "guarded", "torch, memory kept", "guarded, memory kept")
GOALS = {"vocabulary": 0.70, "gpt2": 0.97}  # guarded with memory kept / torch that does not clip


class LanguageModel(nn.Module):
    """A transformer over words, without dropout."""

    def __init__(self, width: int, num_layers: int, num_heads: int, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        layer = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, **layer) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        if is_tied:
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x)).flatten(0, 1)


class Task(NamedTuple):
    """A model and its batches.

    Attributes:
        steps: taken in each round.
        rounds: of each way.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    steps: int
    rounds: int


def _words(batch: int, length: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(WORDS, (batch, length + 1))
        return words[:, :-1], words[:, 1:].flatten()

    return draw


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def _wide() -> nn.Module:
    sizes = (1024, 2048, 2048, 10)
    parts = [part for before, after in itertools.pairwise(sizes) for part in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


TASKS = {
    "vocabulary": Task(lambda: LanguageModel(192, 2, 4, is_tied=False), _words(2, 128), 3, 15),
    "gpt2": Task(lambda: LanguageModel(768, 12, 12, is_tied=True), _words(1, 128), 1, 12),
    "convolutions": Task(_convolutions, lambda: (torch.randn(32, 3, 64, 64), torch.randint(10, (32,))), 1, 10),
    "large batches": Task(_wide, lambda: (torch.randn(8192, 1024), torch.randint(10, (8192,))), 1, 10),
    "small": Task(
        lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        lambda: (torch.randn(64, 64), torch.randint(10, (64,))),
        200,
        10,
    ),
}


def _train(name: str, way: str, pipe: Connection) -> None:
    """Takes as many steps as the pipe asks for, until it asks for none."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    if way.endswith("memory kept") and not fastguard.tools.keep_memory().is_active:
        raise OSError("keep_memory did nothing here: this benchmark needs glibc's allocator")
    task = TASKS[name]
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if way.startswith("guarded"):
        fastguard.wrap(optimizer, model, max_norm=0.1)
    clips, observe = way == "torch clips", getattr(getattr(optimizer, "guard", None), "observe", None)
    losses = hashlib.sha256()
    while num_steps := pipe.recv():
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for _ in range(num_steps):
            inputs, targets = task.batch()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if observe is not None:
                observe(loss=loss)
            losses.update(struct.pack("d", loss.item()))
        seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(
            {
                "step_s": seconds / num_steps,
                "cpu_s": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / num_steps,
                "page_faults": (after.ru_minflt - before.ru_minflt) / num_steps,
                "peak_mib": after.ru_maxrss / 1024,
                "losses": losses.hexdigest(),
            }
        )


class Ways:
    """One process for each way of training the same model."""

    def __init__(self, name: str, ways: tuple[str, ...] = WAYS) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit this process's heap
        self.pipes: dict[str, Any] = {}
        self.processes = []
        for way in ways:
            self.pipes[way], theirs = context.Pipe()
            process = context.Process(target=_train, args=(name, way, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)

    def take(self, way: str, num_steps: int) -> dict[str, Any]:
        """Has one of them train while the others wait."""
        self.pipes[way].send(num_steps)
        found: dict[str, Any] = self.pipes[way].recv()
        return found

    def end(self) -> None:
        """Lets them go."""
        for pipe in self.pipes.values():
            pipe.send(0)
        for process in self.processes:
            process.join()


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(name: str) -> dict[str, Any]:
    """All ways of one model, in turn."""
    task, ways = TASKS[name], Ways(name)
    for way in WAYS:
        ways.take(way, 3 * task.steps)
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for index in range(task.rounds):
        for way in WAYS if index % 2 else reversed(WAYS):
            rounds[way].append(ways.take(way, task.steps))
    ways.end()
    found: dict[str, Any] = {}
    for way in WAYS:
        found[way] = {key: _spread([one[key] for one in rounds[way]]) for key in ("step_s", "cpu_s", "page_faults")}
        found[way]["peak_mib"] = rounds[way][-1]["peak_mib"]
        for rival in ("torch", "torch clips"):
            pairs = zip(rounds[way], rounds[rival], strict=True)
            found[way][f"/ {rival}"] = _spread([one["step_s"] / other["step_s"] for one, other in pairs])
    return found


def same_losses(name: str, num_steps: int) -> bool:
    """Whether guarded training has the same losses, to the last bit, with memory kept and without."""
    ways = Ways(name, ("guarded", "guarded, memory kept"))
    digests = {way: ways.take(way, num_steps)["losses"] for way in ways.pipes}
    ways.end()
    return len(set(digests.values())) == 1


def _show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}\n{'':24}{'ms a step':>10}{'/ torch':>9}{'min':>6}{'max':>6}{'faults':>9}{'peak MiB':>10}")
    for way in WAYS:
        one, ratio = found[way], found[way]["/ torch"]
        print(
            f"{way:24}{1e3 * one['step_s']['median']:10.1f}{ratio['median']:9.2f}{ratio['min']:6.2f}{ratio['max']:6.2f}"
            f"{one['page_faults']['median']:9.0f}{one['peak_mib']:10.0f}"
        )
    if name in GOALS:
        print(f"the goal for {WAYS[-1]} / torch is {GOALS[name]}")


def main() -> None:
    """Measures, prints, and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--losses", type=int, metavar="STEPS", help="compare the losses of so many steps instead")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in asked.only:
        if asked.losses:
            is_same = same_losses(name, asked.losses)
            print(f"{name}: {asked.losses} losses {'are the same to the last bit' if is_same else 'DIFFER'}")
            results.setdefault(name, {})["losses"] = {"num_steps": asked.losses, "are_same": is_same}
        else:
            found = measure(name)
            _show(name, found)
            results[name] = {**found, "losses": results.get(name, {}).get("losses")}
        results["made with"] = f"torch {torch.__version__}, fastguard {fastguard.__version__}, 2 threads"
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
