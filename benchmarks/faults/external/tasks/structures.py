"""Graphs, physics, experts and likeness: stations, a boundary layer, regimes, two sensors, songs."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import operators as f
from .. import optimizers as o
from .. import truths as t
from ..case import Case
from ..data import dice_of
from ..loop import Plan, Tensors
from ..nets import mlp
from ..qualities import accuracy, r_squared

CASES: list[Case] = []
task = f.planning(CASES, __name__)


@functools.cache
def _grid() -> tuple[torch.Tensor, data.Split]:
    """A random grid of 500 stations [N, N], normalised; how far each is from the nearest of few sources: 0 to 4."""
    dice = dice_of(1431)
    place = torch.rand(500, 2, generator=dice)
    near = (place[:, None] - place).norm(dim=-1) < 0.075
    near.fill_diagonal_(True)
    reached = torch.rand(500, generator=dice) < 0.05
    x = torch.stack([reached.float(), near.float().sum(1) / 8.0, torch.randn(500, generator=dice)], 1)
    far = torch.full((500,), 4)
    for hops in range(4):
        far = torch.where(reached & (far == 4), hops, far)
        reached = (near.float() @ reached.float()) > 0
    return near.float() / near.float().sum(1, keepdim=True), data.parted(
        torch.cat([torch.arange(500.0)[:, None], x], 1), far, 0.6
    )


class Hops(nn.Module):
    """Rounds of messages over the whole grid; rows say which station is asked."""

    def __init__(self, rounds: int = 4, adjacency: torch.Tensor | None = None, gain: float = 1.0) -> None:
        super().__init__()
        near, (train, held) = _grid()
        self.near = gain * (near if adjacency is None else adjacency)
        rows = torch.cat([train[0], held[0]])
        self.x = rows[rows[:, 0].argsort(), 1:]
        self.layers = nn.ModuleList(nn.Linear(6 if not k else 64, 32) for k in range(rounds))
        self.head = nn.Linear(32, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        here = self.x
        for layer in self.layers:
            here = layer(torch.cat([here, 3.0 * self.near @ here], 1)).relu()
        return self.head(here)[rows[:, 0].long()]


def _other_grid() -> torch.Tensor:
    order = torch.randperm(500, generator=dice_of(1432))
    return _grid()[0][order][:, order]


@task(
    0.7,
    ("another-grid", f.model_is(lambda: Hops(adjacency=_other_grid())), t.either(t.LABELS, t.BLIND, t.OVERFITTED)),
    ("not-normalised-and-deep", f.model_is(lambda: Hops(9, gain=9.0)), t.either(t.LARGE, t.HIGH)),
    ("one-round", f.model_is(lambda: Hops(1)), t.CANNOT),
    ("lr-2", f.putting(lr=2.0), t.HIGH),
    ("stopped-after-twelve", f.putting(num_epochs=2), t.CUT_SHORT),
    nadam=f.putting(optimizer=o.NADAM, lr=5e-3),
)  # fmt: skip
def stations(seed: int) -> Plan:
    """How many hops a station is from a source, by rounds of messages, AdamW, validated; accuracy."""
    return f.planned(
        seed, Hops, f.cross_entropy, _grid()[1], accuracy, optimizer=o.ADAMW, lr=5e-3, num_epochs=30, batch_size=60,
        **f.VALIDATED,
    )  # fmt: skip


_THIN = 0.25


@functools.cache
def _layer() -> data.Split:
    """Points in (0, 1), and the solution of -thin u'' + u' = 1, u(0) = u(1) = 0."""
    x = torch.rand(1400, 1, generator=dice_of(1433))
    return data.parted(x, x - ((x - 1.0) / _THIN).exp() * (1.0 - (-x / _THIN).exp()) / (1.0 - math.exp(-1.0 / _THIN)))


def _residual(model: nn.Module, batch: Tensors, edge: float = 20.0, sign: float = 1.0) -> torch.Tensor:
    x = batch[0].clone().requires_grad_(True)
    with torch.enable_grad():
        u = model(x)
        slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        if not slope.requires_grad:
            return u.square().mean()
        bend = torch.autograd.grad(slope.sum(), x, create_graph=True, allow_unused=True)[0]
        bend = torch.zeros_like(x) if bend is None else bend
        ends = model(torch.tensor([[0.0], [1.0]])).square().mean()
    return (-_THIN * bend + sign * slope - 1.0).square().mean() + edge * ends


