"""Factors, graphs, sets, rankings, mixtures: tasks that are neither tables nor images nor sequences."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case, sound_cases
from ..loop import Plan, Tensors
from ..qualities import accuracy, explained, r_squared
from .tabular import squared_loss

_cases = functools.partial(sound_cases, __name__)


class Factors(nn.Module):
    """What a user thinks of an item: the product of their factors; pairs [B, 2] to [B, 1]."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60, 6, sparse=sparse), nn.Embedding(50, 6, sparse=sparse)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, 0.0, 0.3)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1, keepdim=True)


def factors(seed: int, *, sparse: bool = False) -> Plan:
    """Matrix factorisation: a batch touches some rows of the embeddings."""
    torch.manual_seed(seed)
    return Plan(
        Factors(sparse=sparse), squared_loss, *data.ratings(), r_squared, 0.6, lr=2e-2, num_epochs=8, batch_size=64,
        seed=seed,
    )  # fmt: skip


def sparse_factors(seed: int) -> Plan:
    """The same with sparse gradients."""
    plan = factors(seed, sparse=True)
    plan.optimizer = o.of(torch.optim.SparseAdam)
    return plan


class Convolved(nn.Module):
    """Two graph convolutions over a fixed graph: classes of nodes [B] by number."""

    def __init__(self, graph: torch.Tensor, features: torch.Tensor, num_out: int) -> None:
        super().__init__()
        degree = graph.sum(1)
        self.register_buffer("mixing", graph / (degree[:, None] * degree[None]).sqrt())
        self.register_buffer("features", features)
        self.first, self.second = nn.Linear(features.shape[1], 16), nn.Linear(16, num_out)

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.mixing @ self.first(self.features))
        return (self.mixing @ self.second(hidden))[nodes]


def graph(seed: int) -> Plan:
    """Three communities of a random graph, from a few known members; all of it at each step."""
    dice = torch.Generator().manual_seed(20)
    labels = torch.arange(180) % 3
    near = labels[:, None] == labels[None]
    edges = (torch.rand(180, 180, generator=dice) < torch.where(near, 0.12, 0.02)).float().triu(1)
    edges = edges + edges.T + torch.eye(180)
    features = F.one_hot(labels, 3).float() + torch.randn(180, 3, generator=dice)
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    split = data.parted(torch.arange(180), labels, 0.4)
    model = Convolved(edges, features, 3)
    return Plan(model, loss, *split, accuracy, 0.9, lr=1e-2, num_epochs=80, batch_size=1000, seed=seed)


class Pooled(nn.Module):
    """A function of a set [B, N, F]: each element on its own, then their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nets.mlp((2, 32, 32)), nets.mlp((32, 32, 1))

    def forward(self, sets: torch.Tensor) -> torch.Tensor:
        return self.all(self.each(sets).mean(1))


def sets(seed: int) -> Plan:
    """The spread of a cloud of ten points."""
    dice = torch.Generator().manual_seed(21)
    spread = 0.2 + torch.rand(1500, 1, generator=dice)
    clouds = torch.randn(1500, 1, 2, generator=dice) + spread[:, :, None] * torch.randn(1500, 10, 2, generator=dice)
    torch.manual_seed(seed)
    wanted = clouds.var(1).sum(1, keepdim=True).sqrt()
    return Plan(Pooled(), squared_loss, *data.parted(clouds, wanted), r_squared, 0.5, lr=1e-2, num_epochs=18, seed=seed)


def ranking(seed: int) -> Plan:
    """Which of two comes first: the logistic loss of their scores' difference."""
    torch.manual_seed(seed)
    (x, y), (held_out, wanted) = data.friedman()

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        order = torch.arange(len(batch[0])).roll(1)
        ahead = model(batch[0]) - model(batch[0][order])
        return F.binary_cross_entropy_with_logits(ahead, (batch[1] > batch[1][order]).float())

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        score, value = model(held_out[0]).flatten(), held_out[1].flatten()
        right = (score[:, None] > score[None]) == (value[:, None] > value[None])
        return float(right.float().mean())

    model = nets.mlp((10, 48, 1))
    return Plan(model, loss, (x, y), (held_out, wanted), quality, 0.85, lr=5e-3, num_epochs=12, seed=seed)


