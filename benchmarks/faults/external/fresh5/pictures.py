"""Pictures: galaxies, veins, dials, coins, tiles in bfloat16, starry skies, digits enlarged, stamps."""

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
from ..damage import noisy_inputs, unbalanced
from ..fresh3.case import LARGE, OUTPUT_OR_LOSS, PARTED, either
from ..fresh4 import case as f
from ..loop import Plan, Tensors
from ..nets import Attending
from ..qualities import accuracy, r_squared
from ..wild.case import dice_of
from . import case as g

CASES: list[Case] = []
task = g.planning(CASES, __name__)
SEEN_SIZE = 12


def _grid(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    line = torch.linspace(-1.0, 1.0, size)
    return line[:, None].expand(size, size), line.expand(size, size)


@functools.cache
def _galaxies() -> data.Split:
    dice, (high, wide) = dice_of(1310), _grid(SEEN_SIZE)
    y = torch.randint(0, 4, (1300,), generator=dice)
    turn = (torch.rand(1300, generator=dice) * math.pi)[:, None, None]
    along, across = turn.cos() * wide + turn.sin() * high, turn.cos() * high - turn.sin() * wide
    far = (along.square() + across.square()).sqrt()
    ways = torch.stack(
        [
            (-(far / 0.5).square()).exp(),
            (-((far - 0.6) / 0.15).square()).exp(),
            (-(across / 0.15).square() - (along / 0.8).square()).exp(),
            (-((along.abs() - 0.6) / 0.2).square() - (across / 0.25).square()).exp(),
        ],
        1,
    )
    x = ways[torch.arange(1300), y] + 0.35 * torch.randn(1300, SEEN_SIZE, SEEN_SIZE, generator=dice)
    return data.parted(((x - x.mean()) / x.std())[:, None], y)


class Residual(nn.Module):
    """Two convolutions with batch norm beside a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.norms[1](self.second(self.norms[0](self.first(x)).relu()))).relu()


def _residual(width: int = 12) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1), Residual(width), Residual(width), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(4 * width, 4),
    )  # fmt: skip


def _statistics_stand(plan: Plan) -> None:
    for m in plan.model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 0.0


@task(
    0.85,
    ("statistics-stand-still", _statistics_stand, either(a.STATISTICS, a.MODE)),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ("two-kinds-as-one", f.targets_as(lambda y: torch.where(y == 3, 1, y)), c.LABELS),
    ("cleared-late", c.putting(play=a.cleared_late), a.NO_GRADIENT),
    ("few-pictures", f.all_of(f.first_rows(24), c.putting(num_epochs=130, schedule=None)), g.FEW),
    adamw=c.putting(optimizer=o.two_groups, lr=3e-3),
)
def galaxies(seed: int) -> Plan:
    """Which of four shapes a galaxy has: two residual blocks, momentum along a cosine; accuracy."""
    return a.task(
        seed, _residual, c.cross_entropy, _galaxies(), accuracy, optimizer=o.MOMENTUM, lr=5e-2, num_epochs=5,
        schedule=o.cosine,
    )  # fmt: skip


@functools.cache
def _veins() -> data.Split:
    dice, (high, wide) = dice_of(1311), _grid(16)
    bend, turn = torch.randn(500, 1, 1, generator=dice), (torch.rand(500, 1, 1, generator=dice) * math.pi)
    along, across = turn.cos() * wide + turn.sin() * high, turn.cos() * high - turn.sin() * wide
    y = ((across - 0.5 * bend * along.square()).abs() < 0.12).float()
    glow = 0.8 * torch.randn(500, 1, 1, generator=dice) * wide
    x = y + glow + 0.5 * torch.randn(500, 16, 16, generator=dice)
    return data.parted(x[:, None], y[:, None])


class Net(nn.Module):
    """Down once and up again, with a way across."""

    def __init__(self, width: int = 10, crosses: bool = True) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.down = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU()
        )
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.leave = nn.Conv2d(2 * width, 1, 3, padding=1)
        self.crosses = crosses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = self.enter(x)
        back = self.up(self.down(here)).relu()
        return self.leave(torch.cat([here if self.crosses else 0.0 * here, back], 1))


def _pixelwise(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], pos_weight=torch.tensor(3.0))


@torch.no_grad()
def _overlap(model: nn.Module, held: Tensors) -> float:
    said = (model(held[0]) > 0.0).float()
    return float(2.0 * (said * held[1]).sum() / (said.sum() + held[1].sum()).clamp(min=1.0))


def _flipped(epoch: int, place: int, batch: Tensors) -> Tensors:
    """An augmentation that turns the picture and leaves its mask."""
    return batch[0].flip(3), batch[1]


@task(
    0.6,
    ("mask-not-turned", c.putting(change=_flipped), c.LABELS),
    ("from-0-to-255", f.targets_as(lambda y: 255.0 * y), either(c.TARGETS, c.LOSS)),
    ("sigmoid-in-the-net", f.ending_in(nn.Sigmoid()), OUTPUT_OR_LOSS),
    ("huge-start", f.scaled_weights(25.0), LARGE),
    ("no-masks", f.targets_as(torch.zeros_like), either(c.LEAK, f.UNEVEN)),
    adamax=c.putting(optimizer=o.ADAMAX, lr=1e-2),
)
def veins(seed: int) -> Plan:
    """Where a vein lies, a small U-Net with group norm, Adam; overlap."""
    return a.task(seed, Net, _pixelwise, _veins(), _overlap, lr=6e-3, num_epochs=10, batch_size=24)


@functools.cache
def _dials() -> data.Split:
    dice, (high, wide) = dice_of(1312), _grid(SEEN_SIZE)
    turn = (torch.rand(1200, generator=dice) * 2.0 * math.pi)[:, None, None]
    along, across = turn.cos() * wide + turn.sin() * high, turn.cos() * high - turn.sin() * wide
    x = (-(across / 0.15).square()).exp() * (along > 0.0) + 0.3 * torch.randn(1200, 12, 12, generator=dice)
    return data.parted((x - 0.15)[:, None], torch.cat([turn[:, :, 0].cos(), turn[:, :, 0].sin()], 1))


def _reader(activation=nn.ReLU) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 10, 3, padding=1), activation(), nn.MaxPool2d(2), nn.Conv2d(10, 16, 3, padding=1), activation(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 32), activation(), nn.Linear(32, 2),
    )  # fmt: skip


@task(
    0.8,
    ("rectified-answer", f.ending_in(nn.ReLU()), c.OUTPUT),
    ("never-alive", f.biases(-9.0), c.DEAD),
    ("in-arcseconds", c.scaled_targets(2e5), c.TARGETS),
    (
        "without-dividing",
        f.all_of(c.putting(optimizer=o.SGD, lr=0.25, batch_size=8), g.summing(8, False)),
        a.NOT_SCALED,
    ),
    ("noisy-in-training", lambda plan: noisy_inputs(9.0)(plan, dice_of(12)), PARTED),
    summed_in_twos=f.all_of(c.putting(batch_size=16), g.summing(2)),
)
def dials(seed: int) -> Plan:
    """Where a needle points, as sine and cosine, max-pooled convolutions, RMSprop, validated; R²."""
    return a.task(
        seed, _reader, c.squared_error, _dials(), r_squared, optimizer=o.RMSPROP, lr=2e-3, num_epochs=9, **a.VALIDATED
    )


@functools.cache
def _coins() -> data.Split:
    dice, (high, wide) = dice_of(1313), _grid(16)
    at = 1.2 * torch.rand(1100, 2, generator=dice) - 0.6
    size, hollow = 0.25 + 0.2 * torch.rand(1100, 1, generator=dice), (torch.rand(1100, 1, generator=dice) < 0.5).float()
    far = ((wide - at[:, :1, None]).square() + (high - at[:, 1:, None]).square()).sqrt()
    x = (far < size[:, :, None]).float() * (1.0 - hollow[:, :, None] * (far < 0.6 * size[:, :, None]))
    x = x + 0.25 * torch.randn(1100, 16, 16, generator=dice)
    return data.parted(x[:, None] - 0.2, torch.cat([at / 0.35, (size - 0.35) / 0.06, hollow], 1))


def _finder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.SiLU(),
        nn.Flatten(), nn.Linear(384, 48), nn.SiLU(), nn.Linear(48, 4),
    )  # fmt: skip


def _box_and_kind(model: nn.Module, batch: Tensors) -> torch.Tensor:
    out = model(batch[0])
    kind = F.binary_cross_entropy_with_logits(out[:, 3], batch[1][:, 3])
    return F.smooth_l1_loss(out[:, :3], batch[1][:, :3]) + kind


@torch.no_grad()
def _located(model: nn.Module, held: Tensors) -> float:
    out, y = model(held[0]), held[1]
    where = 1.0 - float(F.mse_loss(out[:, :3], y[:, :3]) / y[:, :3].var())
    return 0.5 * max(where, -1.0) + 0.5 * float(((out[:, 3] > 0) == (y[:, 3] > 0.5)).float().mean())


def _head_only(plan: Plan) -> None:
    plan.model[:4].requires_grad_(False)
    plan.optimizer = o.of_trainable(torch.optim.AdamW)


def _in_corners(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return former(model, (batch[0], torch.cat([batch[1][:, [1, 0]], batch[1][:, 2:]], 1)))


@task(
    0.75,
    ("rows-for-columns", c.loss_is(_in_corners), either(c.LABELS, c.LOSS)),
    ("trunk-frozen", _head_only, either(a.FROZEN, c.LEFT_OUT, c.CUT)),
    ("rate-per-batch", c.putting(play=a.rate_each_batch), c.SCHEDULE),
    ("other-pictures", c.shuffled, c.LABELS),
    ("nan-pixels", c.one_nan, c.BATCH),
    clipped=c.putting(max_norm=1.0, schedule=o.warm_cosine),
)
def coins(seed: int) -> Plan:
    """Where a coin lies, how large, and whether it has a hole, AdamW; mean of R² and accuracy."""
    return a.task(seed, _finder, _box_and_kind, _coins(), _located, optimizer=o.ADAMW, lr=3e-3, num_epochs=9)


def _tiles(t: torch.Tensor) -> torch.Tensor:
    return F.unfold(t, 2, stride=2).mT.contiguous()


@functools.cache
def _in_tiles() -> data.Split:
    (x, y), (held, known) = data.digits(as_images=True)
    return (_tiles(x), y), (_tiles(held), known)


def _attending(**options: bool) -> nn.Module:
    return Attending(4, 10, 16, 32, 1, is_symbolic=False, pooled=True, **options)


def _without_places(plan: Plan) -> None:
    plan.model.places.data.zero_()
    plan.model.places.requires_grad_(False)
    plan.optimizer = o.of_trainable(torch.optim.AdamW)


@task(
    0.7,
    ("without-places", _without_places, either(a.FROZEN, c.CANNOT)),
    ("lr-1", c.putting(lr=1.0), c.HIGH),
    ("warm-up-not-stepped", c.putting(play=g.warm_up_never_stepped), g.NOT_STEPPED),
    ("sorted-by-digit", c.in_order, c.SORTED),
    ("norm-of-1e-5", c.putting(optimizer=o.SGD, lr=0.3, max_norm=1e-5), c.CLIPPED),
    float32=c.loss_is(lambda _, m, b: c.cross_entropy(m, b)),
)
def tiles_in_bfloat16(seed: int) -> Plan:
    """Digits as sixteen tiles that attend to each other, AdamW under bfloat16 autocast; accuracy."""
    return a.task(
        seed, _attending, g.in_bfloat16(c.cross_entropy), _in_tiles(), accuracy, optimizer=o.ADAMW, lr=4e-3,
        num_epochs=6, batch_size=48, schedule=o.warm_cosine,
    )  # fmt: skip


@functools.cache
def _skies() -> data.Split:
    dice, (high, wide) = dice_of(1315), _grid(SEEN_SIZE)
    at = 2.0 * torch.rand(2, 900, 4, 1, 1, generator=dice) - 1.0
    far = (wide - at[0]).square() + (high - at[1]).square()
    y = (torch.rand(900, 4, 1, 1, generator=dice) * (-far / 0.03).exp()).sum(1, keepdim=True)
    x = y + 0.25 * torch.randn(900, 1, 12, 12, generator=dice)
    return data.parted(4.0 * x, 4.0 * y)


def _cleaner(*last: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 14, 3, padding=1), nn.GELU(), nn.Conv2d(14, 14, 3, padding=1), nn.GELU(),
        nn.Conv2d(14, 1, 3, padding=1), *last,
    )  # fmt: skip


@task(
    0.5,
    ("noise-as-target", lambda plan: vars(plan).update(train=(plan.train[0], plan.train[0])), either(c.LEAK, c.LABELS)),
    ("dropped-everywhere", a.model_is(lambda: nn.Sequential(_cleaner(), nn.Dropout(0.9))), c.DROPPED),
    ("squashed", f.ending_in(nn.Sigmoid()), c.OUTPUT),
    ("decay", c.putting(optimizer=o.of(torch.optim.SGD, momentum=0.9, weight_decay=0.8), lr=3e-2), c.DECAY),
    momentum=c.putting(optimizer=o.MOMENTUM, lr=5e-2),
)
def starry_skies(seed: int) -> Plan:
    """Noise taken off stars, three convolutions, Adam that halves; R²."""
    return a.task(seed, _cleaner, c.squared_error, _skies(), r_squared, lr=6e-3, num_epochs=7, schedule=o.halving)


@functools.cache
def _small_and_large() -> data.Split:
    (x, _), (held, _) = data.pixels()
    pictures = [t.view(-1, 1, 8, 8) for t in (x, held)]
    (low, high), (low2, high2) = (
        (F.avg_pool2d(t, 2) - 0.3, t - F.interpolate(F.avg_pool2d(t, 2), scale_factor=2)) for t in pictures
    )
    return (low, 4.0 * high), (low2, 4.0 * high2)


def _enlarger() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 4, 1),
        nn.PixelShuffle(2),
    )  # fmt: skip


@task(
    0.35,
    ("mean-of-both", c.loss_is(lambda _, m, b: (m(b[0]).mean() - b[1].mean()).square()), c.LOSS),
    ("black-and-white-for-bytes", f.all_of(c.scaled_inputs(255.0, 3000.0)), f.INPUTS),
    ("one-batch", a.first_batch_only, g.FEW),
    ("put-back", c.putting(play=a.undone), c.OVERWRITTEN),
    l1=c.loss_is(lambda _, m, b: F.l1_loss(m(b[0]), b[1])),
)
def enlarged(seed: int) -> Plan:
    """What a digit of a quarter as many pixels lacks, shuffled up, NAdam; R²."""
    return a.task(
        seed, _enlarger, c.squared_error, _small_and_large(), r_squared, optimizer=o.NADAM, lr=5e-3, num_epochs=6
    )


@functools.cache
def _stamps() -> data.Split:
    dice = dice_of(1317)
    drawn = torch.randn(60, 64, generator=dice)
    kind = torch.randint(0, 60, (1800,), generator=dice)
    slip = torch.randint(0, 5, (1800,), generator=dice)
    x = torch.stack([drawn[k].roll(int(s)) for k, s in zip(kind, slip)]) + 0.7 * torch.randn(1800, 64, generator=dice)
    return data.parted(x, kind)


def _matched(model: nn.Module, batch: Tensors, heat: float = 0.2) -> torch.Tensor:
    """Those of the same stamp nearer than all others of the batch."""
    codes = F.normalize(model(batch[0]), dim=1)
    alike = (batch[1][:, None] == batch[1]).float().fill_diagonal_(0.0)
    near = (codes @ codes.T / heat).masked_fill(torch.eye(len(codes), dtype=torch.bool), -1e4)
    return -((near.log_softmax(1) * alike).sum(1) / alike.sum(1).clamp(min=1.0)).mean()


@torch.no_grad()
def _nearest(model: nn.Module, held: Tensors) -> float:
    codes = F.normalize(model(held[0]), dim=1)
    near = (codes @ codes.T).fill_diagonal_(-2.0).argmax(1)
    return float((held[1][near] == held[1]).float().mean())


@task(
    0.55,
    ("only-nearer", c.loss_is(lambda _, m, b: -(F.normalize(m(b[0])) @ F.normalize(m(b[0])).T).mean()), c.COLLAPSED),
    ("pairs-of-others", c.shuffled, c.LABELS),
    ("batches-of-three", c.putting(batch_size=3, num_epochs=1), either(a.SMALL_BATCH, a.SHORT)),
    ("hardly-any-but-one", lambda plan: unbalanced(0.95)(plan, dice_of(13)), either(f.UNEVEN, g.FEW)),
    ("lr-1e-7", c.putting(lr=1e-7), c.LOW),
    hotter=c.loss_is(lambda _, m, b: _matched(m, b, 0.3)),
)
def stamps(seed: int) -> Plan:
    """Codes of sixty stamps, moved and noisy, that lie near their like, RAdam; right nearest neighbours."""
    return a.task(
        seed, lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 24)), _matched, _stamps(), _nearest,
        optimizer=o.RADAM, lr=1e-2, batch_size=96, num_epochs=25,
    )  # fmt: skip