@task(
    0.85,
    ("edges-left-out", f.loss_is(lambda _, m, b: _residual(m, b, 0.0)), t.LOSS),
    ("slope-of-the-other-sign", f.loss_is(lambda _, m, b: _residual(m, b, sign=-1.0)), t.LOSS),
    ("corners-for-bends", f.model_is(lambda: mlp((1, 40, 40, 1), nn.ReLU)), t.CANNOT),
    ("lr-0.5", f.putting(lr=0.5), t.HIGH),
    ("points-in-micrometres", f.scaled_inputs(1000.0), t.UNSCALED),
    cosine=f.putting(schedule=o.warm_cosine, lr=1e-2),
)
def boundary_layer(seed: int) -> Plan:
    """A thin layer at the wall from its equation alone, tanh, Adam; R² against the solution."""
    return f.planned(
        seed, lambda: mlp((1, 40, 40, 1), nn.Tanh), _residual, _layer(), r_squared, lr=5e-3, num_epochs=26,
        batch_size=64,
    )  # fmt: skip


class Experts(nn.Module):
    """Each row goes to one of four experts, and to all a little where it is told to balance."""

    def __init__(self, sharpness: float = 1.0, gate: tuple[float, ...] | None = None) -> None:
        super().__init__()
        self.gate, self.sharpness = nn.Linear(6, 4), sharpness
        self.experts = nn.ModuleList(mlp((6, 16, 1)) for _ in range(4))
        if gate is not None:
            self.gate.bias.data = torch.tensor(gate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = (self.sharpness * self.gate(x)).softmax(1)
        best = shares.topk(2, 1)
        kept = torch.zeros_like(shares).scatter(1, best.indices, best.values)
        return (torch.cat([expert(x) for expert in self.experts], 1) * kept).sum(1, keepdim=True)


@functools.cache
def _regimes() -> data.Split:
    dice = dice_of(1438)
    x, w = torch.randn(2000, 6, generator=dice), torch.randn(4, 6, generator=dice)
    kind = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    y = (x * w[kind]).sum(1) + 2.0 * torch.tensor([1.0, -1.0, -1.0, 1.0])[kind]
    y = y + 0.1 * torch.randn(2000, generator=dice)
    return data.parted(x, ((y - y.mean()) / y.std())[:, None])


@task(
    0.8,
    ("all-to-the-first", f.model_is(lambda: Experts(gate=(30.0, 0.0, 0.0, 0.0))), t.EXPERTS),
    ("two-never-heard", f.model_is(lambda: Experts(60.0, (3.0, 2.0, -9.0, -9.0))), t.EXPERTS),
    ("decay-70", f.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=70.0)), t.DECAY),
    ("lr-3", f.putting(lr=3.0), t.HIGH),
    ("targets-cut-at-a-fifth", f.targets_as(lambda y: y.clamp(-0.2, 0.2)), t.either(t.LABELS, t.SQUASHED)),
    sgd=f.putting(optimizer=o.NESTEROV, lr=5e-2, max_norm=1.0),
)
def regimes_of_four(seed: int) -> Plan:
    """Four regimes by four experts of which two are heard, AdamW; R²."""
    return f.planned(
        seed, Experts, f.squared_error, _regimes(), r_squared, optimizer=o.ADAMW, lr=8e-3, num_epochs=10,
    )  # fmt: skip


@functools.cache
def _sensors() -> data.Split:
    """What two sensors say of one of eight things [B, 2, 30]: little of it is of the thing, the rest each one's own."""
    dice = dice_of(1440)
    kind, middle = torch.randint(0, 8, (1600,), generator=dice), torch.randn(8, 5, generator=dice)
    thing = middle[kind] + 0.25 * torch.randn(1600, 5, generator=dice)
    shared, own = torch.randn(5, 30, generator=dice) / 2.2, torch.randn(12, 30, generator=dice)
    x = (thing @ shared)[:, None] + torch.randn(1600, 2, 12, generator=dice) @ own
    return data.parted(x / x.std(), kind)


