"""Data: scikit-learn's small sets and generators, the standard library's text, and sequences made here."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from ..digits import split as digits_split
from .loop import Tensors

Split = tuple[Tensors, Tensors]


def dice_of(seed: int) -> torch.Generator:
    """Random numbers for data, whatever the seed of the run."""
    return torch.Generator().manual_seed(seed)


def drawn(count: int, size: int, *tensors: torch.Tensor) -> Iterator[Tensors]:
    """`count` batches of `size`, drawn with replacement."""
    for _ in range(count):
        at = torch.randint(len(tensors[0]), (size,))
        yield tuple(t[at] for t in tensors)


def parted(inputs: torch.Tensor, targets: torch.Tensor, share: float = 0.7) -> Split:
    """What is trained on and what is held out, in an order of our own."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    cut = int(share * len(inputs))
    return (inputs[order[:cut]], targets[order[:cut]]), (inputs[order[cut:]], targets[order[cut:]])


def standardised(split: Split) -> Split:
    """The same with features of mean 0 and deviation 1 over the training part."""
    (inputs, targets), (held_out, wanted) = split
    mean, std = inputs.mean(0), inputs.std(0).clamp(min=1e-6)
    return ((inputs - mean) / std, targets), ((held_out - mean) / std, wanted)


def _of_sklearn(name: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn import datasets

    loaded = getattr(datasets, name)(**options)
    features, targets = loaded[:2]
    return torch.tensor(features, dtype=torch.float32), torch.tensor(targets)


@functools.cache
def table(name: str, *, is_standard: bool = True) -> Split:
    """breast_cancer, wine, iris: features and classes; diabetes: features and a number [B, 1]."""
    features, targets = _of_sklearn(f"load_{name}", return_X_y=True)
    split = parted(features, targets.float()[:, None] if name == "diabetes" else targets.long())
    return standardised(split) if is_standard else split


@functools.cache
def blob() -> Split:
    """AUTOTRAINER's Blob: three clouds in the plane that overlap."""
    features, labels = _of_sklearn("make_blobs", n_samples=1000, centers=3, n_features=2, cluster_std=2, random_state=2)
    return parted(features, labels.long())


@functools.cache
def circle() -> Split:
    """AUTOTRAINER's Circle: one ring in another; labels 0 and 1."""
    features, labels = _of_sklearn("make_circles", n_samples=1000, noise=0.1, random_state=1)
    return parted(features, labels.long())


@functools.cache
def moons() -> Split:
    """Two half moons."""
    features, labels = _of_sklearn("make_moons", n_samples=1200, noise=0.15, random_state=3)
    return standardised(parted(features, labels.long()))


@functools.cache
def friedman(scale: float = 1.0, num_samples: int = 1200) -> Split:
    """Friedman's first function of five of ten features, with a little noise; targets [B, 1] times `scale`."""
    features, values = _of_sklearn("make_friedman1", n_samples=num_samples, noise=0.5, random_state=5)
    return standardised(parted(features, scale * values.float()[:, None]))


def digits(*, as_images: bool = False) -> Split:
    """scikit-learn's digits, normalised."""
    return digits_split(as_images=as_images)


@functools.cache
def pixels() -> Split:
    """The digits as grey values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return parted(torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels), 0.8)


@functools.cache
def copy_task(length: int = 6, gap: int = 4, symbols: int = 6, count: int = 1600) -> Split:
    """Symbols, a gap, and as many places at which they are to be said again: targets 0 before that."""
    dice = torch.Generator().manual_seed(7)
    said = torch.randint(2, 2 + symbols, (count, length), generator=dice)
    silent = torch.zeros(count, length, dtype=torch.long)
    inputs = torch.cat([said, silent[:, :1].expand(-1, gap), torch.ones_like(silent)], 1)
    targets = torch.cat([torch.zeros(count, length + gap, dtype=torch.long), said], 1)
    return parted(inputs, targets, 0.85)


@functools.cache
def waves(length: int = 24, count: int = 1200) -> Split:
    """Sums of two sines with noise [B, T, 1], and their next value [B, 1]."""
    dice = torch.Generator().manual_seed(8)
    time = torch.arange(length + 1.0)
    phases, rates = torch.rand(2, count, 1, generator=dice) * 6.28, 0.2 + 0.6 * torch.rand(2, count, 1, generator=dice)
    series = (torch.sin(phases + rates * time)).sum(0) + 0.05 * torch.randn(count, length + 1, generator=dice)
    return parted(series[:, :-1, None], series[:, -1:], 0.8)
