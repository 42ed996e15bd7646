"""Tables: shops, couriers, machines, tumours, wines, sugar, a hospital, wind."""

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
from ..damage import outliers
from ..fresh3.case import ASCENT, NOISE, TINY, either
from ..fresh4 import case as f
from ..loop import Plan, Tensors
from ..nets import mlp
from ..qualities import accuracy, r_squared, sign_accuracy
from ..wild.case import dice_of
from . import case as g

CASES: list[Case] = []
task = g.planning(CASES, __name__)


class Entities(nn.Module):
    """An embedding for each of the first columns, which are codes, beside the numbers that follow."""

    def __init__(self, *sizes: int, numbers: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 6) for size in sizes)
        self.body = mlp((6 * len(sizes) + numbers, 48, 1), nn.GELU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = [table(x[:, place].long()) for place, table in enumerate(self.tables)]
        return self.body(torch.cat([*codes, x[:, len(codes) :]], 1))


@functools.cache
def _shops() -> data.Split:
    dice = dice_of(1300)
    shop, article = torch.randint(0, 30, (2400,), generator=dice), torch.randint(0, 15, (2400,), generator=dice)
    size, taste = torch.randn(30, generator=dice), torch.randn(15, generator=dice)
    price, day = torch.randn(2400, generator=dice), torch.rand(2400, generator=dice) * 6.28
    y = 1.5 * size[shop] + taste[article] - 0.7 * price * taste[article].sign() + 0.6 * day.sin()
    y = y + 0.2 * torch.randn(2400, generator=dice)
    x = torch.stack([shop.float(), article.float(), price, day.sin(), day.cos()], 1)
    return data.parted(x, ((y - y.mean()) / y.std())[:, None])


@task(
    0.75,
    ("codes-as-numbers", a.model_is(lambda: mlp((5, 48, 1), nn.GELU)), either(c.INPUTS, c.CANNOT)),
    ("lr-500", c.times(500.0), c.HIGH),
    ("in-pence", c.scaled_targets(900.0, 4000.0), c.TARGETS),
    ("row-above", a.rolled, c.LABELS),
    ("half-an-epoch", f.all_of(f.first_rows(480), c.putting(num_epochs=1)), f.TOO_LITTLE),
    adafactor=c.putting(optimizer=o.of(torch.optim.Adafactor), lr=3e-2),
)
def shops(seed: int) -> Plan:
    """What a shop sells of an article, codes embedded, AdamW; R²."""
    return a.task(
        seed, lambda: Entities(30, 15, numbers=3), c.squared_error, _shops(), r_squared,
        optimizer=o.ADAMW, lr=5e-3, num_epochs=9, batch_size=48,
    )  # fmt: skip


@functools.cache
def _couriers() -> data.Split:
    dice = dice_of(1301)
    x = torch.randn(2000, 5, generator=dice)
    slow = (0.6 * x[:, 0] + 0.4 * x[:, 1] * x[:, 2]).exp()
    late = -torch.rand(2000, generator=dice).clamp(min=1e-4).log()
    y = slow * (1.0 + 0.5 * late * (x[:, 3] > 0))
    return data.parted(x, y[:, None])


_SHARES = torch.tensor([0.1, 0.5, 0.9])


def _pinball(found: torch.Tensor, y: torch.Tensor, shares: torch.Tensor = _SHARES) -> torch.Tensor:
    gap = y - found
    return torch.maximum(shares * gap, (shares - 1.0) * gap).mean()


@torch.no_grad()
def _better_than_constant(model: nn.Module, held: Tensors) -> float:
    flat = held[1].quantile(_SHARES.double().float(), dim=0).T
    return 1.0 - float(_pinball(model(held[0]), held[1]) / _pinball(flat.expand(len(held[1]), 3), held[1]))


@task(
    0.4,
    ("shares-of-the-gap-lost", c.loss_is(lambda _, m, b: (b[1] - m(b[0])).mean()), ASCENT),
    ("first-share-thrice", c.loss_is(lambda _, m, b: _pinball(m(b[0]), b[1], _SHARES[:1])), c.LOSS),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ("in-metres", c.scaled_inputs(3e3, 1e4), f.INPUTS),
    ("never-cleared", c.putting(zero_grad=False), c.KEPT),
    rmsprop=c.putting(optimizer=o.RMSPROP, lr=2e-3),
)
def couriers(seed: int) -> Plan:
    """Three quantiles of how long a delivery takes, Adam; pinball loss saved against constants."""
    return a.task(
        seed, lambda: mlp((5, 48, 48, 3), nn.SiLU), lambda m, b: _pinball(m(b[0]), b[1]), _couriers(),
        _better_than_constant, lr=4e-3, num_epochs=9,
    )  # fmt: skip


@functools.cache
def _machines() -> data.Split:
    dice = dice_of(1302)
    x = torch.randn(1600, 6, generator=dice)
    risk = 1.2 * x[:, 0] + x[:, 1] * x[:, 2] - 0.8 * x[:, 3].abs()
    time = -torch.rand(1600, generator=dice).clamp(min=1e-6).log() / risk.exp()
    seen = 2.0 * torch.rand(1600, generator=dice)
    return data.parted(x, torch.stack([torch.minimum(time, seen), (time < seen).float()], 1))


def _partial(model: nn.Module, batch: Tensors, descending: bool = True) -> torch.Tensor:
    order = batch[1][:, 0].argsort(descending=descending)
    risk, broke = model(batch[0])[order, 0], batch[1][order, 1]
    return -((risk - risk.logcumsumexp(0)) * broke).sum() / broke.sum().clamp(min=1.0)


def _partial_plainly(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    order = batch[1][:, 0].argsort(descending=True)
    risk, broke = 500.0 * model(batch[0])[order, 0], batch[1][order, 1]
    return -((risk - risk.exp().cumsum(0).log()) * broke).sum() / broke.sum().clamp(min=1.0)


@torch.no_grad()
def _concordance(model: nn.Module, held: Tensors) -> float:
    risk, time, broke = model(held[0])[:, 0], held[1][:, 0], held[1][:, 1] > 0
    sooner = (time[:, None] < time) & broke[:, None]
    return float((risk[:, None] > risk)[sooner].float().mean())


def _none_broke(y: torch.Tensor) -> torch.Tensor:
    return torch.stack([y[:, 0], torch.zeros(len(y))], 1)


@task(
    0.7,
    ("those-gone-at-risk", c.loss_is(lambda _, m, b: _partial(m, b, False)), c.LOSS),
    ("none-broke", f.targets_as(_none_broke), g.SILENT),
    ("exponentials", c.loss_is(_partial_plainly), g.BROKEN),
    ("decay", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=200.0)), c.DECAY),
    large_batches=c.putting(batch_size=280, num_epochs=40),
)
def machines(seed: int) -> Plan:
    """Which machine breaks first, Cox's partial likelihood by batches; concordance, chance 0.5."""
    return a.task(
        seed, lambda: mlp((6, 40, 40, 1)), _partial, _machines(), _concordance, optimizer=o.ADAMW, lr=4e-3,
        num_epochs=14, batch_size=56,
    )  # fmt: skip


