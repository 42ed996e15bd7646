"""Tables: patients, bicycles, steel, concrete, loans, letters, loads, spirals, checkers, genes, plants, flats."""

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
from ..damage import noisy_inputs, outliers, overlapping, unbalanced
from ..fresh3.case import ASCENT, CUT_OR_FROZEN, LARGE, NOISE, OUTPUT_OR_LOSS, PARTED, TINY, either
from ..loop import Plan, Tensors
from ..nets import mlp
from ..qualities import accuracy, r_squared, sign_accuracy
from ..wild.case import dice_of
from . import case as f

CASES: list[Case] = []
task = f.planning(CASES, __name__)


def _of_sklearn(name: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn import datasets

    features, targets = getattr(datasets, name)(**options)
    return torch.tensor(features, dtype=torch.float32), torch.tensor(targets)


@functools.cache
def _patients() -> data.Split:
    """Age, pressure, cholesterol, pulse, weight, three answers of yes and no; who falls ill."""
    dice = dice_of(1100)
    z = torch.randn(1500, 5, generator=dice)
    yes = (torch.rand(1500, 3, generator=dice) < 0.4).float()
    odds = 1.4 * z[:, 0] + z[:, 1] * yes[:, 0] + 1.2 * z[:, 2].abs() - 1.0 - 0.8 * z[:, 3] + 1.5 * yes[:, 1]
    y = (odds + 0.5 * torch.randn(1500, generator=dice) > 0.0).long()
    units = torch.tensor([[12.0, 18.0, 40.0, 14.0, 15.0], [54.0, 130.0, 240.0, 75.0, 80.0]])
    return data.parted(torch.cat([units[0] * z + units[1], yes], 1), y)


def _in_units(plan: Plan) -> None:
    plan.train, plan.held_out = _patients()


def _sigmoid_first(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(4.0 * model(batch[0]).sigmoid()[:, 0].sigmoid(), batch[1].float())


@task(
    0.78,
    ("lr-300", c.times(300.0), c.HIGH),
    ("in-units", _in_units, f.INPUTS),
    ("other-patients", c.shuffled, c.LABELS),
    ("twice-sigmoid", c.loss_is(_sigmoid_first), OUTPUT_OR_LOSS),
    ("absolute", c.loss_is(lambda _, m, b: (m(b[0])[:, 0] - b[1] - 2.0).abs().mean()), c.LOSS),
    rmsprop=c.putting(optimizer=o.RMSPROP),
    dropout=a.model_is(lambda: mlp((8, 48, 24, 1), nn.ReLU, lambda _: nn.Dropout(0.3))),
)
def patients(seed: int) -> Plan:
    """Who falls ill, by two hidden layers, validated each epoch; accuracy."""
    split = data.standardised(_patients())
    return a.task(
        seed, lambda: mlp((8, 32, 16, 1)), f.binary, split, sign_accuracy(), lr=3e-3, num_epochs=12, **a.VALIDATED
    )


@functools.cache
def _bicycles() -> data.Split:
    dice = dice_of(1101)
    hour, day = 24.0 * torch.rand(2000, generator=dice), torch.randint(0, 7, (2000,), generator=dice)
    warm, rain = torch.randn(2000, generator=dice), (torch.rand(2000, generator=dice) < 0.3).float()
    busy = torch.exp(-((hour - 8.0) / 2.0).square()) + torch.exp(-((hour - 17.0) / 2.5).square())
    y = 30.0 + 200.0 * busy * (day < 5) + 60.0 * (day > 4) + 40.0 * warm * (1.0 - rain) - 40.0 * rain
    y = y + 12.0 * torch.randn(2000, generator=dice)
    turn = hour * math.pi / 12.0
    columns = [turn.sin(), turn.cos(), (2 * turn).sin(), (2 * turn).cos(), warm, rain, (day > 4).float()]
    y = (y - y.mean()) / y.std()
    return data.parted(torch.stack(columns, 1), y[:, None])


@task(
    0.8,
    ("as-counted", c.scaled_targets(80.0, 4000.0), c.TARGETS),
    ("momentum-0.999", c.putting(optimizer=o.of(torch.optim.SGD, momentum=0.999)), either(c.SETTINGS, c.HIGH)),
    ("lr-1e-7", c.putting(lr=1e-7), c.LOW),
    ("never-cleared", c.putting(zero_grad=False), c.KEPT),
    ("rectified", a.model_is(lambda: nn.Sequential(mlp((7, 48, 48, 1)), nn.ReLU())), c.OUTPUT),
    adagrad=c.putting(optimizer=o.ADAGRAD, lr=3e-2),
    plain_sgd=c.putting(optimizer=o.SGD, lr=0.1),
)
def bicycles(seed: int) -> Plan:
    """How many bicycles are lent in an hour, Nesterov's momentum; R²."""
    return a.task(
        seed, lambda: mlp((7, 48, 48, 1)), c.squared_error, _bicycles(), r_squared,
        optimizer=o.NESTEROV, lr=3e-2, num_epochs=9,
    )  # fmt: skip


@functools.cache
def _steel() -> data.Split:
    x, y = _of_sklearn(
        "make_classification", n_samples=1600, n_features=20, n_informative=10, n_classes=7,
        n_clusters_per_class=1, class_sep=1.6, random_state=31,
    )  # fmt: skip
    return data.standardised(data.parted(x, y.long()))


@task(
    0.75,
    ("decay", c.putting(optimizer=o.of(torch.optim.SGD, momentum=0.9, weight_decay=0.5)), c.DECAY),
    ("one-epoch", c.putting(num_epochs=1, lr=3e-3), f.TOO_LITTLE),
    ("rate-grows", c.putting(schedule=lambda n: lambda t: 1.04**t), c.GROWING),
    ("all-zero", a.weights(lambda m: [p.zero_() for p in m.parameters()]), a.POOR),
    ("one-by-one", c.putting(batch_size=1, num_epochs=1, lr=0.3), a.SMALL_BATCH),
    ("next-class", f.targets_as(lambda y: torch.where(y % 2 == 0, (y + 1) % 7, y)), c.LABELS),
    adam=c.putting(optimizer=o.ADAM, lr=3e-3),
    large_batches=c.putting(batch_size=256, num_epochs=60, lr=0.1),
)
def steel(seed: int) -> Plan:
    """Which of seven faults a plate has, momentum; accuracy."""
    return a.task(
        seed, lambda: mlp((20, 64, 7)), c.cross_entropy, _steel(), accuracy, optimizer=o.MOMENTUM, lr=3e-2, num_epochs=9
    )


@functools.cache
def _circuits() -> data.Split:
    x, y = _of_sklearn("make_friedman2", n_samples=1500, noise=20.0, random_state=32)
    y = y.float()
    return data.standardised(data.parted(x, ((y - y.mean()) / y.std())[:, None]))


@task(
    0.85,
    ("outliers", lambda plan: outliers(0.02, 300.0)(plan, dice_of(7)), a.OUTLIERS),
    ("climbing", c.loss_is(lambda former, m, b: -former(m, b)), ASCENT),
    ("squashed", f.ending_in(nn.Sigmoid()), c.OUTPUT),
    ("decay-20", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=80.0)), c.DECAY),
    ("clipped", c.putting(optimizer=o.SGD, max_norm=1e-4), c.CLIPPED),
    lion_like=c.putting(optimizer=o.SIGN, lr=1e-3),
)
def circuits(seed: int) -> Plan:
    """The impedance of a circuit, AdamW clipped at 5, validated; R²."""
    return a.task(
        seed, lambda: mlp((4, 64, 64, 1), nn.SiLU), c.squared_error, _circuits(), r_squared,
        optimizer=o.ADAMW, lr=5e-3, num_epochs=10, max_norm=5.0, **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _loans() -> data.Split:
    dice = dice_of(1103)
    x = torch.randn(3000, 12, generator=dice)
    odds = 1.5 * x[:, 0] + x[:, 1] * x[:, 2] + x[:, 3].abs() - 3.6 + 0.4 * torch.randn(3000, generator=dice)
    return data.parted(x, (odds > 0.0).long())


@torch.no_grad()
def _balanced(model: nn.Module, held: Tensors) -> float:
    said, known = model(held[0])[:, 0] > 0.0, held[1] > 0
    return 0.5 * float(said[known].float().mean() + (~said[~known]).float().mean())


def _weighed(model: nn.Module, batch: Tensors) -> torch.Tensor:
    y = batch[1].float()
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], y, pos_weight=torch.tensor(7.0))


