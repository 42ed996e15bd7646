"""What a guard adds to whole trainings of 1000 steps: scripts that take about 5 ms and 0.5 ms a step, from end to end.

Each trains on scikit-learn's digits with a data loader and reads its loss at every step, with a model and settings as
in a tutorial. Guarded means one line with the defaults, `wrap(optimizer, model, max_norm=1.0)`, and each loss observed.
The rival neither clips nor observes. A run's time is from before `wrap` to after `close`; runs alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fastguard
from fastguard.commands.bench import gc_off, without_a_word

from .timing import Settings, compared

NUM_STEPS = 1000
_NUM_PAIRS = 7


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


SCRIPTS: dict[str, Callable[[], nn.Module]] = {"script-5ms": _convolutions, "script-0.5ms": _mlp}


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)


def train(build: Callable[[], nn.Module], data: tuple[torch.Tensor, torch.Tensor], *, guarded: bool) -> float:
    """Seconds that one training takes."""
    torch.manual_seed(0)
    model = build()
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=64, shuffle=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, total = 0, 0.0
    started = time.perf_counter()
    if guarded:
        fastguard.wrap(optimizer, model, max_norm=1.0)
    while step < NUM_STEPS:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if guarded:
                optimizer.guard.observe(loss=loss)
            total += loss.item()
            step += 1
            if step == NUM_STEPS:
                break
    if guarded:
        optimizer.guard.close()
    return time.perf_counter() - started


def measure_script(name: str) -> Callable[[Settings], dict[str, Any]]:
    """Measures one of `SCRIPTS`: seconds with a guard over seconds without."""
    build, data = SCRIPTS[name], _digits()

    def measure(settings: Settings) -> dict[str, Any]:
        times: dict[bool, list[float]] = {True: [], False: []}
        with without_a_word(), gc_off():
            train(build, data, guarded=True)
            for index in range(min(_NUM_PAIRS, settings.num_rounds)):
                for guarded in (True, False) if index % 2 else (False, True):
                    times[guarded].append(1e6 * train(build, data, guarded=guarded) / NUM_STEPS)
        return compared(times[True], times[False])

    return measure
