"""Trainings with nothing wrong in them: the tasks as they are, and runs that look odd and are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.lab import tasks as text
from benchmarks.lab.tasks import sgd
from benchmarks.lab.training import Batch, Setup, warm_up_cosine

from . import digits

Make = Callable[[int], Setup]


def changed(make: Make, build: dict[str, Any] | None = None, **changes: Any) -> Make:
    """`make` with other fields of its `Setup`, and a model built with `build`."""

    def variant(seed: int) -> Setup:
        setup = make(seed)
        if build is not None:
            torch.manual_seed(seed)
            setup.model = setup.build(**build)
        for name, value in changes.items():
            setattr(setup, name, value)
        return setup

    return variant


def warm_restarts(period: int) -> Callable[[int], float]:
    """A schedule: a cosine from 1 to 0.01 again and again (Loshchilov and Hutter 2017)."""
    return lambda step: 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step % period) / period))


def one_cycle(num_steps: int) -> Callable[[int], float]:
    """A schedule: linear up over three tenths, linear down to nearly nothing."""
    return lambda step: min((step + 1) / (0.3 * num_steps), (num_steps - step) / (0.7 * num_steps))


def step_decay(every: int) -> Callable[[int], float]:
    """A schedule: a third after every so many steps."""
    return lambda step: 3.0 ** -(step // every)


def hot_start(num_hot: int, factor: float) -> Callable[[int], float]:
    """A schedule that is `factor` times too high for the first few steps: the loss jumps, and then comes down."""
    return lambda step: factor if step < num_hot else 1.0


class SparseReLU(nn.Module):
    """A wide ReLU layer whose units are each silent for most inputs, and none for all."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.wide = nn.Linear(64, width)
        self.relu = nn.ReLU()
        self.head = nn.Linear(width, 10)
        with torch.no_grad():
            self.wide.bias.fill_(-0.6)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.relu(self.wide(images)))


