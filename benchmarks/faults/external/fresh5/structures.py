"""Graphs, physics, sets, logic, codes and what was learnt before: models that are made for what they are given."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..fresh3.case import ASCENT, LARGE, NOISE, OUTPUT_OR_LOSS, TINY, either
from ..fresh4 import case as f
from ..loop import Plan, Tensors
from ..nets import Flow, mlp
from ..qualities import accuracy, explained, r_squared
from ..wild.case import dice_of
from . import case as g

CASES: list[Case] = []
task = g.planning(CASES, __name__)


@functools.cache
def _molecules() -> data.Split:
    """Graphs of ten atoms [B, 10, 3 kinds + 10 neighbours], and an energy of bonds and of pairs two bonds apart."""
    dice = dice_of(1330)
    kind = F.one_hot(torch.randint(0, 3, (1300, 10), generator=dice), 3).float()
    bonds = (torch.rand(1300, 10, 10, generator=dice) < 0.22).float().triu(1)
    bonds = bonds + bonds.mT
    worth = torch.tensor([[1.0, -0.5, 0.3], [-0.5, 0.2, 0.8], [0.3, 0.8, -1.0]])
    pairs = kind @ worth @ kind.mT
    y = (pairs * bonds).sum((1, 2)) / 2.0 + 0.15 * ((bonds @ bonds) * pairs).sum((1, 2))
    return data.parted(torch.cat([kind, bonds], 2), ((y - y.mean()) / y.std())[:, None])


class Messages(nn.Module):
    """Atoms that hear their neighbours three times."""

    def __init__(self, is_mean: bool = True, hears: bool = True) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 32)
        self.own, self.heard = (nn.ModuleList(nn.Linear(32, 32) for _ in range(2)) for _ in range(2))
        self.leave = mlp((32, 32, 1))
        self.is_mean, self.hears = is_mean, hears

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bonds, here = x[:, :, 3:], self.enter(x[:, :, :3])
        if not self.hears:
            bonds = torch.eye(10).expand_as(bonds)
        for own, heard in zip(self.own, self.heard):
            here = (own(here) + (bonds @ heard(here)) / (2.0 if self.is_mean else 1e-3)).relu()
        return self.leave(here.sum(1) / 5.0)


@task(
    0.75,
    ("no-bonds", a.model_is(lambda: Messages(hears=False)), g.BLIND),
    ("sums-of-thousands", a.model_is(lambda: Messages(is_mean=False)), either(LARGE, f.INPUTS)),
    ("in-electronvolts", c.scaled_targets(700.0, -2e4), c.TARGETS),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ("other-molecules", c.shuffled, c.LABELS),
    amsgrad=c.putting(optimizer=o.of(torch.optim.Adam, amsgrad=True)),
)
def molecules(seed: int) -> Plan:
    """Energies of small graphs by messages between neighbours, Adam; R²."""
    return a.task(seed, Messages, c.squared_error, _molecules(), r_squared, lr=4e-3, num_epochs=12, batch_size=40)


@functools.cache
def _roads() -> data.Split:
    """Pairs of eighty towns that lie on a plane, and whether a road joins them."""
    dice = dice_of(1331)
    place = torch.randn(80, 2, generator=dice)
    pairs = torch.combinations(torch.arange(80))
    near = (place[pairs[:, 0]] - place[pairs[:, 1]]).square().sum(1)
    y = (torch.rand(len(pairs), generator=dice) < 0.97 * (near < 1.0)).long()
    return data.parted(pairs, y)


class Towns(nn.Module):
    """A place for each town; two are joined where theirs lie near: a logit."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(80, 6)
        self.reach = nn.Parameter(torch.tensor(2.0))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        gap = self.places(pairs[:, 0]) - self.places(pairs[:, 1])
        return (self.reach - gap.square().sum(1))[:, None]


@torch.no_grad()
def _ranked(model: nn.Module, held: Tensors) -> float:
    found = model(held[0])[:, 0]
    return float((found[held[1] > 0][:, None] > found[held[1] == 0]).float().mean())


