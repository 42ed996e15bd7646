"""What a training that has not begun consists of, and what sound ones are made of: data and small models."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BATCHES = 3


@dataclass
class Planned:
    """A training that has not begun. A fault changes fields of it, or replaces them."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss_fn: Callable[..., Any]
    optimizer: Callable[[Any], Any] = field(default=functools.partial(torch.optim.Adam, lr=1e-3))
    batch_size: int = 32
    batches: list[Any] | None = None
    made: Any = None  # an optimizer that is there already
    prepare: Callable[[Planned], None] | None = None  # what is done last, as making a scheduler

    def arguments(self) -> tuple[Any, Any, Any, Any]:
        """What `preflight` takes."""
        optimizer = self.made if self.made is not None else self.optimizer(self.model.parameters())
        self.made = optimizer
        if self.prepare is not None:
            self.prepare(self)
        if self.batches is None:
            n = self.batch_size
            parts = [slice(i * n, (i + 1) * n) for i in range(NUM_BATCHES)]
            self.batches = [(self.inputs[s], self.targets[s]) for s in parts if len(self.inputs[s])]
        return self.model, optimizer, self.loss_fn, self.batches


TASKS: dict[str, Callable[[], Planned]] = {}


def task(function: Callable[[], Planned]) -> Callable[[], Planned]:
    """Registers a sound set-up; it is called after the random generators were seeded."""
    TASKS[function.__name__.strip("_").replace("_", "-")] = function
    return function


def opt(name: str, **settings: Any) -> Callable[[Any], Any]:
    """An optimizer of torch's, to be made."""
    return functools.partial(getattr(torch.optim, name), **settings)


@functools.cache
def load(name: str) -> tuple[Tensor, Tensor]:
    """A set of scikit-learn, shuffled, as tensors: features as they are, targets int64 or float32."""
    from sklearn import datasets

    made = {
        "blobs": lambda: datasets.make_blobs(1000, centers=3, n_features=2, cluster_std=2, random_state=2),
        "circles": lambda: datasets.make_circles(1000, noise=0.1, random_state=1),
        "moons": lambda: datasets.make_moons(1000, noise=0.1, random_state=1),
        "swiss-roll": lambda: datasets.make_swiss_roll(1000, noise=0.1, random_state=1),
        "friedman": lambda: datasets.make_friedman1(1000, random_state=1),
        "multilabel": lambda: datasets.make_multilabel_classification(1000, random_state=1),
    }
    if name in made:
        x, y = made[name]()
    else:
        x, y = getattr(datasets, f"load_{name.replace('-', '_')}")(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    x, y = torch.as_tensor(x, dtype=torch.float32)[order], torch.as_tensor(y)[order]
    return x, (y.float() if name in ("diabetes", "swiss-roll", "friedman", "multilabel") else y.long())


def standard(x: Tensor) -> Tensor:
    """Each feature with mean 0 and standard deviation 1."""
    return (x - x.mean(0)) / x.std(0).clamp_min(1e-6)


@functools.cache
def text() -> Tensor:
    """Characters of some of torch's docstrings, as numbers below 64."""
    source = torch.__doc__ or ""
    source += "".join(str(f.__doc__) for f in (nn.Linear, nn.LSTM, nn.Conv2d, nn.Transformer, F.cross_entropy, nn.GRU))
    return torch.tensor([ord(c) % 64 for c in source])


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU, last: nn.Module | None = None) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b)] + ([act()] if i < len(widths) - 2 else [])
    return nn.Sequential(*layers, *([] if last is None else [last]))


def narrow(num_layers: int, act: Callable[[], nn.Module], num_in: int, num_out: int, last: Any = None) -> nn.Module:
    """AUTOTRAINER's nets: layers of five units, He-uniform."""
    model = mlp(num_in, *([5] * num_layers), num_out, act=act, last=last)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        """The function's value."""
        return self.function(*given)


def column(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss for one unit: the output without its last dimension."""
    return lambda output, target: loss(output.squeeze(-1), target)


def windows(length: int, count: int = 200) -> tuple[Tensor, Tensor]:
    """Stretches of text, and the same shifted by one."""
    t = text()
    starts = torch.randint(len(t) - length - 1, (count,))
    return torch.stack([t[s : s + length] for s in starts]), torch.stack([t[s + 1 : s + length + 1] for s in starts])


def images() -> tuple[Tensor, Tensor]:
    """The digits as images."""
    x, y = load("digits")
    return (x / 16).reshape(-1, 1, 8, 8), y
