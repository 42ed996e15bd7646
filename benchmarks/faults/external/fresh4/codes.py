"""Codes, adversaries, likenesses, orders, tastes, graphs, likelihoods and two aims at once."""

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
from ..fresh3.case import ASCENT, CUT_OR_FROZEN, OUTPUT_OR_LOSS, either, fit
from ..loop import Plan, Tensors, Watch
from ..nets import mlp
from ..qualities import explained
from ..sound2.case import drawn
from ..wild.case import dice_of
from . import case as f

CASES: list[Case] = []
task = f.planning(CASES, __name__)
script = f.scripting(CASES, __name__)


@functools.cache
def _faces() -> data.Split:
    """Smooth pictures of 10 by 10 pixels, made of seven numbers."""
    dice = dice_of(1160)
    numbers = torch.randn(1500, 7, generator=dice)
    basis = torch.randn(7, 1, 4, 4, generator=dice)
    basis = F.interpolate(basis, size=10, mode="bicubic").flatten(1)
    x = numbers.tanh() @ basis + 0.1 * torch.randn(1500, 100, generator=dice)
    return data.parted(x / x.std(), numbers)


def _narrow(width: int = 7, *end: nn.Module) -> nn.Module:
    return nn.Sequential(mlp((100, 64, width)), mlp((width, 64, 100)), *end)


@torch.no_grad()
def _rebuilt(model: nn.Module, held: Tensors) -> float:
    return explained(model(held[0]).flatten(), held[0].flatten())


def _itself(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[0])


@task(
    0.75,
    ("through-nothing", a.model_is(lambda: _narrow(1)), c.CANNOT),
    ("squashed", f.ending_in(nn.Sigmoid()), c.OUTPUT),
    ("another-face", c.loss_is(lambda _, m, b: F.mse_loss(m(b[0]), b[0].roll(1, 0))), c.LABELS),
    ("lr-300", c.times(300.0), c.HIGH),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    denoising=c.loss_is(lambda _, m, b: F.mse_loss(m(b[0] + 0.4 * torch.randn_like(b[0])), b[0])),
)
def faces(seed: int) -> Plan:
    """Smooth pictures through seven numbers and back, Adam, validated; R² of the pixels."""
    return a.task(seed, _narrow, _itself, _faces(), _rebuilt, lr=3e-3, num_epochs=9, **a.VALIDATED)


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = mlp((100, 64, 20), nn.SiLU), mlp((10, 64, 100), nn.SiLU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(x)[:, :10])

    def bound(self, x: torch.Tensor, weight: float = 0.02) -> torch.Tensor:
        mean, log = self.enter(x).chunk(2, 1)
        out = self.leave(mean + (0.5 * log).exp() * torch.randn_like(mean))
        return F.mse_loss(out, x) + weight * 0.5 * (mean.square() + log.exp() - log - 1.0).sum(1).mean()


def _sharp_spread(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """The logarithm of a variance is taken of what may be below zero."""
    mean, var = model.enter(batch[0]).chunk(2, 1)
    out = model.leave(mean + var.sqrt() * torch.randn_like(mean))
    return F.mse_loss(out, batch[0]) + 0.01 * (mean.square() + var - var.log() - 1.0).sum(1).mean()


@task(
    0.6,
    ("all-divergence", c.loss_is(lambda _, m, b: m.bound(b[0], 10.0)), either(c.COLLAPSED, c.LOSS)),
    ("root-of-variance", c.loss_is(lambda _, m, b: _sharp_spread(m, b)), c.SINGULAR),
    ("never-cleared", c.putting(zero_grad=False, lr=2e-2), c.KEPT),
    ("decay", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=120.0)), c.DECAY),
    likelihood=c.loss_is(lambda _, m, b: m.bound(b[0], 0.002) / 0.02 + 50.0 * math.log(0.02 * math.tau) / 10.0),
)
def faces_variational(seed: int) -> Plan:
    """The same through a variational code, AdamW; R² of the pixels."""
    return a.task(
        seed, _Variational, lambda m, b: m.bound(b[0]), _faces(), _rebuilt, optimizer=o.ADAMW, lr=3e-3, num_epochs=9
    )


def _three_clouds(count: int, dice: torch.Generator | None = None) -> torch.Tensor:
    at = torch.tensor([[1.5, 0.0], [-1.0, 1.2], [-1.0, -1.2]])[torch.randint(0, 3, (count,), generator=dice)]
    return at + 0.15 * torch.randn(count, 2, generator=dice)


