"""Pictures: odd digits, a residual network, cracks, textures."""

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
from ..nets import cnn
from ..qualities import accuracy, sign_accuracy

CASES: list[Case] = []
task = f.planning(CASES, __name__)


def _odd(labels: float) -> data.Split:
    (x, y), (held, known) = data.digits(as_images=True)
    return (x, labels * (y % 2) + 1.0 - labels), (held, known % 2)


def _hinge(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return (1.0 - model(batch[0])[:, 0] * batch[1]).relu().mean()


@task(
    0.93,
    ("labels-nought-and-one", lambda plan: vars(plan).update(train=_odd(1.0)[0]), t.either(t.LABELS, t.LOSS)),
    ("not-cleared", f.putting(zero_grad=False), t.KEPT),
    ("upside-down-later", f.inputs_later(lambda x: x.flip(2)), t.DIFFERS),
    ("biases-of-minus-six", f.biases(-6.0), t.DEAD),
    ("from-nought-to-40000", f.scaled_inputs(9000.0, 20000.0), t.UNSCALED),
    ("margin-the-other-way", f.loss_is(lambda _, m, b: (1.0 + m(b[0])[:, 0] * b[1]).relu().mean()), t.LOSS),
    squared=f.all_of(
        f.loss_is(lambda _, m, b: (1.0 - m(b[0])[:, 0] * b[1]).relu().square().mean()), f.putting(lr=0.02)
    ),
)
def odd_digits(seed: int) -> Plan:
    """Whether a digit is odd, by a small CNN and the hinge loss, Nesterov; accuracy."""
    return f.planned(
        seed, lambda: cnn(1), _hinge, _odd(2.0), sign_accuracy(), optimizer=o.NESTEROV, lr=0.02, num_epochs=5,
    )  # fmt: skip


class _Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module] = nn.BatchNorm2d, skips: bool = True) -> None:
        super().__init__()
        convs = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        self.body = nn.Sequential(convs[0], norm(width), nn.ReLU(), convs[1], norm(width))
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x if self.skips else 0.0) + self.body(x)).relu()


def _resnet(num_blocks: int = 2, norm=nn.BatchNorm2d, skips: bool = True, width: int = 12) -> nn.Module:
    blocks = [_Block(width, norm, skips) for _ in range(num_blocks)]
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), norm(width), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(4 * width, 10),
    )  # fmt: skip


def _one_by_one(plan: Plan) -> None:
    plan.change = lambda epoch, place, batch: tuple(t[batch[1].argsort()] for t in batch)
    f.in_order(plan)


@task(
    0.9,
    ("class-after-class", _one_by_one, t.either(t.SORTED, t.STATISTICS)),
    (
        "pairs-of-samples",
        f.all_of(f.putting(batch_size=2, num_epochs=1), f.first_rows(400)),
        t.either(t.STATISTICS, t.FAST_OR_SMALL),
    ),
    ("lr-25", f.putting(lr=25.0), t.HIGH),
    ("norms-alone-trained", f.left_out("0.", "6", "3.body.0", "3.body.3", "4.body.0", "4.body.3", "7"), t.FIXED),
    (
        "most-labels-another",
        f.targets_as(lambda y: torch.where(torch.rand(len(y)) < 0.85, (y * 7 + 3) % 10, y)),
        t.LABELS,
    ),
    groups=f.model_is(lambda: _resnet(norm=functools.partial(nn.GroupNorm, 4))),
)
def digits_with_skips(seed: int) -> Plan:
    """Digits by a small residual network with BatchNorm, SGD with cosine restarts, validated; accuracy."""
    return f.planned(
        seed, _resnet, f.cross_entropy, data.digits(as_images=True), accuracy, optimizer=o.MOMENTUM, lr=0.05,
        num_epochs=4, batch_size=48, schedule=o.restarts, **f.VALIDATED,
    )  # fmt: skip


@functools.cache
def _cracks() -> data.Split:
    dice = dice_of(1413)
    start, slope = torch.rand(900, 1, 1, generator=dice) * 14.0, torch.randn(900, 1, 1, generator=dice)
    rows, columns = torch.arange(14.0)[:, None], torch.arange(14.0)
    line = ((columns - start - 0.5 * slope * (rows - 7.0)).abs() < 0.6).float()
    x = torch.randn(900, 14, 14, generator=dice) * 0.5 + line * (0.7 + torch.rand(900, 1, 1, generator=dice))
    return data.parted(x[:, None], line[:, None])


