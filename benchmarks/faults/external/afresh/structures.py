"""Towers, episodes, networks that make weights, graphs: models and losses that are put together by hand."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors, Watch
from ..qualities import r_squared
from ..wild.case import dice_of
from . import case as c

_sound, _faulty = functools.partial(c.sound, __name__), functools.partial(c.faulty, __name__)


class Prototypes(nn.Module):
    """Classes are the means of the codes of their examples."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nets.mlp((12, 48, 16))

    def forward(self, shown: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:  # [W, S, F], [Q, F]
        return -torch.cdist(self.encode(asked), self.encode(shown).mean(1)).square()


def _episode(dice: torch.Generator | None = None, mixed: bool = False) -> tuple[torch.Tensor, ...]:
    """Five new classes, which differ along four of twelve axes; three examples each, and eight questions."""
    middles = torch.zeros(5, 1, 12)
    middles[..., :4] = 2.0 * torch.randn(5, 1, 4, generator=dice)
    samples = middles + torch.randn(5, 11, 12, generator=dice) * torch.tensor([0.7] * 4 + [2.5] * 8)
    labels = torch.arange(5).repeat_interleave(8)
    return samples[:, :3], samples[:, 3:].flatten(0, 1), labels[torch.randperm(40)] if mixed else labels


def _episodes(plan: Plan, watch: Watch, *, mixed: bool = False) -> None:
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    for _ in range(plan.num_epochs):
        shown, asked, labels = _episode(mixed=mixed)
        optimizer.zero_grad()
        loss = F.cross_entropy(plan.model(shown, asked), labels)
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)


def episodes(seed: int) -> Plan:
    """Learning to tell new classes from three examples each."""
    torch.manual_seed(seed)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        dice = dice_of(331)
        rounds = [_episode(dice) for _ in range(40)]
        return float(torch.stack([(model(s, a).argmax(1) == y).float().mean() for s, a, y in rounds]).mean())

    nothing = (torch.zeros(1),)
    return c.planned(
        seed, Prototypes(), c.cross_entropy, nothing, nothing, quality, 0.75, lr=3e-3, num_epochs=300, play=_episodes
    )


class Towers(nn.Module):
    """What is asked and what answers, in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.asking, self.answering = nets.mlp((10, 48, 12)), nets.mlp((14, 48, 12))
        self.is_cut = False

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left, right = F.normalize(self.asking(a), dim=1), F.normalize(self.answering(b), dim=1)
        return 10.0 * left @ (right.detach() if self.is_cut else right).T


@functools.cache
def _pairs() -> tuple[Tensors, Tensors]:
    dice = dice_of(332)
    hidden = torch.randn(1600, 6, generator=dice)
    sides = [hidden @ torch.randn(6, size, generator=dice) for size in (10, 14)]
    sides = [torch.tanh(0.5 * side) + 0.1 * torch.randn(side.shape, generator=dice) for side in sides]
    return data.parted(*sides)


def towers(seed: int) -> Plan:
    """Which answer belongs to which question, against all others of the batch."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.cross_entropy(model(*batch), torch.arange(len(batch[0])))

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return float((model(*held_out).argmax(1) == torch.arange(len(held_out[0]))).float().mean())

    return c.planned(seed, Towers(), loss, *_pairs(), quality, 0.5, lr=4e-3, num_epochs=14, batch_size=64)


def _cut_tower(plan: Plan) -> None:
    plan.model.is_cut = True