@script(0.5, slower_maker=None, judge_wins=a.WON, both_too_fast=c.HIGH, maker_cut=either(a.NO_GRADIENT, a.WON))
def clouds_forged(watch: Watch, word: str = "") -> float:
    """Three clouds by a generator and a judge with spectral norm; 1 - sliced distance."""
    maker, judge = mlp((4, 48, 48, 2)), mlp((2, 48, 48, 1), nn.LeakyReLU)
    if word != "judge-wins":
        for i in (0, 2):
            judge[i] = nn.utils.parametrizations.spectral_norm(judge[i])
    low, high = {"judge-wins": (1e-6, 1e-2), "both-too-fast": (1.0, 1.0), "slower-maker": (1e-3, 2e-3)}.get(
        word, (2e-3, 2e-3)
    )
    makes = watch.wrap(torch.optim.Adam(maker.parameters(), low, betas=(0.5, 0.99)), maker)
    judges = watch.wrap(torch.optim.Adam(judge.parameters(), high, betas=(0.5, 0.99)), judge)
    for _ in range(350):
        real, made = _three_clouds(64), maker(torch.randn(64, 4))
        if word == "maker-cut":
            made = made.detach() + 0.0 * maker(torch.zeros(64, 4))
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        watch.observe(judges, loss=loss)
        loss = F.softplus(-judge(made)).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
        watch.observe(makes, loss=loss)
    dice = dice_of(1162)
    with torch.no_grad():
        made, ways = maker(torch.randn(600, 4, generator=dice)), F.normalize(torch.randn(2, 32, generator=dice), dim=0)
        off = ((made @ ways).sort(0).values - (_three_clouds(600, dice) @ ways).sort(0).values).abs().mean()
    return 1.0 - float(off)


@functools.cache
def _voices() -> data.Split:
    """Eight speakers: 30 numbers, of which five say who speaks."""
    dice = dice_of(1163)
    y = torch.randint(0, 8, (1400,), generator=dice)
    who = 1.6 * torch.randn(8, 5, generator=dice)[y] + 0.5 * torch.randn(1400, 5, generator=dice)
    x = (
        torch.cat([who, 1.5 * torch.randn(1400, 25, generator=dice)], 1)
        @ torch.linalg.qr(torch.randn(30, 30, generator=dice))[0]
    )
    return data.parted(x, y)


@torch.no_grad()
def _neighbour(model: nn.Module, x: torch.Tensor, y: torch.Tensor, held: torch.Tensor, known: torch.Tensor) -> float:
    """Share of what is held out whose nearest code is of the same speaker."""
    near = (F.normalize(model(held), dim=1) @ F.normalize(model(x), dim=1).T).argmax(1)
    return float((y[near] == known).float().mean())


@script(
    0.8,
    adamw=None,
    no_others=c.COLLAPSED,
    strangers=c.LABELS,
    climbing=ASCENT,
)
def voices(watch: Watch, word: str = "") -> float:
    """Two recordings of a speaker against those of others in the batch; share whose nearest is the same one."""
    (x, y), (held, known) = _voices()
    model = mlp((30, 64, 16))
    of = [torch.nonzero(y == i)[:, 0] for i in range(8)]
    kind, lr = (torch.optim.AdamW, 3e-3) if word == "adamw" else (torch.optim.Adam, 2e-3)

    def batches():
        for _ in range(250):
            who = torch.randint(0, 8, (8, 8)).argsort(1)  # eight groups of eight different speakers
            two = [torch.stack([of[i][torch.randint(len(of[i]), (8,))] for i in range(8)], 1) for _ in (0, 1)]
            two = [t.gather(1, who) for t in two]
            yield x[two[0]], x[two[1].flip(1) if word == "strangers" else two[1]]

    def loss(one, two):
        one, two = F.normalize(model(one), dim=2), F.normalize(model(two), dim=2)
        if word == "no-others":
            return -(one * two).sum(2).mean()
        near = one @ two.mT / 0.2
        told = F.cross_entropy(near.flatten(0, 1), torch.arange(8).repeat(8))
        return -told if word == "climbing" else told

    fit(watch, model, kind(model.parameters(), lr), batches(), loss)
    return _neighbour(model, x, y, held, known)


