"""Pictures: shapes, numbers by a deep network, cells to be outlined, marks to be found, blur, stripes, odd quarters."""

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
from ..damage import unbalanced
from ..fresh3.case import PARTED, either
from ..loop import Plan, Tensors
from ..qualities import accuracy, explained
from ..wild.case import dice_of
from . import case as f

CASES: list[Case] = []
task = f.planning(CASES, __name__)


def _grid(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(float(size))
    return at[None, :, None].expand(1, size, size), at[None, None, :].expand(1, size, size)


@functools.cache
def _shapes() -> data.Split:
    """Discs, squares, crosses and rings somewhere on 12 by 12 pixels, in noise."""
    dice = dice_of(1120)
    y = torch.randint(0, 4, (1600,), generator=dice)
    top, left, size = 3.0 + 5.0 * torch.rand(3, 1600, 1, 1, generator=dice)
    size = 1.5 + size / 4.0
    down, right = _grid(12)
    down, right = (down - top).abs(), (right - left).abs()
    far = (down.square() + right.square()).sqrt()
    kinds = [far < size, torch.maximum(down, right) < size, torch.minimum(down, right) < 0.6, (far - size).abs() < 0.6]
    x = torch.stack([k & (torch.maximum(down, right) < 1.3 * size) for k in kinds], 1).float()
    x = x[torch.arange(1600), y][:, None]
    return data.parted((x + 0.25 * torch.randn(x.shape, generator=dice) - 0.2) / 0.4, y)


def _normed_cnn(size: int = 12, num_out: int = 4, drop: float = 0.0, **options: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12, **options), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24, **options), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(drop), nn.Linear(24 * (size // 4) ** 2, num_out),
    )  # fmt: skip


def _same_again(plan: Plan) -> None:
    a.first_batch_only(plan)
    plan.num_epochs = 5


@task(
    0.8,
    ("statistics-stand", a.model_is(lambda: _normed_cnn(momentum=1e-4)), a.STATISTICS),
    ("same-again", _same_again, f.OVER),
    ("prepared-otherwise", f.inputs_later(lambda x: 40.0 * x + 80.0), a.DIFFERS),
    ("lr-1000", c.times(1000.0), c.HIGH),
    ("mostly-discs", lambda plan: unbalanced(0.98)(plan, dice_of(11)), f.UNEVEN),
    ("one-for-another", f.targets_as(lambda y: torch.where(y == 0, 1, torch.where(y == 1, 0, y))), c.LABELS),
    sgd=c.putting(optimizer=o.NESTEROV, lr=3e-2),
    label_noise=f.random_labels(0.15, 4),
)
def shapes(seed: int) -> Plan:
    """Discs, squares, crosses, rings by convolutions with batch norm, validated; accuracy."""
    return a.task(
        seed, _normed_cnn, c.cross_entropy, _shapes(), accuracy, lr=2e-3, num_epochs=8, batch_size=48, **a.VALIDATED
    )


def _deep(act: type[nn.Module] = nn.ReLU, depth: int = 2) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), act()]
    for _ in range(depth):
        layers += [nn.Conv2d(16, 16, 3, padding=1), act()]
    return nn.Sequential(
        *layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 48), act(), nn.Dropout(0.25), nn.Linear(48, 10)
    )


def _of_vectors(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).softmax(1), F.one_hot(batch[1], 10).float())


@task(
    0.85,
    ("sigmoids", a.model_is(lambda: _deep(nn.Sigmoid, 4)), f.DEEP),
    ("by-class", f.all_of(c.in_order, c.putting(num_epochs=2)), c.SORTED),
    ("lr-30", c.putting(lr=3.0), c.HIGH),
    ("brightness", c.scaled_inputs(400.0, 3000.0), f.INPUTS),
    ("not-divided", c.putting(play=a.summed_over(7), num_epochs=25, schedule=None, lr=0.1), a.NOT_SCALED),
    ("squares-of-softmax", c.loss_is(lambda _, m, b: _of_vectors(m, b)), either(c.LOSS, c.LOW, a.VANISHING)),
    adam=c.putting(optimizer=o.ADAM, lr=2e-3, schedule=None),
)
def numbers_deep(seed: int) -> Plan:
    """Digits by four plain convolutions and dropout, momentum, a warm-up and a cosine; accuracy."""
    return a.task(
        seed, _deep, c.cross_entropy, data.digits(as_images=True), accuracy, optimizer=o.MOMENTUM, lr=5e-2,
        num_epochs=7, batch_size=48,
        schedule=lambda n: lambda t: min(1.0, (t + 1) / 20) * 0.5 * (1.0 + math.cos(math.pi * t / n)),
    )  # fmt: skip


