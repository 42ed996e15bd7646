"""Tasks on scikit-learn's digits: 1797 real scans of 8 × 8 pixels, part of the package, nothing is downloaded."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.lab.tasks import adamw, sgd
from benchmarks.lab.training import Batch, Setup, shuffled_batches, warm_up_cosine

NUM_TRAIN = 1408
BATCH_SIZE = 64


class MissingDataError(RuntimeError):
    """scikit-learn, which brings the digits, is not installed."""


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [1797, 64], normalised over the training part, and labels [1797], in an order of our own.

    Raises:
        MissingDataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingDataError(
            "the digits come with scikit-learn, which is not installed here. `pip install -c constraints.txt "
            "-e '.[bench]'` brings it."
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32)[order]
    train = images[:NUM_TRAIN]
    return (images - train.mean()) / train.std(), torch.tensor(labels)[order]


def split(*, as_images: bool = False) -> tuple[Batch, Batch]:
    """(images, labels) to train on, and those held out."""
    images, labels = digits()
    if as_images:
        images = images.view(-1, 1, 8, 8)
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


def mlp(
    depth: int = 2,
    width: int = 96,
    activation: Callable[[], nn.Module] = nn.ReLU,
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> nn.Sequential:
    """Linear layers with an activation after each but the last."""
    sizes = [64, *[width] * depth]
    layers: list[nn.Module] = []
    for low, high in itertools.pairwise(sizes):
        layers += [nn.Linear(low, high), *([nn.BatchNorm1d(high)] if batch_norm else []), activation()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def cnn(width: int = 16, activation: Callable[[], nn.Module] = nn.ReLU, dropout: float = 0.0) -> nn.Sequential:
    """Three convolutions and a linear layer, for images [B, 1, 8, 8]."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        activation(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        activation(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        activation(),
        nn.Flatten(),
        *([nn.Dropout(dropout)] if dropout else []),
        nn.Linear(2 * width * 16, 10),
    )


class Autoencoder(nn.Module):
    """64 pixels through a bottleneck of eight numbers and back."""

    def __init__(self, width: int = 96, activation: Callable[[], nn.Module] = nn.ReLU, dropout: float = 0.0) -> None:
        super().__init__()
        dropped = [nn.Dropout(dropout)] if dropout else []
        self.encoder = nn.Sequential(nn.Linear(64, width), activation(), *dropped, nn.Linear(width, 8))
        self.decoder = nn.Sequential(nn.Linear(8, width), activation(), *dropped, nn.Linear(width, 64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(images))


def class_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def reconstruction_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared error of the pixels."""
    return nn.functional.mse_loss(model(batch[0]), batch[0])


def digits_task(
    build: Callable[..., nn.Module],
    seed: int,
    *,
    as_images: bool = False,
    size: int = BATCH_SIZE,
    num_train: int = NUM_TRAIN,
    **options: Any,
) -> Setup:
    """A run on the digits: `build` makes the model, `options` are those of `Setup`."""
    torch.manual_seed(seed)
    train, held_out = split(as_images=as_images)
    train = (train[0][:num_train], train[1][:num_train])
    return Setup(
        **{
            "seed": seed,
            "build": build,
            "model": build(),
            "loss_of": class_loss,
            "batch_at": shuffled_batches(train, size, seed),
            "held_out": held_out,
            "num_batches": num_train // size,
            "lr": 5e-3,
            "make_optimizer": adamw,
            "num_steps": 300,
            **options,
        }
    )


def digits_mlp(seed: int) -> Setup:
    """Two hidden ReLU layers, AdamW."""
    return digits_task(mlp, seed)


def digits_mlp_sgd(seed: int) -> Setup:
    """The same with SGD and momentum."""
    return digits_task(mlp, seed, lr=0.1, make_optimizer=sgd)


def digits_cnn(seed: int) -> Setup:
    """Three convolutions, AdamW."""
    return digits_task(cnn, seed, as_images=True, num_steps=200)


def digits_autoencoder(seed: int) -> Setup:
    """An autoencoder with a mean squared error, AdamW."""
    return digits_task(Autoencoder, seed, loss_of=reconstruction_loss)


def digits_accumulating(seed: int) -> Setup:
    """SGD on eight batches of 16 a step; not clipped."""
    return digits_task(mlp, seed, size=16, lr=0.1, make_optimizer=sgd, num_micro=8, num_steps=150, max_norm=None)


def digits_cnn_warmed_up(seed: int) -> Setup:
    """SGD with a learning rate that the CNN stands after a warm-up only; not clipped."""
    options = {"max_norm": None, "schedule": warm_up_cosine(80, 300)}
    return digits_task(cnn, seed, as_images=True, lr=0.15, make_optimizer=sgd, **options)


TASKS: dict[str, Callable[[int], Setup]] = {
    "digits-mlp": digits_mlp,
    "digits-mlp-sgd": digits_mlp_sgd,
    "digits-cnn": digits_cnn,
    "digits-autoencoder": digits_autoencoder,
    "digits-accumulating": digits_accumulating,
    "digits-cnn-warmed-up": digits_cnn_warmed_up,
}