def _plain_binary(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return f.binary(model, batch)


def _hardly_any(plan: Plan) -> None:
    unbalanced(0.97)(plan, dice_of(8))
    plan.loss = f.binary


@task(
    0.75,
    ("hardly-any", _hardly_any, f.UNEVEN),
    ("all-good", f.targets_as(torch.zeros_like), either(c.LEAK, f.UNEVEN)),
    ("one-nan", c.one_nan, c.BATCH),
    ("dropout-0.97", a.model_is(lambda: mlp((12, 48, 48, 1), nn.ReLU, lambda _: nn.Dropout(0.97))), c.DROPPED),
    ("lr-1000", c.times(1000.0), c.HIGH),
    half_dropped=a.model_is(lambda: mlp((12, 48, 1), nn.ReLU, lambda _: nn.Dropout(0.4))),
)
def loans(seed: int) -> Plan:
    """Who does not pay back, one in eight, weighed up; balanced accuracy."""
    return a.task(
        seed, lambda: mlp((12, 48, 48, 1)), _weighed, _loans(), _balanced, optimizer=o.NADAM, lr=2e-3, num_epochs=6
    )


@functools.cache
def _letters() -> data.Split:
    x, y = _of_sklearn("make_blobs", n_samples=2600, centers=26, n_features=16, cluster_std=4.0, random_state=34)
    return data.standardised(data.parted(x, y.long()))


@task(
    0.85,
    ("likelihood-of-logits", c.loss_is(lambda _, m, b: F.nll_loss(m(b[0]), b[1])), c.LOSS),
    ("lr-300", c.times(300.0), c.HIGH),
    ("nine-sigmoids", a.model_is(lambda: mlp((16, *[40] * 9, 26), nn.Sigmoid)), f.DEEP),
    ("eps-1", c.putting(optimizer=o.of(torch.optim.RMSprop, eps=30.0)), either(c.SETTINGS, c.LOW)),
    ("two-labels-each", lambda plan: overlapping(plan, dice_of(9)), c.LABELS),
    ("rate-per-batch", c.putting(play=a.rate_each_batch), c.SCHEDULE),
    adam=c.putting(optimizer=o.ADAM),
    smoothed=c.loss_is(lambda _, m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.2)),
)
def letters(seed: int) -> Plan:
    """Which letter, of 26 clouds, RMSprop; accuracy, chance 0.04."""
    return a.task(
        seed, lambda: mlp((16, 64, 26)), c.cross_entropy, _letters(), accuracy, optimizer=o.RMSPROP, lr=3e-3,
        num_epochs=6,
    )  # fmt: skip