@functools.cache
def _cells() -> data.Split:
    """Up to three bright ellipses on 16 by 16 pixels with shade and noise; where they are."""
    dice = dice_of(1122)
    down, right = _grid(16)
    mask = torch.zeros(500, 16, 16, dtype=torch.bool)
    for _ in range(3):
        top, left = 2.0 + 12.0 * torch.rand(2, 500, 1, 1, generator=dice)
        high, wide = 1.5 + 2.0 * torch.rand(2, 500, 1, 1, generator=dice)
        there = torch.rand(500, 1, 1, generator=dice) < 0.8
        mask |= there & (((down - top) / high).square() + ((right - left) / wide).square() < 1.0)
    shade = 0.08 * torch.randn(500, 1, 1, generator=dice) * down
    x = mask.float() + shade + 0.5 * torch.randn(mask.shape, generator=dice)
    return data.parted(x[:, None], mask[:, None].float())


class _Outliner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.far = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 12, 1))
        self.last = nn.Conv2d(24, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = self.near(x)
        return self.last(torch.cat([near, F.interpolate(self.far(near), scale_factor=2.0)], 1))


def _overlap(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    p = out.sigmoid()
    return 1.0 - 2.0 * (p * wanted).sum() / (p.sum() + wanted.sum())


def _outlined(model: nn.Module, batch: Tensors) -> torch.Tensor:
    out = model(batch[0])
    return F.binary_cross_entropy_with_logits(out, batch[1]) + _overlap(out, batch[1])


@torch.no_grad()
def _union(model: nn.Module, held: Tensors) -> float:
    said, known = model(held[0]) > 0.0, held[1] > 0.5
    return float((said & known).sum() / (said | known).sum().clamp(min=1))


@task(
    0.7,
    ("moved-masks", f.targets_as(lambda y: y.roll((5, 5), (2, 3))), c.LABELS),
    ("no-masks", f.targets_as(torch.zeros_like), either(c.LEAK, f.UNEVEN)),
    ("by-bytes", c.loss_is(lambda _, m, b: F.mse_loss(m(b[0]), 255.0 * b[1])), either(c.LOSS, c.TARGETS)),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
)
def cells_outlined(seed: int) -> Plan:
    """Where cells lie, by a small U-net, cross-entropy and overlap, validated; intersection over union."""
    return a.task(
        seed, _Outliner, _outlined, _cells(), _union, optimizer=o.ADAMW, lr=6e-3, num_epochs=11, batch_size=16,
        **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _marks() -> tuple[Tensors, Tensors]:
    """A bright box or frame on 14 by 14 pixels; which, and its middle and sides over 14."""
    dice = dice_of(1123)
    down, right = _grid(14)
    box = torch.rand(1400, 4, generator=dice)
    box = torch.cat([4.0 + 6.0 * box[:, :2], 2.0 + 2.0 * box[:, 2:]], 1)
    kind = torch.randint(0, 2, (1400,), generator=dice)
    off = torch.maximum(
        (down - box[:, 0, None, None]).abs() / box[:, 2, None, None],
        (right - box[:, 1, None, None]).abs() / box[:, 3, None, None],
    )
    x = ((off < 1.0) & ((kind[:, None, None] == 0) | (off > 0.5))).float()
    x = (x + 0.2 * torch.randn(x.shape, generator=dice))[:, None]
    return (x[:1000], kind[:1000], box[:1000] / 14.0), (x[1000:], kind[1000:], box[1000:] / 14.0)


class _Finder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.LeakyReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1),
            nn.LeakyReLU(), nn.Flatten(), nn.Linear(24 * 16, 64), nn.LeakyReLU(),
        )  # fmt: skip
        self.kind, self.box = nn.Linear(64, 2), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x)
        return self.kind(h), self.box(h)


def _detection(model: nn.Module, batch: Tensors) -> torch.Tensor:
    kind, box = model(batch[0])
    return F.cross_entropy(kind, batch[1]) + 5.0 * F.smooth_l1_loss(box, batch[2])


@torch.no_grad()
def _detected(model: nn.Module, held: Tensors) -> float:
    kind, box = model(held[0])
    right = float((kind.argmax(1) == held[1]).float().mean())
    return min(2.0 * right - 1.0, explained(box.flatten(), held[2].flatten()))


def _no_body(plan: Plan) -> None:
    plan.optimizer = lambda m, lr: torch.optim.Adam([*m.box.parameters(), *m.kind.parameters()], lr)


def _in_screen_pixels(plan: Plan) -> None:
    plan.train = (*plan.train[:2], 14e2 * plan.train[2])
    plan.held_out = (*plan.held_out[:2], 14e2 * plan.held_out[2])