class Residual(nn.Module):
    """Twelve residual blocks of two linear layers each, behind LayerNorms."""

    def __init__(self, depth: int = 12, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def summed_reconstruction_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Squared error summed over pixels and batch: loss and gradients are thousands of times those of a mean."""
    return nn.functional.mse_loss(model(batch[0]), batch[0], reduction="sum")


def smoothed_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy with label smoothing 0.1: it cannot go to zero."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def fine_tuning(seed: int) -> Setup:
    """Begins where a finished run ended, with a small learning rate: the loss is low, and hardly moves."""
    setup = digits.digits_mlp(seed)
    optimizer = torch.optim.AdamW(setup.model.parameters(), lr=5e-3)
    for number in range(120):
        loss = setup.loss_of(setup.model, setup.batch_at(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    setup.lr = 1e-4
    return setup


def summed_loss(seed: int) -> Setup:
    """The autoencoder with that loss, validated on as many samples as a batch has."""
    setup = digits.digits_autoencoder(seed)
    setup.loss_of, setup.max_norm = summed_reconstruction_loss, None
    images, labels = setup.held_out
    setup.held_out = images[: digits.BATCH_SIZE], labels[: digits.BATCH_SIZE]
    return setup


def sparse_embedding(seed: int) -> Setup:
    """An embedding whose gradients are sparse: most rows are not touched by a batch."""
    setup = changed(text.char_mlp, {"sparse": True})(seed)
    setup.lr, setup.make_optimizer = 0.3, lambda parameters, lr: torch.optim.SGD(parameters, lr=lr)
    return setup


def rare_classes(seed: int) -> Setup:
    """Nine of ten samples are of two classes."""
    setup = digits.digits_mlp(seed)
    images, labels = digits.split()[0]
    common = (labels < 2).nonzero().flatten()
    rare = (labels >= 2).nonzero().flatten()[: len(common) // 9]
    chosen = torch.cat([common, rare])
    setup.batch_at = digits.shuffled_batches((images[chosen], labels[chosen]), 32, seed)
    setup.num_batches = len(chosen) // 32
    held_out, targets = digits.split()[1]
    kept = torch.cat([(targets < 2).nonzero().flatten(), (targets >= 2).nonzero().flatten()[:10]])
    setup.held_out = (held_out[kept], targets[kept])
    return setup


def small_batches(build: Callable[..., nn.Module], size: int, **options: Any) -> Make:
    """Batches so small that loss and gradients are noise around their mean."""
    return lambda seed: digits.digits_task(build, seed, size=size, **options)


def noisy_text(seed: int) -> Setup:
    """Two short texts a batch."""
    setup = text.char_lstm(seed)
    setup.batch_at, setup.lr = text.text_batches(2, 24, seed), 5e-3
    return setup


def _optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[Any, float], torch.optim.Optimizer]:
    return lambda parameters, lr: kind(parameters, lr=lr, **options)


_FOR_FAULTS_ALONE = (
    "small-char-mlp",
    "hot-char-mlp",
)  # one is too short of data, the other too hot, to be called healthy

HEALTHY: dict[str, Make] = {
    **digits.TASKS,
    **{name: make for name, make in text.TASKS.items() if name not in _FOR_FAULTS_ALONE},
    "noisy-batch-of-4": small_batches(digits.mlp, 4, lr=1e-3),
    "noisy-batch-of-4-sgd": small_batches(digits.mlp, 4, lr=5e-3, make_optimizer=sgd),
    "noisy-batch-of-8-cnn": small_batches(digits.cnn, 8, as_images=True, lr=2e-3),
    "noisy-batch-of-2-text": noisy_text,
    "large-batch": small_batches(digits.mlp, 352),
    "warm-restarts": changed(digits.digits_cnn, schedule=warm_restarts(50)),
    "warm-restarts-sgd": changed(digits.digits_mlp_sgd, schedule=warm_restarts(75)),
    "warm-restarts-text": changed(text.char_transformer, schedule=warm_restarts(60), lr=3e-3),
    "early-loss-jump": changed(digits.digits_autoencoder, schedule=hot_start(6, 6.0)),
    "early-loss-jump-text": changed(text.char_mlp, schedule=hot_start(5, 10.0)),
    "sparse-embedding": sparse_embedding,
    "sparse-relu": lambda seed: digits.digits_task(SparseReLU, seed),
    "sparse-relu-autoencoder": changed(digits.digits_autoencoder, {"width": 256}),
    "dropout-half": changed(digits.digits_mlp, {"dropout": 0.5}),
    "dropout-text": changed(text.char_mlp, {"dropout": 0.2}),
    "batch-norm": changed(digits.digits_mlp, {"batch_norm": True}, lr=2e-3),
    "weight-decay-usual": changed(
        digits.digits_mlp, make_optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1)
    ),
    "gelu": changed(digits.digits_mlp, {"activation": nn.GELU}, lr=2e-3),
    "silu-cnn": changed(digits.digits_cnn, {"activation": nn.SiLU}),
    "tanh-two-layers": changed(digits.digits_mlp, {"activation": nn.Tanh}),
    "tanh-text": changed(text.char_mlp, {"activation": nn.Tanh}),
    "sigmoid-one-layer": changed(digits.digits_mlp, {"activation": nn.Sigmoid, "depth": 1}),
    "residual-12": lambda seed: digits.digits_task(Residual, seed, lr=1e-3, num_steps=150),
    "gru": changed(text.char_lstm, {"kind": nn.GRU}),
    "not-clipped": changed(digits.digits_cnn, max_norm=None),
    "not-clipped-lstm": changed(text.char_lstm, max_norm=None),
    "float16-with-scaler": changed(digits.digits_mlp, autocast=torch.float16, scales_loss=True),
    "float16-without-scaler": changed(digits.digits_mlp, autocast=torch.float16),
    "bfloat16": changed(text.char_mlp, autocast=torch.bfloat16),
    "label-smoothing": changed(digits.digits_mlp, loss_of=smoothed_loss),
    "summed-loss": summed_loss,
    "rare-classes": changed(rare_classes, num_steps=120),
    "converged": changed(digits.digits_mlp_sgd, num_steps=600, schedule=warm_up_cosine(30, 600)),
    "fine-tuning": fine_tuning,
    "long-warm-up": changed(text.char_lstm, schedule=warm_up_cosine(125, 125, 1.0)),
    "one-cycle": changed(digits.digits_cnn, schedule=one_cycle(200), lr=1e-2),
    "step-decay": changed(digits.digits_mlp_sgd, schedule=step_decay(100)),
    "linear-decay": changed(text.char_transformer, schedule=lambda step: max(0.0, 1 - step / 250)),
    "rmsprop": changed(digits.digits_mlp, lr=1e-3, make_optimizer=_optimizer(torch.optim.RMSprop)),
    "adagrad": changed(digits.digits_mlp, lr=2e-2, make_optimizer=_optimizer(torch.optim.Adagrad)),
    "nesterov": changed(
        digits.digits_cnn, lr=0.02, make_optimizer=_optimizer(torch.optim.SGD, momentum=0.9, nesterov=True)
    ),
}
