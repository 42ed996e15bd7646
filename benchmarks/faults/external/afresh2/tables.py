"""Tables: wines, cells, houses, frauds, angles, counts, two questions at once, and sets."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..afresh import case as c
from ..case import Case
from ..loop import Plan, Tensors
from ..qualities import accuracy, explained, r_squared, sign_accuracy
from ..wild.case import dice_of
from . import case as a

_faulty = functools.partial(a.faulty, __name__)


class Net(nn.Module):
    """Two hidden layers, activations as functions."""

    def __init__(self, num_in: int, num_out: int, width: int = 32, act=F.relu, last=None, p: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(num_in, width), nn.Linear(width, width), nn.Linear(width, num_out)
        self.act, self.last, self.p = act, last, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.act(self.fc1(x)), self.p, self.training)
        out = self.fc3(self.act(self.fc2(h)))
        return out if self.last is None else self.last(out)


def wines(seed: int) -> Plan:
    """Three growers, thirteen measurements."""
    return a.task(
        seed, lambda: Net(13, 3), c.cross_entropy, data.table("wine"), accuracy, lr=3e-3, num_epochs=40, batch_size=16
    )


def _raw_wines(plan: Plan) -> None:
    plan.train, plan.held_out = data.table("wine", is_standard=False)


def _by_rows(plan: Plan) -> None:
    """Each row brought to mean 0 and deviation 1e-4 instead of each column."""
    for field in ("train", "held_out"):
        x, y = getattr(plan, field)
        setattr(plan, field, (1e-4 * (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), y))


def _focal(model: nn.Module, batch: Tensors, power: float = 2.0) -> torch.Tensor:
    logit = model(batch[0])[:, 0]
    p = torch.where(batch[1] == 1, logit.sigmoid(), (-logit).sigmoid())
    return (-((1.0 - p) ** power) * (p + 1e-7).log()).mean()


def cells(seed: int) -> Plan:
    """Benign or not, by a focal loss written by hand, validated."""
    return a.task(
        seed, lambda: Net(30, 1, act=torch.tanh), _focal, data.table("breast_cancer"), sign_accuracy(),
        optimizer=o.MOMENTUM, lr=5e-2, num_epochs=12, **a.VALIDATED,
    )  # fmt: skip


def _twice(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Sigmoid of a sigmoid, shifted so far that the smaller class is never named."""
    p = model(batch[0])[:, 0].sigmoid().sigmoid()
    return F.binary_cross_entropy(p, batch[1].float())