@torch.no_grad()
def _nearest(model: nn.Module, held: Tensors) -> float:
    """Share of things whose five nearest in what was trained on are mostly of their kind; chance 0.125."""
    x, y = _sensors()[0]
    known, asked = F.normalize(model(x[:, 0]), dim=1), F.normalize(model(held[0][:, 0]), dim=1)
    near = y[(asked @ known.T).nan_to_num().topk(5, 1).indices]
    return float((near.mode(1).values == held[1]).float().mean())


def _pairs(model: nn.Module, batch: Tensors, kind: str = "") -> torch.Tensor:
    first, second = (F.normalize(model(batch[0][:, k]), dim=1) for k in (0, 1))
    if kind == "alone":
        return 1.0 - (first * second).sum(1).mean()
    return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))


def _not_one_thing(plan: Plan) -> None:
    x = plan.train[0]
    plan.train = (torch.stack([x[:, 0], x[:, 1].roll(1, 0)], 1), plan.train[1])


@task(
    0.7,
    ("pairs-alone", f.loss_is(lambda _, m, b: _pairs(m, b, kind="alone")), t.COLLAPSED),
    ("not-of-one-thing", _not_one_thing, t.LABELS),
    ("lr-2", f.putting(lr=2.0), t.either(t.HIGH, t.COLLAPSED)),
    ("lr-1e-6", f.putting(lr=1e-6), t.LOW),
    small_batches=f.putting(batch_size=24, lr=2e-3),
)
def two_sensors(seed: int) -> Plan:
    """What two sensors have in common, told from others in the batch, Adam; nearest neighbours right."""
    return f.planned(
        seed, lambda: mlp((30, 64, 16)), _pairs, _sensors(), _nearest, lr=4e-3, num_epochs=14, batch_size=112,
    )  # fmt: skip


class Towers(nn.Module):
    """Listener and song, each a table; likeness of every listener of a batch with every song of it."""

    def __init__(self, start: float = 0.3) -> None:
        super().__init__()
        self.listeners, self.songs = nn.Embedding(80, 8), nn.Embedding(120, 8)
        for table in (self.listeners, self.songs):
            nn.init.normal_(table.weight, std=start)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return self.listeners(pairs[:, 0]) @ self.songs(pairs[:, 1]).T


@functools.cache
def _songs() -> data.Split:
    dice = dice_of(1441)
    taste, kind = torch.randn(80, 4, generator=dice), torch.randn(120, 4, generator=dice)
    liked = (1.4 * taste @ kind.T).softmax(1)
    heard = torch.multinomial(liked, 60, True, generator=dice)
    pairs = torch.stack([torch.arange(80)[:, None].expand(-1, 60), heard], 2).flatten(0, 1)
    return data.parted(pairs, pairs[:, 1], 0.8)


def _among_the_batch(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), torch.arange(len(batch[0])))


@torch.no_grad()
def _recall(model: nn.Module, held: Tensors) -> float:
    """Share of songs heard that are among the twenty of 120 that are told first; chance 0.17."""
    told = (model.listeners.weight @ model.songs.weight.T).nan_to_num().topk(20, 1).indices
    return float((told[held[0][:, 0]] == held[0][:, 1:]).any(1).float().mean())


def _strangers(plan: Plan) -> None:
    x = plan.train[0].clone()
    x[:, 0] = x[torch.randperm(len(x)), 0]
    plan.train = (x, plan.train[1])


@task(
    0.45,
    ("listeners-of-others", _strangers, t.LABELS),
    ("all-alike-at-first", f.weights(f.all_zero), t.either(t.POOR, t.NO_GRADIENT)),
    ("songs-left-out", f.all_of(f.left_out("songs"), f.weights(lambda m: m.songs.weight.fill_(0.3))), t.FIXED),
    ("likeness-pushed-down", f.loss_is(lambda former, m, b: -former(m, b)), t.ASCENT),
    ("lr-1e-6", f.putting(lr=1e-6), t.LOW),
    ("decay-80", f.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=80.0)), t.DECAY),
    adagrad=f.putting(optimizer=o.ADAGRAD, lr=0.1),
)
def songs(seed: int) -> Plan:
    """Which song a listener hears, among those of the batch, Adam; heard songs among the first twenty."""
    return f.planned(
        seed, Towers, _among_the_batch, _songs(), _recall, lr=1e-2, num_epochs=4, batch_size=64,
    )  # fmt: skip
