"""Losses of pairs, graphs and mixtures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .planned import Planned, load, mlp, opt, standard, task


@task
def multilabel() -> Planned:
    x, y = load("multilabel")
    return Planned(mlp(20, 64, 5), standard(x), y, nn.BCEWithLogitsLoss(), opt("Adam", lr=1e-3), 64)


@task
def triplets() -> Planned:
    x, y = load("digits")
    same = [x[y == c] for c in range(10)]
    anchors = torch.stack([same[i % 10][i // 10] for i in range(90)]) / 16
    positives = torch.stack([same[i % 10][i // 10 + 30] for i in range(90)]) / 16
    negatives = torch.stack([same[(i + 3) % 10][i // 10] for i in range(90)]) / 16

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.triplet_margin_loss(model(batch["a"]), model(batch["p"]), model(batch["n"]))

    batch = {"a": anchors, "p": positives, "n": negatives}
    return Planned(mlp(64, 64, 16), x, y, loss, opt("Adam", lr=1e-3), batches=batch)  # type: ignore[arg-type]


@task
def contrastive() -> Planned:
    x, y = load("digits")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (F.normalize(model(part + 0.05 * torch.randn_like(part)), dim=1) for part in batch)
        return F.cross_entropy(a @ b.t() / 0.2, torch.arange(len(a)))

    return Planned(mlp(64, 64, 32), x, y, loss, opt("Adam", lr=1e-3), batches=[(x[:64] / 16, x[:64] / 16)])


class Factors(nn.Module):
    """Matrix factorisation."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 8), nn.Embedding(80, 8)
        self.bias = nn.Parameter(torch.tensor(3.0))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Ratings."""
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1) + self.bias


@task
def ratings() -> Planned:
    pairs = torch.stack([torch.randint(50, (600,)), torch.randint(80, (600,))], 1)
    a, b = torch.randn(50, 3), torch.randn(80, 3)
    y = ((a[pairs[:, 0]] * b[pairs[:, 1]]).sum(1) * 0.6 + 3).clamp(1, 5)
    return Planned(Factors(), pairs, y, nn.MSELoss(), opt("Adam", lr=1e-2), 128)


class Graph(nn.Module):
    """Two graph convolutions over a ring."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        a = torch.eye(num_nodes) + torch.roll(torch.eye(num_nodes), 1, 0) + torch.roll(torch.eye(num_nodes), -1, 0)
        self.register_buffer("adjacency", a / 3)
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each node."""
        return self.b(self.adjacency @ F.relu(self.a(self.adjacency @ x)))


@task
def graph_nodes() -> Planned:
    x = torch.randn(60, 8)
    y = (x[:, 0] + torch.roll(x[:, 0], 1)).mul(1.5).round().clamp(-1, 2).long() + 1
    return Planned(Graph(60), x, y, nn.CrossEntropyLoss(), opt("Adam", lr=1e-2), batches=[(x, y)])


class Denoiser(nn.Module):
    """Predicts the noise that was added, given how much."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 64, 64, 2, act=nn.SiLU)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """The noise."""
        return self.net(torch.cat([x, level], 1))


@task
def denoiser() -> Planned:
    x, _ = load("moons")

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        level = torch.rand(len(batch), 1)
        noise = torch.randn_like(batch)
        return F.mse_loss(model((1 - level).sqrt() * batch + level.sqrt() * noise, level), noise)

    return Planned(Denoiser(), x, x, loss, opt("Adam", lr=1e-3), batches=standard(x)[:128])  # type: ignore[arg-type]


@task
def distillation() -> Planned:
    x, y = load("digits")
    teacher = F.softmax(4 * F.one_hot(y, 10) + 0.5 * torch.randn(len(y), 10), 1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(F.log_softmax(output, 1), target, reduction="batchmean")

    return Planned(mlp(64, 32, 10), x / 16, teacher, loss, opt("Adam", lr=2e-3), 64)


@task
def mixup() -> Planned:
    x, y = load("digits")
    other = torch.randperm(len(x))
    share = torch.rand(len(x), 1)
    targets = share * F.one_hot(y, 10) + (1 - share) * F.one_hot(y[other], 10)
    inputs = (share * x + (1 - share) * x[other]) / 16
    return Planned(mlp(64, 64, 10), inputs, targets, nn.CrossEntropyLoss(), opt("SGD", lr=0.1, momentum=0.9), 64)


class Experts(nn.Module):
    """Routes each sample to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList([mlp(64, 32, 10) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """The chosen expert's logits, times its share."""
        weight, chosen = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 10)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                out[mask] = expert(x[mask])
        return out * weight[:, None]


@task
def mixture_of_experts() -> Planned:
    x, y = load("digits")
    return Planned(Experts(), x / 16, y, nn.CrossEntropyLoss(), opt("Adam", lr=2e-3), 128)
