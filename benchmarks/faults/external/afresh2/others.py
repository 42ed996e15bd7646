"""Games, equations, likelihoods and losses by hand."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..afresh import case as c
from ..case import Case
from ..loop import Plan, Tensors, Watch
from ..qualities import accuracy, explained, r_squared
from ..wild.case import dice_of
from . import case as a
from .tables import Net

_faulty = functools.partial(a.faulty, __name__)


class Duel(nn.Module):
    """One makes numbers of the line, the other judges them."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = Net(2, 1, 24), Net(1, 1, 24, act=functools.partial(F.leaky_relu, negative_slope=0.2))


def _duel(plan: Plan, watch: Watch, judge_lr: float = 1.0, rounds: int = 1, lets_through: bool = True) -> None:
    maker, judge = plan.model.maker, plan.model.judge
    makes = watch.wrap(torch.optim.Adam(maker.parameters(), plan.lr, (0.5, 0.99)), maker)
    judges = watch.wrap(torch.optim.Adam(judge.parameters(), judge_lr * plan.lr, (0.5, 0.99)), judge)
    for _ in range(plan.num_epochs):
        for _ in range(rounds):
            real = plan.train[0][torch.randint(len(plan.train[0]), (64,))]
            with torch.no_grad():
                made = maker(torch.randn(64, 2))
            loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made)).mean()
            judges.zero_grad()
            loss.backward()
            judges.step()
            watch.observe(judges, loss=loss)
        made = maker(torch.randn(64, 2))
        if lets_through:
            loss = F.softplus(-judge(made)).mean()
        else:
            loss = F.logsigmoid(-judge(made)).mean()  # saturates where the judge is sure
        makes.zero_grad()
        loss.backward()
        makes.step()
        watch.observe(makes, loss=loss)


@functools.cache
def _heights() -> data.Split:
    x = 3.0 + 0.5 * torch.randn(1000, 1, generator=dice_of(560))
    return (x,), (x[:300],)


def duel(seed: int) -> Plan:
    """Numbers around three."""

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        torch.manual_seed(0)
        made, real = model.maker(torch.randn(500, 2)), wanted[0]
        return 1.0 - float((made.mean() - real.mean()).abs() + (made.std() - real.std()).abs())

    return a.task(seed, Duel, None, _heights(), quality, lr=2e-3, num_epochs=500, play=_duel)


class Orbit(nn.Module):
    """The force at a place; the way is walked by Euler's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.force = nets.mlp((2, 32, 2), nn.Tanh)

    def forward(self, start: torch.Tensor, step: float = 0.1, count: int = 12) -> torch.Tensor:
        places = [start]
        for _ in range(count):
            places.append(places[-1] + step * self.force(places[-1]))
        return torch.stack(places[1:], 1)


@functools.cache
def _orbits() -> data.Split:
    start = torch.randn(400, 2, generator=dice_of(561))
    turn = torch.tensor([[-0.1, 1.0], [-1.0, -0.1]])
    ways = torch.stack([start @ torch.linalg.matrix_exp(0.1 * k * turn.T) for k in range(1, 13)], 1)
    return data.parted(start, ways)


def orbits(seed: int) -> Plan:
    """A spiral, from where it begins."""

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        return explained(model(wanted[0]), wanted[1])

    return a.task(seed, Orbit, c.squared_error, _orbits(), quality, lr=1e-2, num_epochs=25)


def _distance(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Lengths of the differences, one of which is always nothing: a root of 0."""
    apart = torch.cat([batch[1][:, :1] * 0.0, model(batch[0]) - batch[1]], 1)
    return apart.square().sum(-1).sqrt().mean()


def _frozen_force(plan: Plan) -> None:
    """The first layer was left at zero, and frozen."""
    first = plan.model.force[0].requires_grad_(False)
    with torch.no_grad():
        first.weight.zero_()