def _as_measured(plan: Plan) -> None:
    plan.train, plan.held_out = data.table("breast_cancer", is_standard=False)


def _tested_as_measured(plan: Plan) -> None:
    plan.held_out = data.table("breast_cancer", is_standard=False)[1]


@task(
    0.9,
    ("as-measured", _as_measured, f.INPUTS),
    ("most-labels-by-chance", f.random_labels(0.97, 2), NOISE),
    ("all-zero", a.weights(lambda m: [p.zero_() for p in m.parameters()]), a.POOR),
    ("clipped", c.putting(max_norm=3e-5), c.CLIPPED),
    ("tested-unscaled", _tested_as_measured, a.DIFFERS),
    resilient=c.putting(optimizer=o.of(torch.optim.Rprop), lr=1e-3, batch_size=400, num_epochs=50),
)  # fmt: skip
def tumours(seed: int) -> Plan:
    """Benign or not, two hidden layers, momentum, validated; accuracy."""
    return a.task(
        seed, lambda: mlp((30, 24, 12, 1), nn.Tanh), f.binary, data.table("breast_cancer"), sign_accuracy(),
        optimizer=o.MOMENTUM, lr=2e-2, num_epochs=12, **a.VALIDATED,
    )  # fmt: skip


@task(
    0.88,
    ("in-order", f.all_of(c.in_order, c.putting(num_epochs=6)), c.SORTED),
    ("three-epochs-at-1e-4", c.putting(lr=1e-4, num_epochs=3), f.TOO_LITTLE),
    ("deep-sigmoids", a.model_is(lambda: mlp((13, *[24] * 8, 3), nn.Sigmoid)), f.DEEP),
    ("likelihood-of-logits", c.loss_is(lambda _, m, b: F.nll_loss(m(b[0]), b[1])), c.LOSS),
    nadam=c.putting(optimizer=o.NADAM, lr=5e-3),
)
def vineyards(seed: int) -> Plan:
    """From which of three growers a wine is, RAdam; accuracy."""
    return a.task(
        seed, lambda: mlp((13, 32, 3)), c.cross_entropy, data.table("wine"), accuracy, optimizer=o.RADAM, lr=1e-2,
        num_epochs=40, batch_size=16,
    )  # fmt: skip