class _UNet(nn.Module):
    def __init__(self, width: int = 8, kind: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        conv = lambda low, high: nn.Sequential(nn.Conv2d(low, high, 3, padding=1), kind())  # noqa: E731
        self.down, self.deep, self.up = conv(1, width), conv(width, 2 * width), conv(3 * width, width)
        self.wide, self.out = conv(2 * width, 2 * width), nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x)
        low = self.wide(self.deep(F.max_pool2d(high, 2)))
        return self.out(self.up(torch.cat([high, F.interpolate(low, scale_factor=2)], 1)))


def _overlap(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    p = out.sigmoid()
    return 1.0 - (2.0 * (p * mask).sum() + 1.0) / (p.sum() + mask.sum() + 1.0)


def _cracked(model: nn.Module, batch: Tensors) -> torch.Tensor:
    out = model(batch[0])
    return F.binary_cross_entropy_with_logits(out, batch[1]) + _overlap(out, batch[1])


@torch.no_grad()
def _iou(model: nn.Module, held: Tensors) -> float:
    said, known = model(held[0]) > 0, held[1] > 0.5
    return float((said & known).sum() / (said | known).sum().clamp(min=1))


def _softmaxed(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.binary_cross_entropy(model(batch[0]).softmax(1), batch[1])


@task(
    0.6,
    ("softmax-of-one-channel", f.loss_is(_softmaxed), t.OUTPUT_OR_LOSS),
    ("masks-of-others", f.shuffled, t.LABELS),
    ("overlap-the-other-way", f.loss_is(lambda _, m, b: 2.0 - _overlap(m(b[0]), b[1])), t.LOSS),
    ("mask-255", f.targets_as(lambda y: 255.0 * y), t.either(t.LABELS, t.TARGETS, t.LOSS)),
    ("lr-2", f.putting(lr=2.0), t.HIGH),
    rmsprop_one_cycle=f.putting(optimizer=o.RMSPROP, lr=6e-3, schedule=o.one_cycle),
)
def cracks(seed: int) -> Plan:
    """Cracks outlined by a small U-Net, cross-entropy and overlap, AdamW; intersection over union."""
    return f.planned(
        seed, _UNet, _cracked, _cracks(), _iou, optimizer=o.ADAMW, lr=6e-3, num_epochs=6, batch_size=24,
    )  # fmt: skip


@functools.cache
def _textures() -> data.Split:
    dice = dice_of(1416)
    kinds = torch.randint(0, 6, (1300,), generator=dice)
    angle, rate = (kinds % 3) * math.pi / 3.0, 0.6 + 0.7 * (kinds // 3)
    rows, columns = torch.arange(12.0)[:, None], torch.arange(12.0)
    phase = 6.28 * torch.rand(1300, 1, 1, generator=dice)
    along = angle.cos()[:, None, None] * rows + angle.sin()[:, None, None] * columns
    x = (rate[:, None, None] * along + phase).sin() + 1.0 * torch.randn(1300, 12, 12, generator=dice)
    return data.parted(x[:, None], kinds)


class _Patches(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, 4, 4)
        self.places = nn.Parameter(0.1 * torch.randn(9, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.cut(x).flatten(2).mT + self.places).mean(1))


def _whole_in_half(plan: Plan) -> None:
    plan.model, plan.loss = plan.model.half(), f.cross_entropy
    plan.train, plan.held_out = ((t[0].half(), t[1]) for t in (plan.train, plan.held_out))


@task(
    0.85,
    ("lr-0.2", f.putting(lr=0.2, schedule=None), t.HIGH),
    ("whole-in-float16", _whole_in_half, t.either(t.HALF, t.SETTINGS)),
    ("labels-without-the-rate", f.targets_as(lambda y: y % 3), t.LABELS),
    ("labels-one-row-down", f.rolled, t.LABELS),
    ("warm-up-of-400-runs", f.putting(schedule=lambda n: lambda t: min(1.0, (t + 1) / (400.0 * n))), t.SCHEDULE),
    flat_bfloat16=f.putting(schedule=None, lr=1e-3),
)  # fmt: skip
def textures(seed: int) -> Plan:
    """Six textures in noise by patches that attend, bfloat16, AdamW, warm-up and cosine; accuracy."""
    return f.planned(
        seed, _Patches, f.in_bfloat16(f.cross_entropy), _textures(), accuracy, optimizer=o.ADAMW, lr=3e-3,
        schedule=o.warm_cosine, num_epochs=5,
    )  # fmt: skip