class Mixture(nn.Module):
    """Log-density [B] of points under six round clouds."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(1.5 * torch.randn(6, 2))
        self.log_sizes, self.log_shares = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        squares = (points[:, None] - self.centres).square().sum(-1) * (-2.0 * self.log_sizes).exp()
        logs = self.log_shares.log_softmax(0) - 0.5 * squares - 2.0 * self.log_sizes - 1.8378770664093453
        return logs.logsumexp(1)


def mixture(seed: int) -> Plan:
    """A mixture of clouds by maximum likelihood."""
    torch.manual_seed(seed)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return float(model(held_out[0]).mean()) + 2.84  # that of a normal density of the same spread

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return -model(batch[0]).mean()

    return Plan(Mixture(), loss, *data.moons(), quality, 0.2, lr=2e-2, num_epochs=10, seed=seed)


class Near(nn.Module):
    """Words by their places among others: scores [B] of pairs [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.contexts = nn.Embedding(64, 12), nn.Embedding(64, 12)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return (self.words(pairs[:, 0]) * self.contexts(pairs[:, 1])).sum(1)


def skip_gram(seed: int) -> Plan:
    """Words of eight topics, next to words of their own; drawn against words at random."""
    dice = torch.Generator().manual_seed(22)
    words = torch.randint(64, (6000,), generator=dice)
    own = words // 8 * 8 + torch.randint(8, (6000,), generator=dice)
    is_own = torch.rand(6000, generator=dice) < 0.5
    other = torch.where(is_own, own, torch.randint(64, (6000,), generator=dice))
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return float(((model(held_out[0]) > 0.0) == (held_out[1] > 0.5)).float().mean())

    split = data.parted(torch.stack([words, other], 1), is_own.float())
    return Plan(Near(), loss, *split, quality, 0.8, lr=2e-2, num_epochs=12, batch_size=64, seed=seed)


def noisy_regression(seed: int) -> Plan:
    """Mostly noise: a third of the variance can be explained, and the loss stays where it is soon."""
    dice = torch.Generator().manual_seed(23)
    x = torch.randn(2000, 5, generator=dice)
    y = x[:, :1] - 0.5 * x[:, 1:2] + 1.5 * torch.randn(2000, 1, generator=dice)
    torch.manual_seed(seed)
    return Plan(nn.Linear(5, 1), squared_loss, *data.parted(x, y), r_squared, 0.25, lr=2e-2, num_epochs=12, seed=seed)


class Student(nn.Module):
    """Radial functions around learnt centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres, self.log_width = nn.Parameter(torch.linspace(-1, 1, 16)[:, None]), nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((-(x - self.centres.T).square() * (2.0 * self.log_width).exp() * 20.0).exp())


def radial(seed: int) -> Plan:
    """A radial basis network on a noisy sine."""
    torch.manual_seed(seed)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return explained(model(held_out[0]), held_out[1])

    return Plan(Student(), squared_loss, *data.noisy_sine(), quality, 0.9, lr=2e-2, num_epochs=12, seed=seed)


_CLIPPED = {"max_norm": 1.0}
CASES: tuple[Case, ...] = (
    *_cases("ratings-factors", "matrix factorisation", factors, adam={}, adagrad={"optimizer": o.ADAGRAD, "lr": 0.3}),
    *_cases("ratings-sparse", "the same, sparse gradients", sparse_factors, sparse_adam={}),
    *_cases("graph-convolutions", "communities of a graph", graph, adam={}, adamw={"optimizer": o.ADAMW, "lr": 2e-2}),
    *_cases("sets-spread", "a function of a set", sets, adam={}, nadam_clipped={"optimizer": o.NADAM, **_CLIPPED}),
    *_cases(
        "friedman-ranking", "pairs to be ordered", ranking, adam={}, momentum={"optimizer": o.MOMENTUM, "lr": 0.05}
    ),
    *_cases("moons-mixture", "a mixture of clouds", mixture, adam={}, clipped={**_CLIPPED}),
    *_cases("words-skip-gram", "words beside words", skip_gram, adam={}, adamax={"optimizer": o.ADAMAX, "lr": 5e-2}),
    *_cases("noisy-regression", "mostly noise", noisy_regression, adam={}, sgd={"optimizer": o.SGD, "lr": 0.05}),
    *_cases("sine-radial", "radial basis network", radial, adam={}, adadelta={"optimizer": o.ADADELTA, "lr": 1.0}),
)