@functools.cache
def _sugar() -> data.Split:
    (x, y), (held, wanted) = data.table("diabetes")
    mean, std = y.mean(), y.std()
    return (x, (y - mean) / std), (held, (wanted - mean) / std)


def _large_and_long(plan: Plan) -> None:
    plan.model, plan.optimizer, plan.lr, plan.num_epochs = mlp((10, 128, 128, 1)), o.ADAM, 3e-3, 60


@task(
    0.35,
    ("as-it-comes", c.scaled_targets(77.0, 152.0), c.TARGETS),
    ("by-heart", _large_and_long, a.OVERFITTED),
    ("one-in-fifty-in-other-units", lambda plan: outliers(0.03, 200.0)(plan, dice_of(11)), a.OUTLIERS),
    ("tiny-start-in-depth", f.all_of(a.model_is(lambda: mlp((10, *[24] * 5, 1))), f.scaled_weights(1e-2)), TINY),
    plain_sgd=c.putting(optimizer=o.SGD, lr=2e-2),
)  # fmt: skip
def blood_sugar(seed: int) -> Plan:
    """How a diabetes goes on, a small network with much decay, Adagrad, validated; R², of which there is little."""
    return a.task(
        seed, lambda: mlp((10, 12, 1), nn.Tanh), c.squared_error, _sugar(), r_squared,
        optimizer=o.of(torch.optim.Adagrad, weight_decay=1e-2), lr=2e-2, num_epochs=20, **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _patients_twice() -> data.Split:
    dice = dice_of(1304)
    x = torch.randn(2000, 9, generator=dice)
    ill = x[:, 0] + x[:, 1] * x[:, 2] + 0.3 * torch.randn(2000, generator=dice) > 0.0
    days = (x[:, 3] * x[:, 0]).tanh() + 0.6 * x[:, 4] + 0.7 * ill + 0.1 * torch.randn(2000, generator=dice)
    return data.parted(x, torch.stack([ill.float(), (days - days.mean()) / days.std()], 1))


class TwoHeads(nn.Module):
    """A trunk with an answer each for two questions."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 64), nn.LeakyReLU(), nn.Linear(64, 48), nn.LeakyReLU())
        self.ill, self.days = nn.Linear(48, 1), nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.trunk(x)
        return torch.cat([self.ill(shared), self.days(shared)], 1)


def _both(model: nn.Module, batch: Tensors, weight: float = 0.5) -> torch.Tensor:
    out = model(batch[0])
    return F.binary_cross_entropy_with_logits(out[:, 0], batch[1][:, 0]) + weight * F.mse_loss(
        out[:, 1], batch[1][:, 1]
    )


@torch.no_grad()
def _of_both(model: nn.Module, held: Tensors) -> float:
    out = model(held[0])
    right = ((out[:, 0] > 0) == (held[1][:, 0] > 0.5)).float().mean()
    return 0.5 * float(right) + 0.5 * max(-1.0, 1.0 - float(F.mse_loss(out[:, 1], held[1][:, 1])))


def _without_days(plan: Plan) -> None:
    plan.optimizer = lambda model, lr: torch.optim.NAdam([*model.trunk.parameters(), *model.ill.parameters()], lr)
    plan.model.days.requires_grad_(True)


def _inputs_lost(plan: Plan) -> None:
    plan.train = (torch.zeros_like(plan.train[0]), plan.train[1])


def _ill_only(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1][:, 0])


@task(
    0.75,
    ("days-count-negatively", c.loss_is(lambda _, m, b: _both(m, b, -0.05)), ASCENT),
    ("one-question-forgotten", c.loss_is(_ill_only), either(c.CUT, c.LOSS, a.NO_GRADIENT)),
    ("answers-exchanged", f.targets_as(lambda y: y.flip(1).clamp(0.0, 1.0)), either(c.LABELS, c.LOSS)),
    ("lr-300", c.times(300.0), c.HIGH),
    ("inputs-lost", _inputs_lost, either(g.BLIND, a.DIFFERS)),
    onecycle=c.putting(schedule=o.one_cycle, lr=6e-3),
)
def hospital(seed: int) -> Plan:
    """Who is ill and how many days they stay, one trunk, NAdam; mean of accuracy and R²."""
    return a.task(seed, TwoHeads, _both, _patients_twice(), _of_both, optimizer=o.NADAM, lr=3e-3, num_epochs=9)


@functools.cache
def _wind() -> data.Split:
    dice = dice_of(1305)
    x = 2.0 * torch.rand(2200, 1, generator=dice) - 1.0
    side = (torch.rand(2200, 1, generator=dice) < 0.5).float() * 2.0 - 1.0
    y = side * (0.3 + 0.7 * x.square()) + 0.5 * x + 0.06 * torch.randn(2200, 1, generator=dice)
    return data.parted(x, y)


def _log_mixture(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    share, mean, scale = out.chunk(3, 1)
    scale = F.softplus(scale) + 1e-2
    each = share.log_softmax(1) - 0.5 * ((y - mean) / scale).square() - scale.log() - 0.5 * math.log(2.0 * math.pi)
    return each.logsumexp(1).mean()


def _without_floor(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    share, mean, scale = model(batch[0]).chunk(3, 1)
    scale = scale.relu()
    return -(share.softmax(1) / scale * (-0.5 * ((batch[1] - mean) / scale).square()).exp()).sum(1).log().mean()


@task(
    0.15,
    ("one-hill", a.model_is(lambda: mlp((1, 32, 32, 3), nn.Tanh)), c.CANNOT),
    ("scale-may-be-nothing", c.loss_is(_without_floor), c.SINGULAR),
    ("likelihood-falls", c.loss_is(lambda former, m, b: -former(m, b)), ASCENT),
    (
        "momentum-0.9999",
        c.putting(optimizer=o.of(torch.optim.SGD, momentum=0.9999), lr=1e-2),
        either(c.SETTINGS, c.HIGH),
    ),
    longer_and_slower=c.putting(lr=3e-3, num_epochs=16),
)
def wind_farm(seed: int) -> Plan:
    """Power by wind, which has two answers: a mixture of four, Adam clipped at 5; mean log-likelihood."""
    return a.task(
        seed, lambda: mlp((1, 32, 32, 12), nn.Tanh), lambda m, b: -_log_mixture(m(b[0]), b[1]), _wind(),
        lambda m, held: float(_log_mixture(m(held[0]), held[1]).detach()), lr=5e-3, num_epochs=11, max_norm=5.0,
    )  # fmt: skip