@functools.cache
def _loads() -> data.Split:
    dice = dice_of(1105)
    x = 2.0 * torch.rand(1800, 8, generator=dice) - 1.0
    heat = x[:, 0] * x[:, 1] + (2.0 * x[:, 2]).sin() + 0.5 * x[:, 3]
    cool = heat.abs() - x[:, 4].square() + 0.5 * x[:, 5]
    y = torch.stack([heat, cool], 1) + 0.05 * torch.randn(1800, 2, generator=dice)
    return data.parted(x, (y - y.mean(0)) / y.std(0))


@torch.no_grad()
def _lesser(model: nn.Module, held: Tensors) -> float:
    return min(1.0 - float(F.mse_loss(model(held[0])[:, i], held[1][:, i]) / held[1][:, i].var()) for i in (0, 1))


def _told(plan: Plan) -> None:
    """Targets stand among the inputs, and are not there later."""
    x, y = plan.train
    plan.train = (torch.cat([x[:, :6], y], 1), y)
    plan.held_out = (torch.cat([plan.held_out[0][:, :6], torch.zeros(len(plan.held_out[0]), 2)], 1), plan.held_out[1])


def _only_last(plan: Plan) -> None:
    plan.optimizer = lambda model, lr: torch.optim.Adamax(model[-1].parameters(), lr)