class Rod(nn.Module):
    """A field along a rod, as a function of the place."""

    def __init__(self, act=torch.tanh) -> None:
        super().__init__()
        self.net = Net(1, 1, 32, act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@functools.cache
def _rod() -> data.Split:
    x = torch.linspace(-1.0, 1.0, 200)[:, None]
    return (x, (math.pi * x).sin()), (x, (math.pi * x).sin())


def _residual(model: nn.Module, batch: Tensors, ends: float = 10.0) -> torch.Tensor:
    x = batch[0].clone().requires_grad_()
    u = model(x)
    first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    wanted = -(math.pi**2) * (math.pi * x).sin()
    border = model(torch.tensor([[-1.0], [1.0]]))
    return (second - wanted).square().mean() + ends * border.square().mean()


def rod(seed: int) -> Plan:
    """u'' = -pi^2 sin(pi x), nothing at both ends."""
    return a.task(seed, Rod, _residual, _rod(), r_squared, lr=5e-3, batch_size=50, num_epochs=90)


class Mixture(nn.Module):
    """A mean and a deviation for each input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(1, 2, 32, F.silu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@functools.cache
def _bands() -> data.Split:
    dice = dice_of(562)
    x = 4.0 * torch.rand(1000, 1, generator=dice) - 2.0
    return data.parted(x, (1.5 * x).sin() + (0.05 + 0.15 * x.abs()) * torch.randn(1000, 1, generator=dice))


def _likelihood(model: nn.Module, batch: Tensors) -> torch.Tensor:
    mean, log_std = model(batch[0]).chunk(2, 1)
    return (0.5 * ((batch[1] - mean) / log_std.exp()).square() + log_std).mean()


def bands(seed: int) -> Plan:
    """How sure one can be, by a likelihood that falls below zero."""

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        found = float(_likelihood(model, wanted))
        return 0.5 - found if math.isfinite(found) else -1.0

    return a.task(seed, Mixture, _likelihood, _bands(), quality, lr=5e-3, num_epochs=15)


def _deviation_itself(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    """The second output is taken for the deviation, which may pass zero."""
    mean, std = model(batch[0]).chunk(2, 1)
    return (0.5 * ((batch[1] - mean) / std).square() + std.log()).mean()


def _turned(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    mean, log_std = model(batch[0]).chunk(2, 1)
    return (0.5 * ((batch[1] - mean) / log_std.exp()).square() - log_std).mean()


@functools.cache
def _ratings() -> data.Split:
    dice = dice_of(563)
    users, items = torch.randn(60, 3, generator=dice), torch.randn(50, 3, generator=dice)
    pairs = torch.stack([torch.randint(60, (3000,), generator=dice), torch.randint(50, (3000,), generator=dice)], 1)
    stars = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) + 0.2 * torch.randn(3000, generator=dice)
    return data.parted(pairs, stars / stars.std())


class Tastes(nn.Module):
    """Two tables, and a net over what they give."""

    def __init__(self, std: float = 0.5, trains_users: bool = True) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60, 8), nn.Embedding(50, 8)
        self.net, self.trains_users = Net(24, 1), trains_users
        nn.init.normal_(self.users.weight, std=std), nn.init.normal_(self.items.weight, std=std)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        users, items = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        users = users if self.trains_users else users.detach()
        return self.net(torch.cat([users, items, users * items], 1))[:, 0]


def tastes(seed: int) -> Plan:
    """Stars of films."""
    return a.task(
        seed, Tastes, c.squared_error, _ratings(), r_squared, optimizer=o.ADAMW, lr=1e-2, batch_size=64, num_epochs=12
    )


@torch.no_grad()
def _thousand_times(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if name.endswith("fc2.weight"):
            p.mul_(100.0)


def moons(seed: int) -> Plan:
    """Two half moons in full batches, by plain descent, validated."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return a.task(
        seed, lambda: Net(2, 2, 24, torch.tanh), loss, data.moons(), accuracy,
        optimizer=o.SGD, lr=0.3, batch_size=100, num_epochs=60, **a.VALIDATED,
    )  # fmt: skip


def _one_hot_labels(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Squared error between a log-softmax and labels as one-hot."""
    return F.mse_loss(model(batch[0]).log_softmax(1), F.one_hot(batch[1], 2).float())


def _dropping_always(plan: Plan) -> None:
    """Nine tenths are dropped, in validation too."""
    a.model_is(lambda: Net(2, 2, 24, torch.tanh, p=0.9))(plan)
    plan.eval_mode = False


def _slips(plan: Plan) -> None:
    """One target in forty is far out."""
    y = plan.train[1].clone()
    y[::40] = 1e4
    plan.train = (plan.train[0], y)


_MODE = a.Truth((*a.MODE.families, *c.DROPPED.families), (*a.MODE.causes, *c.DROPPED.causes))
_SLIPS = a.Truth(a.OUTLIERS.families, ("outliers", "bad-batch", "recurring-bad-batch", "unnormalised-targets"))
_NO_SECOND = a.Truth(  # of a ReLU there is no second derivative
    (*c.CUT.families, "units", "data"), ("model-cannot-fit", "parameters-cut-off", "wrong-loss", "no-gradient-arrives")
)

CASES: tuple[Case, ...] = (
    *_faulty(
        "duel",
        duel,
        ("judge-50", c.putting(play=functools.partial(_duel, judge_lr=15.0, rounds=4, lets_through=False)), a.WON),
        ("saturating", c.putting(play=functools.partial(_duel, judge_lr=5.0, rounds=8, lets_through=False)), a.WON),
    ),
    *_faulty(
        "orbits",
        orbits,
        ("root-of-zero", c.loss_is(_distance), c.SINGULAR),
        ("one-row-off", a.rolled, c.LABELS),
        ("first-frozen", _frozen_force, a.FROZEN),
        ("lr-10-sgd", c.putting(optimizer=o.SGD, lr=10.0), c.HIGH),
    ),
    *_faulty(
        "rod",
        rod,
        ("relu", a.model_is(lambda: Rod(F.relu)), _NO_SECOND),
        ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
        ("few-steps", c.putting(num_epochs=3), a.SHORT),
    ),
    *_faulty(
        "bands",
        bands,
        ("deviation-itself", c.loss_is(_deviation_itself), c.SINGULAR),
        ("sign-of-log", c.loss_is(_turned), c.LOSS),
        ("shuffled", c.shuffled, c.LABELS),
        ("outliers", _slips, _SLIPS),
    ),
    *_faulty(
        "tastes",
        tastes,
        ("users-cut", a.model_is(lambda: Tastes(trains_users=False)), c.CUT),
        ("tables-large", a.model_is(lambda: Tastes(100.0)), a.POOR),
        ("decay", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=20.0)), c.DECAY),
        ("strangers", c.shuffled, c.LABELS),
        ("eps", c.putting(optimizer=o.of(torch.optim.AdamW, eps=3.0)), c.SETTINGS),
    ),
    *_faulty(
        "moons",
        moons,
        ("log-softmax-mse", c.loss_is(_one_hot_labels), c.LOSS),
        ("never-cleared", c.putting(zero_grad=False), c.KEPT),
        ("train-mode", _dropping_always, _MODE),
        ("large-start", a.weights(_thousand_times), c.SATURATED),
        ("lr-300", c.putting(lr=100.0), c.HIGH),
        ("far-apart", c.scaled_inputs(1e-3), c.INPUTS),
    ),
)  # fmt: skip