class Generated(nn.Module):
    """A network that makes the weights of another, for each task code."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nets.mlp((3, 48, 61))
        self.is_cut, self.extra = False, nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, 3 + 1]
        w = self.make(x[:, :3])
        w = w.detach() if self.is_cut else w
        hidden = torch.tanh(3.0 * w[:, :20] * x[:, 3:] + 3.0 * w[:, 20:40])
        return (hidden * w[:, 40:60]).sum(1, keepdim=True) + w[:, 60:] + self.extra


@functools.cache
def _waves_by_code() -> data.Split:
    dice = dice_of(333)
    x = torch.rand(2000, 4, generator=dice) * 2.0 - 1.0
    y = (1.0 + x[:, 0]) * torch.sin(3.0 * x[:, 3] + 2.0 * x[:, 1]) + x[:, 2]
    return data.parted(x, y[:, None])


def generated(seed: int) -> Plan:
    """A hypernetwork."""
    torch.manual_seed(seed)
    return c.planned(seed, Generated(), c.squared_error, *_waves_by_code(), r_squared, 0.85, lr=5e-3, num_epochs=9)


def _cut_maker(plan: Plan) -> None:
    plan.model.is_cut = True


class Graph(nn.Module):
    """Two rounds of averaging over neighbours; the mask says who is known."""

    def __init__(self, adjacency: torch.Tensor, normal: bool = True) -> None:
        super().__init__()
        if normal:
            roots = adjacency.sum(1).rsqrt()
            adjacency = roots[:, None] * adjacency * roots
        self.register_buffer("ways", adjacency)
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ways @ self.second(F.dropout(F.relu(self.ways @ self.first(x)), 0.2, self.training))


@functools.cache
def _citations() -> tuple[torch.Tensor, ...]:
    dice = dice_of(334)
    labels = torch.arange(240) % 4
    near = labels[:, None] == labels[None]
    edges = (torch.rand(240, 240, generator=dice) < torch.where(near, 0.10, 0.015)).float().triu(1)
    words = 0.6 * F.one_hot(labels, 16).float() + torch.randn(240, 16, generator=dice)
    return edges + edges.T + torch.eye(240), words, labels


def _whole_graph(plan: Plan, watch: Watch) -> None:
    """One step an epoch, over all known nodes."""
    x, y = plan.train
    known = torch.arange(len(y)) % 5 < 2
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    for _ in range(plan.num_epochs):
        if plan.zero_grad:
            optimizer.zero_grad()
        loss = F.cross_entropy(plan.model(x)[known], y[known])
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)


def citations(seed: int) -> Plan:
    """The fields of papers by whom they cite."""
    adjacency, words, labels = _citations()
    torch.manual_seed(seed)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        unknown = torch.arange(240) % 5 >= 2
        return float((model(held_out[0]).argmax(1) == held_out[1])[unknown].float().mean())

    return c.planned(
        seed, Graph(adjacency), c.cross_entropy, (words, labels), (words, labels), quality, 0.75,
        lr=1e-2, num_epochs=150, play=_whole_graph, optimizer=o.of(torch.optim.Adam, weight_decay=5e-4),
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    *_sound("episodes", "three examples each", episodes, adam={}),
    *_faulty("episodes", episodes, ("mixed", c.putting(play=functools.partial(_episodes, mixed=True)), c.LABELS)),
    *_sound("towers", "questions and answers", towers, adam={}, adamw={"optimizer": o.ADAMW, "schedule": o.cosine}),
    *_faulty(
        "towers",
        towers,
        ("shuffled", c.shuffled, c.LABELS),
        ("cut", _cut_tower, c.CUT),
        ("lr-100", c.times(100.0), c.HIGH),
    ),
    *_sound("generated", "weights that are made", generated, adam={}, clipped={"max_norm": 1.0}),
    *_faulty(
        "generated",
        generated,
        ("cut", _cut_maker, c.CUT),
        ("raw", c.scaled_targets(300.0, 2000.0), c.TARGETS),
        ("growing", c.putting(schedule=lambda num_steps: lambda step: 1.02**step), c.GROWING),
    ),
    *_sound("citations", "a graph at once", citations, adam={}),
    *_faulty(
        "citations",
        citations,
        ("not-cleared", c.putting(zero_grad=False, optimizer=o.MOMENTUM, lr=0.5), c.KEPT),
        ("shuffled", c.shuffled, c.LABELS),
        ("decay", c.putting(optimizer=o.of(torch.optim.Adam, weight_decay=0.5)), c.DECAY),
    ),
)
