"""Likeness, choice and what was learnt before: sensors, songs, duels, a small student, new heads, two senses."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..fresh3.case import ASCENT, LARGE, either
from ..fresh4 import case as f
from ..loop import Plan, Tensors
from ..nets import mlp
from ..qualities import accuracy
from ..wild.case import dice_of
from . import case as g

MADE: list[Case] = []
task = f.planning(MADE, __name__)


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
    ("pairs-alone", c.loss_is(lambda _, m, b: _pairs(m, b, kind="alone")), c.COLLAPSED),
    ("not-of-one-thing", _not_one_thing, c.LABELS),
    ("lr-2", c.putting(lr=2.0), either(c.HIGH, c.COLLAPSED)),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    small_batches=c.putting(batch_size=24, lr=2e-3),
)
def two_sensors(seed: int) -> Plan:
    """What two sensors have in common, told from others in the batch, Adam; nearest neighbours right."""
    return a.task(
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
    ("listeners-of-others", _strangers, c.LABELS),
    ("all-alike-at-first", a.weights(g.all_zero), either(a.POOR, a.NO_GRADIENT)),
    ("songs-left-out", f.all_of(g.left_out("songs"), a.weights(lambda m: m.songs.weight.fill_(0.3))), g.FIXED),
    ("likeness-pushed-down", c.loss_is(lambda former, m, b: -former(m, b)), ASCENT),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ("decay-80", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=80.0)), c.DECAY),
    adagrad=c.putting(optimizer=o.ADAGRAD, lr=0.1),
)
def songs(seed: int) -> Plan:
    """Which song a listener hears, among those of the batch, Adam; heard songs among the first twenty."""
    return a.task(
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
    ("winner-always-first-by-file", _winner_first, c.LABELS),
    ("not-of-one-sign", c.loss_is(lambda _, m, b: _won(m, b, -1.0)), either(c.LOSS, c.LABELS)),
    (
        "logarithm-of-a-share",
        c.loss_is(
            lambda _, m, b: (
                -(
                    b[1][:, 0] * (1.0 - _margin(m, b[0]).exp()).log()
                    + (1.0 - b[1][:, 0]) * _margin(m, b[0]).sigmoid().log()
                ).mean()
            )
        ),
        g.NAN_INSIDE,
    ),
    ("lr-4", c.putting(lr=4.0), c.HIGH),
    ("eight-batches", f.all_of(f.first_rows(256), c.putting(num_epochs=1, lr=1e-4)), g.CUT_SHORT),
    rprop=c.putting(optimizer=o.of(torch.optim.Rprop), lr=1e-4, batch_size=1680, num_epochs=50),
)
def duels(seed: int) -> Plan:
    """Who is stronger, told by who won, which is half chance, RAdam; the stronger known."""
    return a.task(
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
    ("other-way-round", c.loss_is(lambda _, m, b: -0.05 * _taught(m, b)), ASCENT),
    (
        "teacher-sees-other-digits",
        c.loss_is(
            lambda _, m, b: F.kl_div(
                m(b[0]).log_softmax(1), _teacher()(b[0].roll(1, 0)).softmax(1), reduction="batchmean"
            )
        ),
        c.LABELS,
    ),
    ("biases-of-minus-nine", f.biases(-9.0), c.DEAD),
    ("student-frozen-but-for-its-end", f.all_of(g.frozen("0"), a.weights(lambda m: m[0].weight[2:].zero_())), g.FIXED),
    ("lr-1e-5", c.putting(lr=1e-5), c.LOW),
    sgd=c.putting(optimizer=o.MOMENTUM, lr=2e-2),
)
def small_student(seed: int) -> Plan:
    """A small network taught by a larger one's shares at heat three, Adam; accuracy on digits."""
    return a.task(
        seed, lambda: mlp((64, 14, 10)), _taught, data.digits(), accuracy, lr=6e-3, num_epochs=8,
    )  # fmt: skip


@functools.cache
def _knows_half() -> nn.Sequential:
    """A network that was trained on digits below five, and a head of its own."""
    (x, y), _ = data.digits()
    x, y = x[y < 5], y[y < 5]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(29)
        model = mlp((64, 96, 48, 5))
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        for _ in range(150):
            at = torch.randint(len(x), (64,))
            optimizer.zero_grad()
            F.cross_entropy(model(x[at]), y[at]).backward()
            optimizer.step()
    return model