@task(
    0.85,
    ("places-stay", c.putting(optimizer=lambda m, lr: torch.optim.Adagrad([m.reach], lr)), c.LEFT_OUT),
    ("roads-where-none-are", f.targets_as(lambda y: 1 - y), either(c.LABELS, c.LOSS)),
    ("all-joined", f.targets_as(torch.ones_like), either(c.LEAK, f.UNEVEN)),
    ("far-apart-at-first", f.scaled_weights(300.0), either(a.POOR, c.EXPLODING, c.LOW)),
    sgd=c.putting(optimizer=o.MOMENTUM, lr=0.5),
)  # fmt: skip
def roads(seed: int) -> Plan:
    """Which towns a road joins, by places that are learnt, Adagrad; share of pairs in order."""
    return a.task(seed, Towns, f.binary, _roads(), _ranked, optimizer=o.ADAGRAD, lr=0.5, num_epochs=8, batch_size=64)


def _path(x: torch.Tensor) -> torch.Tensor:
    return (-0.3 * x).exp() * (2.0 * x).cos()


def _residual(model: nn.Module, batch: Tensors, begins: float = 1.0, weight: float = 1.0) -> torch.Tensor:
    """Of x'' + 0.6 x' + 4.09 x = 0, with x(0) = 1, x'(0) = -0.3."""
    t = batch[0].clone().requires_grad_()
    x = model(t)
    (speed,) = torch.autograd.grad(x.sum(), t, create_graph=True)
    (force,) = torch.autograd.grad(speed.sum(), t, create_graph=True)
    zero = torch.zeros(1, 1, requires_grad=True)
    first = model(zero)
    (rate,) = torch.autograd.grad(first.sum(), zero, create_graph=True)
    start = (first - begins).square().sum() + (rate + 0.3).square().sum()
    return weight * (force + 0.6 * speed + 4.09 * x).square().mean() / 4.0 + 4.0 * start


@torch.no_grad()
def _as_solved(model: nn.Module, held: Tensors) -> float:
    return explained(model(held[0]).flatten(), _path(held[0]).flatten())