@functools.cache
def _results() -> tuple[Tensors, Tensors]:
    """Ten pages for each question, seven numbers each, and how well they answer."""
    dice = dice_of(1164)
    x = torch.randn(500, 10, 7, generator=dice)
    worth = x[..., 0] + x[..., 1] * x[..., 2] + (2.0 * x[..., 3]).sin() + 0.3 * torch.randn(500, 10, generator=dice)
    return (x[:350], worth[:350]), (x[350:], worth[350:])


def _pairwise(model: nn.Module, batch: Tensors) -> torch.Tensor:
    out = model(batch[0])[..., 0]
    apart = out[:, :, None] - out[:, None]
    better = (batch[1][:, :, None] > batch[1][:, None]).float()
    return (F.softplus(-apart) * better).sum() / better.sum()


@torch.no_grad()
def _in_order(model: nn.Module, held: Tensors) -> float:
    """Share of pairs in order, from -1 to 1."""
    out = model(held[0])[..., 0]
    return float(((out[:, :, None] - out[:, None]) * (held[1][:, :, None] - held[1][:, None])).sign().sum() / 90 / 150)


@task(
    0.55,
    ("upside-down", f.targets_as(torch.neg), either(c.LABELS, c.LOSS)),
    ("other-question", c.shuffled, c.LABELS),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ("large-numbers", c.scaled_inputs(1e4, 1e5), f.INPUTS),
    listed=c.loss_is(lambda _, m, b: -(b[1].softmax(1) * m(b[0])[..., 0].log_softmax(1)).sum(1).mean()),
)
def search_results(seed: int) -> Plan:
    """Pages in the order of their worth, pair by pair, AdamW; concordance."""
    torch.manual_seed(seed)
    return c.planned(
        seed, mlp((7, 48, 48, 1)), _pairwise, *_results(), _in_order, 0.0, optimizer=o.ADAMW, lr=5e-3, num_epochs=12,
        batch_size=16,
    )  # fmt: skip


@functools.cache
def _seen() -> tuple[torch.Tensor, torch.Tensor]:
    """Who would watch what [120, 90], from four numbers each; a fifth of what is true is known."""
    dice = dice_of(1165)
    likes = torch.randn(120, 4, generator=dice) @ torch.randn(4, 90, generator=dice) > 1.5
    return likes, likes & (torch.rand(likes.shape, generator=dice) < 0.6)


class _Tastes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.people, self.films = nn.Embedding(120, 16), nn.Embedding(90, 16)
        self.both = mlp((32, 48, 1))
        for table in (self.people, self.films):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, who: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
        one, two = self.people(who), self.films(what)
        return (one * two).sum(-1) + self.both(torch.cat([one, two], -1))[..., 0]


@script(
    0.72,
    rmsprop=None,
    only_seen=either(c.LEAK, f.UNEVEN, c.COLLAPSED),
    people_left_out=c.LEFT_OUT,
    lr_1000=c.HIGH,
    ids_off=c.LABELS,
)
def films(watch: Watch, word: str = "") -> float:
    """Who watches what, against films drawn by chance; area under the curve on what was held back."""
    likes, known = _seen()
    model, taken = _Tastes(), known.nonzero()
    kind = torch.optim.RMSprop if word == "rmsprop" else torch.optim.Adam
    lr = 20.0 if word == "lr-1000" else 2e-2
    trained = model.parameters()
    if word == "people-left-out":
        trained = [*model.both[2].parameters()]

    def batches():
        for _ in range(400):
            rows = taken[torch.randint(len(taken), (64,))]
            who, what = (rows[:, 0] * 7 + 3) % 120 if word == "ids-off" else rows[:, 0], rows[:, 1]
            if word == "ids-off":
                who = torch.randint(0, 120, who.shape)
            if word == "only-seen":
                yield who, what, torch.ones(64)
            else:
                yield who.repeat(2), torch.cat([what, torch.randint(0, 90, (64,))]), torch.arange(128).lt(64).float()

    loss = lambda who, what, y: F.binary_cross_entropy_with_logits(model(who, what), y)  # noqa: E731
    fit(watch, model, kind(trained, lr), batches(), loss)
    with torch.no_grad():
        out = model(torch.arange(120)[:, None].expand(120, 90), torch.arange(90).expand(120, 90))
    new, never = out[likes & ~known], out[~likes]
    return float((new[:, None] > never[None, :2000]).float().mean())


