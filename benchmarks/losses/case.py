"""The tasks that losses are written for: a small model and a batch each; and what a case is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

N, FEATURES, CLASSES, TOKENS, LENGTH = 48, 6, 4, 11, 12
CASES: list[Case] = []


@dataclass(frozen=True)
class Case:
    """A loss for a task.

    Attributes:
        task: a name of `TASKS`.
        kind: what is wrong with it, or what sort of sound loss it is.
        thread: repository#number of a thread that reported the fault, or that explains the sound loss.
        loss: what preflight gets.
        is_wrong: whether it is.
    """

    task: str
    kind: str
    thread: str
    loss: Callable[..., Any]
    is_wrong: bool
    name: str
    is_fresh: bool = False

    @property
    def half(self) -> str:
        """ "tune" or "report", by a hash of the kind; or "fresh". The last two were asked once, then mended."""
        if self.is_fresh:
            return "fresh"
        return "report" if hashlib.sha256(self.kind.encode()).digest()[0] % 2 else "tune"


def add(is_wrong: bool, kind: str, thread: str, task: str, *losses: Callable[..., Any], is_fresh: bool = False) -> None:
    """Adds losses of one kind."""
    for loss in losses:
        number = sum(case.kind == kind for case in CASES)
        CASES.append(Case(task, kind, thread, loss, is_wrong, f"{kind}/{number}-{task}", is_fresh))


class Net(nn.Module):
    """A layer for each head; `last` of what they give."""

    def __init__(self, *widths: int, last: Callable[..., Any] | None = None, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(16, width) for width in widths)
        self.last, self.shape = last, shape

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        outs = [head(hidden).reshape(len(x), *self.shape) if self.shape else head(hidden) for head in self.heads]
        return self.last(*outs) if self.last else outs[0]


class Text(nn.Module):
    """Logits of each position; with `causal`, of what went before it alone."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.mixing = nn.GRU(16, 16, batch_first=True, bidirectional=not causal)
        self.head = nn.Linear(16 if causal else 32, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mixing(self.embedding(ids))[0])