def _residual_apart(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return _residual(model, batch, 1.0, 0.0)


@task(
    0.9,
    ("equation-forgotten", c.loss_is(_residual_apart), c.LOSS),
    ("begins-elsewhere", c.loss_is(lambda _, m, b: _residual(m, b, 0.0)), either(c.LOSS, c.LABELS)),
    ("rectified", a.model_is(lambda: mlp((1, 32, 32, 1), nn.ReLU)), either(c.CANNOT, c.LOSS)),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    silu=a.model_is(lambda: mlp((1, 32, 32, 1), nn.SiLU)),
)
def damped_spring(seed: int) -> Plan:
    """How a spring comes to rest, from its equation alone, Adam along a cosine; R² against the exact path."""
    points = 3.0 * torch.rand(1280, 1, generator=dice_of(1332))
    return a.task(
        seed, lambda: mlp((1, 32, 32, 1), nn.Tanh), _residual, ((points, points), (points[:200], points[:200])),
        _as_solved, lr=1e-2, num_epochs=12, batch_size=32, schedule=o.cosine,
    )  # fmt: skip


@functools.cache
def _orbits() -> data.Split:
    """Where bodies of a strange field are, and where after eight ticks of a tenth [B, 8, 2]."""
    dice = dice_of(1333)
    at = 2.4 * torch.rand(1000, 2, generator=dice) - 1.2
    now, path = at, []
    for _ in range(80):
        turn = torch.stack([now[:, 1], (1.0 - now[:, 0].square()) * now[:, 1] - now[:, 0]], 1)
        now = now + 0.02 * turn
        path.append(now)
    return data.parted(at, torch.stack(path[9::10], 1))


class Unrolled(nn.Module):
    """A field that carries points along, eight steps by the midpoint rule."""

    def __init__(self, tick: float = 0.2, *sizes: int) -> None:
        super().__init__()
        self.field = mlp((2, *(sizes or (40,)), 2), nn.Tanh)
        self.tick = tick

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        path = []
        for _ in range(8):
            at = at + self.tick * self.field(at + 0.5 * self.tick * self.field(at))
            path.append(at)
        return torch.stack(path, 1)


@torch.no_grad()
def _in_the_field(model: nn.Module, held: Tensors) -> float:
    return explained((model(held[0]) - held[0][:, None]).flatten(), (held[1] - held[0][:, None]).flatten())


@task(
    0.8,
    ("time-runs-back", f.targets_as(lambda y: y.flip(1)), c.LABELS),
    ("momentum-0.999", c.putting(optimizer=o.of(torch.optim.SGD, momentum=0.999), lr=0.1), either(c.SETTINGS, c.HIGH)),
    ("field-times-30", a.model_is(lambda: Unrolled(6.0)), either(LARGE, c.HIGH)),
    ("ticks-of-nothing", a.model_is(lambda: Unrolled(0.0001)), either(a.VANISHING, c.LOW, c.CANNOT)),
    adamw=c.putting(optimizer=o.ADAMW, lr=1e-2),
)
def carried_along(seed: int) -> Plan:
    """A field learnt from where it carries things, through eight steps, Adam; R² of the ways gone."""
    return a.task(seed, Unrolled, c.squared_error, _orbits(), _in_the_field, lr=6e-3, num_epochs=10, batch_size=40)


@functools.cache
def _outline() -> data.Split:
    """Points of the plane, and how far each is from a star's edge, negative inside."""
    x = 2.4 * torch.rand(2400, 2, generator=dice_of(1334)) - 1.2
    y = x.norm(dim=1) - 0.6 - 0.2 * (5.0 * torch.atan2(x[:, 1], x[:, 0])).cos()
    return data.parted(x, y[:, None] / 0.3)


class Waves(nn.Module):
    """Sines and cosines of coordinates before a network."""

    def __init__(self, rate: float = 2.0) -> None:
        super().__init__()
        self.register_buffer("rates", rate * torch.randn(2, 24))
        self.body = mlp((48, 48, 48, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns = x @ self.rates
        return self.body(torch.cat([turns.sin(), turns.cos()], 1))


@task(
    0.9,
    ("far-too-fast-waves", a.model_is(lambda: Waves(300.0)), either(a.OVERFITTED, f.INPUTS, c.CANNOT)),
    ("outside-only", c.loss_is(lambda _, m, b: F.mse_loss(m(b[0]).relu(), b[1])), either(c.OUTPUT, c.LOSS)),
    ("in-millimetres", c.scaled_inputs(1e3, 2e3), f.INPUTS),
    ("lr-2", c.putting(lr=2.0), c.HIGH),
    lbfgs=c.putting(optimizer=o.LBFGS, lr=1.0, batch_size=1680, num_epochs=40),
)
def outline(seed: int) -> Plan:
    """How far points are from a star's edge, by waves of their coordinates, NAdam, validated; R²."""
    return a.task(
        seed, Waves, c.squared_error, _outline(), r_squared, optimizer=o.NADAM, lr=4e-3, num_epochs=8, **a.VALIDATED
    )


@functools.cache
def _crescents() -> data.Split:
    dice = dice_of(1335)
    turn, side = math.pi * torch.rand(1600, generator=dice), torch.randint(0, 2, (1600,), generator=dice)
    x = torch.stack([turn.cos() + 0.6 * side, turn.sin() * (1 - 2 * side)], 1) + 0.07 * torch.randn(
        1600, 2, generator=dice
    )
    x = (x - x.mean(0)) / x.std(0)
    return data.parted(x, side)


def _unlikely(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return -model(batch[0]).mean()


@torch.no_grad()
def _above_gaussian(model: nn.Module, held: Tensors) -> float:
    return float(model(held[0]).mean()) + math.log(2.0 * math.pi) + 1.0


def _volume_lost(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    points = batch[0]
    for coupling in model.couplings:
        kept, other = points[:, :1], points[:, 1:]
        log_scale, shift = coupling(kept).chunk(2, 1)
        points = torch.cat([other * log_scale.tanh().exp() + shift, kept], 1)
    return 0.5 * points.square().sum(1).mean()


@task(
    0.3,
    ("volume-lost", c.loss_is(_volume_lost), either(c.LOSS, c.COLLAPSED)),
    ("sign", c.loss_is(lambda former, m, b: -former(m, b)), ASCENT),
    ("clipped", c.putting(optimizer=o.MOMENTUM, lr=1e-2, max_norm=1e-4), c.CLIPPED),
    ("same-points", a.first_batch_only, g.FEW),
    sgd=c.putting(optimizer=o.MOMENTUM, lr=2e-2, max_norm=2.0),
)
def crescents(seed: int) -> Plan:
    """Two crescents by affine couplings, Adam that warms up; log-likelihood above a Gaussian's."""
    return a.task(
        seed, Flow, _unlikely, _crescents(), _above_gaussian, lr=6e-3, num_epochs=9, batch_size=48, max_norm=5.0,
        schedule=o.warm_cosine,
    )  # fmt: skip


@functools.cache
def _baskets() -> data.Split:
    """Baskets of eight out of ten fruits, one-hot, and how many different ones are in each: 0 to 7, one less."""
    fruits = torch.randint(0, 10, (1800, 8), generator=dice_of(1336))
    fruits = torch.minimum(fruits, torch.randint(0, 10, (1800, 1), generator=dice_of(1337)))
    y = F.one_hot(fruits, 10).amax(1).sum(1) - 1
    return data.parted(F.one_hot(fruits, 10).float(), y)


class Basket(nn.Module):
    """Codes of what is in it, pooled, and an answer."""

    def __init__(self, activation=nn.ReLU, depth: int = 1) -> None:
        super().__init__()
        self.one = mlp((10, 32, 32), activation)
        self.whole = mlp((32, *[48] * depth, 8), activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(self.one(x).amax(1))


@task(
    0.75,
    ("nine-sigmoid-layers", a.model_is(lambda: Basket(nn.Sigmoid, 9)), f.DEEP),
    ("never-alive", f.biases(-20.0), c.DEAD),
    ("mean-as-count", c.loss_is(lambda _, m, b: F.mse_loss(m(b[0]).mean(1), b[1].float())), c.LOSS),
    ("counts-by-chance", f.random_labels(0.9, 8), NOISE),
    ("tiny-start", f.scaled_weights(1e-3), TINY),
    nesterov=c.putting(optimizer=o.NESTEROV, lr=5e-2),
)  # fmt: skip
def baskets(seed: int) -> Plan:
    """How many kinds of fruit are in a basket, codes and their maximum, Adam; accuracy."""
    return a.task(seed, Basket, c.cross_entropy, _baskets(), accuracy, lr=5e-3, num_epochs=9)


@functools.cache
def _gates() -> data.Split:
    """Sixteen switches, and what a small network of gates makes of them."""
    x = torch.randint(0, 2, (1800, 16), generator=dice_of(1338))
    y = (x[:, 0] ^ x[:, 1]) | (x[:, 2] & x[:, 3] & (1 - x[:, 4]))
    return data.parted(2.0 * x.float() - 1.0, y)


@task(
    0.9,
    ("as-voltages", c.scaled_inputs(24.0, 230.0), f.INPUTS),
    ("without-activations", a.model_is(lambda: nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1))), g.LINEAR),
    ("rate-gone", c.putting(schedule=lambda n: lambda t: 0.9**t), c.SCHEDULE),
    ("softmax-of-one", f.ending_in(nn.Softmax(1)), either(OUTPUT_OR_LOSS, a.NO_GRADIENT)),
    ("next-row", a.rolled, c.LABELS),
    adam=c.putting(optimizer=o.ADAM, lr=4e-3),
)  # fmt: skip
def gates(seed: int) -> Plan:
    """What gates make of switches, one hidden layer, Nesterov's momentum; accuracy."""
    return a.task(seed, lambda: mlp((16, 48, 1)), f.binary, _gates(), sign, optimizer=o.NESTEROV, lr=5e-2, num_epochs=9)


@torch.no_grad()
def sign(model: nn.Module, held: Tensors) -> float:
    """Accuracy of one logit."""
    return float(((model(held[0])[:, 0] > 0.0) == (held[1] > 0)).float().mean())