@task(
    0.8,
    ("told", _told, c.LEAK),
    ("row-below", a.rolled, c.LABELS),
    ("large", c.scaled_targets(1e4, 3e4), c.TARGETS),
    ("only-the-last", _only_last, c.LEFT_OUT),
    ("one-for-both", c.loss_is(lambda _, m, b: (m(b[0]).mean(1, keepdim=True) - b[1]).square().mean()), c.LOSS),
    squared=c.loss_is(lambda _, m, b: F.mse_loss(m(b[0]), b[1])),
)
def loads(seed: int) -> Plan:
    """What a house needs for heating and for cooling, Huber, Adamax, validated; the lesser R²."""
    return a.task(
        seed, lambda: mlp((8, 48, 48, 2), nn.ELU), lambda m, b: F.huber_loss(m(b[0]), b[1]), _loads(), _lesser,
        optimizer=o.ADAMAX, lr=1e-2, num_epochs=14, **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _spirals() -> data.Split:
    dice = dice_of(1106)
    way, y = torch.rand(1400, generator=dice).sqrt(), torch.randint(0, 2, (1400,), generator=dice)
    angle = 7.0 * way + math.pi * y
    x = torch.stack([way * angle.cos(), way * angle.sin()], 1) + 0.02 * torch.randn(1400, 2, generator=dice)
    return data.parted(2.0 * x, y)


@task(
    0.9,
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ("never-alive", f.biases(-12.0), c.DEAD),
    ("huge-start", f.scaled_weights(40.0), LARGE),
    ("straight", a.model_is(lambda: nn.Sequential(nn.Linear(2, 48), nn.Linear(48, 48), nn.Linear(48, 2))), f.LINEAR),
    ("put-back", c.putting(play=a.undone), c.OVERWRITTEN),
    nadam=c.putting(optimizer=o.NADAM),
)
def spirals(seed: int) -> Plan:
    """Two spirals, two hidden layers, RAdam; accuracy."""
    return a.task(
        seed, lambda: mlp((2, 48, 48, 2)), c.cross_entropy, _spirals(), accuracy, optimizer=o.RADAM, lr=1e-2,
        num_epochs=16,
    )  # fmt: skip


@functools.cache
def _checkers() -> data.Split:
    dice = dice_of(1107)
    x = 3.0 * torch.rand(2000, 2, generator=dice)
    return data.parted(x - 1.5, (x.floor().sum(1) % 2).long())


@task(
    0.85,
    ("deep-sigmoid", a.model_is(lambda: mlp((2, *[32] * 8, 2), nn.Sigmoid)), f.DEEP),
    ("tiny-start", f.scaled_weights(1e-4), TINY),
    ("shifted-far", c.scaled_inputs(50.0, 2000.0), f.INPUTS),
    ("one-batch", a.first_batch_only, f.OVER),
    (
        "half-labels",
        f.random_labels(0.8, 2),
        NOISE,
    ),
    cyclic=c.putting(schedule=lambda n: lambda t: 0.2 + 0.8 * abs(1.0 - (4.0 * t / n) % 2.0)),
)
def checkers(seed: int) -> Plan:
    """Black or white of a board of nine, tanh, Adam; accuracy."""
    return a.task(
        seed, lambda: mlp((2, 48, 48, 2), nn.Tanh), c.cross_entropy, _checkers(), accuracy, lr=1.5e-2, num_epochs=11
    )


@functools.cache
def _genes() -> data.Split:
    x, y = _of_sklearn(
        "make_classification", n_samples=700, n_features=120, n_informative=12, n_redundant=8, class_sep=1.5,
        random_state=38,
    )  # fmt: skip
    return data.standardised(data.parted(x, y.long()))


def _normed(drop: float = 0.5) -> nn.Module:
    return mlp((120, 48, 2), nn.ReLU, nn.BatchNorm1d, lambda _: nn.Dropout(drop))


def _frozen(plan: Plan) -> None:
    for p in plan.model[0].parameters():
        p.requires_grad_(False)
    plan.model[0].weight.data.mul_(0.0).add_(1e-3)


@task(
    0.75,
    ("few-rows", f.all_of(f.first_rows(30), c.putting(num_epochs=150)), f.OVER),
    ("frozen", _frozen, CUT_OR_FROZEN),
    ("lr-1e-7", c.putting(lr=1e-7), c.LOW),
    ("noisy-in-training", lambda plan: noisy_inputs(6.0)(plan, dice_of(10)), PARTED),
    ("in-order", f.all_of(c.in_order, c.putting(num_epochs=4)), c.SORTED),
    ("decay", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=150.0)), c.DECAY),
    much_decay=c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=0.5)),
)
def genes(seed: int) -> Plan:
    """Which tissue, of 120 genes and few rows: batch norm, dropout, AdamW along a cosine, validated; accuracy."""
    return a.task(
        seed, _normed, c.cross_entropy, _genes(), accuracy, optimizer=o.ADAMW, lr=3e-3, num_epochs=14,
        schedule=o.cosine, **a.VALIDATED,
    )  # fmt: skip