class Picture(nn.Module):
    """A picture of some channels from one of one channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _tabular(target: Callable[[Tensor], Any], *widths: int, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        x = torch.randn(N, FEATURES)
        return Net(*widths, **options), (x, target(x))

    return make


def _tokens(padding: int | None, causal: bool = False, shifted: bool = False) -> Callable[[], tuple[nn.Module, Any]]:
    """Pairs of ids and one label each, padded at the end with `padding`; `shifted`: labels are the next ids."""

    def make() -> tuple[nn.Module, Any]:
        ids = torch.randint(1, TOKENS, (8, LENGTH + 1))
        labels = ids[:, 1:].clone() if shifted else (3 * ids[:, :-1] + 1) % (TOKENS - 1) + 1
        lengths = torch.arange(5, 5 + 8).clamp(max=LENGTH)[:, None]
        ids = ids[:, :-1].masked_fill(torch.arange(LENGTH) >= lengths, 0)
        if padding is not None:
            labels = labels.masked_fill(torch.arange(LENGTH) >= lengths, padding)
        return Text(causal), (ids, labels)

    return make


def _language() -> tuple[nn.Module, Any]:
    model, (ids, _) = _tokens(0, causal=True)()
    mask = ids != 0
    return model, {"ids": ids, "mask": mask, "labels": ids.masked_fill(~mask, -100)}


def _masked_words() -> tuple[nn.Module, Any]:
    ids = torch.randint(2, TOKENS, (8, LENGTH))
    chosen = torch.rand(8, LENGTH) < 0.3
    return Text(False), (ids.masked_fill(chosen, 1), ids.masked_fill(~chosen, -100))


def _pictures(channels: int, target: Callable[[Tensor], Tensor]) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        x = torch.randn(6, 1, 8, 8)
        return Picture(channels), (x, target(x))

    return make


def _policy() -> tuple[nn.Module, Any]:
    x = torch.randn(N, FEATURES)
    actions, advantages, old = torch.randint(CLASSES, (N,)), torch.randn(N), -torch.rand(N)
    return Net(CLASSES), {"states": x, "actions": actions, "advantages": advantages, "old": old}


def _views() -> tuple[nn.Module, Any]:
    x = torch.randn(N, FEATURES)
    return Net(8), {"first": x, "second": x + 0.1 * torch.randn_like(x), "third": torch.randn(N, FEATURES)}


TASKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "classes": _tabular(lambda x: x[:, :CLASSES].argmax(1), CLASSES),
    "log-probabilities": _tabular(lambda x: x[:, :CLASSES].argmax(1), CLASSES, last=nn.LogSoftmax(1)),
    "binary": _tabular(lambda x: (x[:, :1] > 0).float(), 1),
    "binary-flat": _tabular(lambda x: (x[:, 0] > 0).float(), 1, last=lambda o: o.squeeze(1)),
    "probability": _tabular(lambda x: (x[:, :1] > 0).float(), 1, last=torch.sigmoid),
    "labels": _tabular(lambda x: (x[:, :5] > 0.2).float(), 5),
    "number": _tabular(lambda x: x[:, :1] - x[:, 1:2], 1),
    "column-and-row": _tabular(lambda x: x[:, 0] - x[:, 1], 1),
    "numbers": _tabular(lambda x: x[:, :3] + 0.5 * x[:, 3:], 3),
    "positive": _tabular(lambda x: (0.7 * x[:, :1]).exp() + 0.1, 1),
    "counts": _tabular(lambda x: torch.poisson((0.6 * x[:, :1] + 1).exp()), 1),
    "quantiles": _tabular(lambda x: x[:, 0] + x[:, 1], 3),
    "mean-and-variance": _tabular(lambda x: x[:, :1] + x[:, 1:2], 1, 1, last=lambda a, b: (a, b)),
    "mixture": _tabular(lambda x: x[:, 0] + x[:, 1], 9),
    "two-tasks": _tabular(
        lambda x: {"class": x[:, :CLASSES].argmax(1), "value": x[:, 4:5]},
        CLASSES, 1, last=lambda a, b: {"class": a, "value": b},
    ),
    "steps-of-ten": _tabular(lambda x: x.cumsum(1).repeat(1, 2)[:, :10, None] * torch.ones(2), 20, shape=(10, 2)),
    "ranking": _tabular(lambda x: x[:, :5].argsort(1).argsort(1).float(), 5),
    "grades": _tabular(lambda x: torch.bucketize(x[:, 0], torch.tensor([-0.7, 0.0, 0.7])), 3),
    "survival": _tabular(lambda x: torch.stack([x[:, 0].exp(), (x[:, 1] > -0.5).float()], 1), 1),
    "boxes": _tabular(lambda x: torch.cat([x[:, :2], x[:, :2] + x[:, 2:4].abs() + 0.5], 1), 4),
    "teacher": _tabular(lambda x: 2.0 * x[:, :CLASSES], CLASSES),
    "embeddings": _tabular(lambda x: x[:, :CLASSES].argmax(1), 8),
    "copies": _tabular(lambda x: x.clone(), FEATURES),
    "autoencoder": _tabular(
        lambda x: x.clone(), FEATURES, 3, 3, last=lambda recon, mean, logvar: (recon, mean, logvar)
    ),
    "tokens": _tokens(-100),
    "padded-tokens": _tokens(0),
    "next-tokens": _tokens(-100, causal=True, shifted=True),
    "language": _language,
    "masked-words": _masked_words,
    "pictures": _pictures(3, lambda x: (x[:, 0] > -0.4).long() + (x[:, 0] > 0.4).long()),
    "pixels": _pictures(1, lambda x: (x > 0.3).float()),
    "denoising": _pictures(1, lambda x: torch.nn.functional.avg_pool2d(x, 3, 1, 1)),
    "policy": _policy,
    "views": _views,
}  # fmt: skip
