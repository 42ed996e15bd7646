"""Physics, graphs and shapes: springs, stations, a boundary layer, prey, equilibria, a star, experts, squares."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..fresh3.case import LARGE, NOISE, OUTPUT_OR_LOSS, either
from ..fresh4 import case as f
from ..fresh5.case import BLIND, in_bfloat16
from ..loop import Plan, Tensors
from ..nets import mlp
from ..qualities import accuracy, r_squared
from ..wild.case import dice_of
from . import case as g

MADE: list[Case] = []
task = f.planning(MADE, __name__)


class Springs(nn.Module):
    """Forces on five bodies [B, 5, 4]: places and speeds; messages between all pairs."""

    def __init__(self, width: int = 32, sees_others: bool = True) -> None:
        super().__init__()
        self.message, self.update = mlp((8, width, width), nn.SiLU), mlp((4 + width, width, 2), nn.SiLU)
        self.sees_others = sees_others

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.cat([x[:, :, None].expand(-1, -1, 5, -1), x[:, None].expand(-1, 5, -1, -1)], -1)
        sent = self.message(pairs).sum(2) * float(self.sees_others)
        return self.update(torch.cat([x, sent], -1))


@functools.cache
def _springs() -> data.Split:
    x = torch.randn(1500, 5, 4, generator=dice_of(1430))
    gap = x[:, None, :, :2] - x[:, :, None, :2]
    far = gap.norm(dim=-1, keepdim=True).clamp(min=0.1)
    force = (gap * (far - 1.0) / far).sum(2) - 0.3 * x[..., 2:]
    return data.parted(x, force / force.std())


@task(
    0.85,
    ("messages-of-nobody", a.model_is(lambda: Springs(sees_others=False)), either(c.CANNOT, g.FIXED, BLIND)),
    ("forces-of-other-bodies", f.targets_as(lambda y: y.roll(1, 1)), c.LABELS),
    ("in-other-units", c.scaled_targets(5000.0), c.TARGETS),
    ("lr-1", c.putting(lr=1.0), c.HIGH),
    ("not-cleared", c.putting(zero_grad=False), c.KEPT),
    rmsprop=c.putting(optimizer=o.RMSPROP, lr=2e-3),
)
def springs(seed: int) -> Plan:
    """Forces between five bodies by messages, Adam; R²."""
    return a.task(seed, Springs, c.squared_error, _springs(), r_squared, lr=5e-3, num_epochs=7)


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
    ("another-grid", a.model_is(lambda: Hops(adjacency=_other_grid())), either(c.LABELS, BLIND, a.OVERFITTED)),
    ("not-normalised-and-deep", a.model_is(lambda: Hops(9, gain=9.0)), either(LARGE, c.HIGH)),
    ("one-round", a.model_is(lambda: Hops(1)), c.CANNOT),
    ("lr-2", c.putting(lr=2.0), c.HIGH),
    ("stopped-after-twelve", c.putting(num_epochs=2), g.CUT_SHORT),
    nadam=c.putting(optimizer=o.NADAM, lr=5e-3),
)  # fmt: skip
def stations(seed: int) -> Plan:
    """How many hops a station is from a source, by rounds of messages, AdamW, validated; accuracy."""
    return a.task(
        seed, Hops, c.cross_entropy, _grid()[1], accuracy, optimizer=o.ADAMW, lr=5e-3, num_epochs=30, batch_size=60,
        **a.VALIDATED,
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
    ("edges-left-out", c.loss_is(lambda _, m, b: _residual(m, b, 0.0)), c.LOSS),
    ("slope-of-the-other-sign", c.loss_is(lambda _, m, b: _residual(m, b, sign=-1.0)), c.LOSS),
    ("corners-for-bends", a.model_is(lambda: mlp((1, 40, 40, 1), nn.ReLU)), c.CANNOT),
    ("lr-0.5", c.putting(lr=0.5), c.HIGH),
    ("points-in-micrometres", c.scaled_inputs(1000.0), f.INPUTS),
    cosine=c.putting(schedule=o.warm_cosine, lr=1e-2),
)
def boundary_layer(seed: int) -> Plan:
    """A thin layer at the wall from its equation alone, tanh, Adam; R² against the solution."""
    return a.task(
        seed, lambda: mlp((1, 40, 40, 1), nn.Tanh), _residual, _layer(), r_squared, lr=5e-3, num_epochs=26,
        batch_size=64,
    )  # fmt: skip


def _lived(change, start: torch.Tensor, ticks: int, step: float) -> torch.Tensor:
    now, path = start, []
    for _ in range(ticks):
        half = now + 0.5 * step * change(now)
        now = now + step * change(half)
        path.append(now)
    return torch.stack(path, 1)


@functools.cache
def _prey() -> data.Split:
    start = torch.randn(900, 2, generator=dice_of(1434)) * 0.6

    def change(log: torch.Tensor) -> torch.Tensor:
        prey, hunters = log.exp().unbind(1)
        return torch.stack([1.0 - hunters, 0.8 * (prey - 1.0)], 1)

    path = _lived(change, start, 40, 0.05)[:, 3::4]
    return data.parted(start, path + 0.02 * torch.randn(path.shape, generator=dice_of(1435)))


class Change(nn.Module):
    """A path of ten points [B, 10, 2] along a field that is learnt."""

    def __init__(self, step: float = 0.2, scale: float = 1.0, kind: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.field, self.step, self.scale = mlp((2, 32, 32, 2), kind), step, scale

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        return _lived(lambda now: self.scale * self.field(now), start, 10, self.step)


@task(
    0.9,
    ("path-read-backwards", f.targets_as(lambda y: y.flip(1)), c.LABELS),
    ("field-grows", a.model_is(lambda: Change(2.0, 10.0, nn.ELU)), either(c.EXPLODING, c.HIGH)),
    ("field-for-the-path", c.loss_is(lambda _, m, b: F.mse_loss(m.field(b[0]), b[1].mean(1))), c.LOSS),
    ("lr-3e-7", c.putting(lr=3e-7), c.LOW),
    ("not-cleared", c.putting(zero_grad=False), c.KEPT),
    adamax=c.putting(optimizer=o.ADAMAX, lr=1e-2),
)
def prey(seed: int) -> Plan:
    """Prey and hunters by a field that is unrolled for ten ticks, Adam clipped; R²."""
    return a.task(
        seed, Change, c.squared_error, _prey(), r_squared, lr=5e-3, num_epochs=9, max_norm=1.0,
    )  # fmt: skip


class Equilibrium(nn.Module):
    """States that no longer change, found by turning round and round; bodies of water [B, 12] to a class."""

    def __init__(self, width: int = 40, turns: int = 12, scale: float = 0.6) -> None:
        super().__init__()
        self.into, self.back, self.out = nn.Linear(12, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.turns = turns
        nn.init.orthogonal_(self.back.weight, scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = torch.zeros(len(x), self.back.in_features)
        for _ in range(self.turns):
            here = (self.into(x) + self.back(here)).tanh()
        return self.out(here)


@functools.cache
def _waters() -> data.Split:
    x, y = data._of_sklearn(
        "make_classification", n_samples=1600, n_features=12, n_informative=8, n_classes=4, n_clusters_per_class=2,
        class_sep=1.1, flip_y=0.08, random_state=31,
    )  # fmt: skip
    return data.standardised(data.parted(x, y.long()))


@task(
    0.65,
    ("back-weights-of-eight", a.model_is(lambda: Equilibrium(scale=12.0)), LARGE),
    ("labels-mostly-chance", f.random_labels(0.92, 4), NOISE),
    (
        "softmax-first",
        f.all_of(f.ending_in(nn.Softmax(1)), c.putting(optimizer=o.SGD, lr=1e-2, num_epochs=4)),
        either(OUTPUT_OR_LOSS, c.LOW),
    ),
    ("momentum-0.9999", c.putting(optimizer=o.of(torch.optim.SGD, momentum=0.9999), lr=0.05), g.FOREIGN_HIGH),
    (
        "input-frozen-at-nought",
        f.all_of(a.weights(lambda m: [p.zero_() for p in m.into.parameters()]), g.frozen("into")),
        g.FIXED,
    ),
    sgd=c.putting(optimizer=o.MOMENTUM, lr=2e-2, max_norm=2.0),
)
def equilibria(seed: int) -> Plan:
    """Four kinds of water by a state that settles, one label in twelve wrong, Adam, L2; accuracy."""
    return a.task(
        seed, Equilibrium, c.cross_entropy, _waters(), accuracy, optimizer=o.of(torch.optim.Adam, weight_decay=1e-3),
        lr=4e-3, num_epochs=10,
    )  # fmt: skip


class Sines(nn.Module):
    """Sines of sines of a place."""

    def __init__(self, rate: float = 12.0, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, width), nn.Linear(width, width)])
        self.out, self.rate = nn.Linear(width, 1), rate
        with torch.no_grad():
            self.layers[0].weight.uniform_(-0.5, 0.5)
            self.layers[1].weight.uniform_(-math.sqrt(6.0 / width) / 4.0, math.sqrt(6.0 / width) / 4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = (self.rate * self.layers[0](x)).sin()
        return self.out((4.0 * self.layers[1](here)).sin())


@functools.cache
def _star() -> data.Split:
    x = torch.rand(2200, 2, generator=dice_of(1437)) * 2.0 - 1.0
    angle = torch.atan2(x[:, 1], x[:, 0])
    return data.parted(x, (4.0 * (x.norm(dim=1) - 0.55 - 0.2 * (5.0 * angle).cos())).tanh()[:, None])


@task(
    0.8,
    ("rate-of-900", a.model_is(lambda: Sines(900.0)), either(a.POOR, LARGE, c.INPUTS, a.OVERFITTED)),
    ("places-in-pixels", c.scaled_inputs(256.0, 256.0), f.INPUTS),
    ("lr-0.3", c.putting(lr=0.3), c.HIGH),
    ("sign-lost", f.targets_as(lambda y: y.abs()), c.LABELS),
    ("sixty-places", f.all_of(f.first_rows(60), c.putting(num_epochs=150)), a.OVERFITTED),
    adamw_bfloat16=f.all_of(c.putting(optimizer=o.ADAMW), c.loss_is(lambda former, m, b: in_bfloat16(former)(m, b))),
)
def star(seed: int) -> Plan:
    """How far a place is from the edge of a star, sines of sines, Adam; R²."""
    return a.task(seed, Sines, c.squared_error, _star(), r_squared, lr=2e-3, num_epochs=12)


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
    ("all-to-the-first", a.model_is(lambda: Experts(gate=(30.0, 0.0, 0.0, 0.0))), a.EXPERTS),
    ("two-never-heard", a.model_is(lambda: Experts(60.0, (3.0, 2.0, -9.0, -9.0))), a.EXPERTS),
    ("decay-70", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=70.0)), c.DECAY),
    ("lr-3", c.putting(lr=3.0), c.HIGH),
    ("targets-cut-at-a-fifth", f.targets_as(lambda y: y.clamp(-0.2, 0.2)), either(c.LABELS, g.SQUASHED)),
    sgd=c.putting(optimizer=o.NESTEROV, lr=5e-2, max_norm=1.0),
)
def regimes_of_four(seed: int) -> Plan:
    """Four regimes by four experts of which two are heard, AdamW; R²."""
    return a.task(
        seed, Experts, c.squared_error, _regimes(), r_squared, optimizer=o.ADAMW, lr=8e-3, num_epochs=10,
    )  # fmt: skip


@functools.cache
def _squares() -> data.Split:
    """All 4 x 4 squares of four symbols, each with half of its cells open; 0 is an open cell."""
    rows = list(itertools.permutations(range(4)))
    whole = [
        s for s in itertools.product(rows, repeat=4)
        if all(len({r[k] for r in s}) == 4 for k in range(4))
        and all(len({s[i][j], s[i][j + 1], s[i + 1][j], s[i + 1][j + 1]}) == 4 for i in (0, 2) for j in (0, 2))
    ]  # fmt: skip
    dice = dice_of(1439)
    full = torch.tensor(whole).flatten(1)
    full = full[torch.randint(0, len(full), (2500,), generator=dice)]
    opened = torch.rand(2500, 16, generator=dice) < 0.4
    return data.parted((full + 1) * ~opened, full, 0.85)


def _filler(width: int = 160) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(5, 8), nn.Flatten(), *mlp((128, width, width, 64), nn.GELU), nn.Unflatten(1, (16, 4))
    )


@torch.no_grad()
def _filled(model: nn.Module, held: Tensors) -> float:
    opened = held[0] == 0
    return float((model(held[0]).argmax(2) == held[1])[opened].float().mean())


def _of_cells(model: nn.Module, batch: Tensors, opened: bool = True) -> torch.Tensor:
    chosen = (batch[0] == 0) == opened
    return F.cross_entropy(model(batch[0])[chosen], batch[1][chosen])


def _summed(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


@task(
    0.7,
    ("loss-of-what-is-given", c.loss_is(lambda _, m, b: _of_cells(m, b, False)), either(c.LOSS, c.LEAK)),
    ("squares-of-others", c.shuffled, c.LABELS),
    ("lr-0.5", c.putting(lr=0.5, schedule=None), c.HIGH),
    ("clipped-at-1e-9", c.putting(max_norm=1e-9), c.CLIPPED),
    ("summed-loss-and-sgd", f.all_of(c.loss_is(_summed), c.putting(optimizer=o.SGD, lr=0.05, schedule=None)), a.SUMMED),
    flat=c.putting(schedule=None, lr=2e-3, optimizer=o.RADAM),
)  # fmt: skip
def squares_filled(seed: int) -> Plan:
    """Open cells of 4 x 4 squares by two wide layers, AdamW, warm-up; open cells right."""
    return a.task(
        seed, _filler, _of_cells, _squares(), _filled, optimizer=o.ADAMW, lr=3e-3, schedule=o.warm_cosine,
        num_epochs=8,
    )  # fmt: skip


CASES = g.renamed(MADE)
