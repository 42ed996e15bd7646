"""Peak memory of a training, guarded against not guarded, each in a process of its own.

python -m benchmarks.speed.training_memory                  # results/memory.json, and the sentence in the README
python -m benchmarks.speed.training_memory --only conv      # one model, in the terminal
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# fastguard is imported only where it guards: what its own code takes counts as memory of guarding.

FOLDER = Path(__file__).resolve().parents[1]
RESULTS = FOLDER / "results" / "memory.json"
README = FOLDER.parent / "README.md"
AT_MOST = 1.05  # guarded / not guarded
PLAIN, DEFAULTS, SAMPLED = MODES = ("plain", "defaults", "sampled")
_SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULTS: {},
    SAMPLED: {"activations": {"every": 10, "overhead_budget": None}, "weights": 10},
}
_CONDITIONS = ("cpu", "isa", "system", "python", "torch", "fastguard", "date")
# The same for both sides. Memory beyond 64 KiB goes back to the system as soon as it is free, so that the peak is what
# was in use at once and not how the allocator happened to reuse it.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


@dataclass(frozen=True)
class Training:
    """A model, its batches, and for how many steps it is trained.

    Attributes:
        title: what the table calls it.
        make: the model; `batch`: inputs and targets; `loss`: of the output and the targets.
        num_steps: enough for every look to have come due; BatchNorm is looked at after 42 steps.
    """

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    num_steps: int


class LanguageModel(nn.Module):
    """A small transformer over a large vocabulary: nearly all memory is the embedding, the head and the logits."""

    def __init__(self, vocabulary: int = 50_257, width: int = 192, length: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.blocks(self.tokens(ids) + self.places, mask=mask, is_causal=True))


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(50_257, (2, 257))
    return ids[:, :-1], ids[:, 1:]


def _convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]


def _segmentation() -> nn.Module:
    return nn.Sequential(*_convolution(3, 8), *_convolution(8, 8), nn.Conv2d(8, 21, 1))


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 8192))


def _classifier() -> nn.Module:
    layers = [*_convolution(3, 32), *_convolution(32, 64, 2), *_convolution(64, 64)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100))


TRAININGS = {
    "language": Training(
        "language model, vocabulary 50,257, 2 x 256 tokens",
        LanguageModel,
        _tokens,
        lambda y, target: F.cross_entropy(y.flatten(0, 1), target.flatten()),
        24,
    ),
    "segmentation": Training(
        "segmentation, 21 classes, 512 x 512",
        _segmentation,
        lambda: (torch.randn(1, 3, 512, 512), torch.randint(21, (1, 512, 512))),
        F.cross_entropy,
        48,
    ),
    "wide": Training(
        "MLP, 512-2048-2048-8192, batches of 1024",
        _wide,
        lambda: (torch.randn(1024, 512), torch.randn(1024, 8192)),
        F.mse_loss,
        24,
    ),
    "conv": Training(
        "convolutional classifier, 64 x 64, batches of 32",
        _classifier,
        lambda: (torch.randn(32, 3, 64, 64), torch.randint(100, (32,))),
        F.cross_entropy,
        48,
    ),
}


def peak_bytes(training: Training, mode: str, num_steps: int | None = None) -> int:
    """The high-water mark of this process's memory once `training` is over."""
    torch.manual_seed(0)
    model = training.make()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if mode != PLAIN:
        import fastguard

        optimizer = fastguard.wrap(optimizer, model, max_norm=1.0, **_SETTINGS[mode])
    for _ in range(num_steps or training.num_steps):
        inputs, targets = training.batch()
        loss = training.loss(model(inputs), targets)
        loss.backward()
        if mode == PLAIN:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mode != PLAIN:
            optimizer.guard.observe(loss=loss)
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure(name: str, modes: Sequence[str] = MODES, num_steps: int | None = None) -> dict[str, Any]:
    """Peaks of one training, each in a fresh process, and each mode's ratio to `PLAIN`."""
    from .frames import run_module

    module = "benchmarks.speed.training_memory"
    peaks = {mode: run_module(module, "--child", name, mode, str(num_steps or 0), **ENVIRONMENT) for mode in modes}
    return {
        "title": TRAININGS[name].title,
        "peak_mib": {mode: round(peak / 2**20) for mode, peak in peaks.items()},
        "ratio": {mode: round(peaks[mode] / peaks[PLAIN], 3) for mode in modes if mode != PLAIN},
    }


def sentence(results: dict[str, Any]) -> str:
    """What guarding does to the peak memory of training, for the README."""
    found = [training["ratio"] for training in results["trainings"].values()]
    defaults, sampled = (f"{100 * (max(ratios[mode] for ratios in found) - 1):.1f} %" for mode in (DEFAULTS, SAMPLED))
    return f"Training's peak memory grows by at most {defaults}, with activations and weights by {sampled} (4 models)."


def written(text: str, results: dict[str, Any]) -> str:
    """`text` with the sentence between its markers, which stand within a paragraph."""
    pattern = r"(<!-- memory:begin -->).*?(<!-- memory:end -->)"
    new, count = re.subn(pattern, lambda match: match[1] + sentence(results) + match[2], text, flags=re.DOTALL)
    if not count:
        raise ValueError("there is no <!-- memory:begin --> with its end")
    return new


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.training_memory", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(TRAININGS), help="print the ratios of these, save nothing")
    parser.add_argument("--steps", type=int, help="train for so many steps")
    parser.add_argument("--child", nargs=3, metavar=("NAME", "MODE", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        name, mode, num_steps = arguments.child
        print(peak_bytes(TRAININGS[name], mode, int(num_steps)))
        return 0
    found: dict[str, Any] = {}
    for name in arguments.only or TRAININGS:
        found[name] = measure(name, num_steps=arguments.steps)
        peaks = ", ".join(f"{mode} {peak} MiB" for mode, peak in found[name]["peak_mib"].items())
        print(f"{name}: {peaks}; " + ", ".join(f"{mode} x{x:.3f}" for mode, x in found[name]["ratio"].items()))
    if not (arguments.only or arguments.steps):
        _save(found)
    return 0


def _save(found: dict[str, Any]) -> None:
    from .. import machine

    about = machine.Machine().to_dict()
    results = {"machine": {key: about[key] for key in _CONDITIONS}, "trainings": found}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    README.write_text(written(README.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