def _new_head() -> nn.Module:
    model = copy.deepcopy(_knows_half())
    model[4] = nn.Linear(48, 5)
    for p in model[:4].parameters():
        p.requires_grad_(False)
    return model


@functools.cache
def _upper_half() -> data.Split:
    (x, y), (held, known) = data.digits()
    return (x[y >= 5], y[y >= 5] - 5), (held[known >= 5], known[known >= 5] - 5)


def _old_head(plan: Plan) -> None:
    """The head is replaced after the optimizer has been made for the former one."""
    former = copy.deepcopy(plan.model[4])
    plan.optimizer = lambda model, lr: torch.optim.AdamW([*model[:4].parameters(), *former.parameters()], lr=lr)


def _all_trained(lr: float) -> c.Change:
    def change(plan: Plan) -> None:
        plan.model.requires_grad_(True)
        plan.lr = lr

    return change


@task(
    0.75,
    ("optimizer-of-the-former-head", _old_head, g.FIXED),
    ("trunk-burnt", _all_trained(0.3), c.HIGH),
    ("labels-moved", f.targets_as(lambda y: (y + 1) % 5), c.LABELS),
    ("adams-rate-for-sgd", c.putting(optimizer=o.of_trainable(torch.optim.SGD), lr=3e-4), c.LOW),
    all_slowly=_all_trained(5e-4),
)
def upper_digits(seed: int) -> Plan:
    """Digits from five on by a new head over a frozen trunk that knows the lower ones, AdamW; accuracy."""
    return a.task(
        seed, _new_head, c.cross_entropy, _upper_half(), accuracy, optimizer=o.of_trainable(torch.optim.AdamW),
        lr=2e-2, num_epochs=12,
    )  # fmt: skip


class Senses(nn.Module):
    """A picture and a sound beside it [B, 64 + 20], each to a place on a sphere."""

    def __init__(self, gain: float = 2.0) -> None:
        super().__init__()
        self.sees, self.hears = mlp((64, 64, 16), nn.GELU), mlp((20, 64, 16), nn.GELU)
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, heard = F.normalize(self.sees(x[:, :64]), dim=1), F.normalize(self.hears(x[:, 64:]), dim=1)
        return self.gain.exp() * seen @ heard.T


@functools.cache
def _senses() -> data.Split:
    (x, y), (held, known) = data.digits()
    dice = dice_of(1446)
    tone = 1.5 * torch.randn(10, 20, generator=dice)
    mix = torch.randn(64, 20, generator=dice) / 10.0
    hear = lambda t, k: tone[k] + t @ mix + 0.5 * torch.randn(len(t), 20, generator=dice)  # noqa: E731
    return (torch.cat([x, hear(x, y)], 1), y), (torch.cat([held, hear(held, known)], 1), known)


def _matched(model: nn.Module, batch: Tensors) -> torch.Tensor:
    likeness, aim = model(batch[0]), torch.arange(len(batch[0]))
    return 0.5 * (F.cross_entropy(likeness, aim) + F.cross_entropy(likeness.T, aim))


@torch.no_grad()
def _same_kind(model: nn.Module, held: Tensors) -> float:
    told = model(held[0]).argmax(1)
    return float((held[1][told] == held[1]).float().mean())


def _out_of_step(plan: Plan) -> None:
    x = plan.train[0]
    plan.train = (torch.cat([x[:, :64], x[:, 64:].roll(5, 0)], 1), plan.train[1])


@task(
    0.8,
    ("sounds-out-of-step", _out_of_step, c.LABELS),
    ("gain-of-e-to-the-12", a.model_is(lambda: Senses(12.0)), LARGE),
    ("kinds-as-places", c.loss_is(lambda _, m, b: F.cross_entropy(m(b[0]), b[1].clamp(max=len(b[0]) - 1))), c.LABELS),
    ("batches-of-two", f.all_of(c.putting(batch_size=2, lr=0.05), f.first_rows(400)), g.FAST_OR_SMALL),
    ("lr-3e-6", c.putting(lr=3e-6), c.LOW),
    decayed=c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=0.3), schedule=o.warm_cosine),
)  # fmt: skip
def picture_and_sound(seed: int) -> Plan:
    """Which sound belongs to a picture, among those of the batch, AdamW; kinds right."""
    return a.task(
        seed, Senses, _matched, _senses(), _same_kind, optimizer=o.ADAMW, lr=3e-3, num_epochs=8, batch_size=64,
    )  # fmt: skip


CASES = g.renamed(MADE)
