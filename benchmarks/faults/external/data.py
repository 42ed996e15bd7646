"""Data: scikit-learn's small sets and generators, the standard library's text, and sequences made here."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from fastguard.commands.demo.text import library_text

from ..digits import split as digits_split
from .loop import Tensors

Split = tuple[Tensors, Tensors]
NUM_BYTES = 200_000


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
def text(length: int, num_train: int = 2000, num_held_out: int = 300) -> Split:
    """Pieces of the standard library's source, byte by byte, and the same one byte on; bytes above 127 become 127."""
    whole = torch.frombuffer(bytearray(library_text(NUM_BYTES)), dtype=torch.uint8).long().clamp(max=127)
    cut = int(0.9 * len(whole))
    dice = torch.Generator().manual_seed(6)
    parts = []
    for low, high, count in ((0, cut, num_train), (cut, len(whole), num_held_out)):
        starts = torch.randint(low, high - length - 1, (count, 1), generator=dice)
        pieces = whole[starts + torch.arange(length + 1)]
        parts.append((pieces[:, :-1], pieces[:, 1:]))
    return parts[0], parts[1]


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


@functools.cache
def adding(length: int = 12, count: int = 2000) -> Split:
    """Numbers and marks [B, T, 2]; the sum of the two marked numbers [B, 1]."""
    dice = torch.Generator().manual_seed(9)
    numbers, marks = torch.rand(count, length, generator=dice), torch.zeros(count, length)
    places = torch.rand(count, length, generator=dice).argsort(1)[:, :2]
    marks.scatter_(1, places, 1.0)
    return parted(torch.stack([numbers, marks], -1), (numbers * marks).sum(1, keepdim=True), 0.85)


@functools.cache
def brackets(length: int = 16, count: int = 1500) -> Split:
    """Random brackets, 0 opens and 1 closes, and at each place how deep it lies, from 0 to 4."""
    dice = torch.Generator().manual_seed(10)
    symbols = torch.randint(0, 2, (count, length), generator=dice)
    depth, depths = torch.zeros(count, dtype=torch.long), []
    for place in range(length):
        depth = (depth + 1 - 2 * symbols[:, place]).clamp(0, 4)
        depths.append(depth)
    return parted(symbols, torch.stack(depths, 1), 0.8)


@functools.cache
def counts(count: int = 1200) -> Split:
    """Features and numbers of events [B, 1] that they make likely."""
    dice = torch.Generator().manual_seed(11)
    features = torch.randn(count, 6, generator=dice)
    rate = torch.exp(0.8 + 0.6 * features[:, :1] - 0.4 * features[:, 1:2] + 0.3 * torch.sin(2 * features[:, 2:3]))
    return parted(features, torch.poisson(rate, generator=dice))