@task(
    0.7,
    ("screen-pixels", _in_screen_pixels, c.TARGETS),
    ("other-boxes", c.shuffled, c.LABELS),
    ("body-left-out", _no_body, c.LEFT_OUT),
    ("clipped", c.putting(optimizer=o.SGD, max_norm=1e-5), c.CLIPPED),
    rmsprop=c.putting(optimizer=o.RMSPROP, lr=1e-3),
)
def marks(seed: int) -> Plan:
    """A mark's kind and its box, two heads; the lesser of accuracy above chance and the boxes' R²."""
    torch.manual_seed(seed)
    return c.planned(seed, _Finder(), _detection, *_marks(), _detected, 0.0, lr=3e-3, num_epochs=8)


@functools.cache
def _blurred() -> data.Split:
    (x, _), (held, _) = data.pixels()
    parts = []
    for t, seed in ((x[:1000], 1124), (held, 1125)):
        t = t.reshape(-1, 1, 8, 8)
        soft = F.avg_pool2d(F.pad(t, (1, 1, 1, 1)), 3, stride=1)
        parts.append((soft + 0.03 * torch.randn(soft.shape, generator=dice_of(seed)), t))
    return parts[0], parts[1]


class _Sharpener(nn.Module):
    def __init__(self, act: type[nn.Module] = nn.PReLU) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), act(), nn.Conv2d(16, 16, 3, padding=1), act(),
            nn.Conv2d(16, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


@torch.no_grad()
def _restored(model: nn.Module, held: Tensors) -> float:
    return explained(model(held[0]).flatten(), held[1].flatten())


def _sharp_already(plan: Plan) -> None:
    plan.train = (plan.train[1], plan.train[1])


@task(
    0.85,
    ("sharp-already", _sharp_already, either(c.LEAK, PARTED)),
    ("other-pictures", c.shuffled, c.LABELS),
    ("momentum-rate", c.putting(optimizer=o.MOMENTUM, lr=5.0), f.HIGH),
    ("square-root", c.loss_is(lambda _, m, b: ((m(b[0]) - b[1]).clamp(min=0.0) - 0.001).sqrt().mean()), c.SINGULAR),
    adagrad=c.putting(optimizer=o.ADAGRAD, lr=2e-2),
)
def sharpening(seed: int) -> Plan:
    """Blurred digits made sharp, what is added is learnt, absolute errors; R² of the pixels."""
    return a.task(seed, _Sharpener, lambda m, b: F.l1_loss(m(b[0]), b[1]), _blurred(), _restored, lr=4e-3, num_epochs=9)


@functools.cache
def _stripes() -> data.Split:
    """Gratings at some angle, as the cosine and sine of twice the angle."""
    dice = dice_of(1126)
    angle, rate, phase = torch.rand(3, 1400, 1, 1, generator=dice)
    angle, down_right = math.pi * angle, _grid(10)
    wave = down_right[0] * angle.sin() + down_right[1] * angle.cos()
    x = torch.sin((0.7 + 0.7 * rate) * wave + 6.3 * phase)
    x = x + 0.3 * torch.randn(x.shape, generator=dice)
    return data.parted(x[:, None], torch.stack([(2 * angle).cos(), (2 * angle).sin()], 1)[:, :, 0, 0])


def _rowed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.GELU(), nn.Conv2d(16, 32, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(128, 64),
        nn.GELU(), nn.Linear(64, 2),
    )  # fmt: skip


def _in_half(plan: Plan) -> None:
    plan.model = plan.model.half()
    plan.optimizer, plan.lr = o.of(torch.optim.SGD), 1e-6
    plan.train = tuple(1e-3 * t.half() for t in plan.train)
    plan.held_out = tuple(1e-3 * t.half() for t in plan.held_out)


@torch.no_grad()
def _turned(model: nn.Module, held: Tensors) -> float:
    return explained(model(held[0]).float().flatten(), held[1].float().flatten())


@task(
    0.8,
    ("in-half", _in_half, either(a.HALF, c.LOW)),
    ("rectified", f.ending_in(nn.ReLU()), c.OUTPUT),
    (
        "betas",
        c.putting(optimizer=o.of(torch.optim.AdamW, betas=(0.9, 0.0), eps=0.0), lr=3e-2),
        either(c.SETTINGS, c.HIGH),
    ),
    ("gone-after-ten", c.putting(schedule=lambda n: lambda t: 0.5**t), c.SCHEDULE),
    ("never-cleared", c.putting(zero_grad=False, lr=1e-2), c.KEPT),
    large_batch=c.putting(batch_size=140, num_epochs=30, lr=4e-3),
)
def stripes(seed: int) -> Plan:
    """The angle of stripes as a cosine and a sine, AdamW; R²."""
    return a.task(
        seed, _rowed, c.squared_error, _stripes(), _turned, optimizer=o.ADAMW, lr=2e-3, num_epochs=8, batch_size=48
    )
