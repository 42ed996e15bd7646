"""Physics, graphs and experts: springs, stations, a boundary layer, prey, regimes."""

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
    ("messages-of-nobody", f.model_is(lambda: Springs(sees_others=False)), t.either(t.CANNOT, t.FIXED, t.BLIND)),
    ("forces-of-other-bodies", f.targets_as(lambda y: y.roll(1, 1)), t.LABELS),
    ("in-other-units", f.scaled_targets(5000.0), t.TARGETS),
    ("lr-1", f.putting(lr=1.0), t.HIGH),
    ("not-cleared", f.putting(zero_grad=False), t.KEPT),
    rmsprop=f.putting(optimizer=o.RMSPROP, lr=2e-3),
)
def springs(seed: int) -> Plan:
    """Forces between five bodies by messages, Adam; R²."""
    return f.planned(seed, Springs, f.squared_error, _springs(), r_squared, lr=5e-3, num_epochs=7)


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
    ("path-read-backwards", f.targets_as(lambda y: y.flip(1)), t.LABELS),
    ("field-grows", f.model_is(lambda: Change(2.0, 10.0, nn.ELU)), t.either(t.EXPLODING, t.HIGH)),
    ("field-for-the-path", f.loss_is(lambda _, m, b: F.mse_loss(m.field(b[0]), b[1].mean(1))), t.LOSS),
    ("lr-3e-7", f.putting(lr=3e-7), t.LOW),
    ("not-cleared", f.putting(zero_grad=False), t.KEPT),
    adamax=f.putting(optimizer=o.ADAMAX, lr=1e-2),
)
def prey(seed: int) -> Plan:
    """Prey and hunters by a field that is unrolled for ten ticks, Adam clipped; R²."""
    return f.planned(
        seed, Change, f.squared_error, _prey(), r_squared, lr=5e-3, num_epochs=9, max_norm=1.0,
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