def _one_unit(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.binary_cross_entropy(model(batch[0]).softmax(1)[:, 0], batch[1].float())


@functools.cache
def _prices() -> data.Split:
    dice = dice_of(500)
    x = torch.randn(1200, 8, generator=dice)
    y = x[:, 0] + 0.6 * x[:, 1] * x[:, 2] + 0.5 * (x[:, 3] > 0.0) - 0.4 * x[:, 4].abs()
    y = y + 0.15 * torch.randn(1200, generator=dice)
    return data.parted(x, ((y - y.mean()) / y.std())[:, None])


def houses(seed: int) -> Plan:
    """What a house costs, in deviations from the mean."""
    return a.task(seed, lambda: Net(8, 1, 48), c.squared_error, _prices(), r_squared, lr=3e-3, num_epochs=12)


def _summed(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def _log_price(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    """The logarithm of prices that are below zero, too."""
    return (torch.log(model(batch[0])) - torch.log(batch[1])).square().mean()


@functools.cache
def _transfers() -> data.Split:
    dice = dice_of(501)
    x = torch.randn(6000, 10, generator=dice)
    score = x[:, 0] + x[:, 1] * x[:, 2] + 0.3 * torch.randn(6000, generator=dice)
    return data.parted(x, (score > 3.2).float())


@torch.no_grad()
def _balanced(model: nn.Module, wanted: Tensors) -> float:
    found, known = model(wanted[0])[:, 0] > 0.0, wanted[1] > 0.5
    return 0.5 * float(found[known].float().mean() + (~found[~known]).float().mean())


def frauds(seed: int) -> Plan:
    """Two in a hundred, weighed up."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        out = model(batch[0])[:, 0]
        return F.binary_cross_entropy_with_logits(out, batch[1], pos_weight=torch.tensor(40.0))

    return a.task(
        seed, lambda: Net(10, 1), loss, _transfers(), _balanced, optimizer=o.ADAMW, lr=3e-3, batch_size=64, num_epochs=6
    )


def _unweighed(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])


def _none_left(plan: Plan) -> None:
    """A filter took all positives."""
    kept = plan.train[1] < 0.5
    plan.train = tuple(t[kept] for t in plan.train)


def _coded_missing(plan: Plan) -> None:
    """What is missing is written as -99999."""
    for field, seed in (("train", 1), ("held_out", 2)):
        x, y = getattr(plan, field)
        setattr(plan, field, (x.masked_fill(torch.rand(x.shape, generator=dice_of(seed)) < 0.03, -99999.0), y))


@functools.cache
def _directions() -> data.Split:
    dice = dice_of(502)
    angle = 2.0 * math.pi * torch.rand(1000, generator=dice)
    x = torch.stack([angle.cos(), angle.sin(), (2.0 * angle).cos(), angle.cos() * angle.sin()], 1)
    x = x + 0.1 * torch.randn(x.shape, generator=dice)
    return data.parted(x, torch.stack([angle.cos(), angle.sin()], 1))


@torch.no_grad()
def _turned(model: nn.Module, wanted: Tensors) -> float:
    return float(F.cosine_similarity(model(wanted[0]), wanted[1]).mean())


def angles(seed: int) -> Plan:
    """A direction as a point of the circle."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return (1.0 - F.cosine_similarity(model(batch[0]), batch[1])).mean()

    return a.task(seed, lambda: Net(4, 2, act=F.gelu), loss, _directions(), _turned, optimizer=o.NADAM, lr=2e-3)


def _in_degrees(plan: Plan) -> None:
    """An angle of 0 to 360 by a squared error."""

    class Degrees(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turn = super().forward(x)
            return turn if self.training else torch.cat([turn.deg2rad().cos(), turn.deg2rad().sin()], 1)

    plan.model = Degrees(4, 1, act=F.gelu)
    x, y = plan.train
    plan.train = (x, torch.atan2(y[:, 1], y[:, 0]).rad2deg()[:, None] % 360.0)
    plan.loss = c.squared_error


def _away(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.cosine_similarity(model(batch[0]), batch[1]).mean()


@functools.cache
def _visits() -> data.Split:
    dice = dice_of(503)
    x = torch.randn(1500, 6, generator=dice)
    rate = (0.6 * x[:, 0] - 0.5 * x[:, 1] + 0.3 * x[:, 2] * x[:, 3] + 1.2).exp()
    return data.parted(x, torch.poisson(rate, generator=dice)[:, None])


def visits(seed: int) -> Plan:
    """Counts, by their logarithm."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.poisson_nll_loss(model(batch[0]), batch[1])

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        return explained(model(wanted[0]).clamp(max=8.0).exp().sqrt(), wanted[1].sqrt())

    return a.task(seed, lambda: Net(6, 1), loss, _visits(), quality, optimizer=o.RMSPROP, lr=1e-3, num_epochs=12)


def _exp_twice(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.poisson_nll_loss(model(batch[0]).exp(), batch[1])


def _plain_number(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    """The output is taken for the rate itself, which may fall below zero."""
    return F.poisson_nll_loss(model(batch[0]), batch[1], log_input=False, eps=0.0)


class Heads(nn.Module):
    """One trunk, two answers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.kind, self.size = Net(8, 32, act=F.silu), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.trunk(x))
        return torch.cat([self.kind(h), self.size(h)], 1)


@functools.cache
def _twofold() -> data.Split:
    x = torch.randn(1500, 8, generator=dice_of(504))
    kind = torch.stack([x[:, 0], x[:, 1], x[:, 2] * x[:, 3]], 1).argmax(1).float()
    return data.parted(x, torch.stack([kind, x[:, 4] * x[:, 5]], 1))


def _both(model: nn.Module, batch: Tensors, weight: float = 1.0) -> torch.Tensor:
    out, (kind, size) = model(batch[0]), batch[1].unbind(1)
    return F.cross_entropy(out[:, :3], kind.long()) + weight * F.mse_loss(out[:, 3], size)


def two_questions(seed: int) -> Plan:
    """A class and a number of the same input; the quality is that of the class."""

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        return float((model(wanted[0])[:, :3].argmax(1) == wanted[1][:, 0]).float().mean())

    return a.task(seed, Heads, _both, _twofold(), quality, lr=3e-3, num_epochs=12)


class Sum(nn.Module):
    """A sum over what a set holds."""

    def __init__(self, pool=torch.sum, width: int = 24) -> None:
        super().__init__()
        self.each, self.all, self.pool = Net(2, width), nn.Linear(width, 1), pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all(self.pool(F.relu(self.each(x)), 1))


@functools.cache
def _baskets() -> data.Split:
    dice = dice_of(505)
    x = torch.rand(1200, 12, 2, generator=dice)
    x = x * (torch.rand(1200, 12, 1, generator=dice) < torch.rand(1200, 1, 1, generator=dice))
    total = (x[..., 0] * x[..., 1]).sum(1, keepdim=True)
    return data.parted(x, (total - total.mean()) / total.std())


def baskets(seed: int) -> Plan:
    """What a basket costs: prices times numbers, summed."""
    return a.task(
        seed, Sum, c.squared_error, _baskets(), r_squared, optimizer=o.ADAGRAD, lr=2e-2, num_epochs=15, **a.VALIDATED
    )


CASES: tuple[Case, ...] = (
    *_faulty(
        "wines",
        wines,
        ("raw", _raw_wines, c.INPUTS),
        ("tiny-features", _by_rows, c.INPUTS),
        ("one-epoch", c.putting(num_epochs=1), a.SHORT),
        ("decay", c.putting(optimizer=o.of(torch.optim.Adam, weight_decay=1.0)), c.DECAY),
        ("shuffled", c.shuffled, c.LABELS),
    ),
    *_faulty(
        "cells",
        cells,
        ("sigmoid-twice", c.loss_is(_twice), c.OUTPUT),
        ("softmax-of-one", c.loss_is(_one_unit), c.OUTPUT),
        ("power-negative", c.loss_is(lambda former, m, b: _focal(m, b, -3.0)), c.LOSS),
        ("momentum", c.putting(optimizer=o.of(torch.optim.SGD, momentum=0.9995)), c.SETTINGS),
    ),
    *_faulty(
        "houses",
        houses,
        ("dollars", c.scaled_targets(90_000.0, 400_000.0), c.TARGETS),
        ("flattened", c.loss_is(lambda former, m, b: F.mse_loss(m(b[0])[:, 0], b[1])), c.LOSS),
        ("ends-in-relu", a.model_is(lambda: Net(8, 1, 48, last=F.relu)), c.OUTPUT),
        ("ends-in-softplus", a.model_is(lambda: Net(8, 1, 48, last=F.softplus)), c.OUTPUT),
        ("one-row-off", a.rolled, c.LABELS),
        ("log-of-negative", c.loss_is(_log_price), c.SINGULAR),
        ("summed-sgd", c.putting(optimizer=o.SGD, lr=0.05, loss=_summed), a.SUMMED),
        ("linear", a.model_is(lambda: Net(8, 1, 48, act=lambda x: x)), c.CANNOT),
    ),
    *_faulty(
        "frauds",
        frauds,
        ("unweighed-slow", lambda plan: (c.loss_is(_unweighed)(plan), setattr(plan, "num_epochs", 2)), a.UNEVEN),
        ("none-left", _none_left, a.UNEVEN),
        ("missing-coded", _coded_missing, a.OUTLIERS),
        ("nan-samples", c.one_nan, c.BATCH),
        ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ),
    *_faulty(
        "angles",
        angles,
        ("degrees", _in_degrees, c.TARGETS),
        ("sign", c.loss_is(_away), c.LOSS),
        ("lr-1", c.putting(lr=1.0), c.HIGH),
    ),
    *_faulty(
        "visits",
        visits,
        ("exp-twice", c.loss_is(_exp_twice), c.OUTPUT),
        ("log-of-rate", c.loss_is(_plain_number), c.SINGULAR),
        ("ids-in-features", c.scaled_inputs(1.0, 20_000.0), c.INPUTS),
        ("not-cleared", c.putting(zero_grad=False, optimizer=o.SGD, lr=2e-2), c.KEPT),
    ),
    *_faulty(
        "two-questions",
        two_questions,
        ("one-outweighs", c.loss_is(lambda former, m, b: _both(m, b, 1e6)), c.LOSS),
        ("cleared-late", c.putting(play=a.cleared_late), a.NO_GRADIENT),
        ("eps", c.putting(optimizer=o.of(torch.optim.AdamW, eps=1.0)), c.SETTINGS),
        ("undone", c.putting(play=a.undone), c.OVERWRITTEN),
    ),
    *_faulty(
        "baskets",
        baskets,
        ("largest", a.model_is(functools.partial(Sum, torch.amax)), c.CANNOT),
        ("narrow", a.model_is(functools.partial(Sum, torch.mean, 1)), c.CANNOT),
        ("trained-on-cents", lambda plan: setattr(plan, "train", (100.0 * plan.train[0], plan.train[1])), a.DIFFERS),
        ("dropout", a.model_is(lambda: nn.Sequential(nn.Dropout(0.95), Sum())), c.DROPPED),
    ),
)  # fmt: skip
