"""Likeness, choice and transfer: sensors, songs, duels, a small student."""

from __future__ import annotations

import functools

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
from ..qualities import accuracy

CASES: list[Case] = []
task = f.planning(CASES, __name__)


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


@functools.cache
def _duels() -> data.Split:
    """Two players of eight features each [B, 2, 8], and whether the first won."""
    dice = dice_of(1442)
    x = torch.randn(2400, 2, 8, generator=dice)
    strength = x[..., 0] * x[..., 1] + x[..., 2].tanh() - 0.7 * x[..., 3].abs()
    won = torch.rand(2400, generator=dice) < (1.3 * (strength[:, 0] - strength[:, 1])).sigmoid()
    return data.parted(x, torch.stack([won.float(), strength[:, 0] - strength[:, 1]], 1))


def _margin(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    strength = model(x)[..., 0]
    return strength[:, 0] - strength[:, 1]


def _won(model: nn.Module, batch: Tensors, gain: float = 1.0) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(gain * _margin(model, batch[0]), batch[1][:, 0])


@torch.no_grad()
def _stronger(model: nn.Module, held: Tensors) -> float:
    return float(((_margin(model, held[0]) > 0) == (held[1][:, 1] > 0)).float().mean())


def _winner_first(plan: Plan) -> None:
    x, y = plan.train
    turned = torch.where(y[:, :1, None] > 0, x, x.flip(1))
    plan.train = (turned, y)


@task(
    0.8,
    ("winner-always-first-by-file", _winner_first, t.LABELS),
    ("not-of-one-sign", f.loss_is(lambda _, m, b: _won(m, b, -1.0)), t.either(t.LOSS, t.LABELS)),
    (
        "logarithm-of-a-share",
        f.loss_is(
            lambda _, m, b: (
                -(
                    b[1][:, 0] * (1.0 - _margin(m, b[0]).exp()).log()
                    + (1.0 - b[1][:, 0]) * _margin(m, b[0]).sigmoid().log()
                ).mean()
            )
        ),
        t.NAN_INSIDE,
    ),
    ("lr-4", f.putting(lr=4.0), t.HIGH),
    ("eight-batches", f.all_of(f.first_rows(256), f.putting(num_epochs=1, lr=1e-4)), t.CUT_SHORT),
    rprop=f.putting(optimizer=o.of(torch.optim.Rprop), lr=1e-4, batch_size=1680, num_epochs=50),
)
def duels(seed: int) -> Plan:
    """Who is stronger, told by who won, which is half chance, RAdam; the stronger known."""
    return f.planned(
        seed, lambda: mlp((8, 48, 1), nn.SiLU), _won, _duels(), _stronger, optimizer=o.RADAM, lr=4e-3, num_epochs=10,
        batch_size=48,
    )  # fmt: skip


@functools.cache
def _teacher() -> nn.Module:
    """A network that knows digits."""
    (x, y), _ = data.digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(23)
        model = mlp((64, 128, 10))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(220):
            at = torch.randint(len(x), (64,))
            optimizer.zero_grad()
            F.cross_entropy(model(x[at]), y[at]).backward()
            optimizer.step()
    return model.requires_grad_(False).eval()


def _taught(model: nn.Module, batch: Tensors, heat: float = 3.0) -> torch.Tensor:
    wanted = (_teacher()(batch[0]) / heat).softmax(1)
    return heat**2 * F.kl_div((model(batch[0]) / heat).log_softmax(1), wanted, reduction="batchmean")


@task(
    0.9,
    ("other-way-round", f.loss_is(lambda _, m, b: -0.05 * _taught(m, b)), t.ASCENT),
    (
        "teacher-sees-other-digits",
        f.loss_is(
            lambda _, m, b: F.kl_div(
                m(b[0]).log_softmax(1), _teacher()(b[0].roll(1, 0)).softmax(1), reduction="batchmean"
            )
        ),
        t.LABELS,
    ),
    ("biases-of-minus-nine", f.biases(-9.0), t.DEAD),
    (
        "student-frozen-but-for-its-end",
        f.all_of(f.frozen("0"), f.weights(lambda m: m[0].weight[2:].zero_())),
        t.FIXED,
    ),
    ("lr-1e-5", f.putting(lr=1e-5), t.LOW),
    sgd=f.putting(optimizer=o.MOMENTUM, lr=2e-2),
)
def small_student(seed: int) -> Plan:
    """A small network taught by a larger one's shares at heat three, Adam; accuracy on digits."""
    return f.planned(
        seed, lambda: mlp((64, 14, 10)), _taught, data.digits(), accuracy, lr=6e-3, num_epochs=8,
    )  # fmt: skip