@functools.cache
def _friends() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A graph of 240 with four circles of friends: neighbours, weak features, circles, whose is known."""
    dice = dice_of(1166)
    y = torch.randint(0, 4, (240,), generator=dice)
    chance = torch.where(y[:, None] == y, 0.06, 0.008)
    edge = (torch.rand(240, 240, generator=dice) < chance).triu(1).float()
    edge = edge + edge.T + torch.eye(240)
    x = F.one_hot(y, 4).float() @ torch.randn(4, 12, generator=dice) + 1.5 * torch.randn(240, 12, generator=dice)
    return edge, x, y, torch.rand(240, generator=dice) < 0.4


class _Convolved(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(12 if i == 0 else 32, 4 if i == depth - 1 else 32) for i in range(depth)]
        )

    def forward(self, edge: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = edge @ layer(x)
            x = x if i == len(self.layers) - 1 else x.relu()
        return x


@script(
    0.7,
    sgd=None,
    not_divided=either(c.INPUTS, c.EXPLODING, c.HIGH, a.OVERFITTED),
    other_circles=either(c.LABELS, a.OVERFITTED),
    twelve_deep=either(f.DEEP, c.COLLAPSED, c.CANNOT),
    lr_1e_7=c.LOW,
)
def circles_of_friends(watch: Watch, word: str = "") -> float:
    """Whose circle, by graph convolutions, all nodes in each step, decay, validated; accuracy where not known."""
    edge, x, y, known = _friends()
    root = edge.sum(1).rsqrt()
    edge = 20.0 * edge if word == "not-divided" else root[:, None] * edge * root
    x = 100.0 * x if word == "not-divided" else x
    model = _Convolved(14 if word == "twelve-deep" else 2)
    wanted = y[torch.randperm(240, generator=dice_of(5))] if word == "other-circles" else y
    optimizer = torch.optim.Adam(model.parameters(), 1e-7 if word == "lr-1e-7" else 1e-2, weight_decay=5e-3)
    if word == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=5e-3)
    loss = lambda: F.cross_entropy(model(edge, x)[known], wanted[known])  # noqa: E731
    val = lambda: F.cross_entropy(model(edge, x)[~known], wanted[~known])  # noqa: E731
    fit(watch, model, optimizer, ((),) * 200, loss, val=val)
    with torch.no_grad():
        return float((model(edge, x).argmax(1) == y)[~known].float().mean())


@functools.cache
def _shares() -> data.Split:
    """Shares between 0 and 1, which hang on five numbers."""
    dice = dice_of(1167)
    x = torch.randn(1300, 5, generator=dice)
    middle = (1.2 * x[:, 0] + x[:, 1] * x[:, 2]).sigmoid()
    sure = 60.0 * (0.3 * x[:, 3]).exp()
    draw = middle + (middle * (1.0 - middle) / sure).sqrt() * torch.randn(1300, generator=dice)
    return data.parted(x, draw.clamp(1e-3, 1.0 - 1e-3)[:, None])


def _beta(model: nn.Module, batch: Tensors) -> torch.Tensor:
    middle, sure = model(batch[0]).chunk(2, 1)
    middle, sure = middle.sigmoid().clamp(1e-4, 1.0 - 1e-4), F.softplus(sure + 3.0) + 1.0
    return -torch.distributions.Beta(middle * sure, (1.0 - middle) * sure).log_prob(batch[1]).mean()


@torch.no_grad()
def _middle_right(model: nn.Module, held: Tensors) -> float:
    return explained(model(held[0])[:, :1].sigmoid().flatten(), held[1].flatten())


def _of_the_tanh(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    middle = model(batch[0])[:, :1].tanh()
    return -(batch[1] * middle.log() + (1.0 - batch[1]) * (1.0 - middle).log()).mean()


@task(
    0.8,
    ("climbing", c.loss_is(lambda former, m, b: -former(m, b).clamp(max=1e6)), ASCENT),
    ("log-of-tanh", c.loss_is(_of_the_tanh), either(c.SINGULAR, c.OUTPUT)),
    ("lr-1000", c.times(1000.0), c.HIGH),
    ("other-rows", c.shuffled, c.LABELS),
    lion_like=c.putting(optimizer=o.SIGN, lr=1e-3),
)
def shares(seed: int) -> Plan:
    """Shares by a beta likelihood, whose loss ends below zero, Adam, validated; R² of the mean."""
    return a.task(
        seed, lambda: mlp((5, 48, 48, 2)), _beta, _shares(), _middle_right, lr=3e-3, num_epochs=10, **a.VALIDATED
    )


@functools.cache
def _drinks() -> tuple[Tensors, Tensors]:
    """Twelve measurements; which of four drinks, and how strong."""
    dice = dice_of(1168)
    y, strong = torch.randint(0, 4, (1500,), generator=dice), torch.randn(1500, 1, generator=dice)
    x = 1.3 * torch.randn(4, 12, generator=dice)[y] + strong * torch.randn(1, 12, generator=dice).abs()
    x = x + torch.randn(1500, 12, generator=dice)
    return (x[:1000], y[:1000], strong[:1000]), (x[1000:], y[1000:], strong[1000:])


class _TwoAnswers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.which, self.strong = mlp((12, 48, 48)), nn.Linear(48, 4), nn.Linear(48, 1)
        self.is_cut = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x).relu()
        return self.which(h), self.strong(h.detach() if self.is_cut else h)


def _two_aims(model: nn.Module, batch: Tensors, weight: float = 1.0) -> torch.Tensor:
    which, strong = model(batch[0])
    return weight * F.cross_entropy(which, batch[1]) + F.mse_loss(strong, batch[2])


def _one_aim(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    """The regression is broadcast: [N, 1] against [N]."""
    which, strong = model(batch[0])
    return F.cross_entropy(which, batch[1]) + (strong - batch[2][:, 0]).square().mean()


@torch.no_grad()
def _both_right(model: nn.Module, held: Tensors) -> float:
    which, strong = model(held[0])
    right = float((which.argmax(1) == held[1]).float().mean())
    return min(right, explained(strong.flatten(), held[2].flatten()))


def _frozen_body(plan: Plan) -> None:
    plan.model.body.requires_grad_(False)
    for p in plan.model.body.parameters():
        p.data.mul_(0.2)


@task(
    0.72,
    ("broadcast", c.loss_is(_one_aim), c.LOSS),
    ("frozen-body", _frozen_body, CUT_OR_FROZEN),
    ("percent", lambda p: setattr(p, "train", (*p.train[:2], 1e4 * p.train[2])), either(c.TARGETS, c.LABELS)),
    (
        "softmax-first",
        c.loss_is(lambda _, m, b: F.cross_entropy(m(b[0])[0].softmax(1).softmax(0), b[1])),
        OUTPUT_OR_LOSS,
    ),
    momentum=c.putting(optimizer=o.MOMENTUM, lr=2e-2),
)
def drinks(seed: int) -> Plan:
    """Which drink and how strong, one body and two heads, Adam; the lesser of accuracy and R²."""
    torch.manual_seed(seed)
    return c.planned(seed, _TwoAnswers(), _two_aims, *_drinks(), _both_right, 0.0, lr=3e-3, num_epochs=9)


@functools.cache
def _mixed() -> torch.Tensor:
    dice = dice_of(1169)
    return 0.3 * torch.randn(1500, 6, generator=dice) @ torch.randn(6, 6, generator=dice) + torch.randn(
        6, generator=dice
    )


@script(0.9, clipped=None, no_determinant=either(c.LOSS, c.COLLAPSED), lr_1000=c.HIGH)
def spread_of_six(watch: Watch, word: str = "") -> float:
    """A full covariance by its likelihood, far below zero at last; 1 - distance of covariances."""
    x = _mixed()
    model = nn.ParameterList([torch.zeros(6), torch.eye(6)])
    lr = 20.0 if word == "lr-1000" else 2e-2

    def loss(rows):
        root = model[1].tril()
        if word == "no-determinant":
            return 0.5 * ((rows - model[0]) @ root).square().sum(1).mean()
        return 0.5 * ((rows - model[0]) @ root).square().sum(1).mean() - root.diagonal().abs().log().sum()

    optimizer = torch.optim.Adam(model.parameters(), lr)
    fit(watch, model, optimizer, drawn(450, 128, x), loss, max_norm=2.0 if word == "clipped" else None)
    with torch.no_grad():
        root, true = model[1].tril(), x.T.cov()
        found = torch.linalg.pinv(root @ root.T)
        return 1.0 - float((found - true).norm() / true.norm())
