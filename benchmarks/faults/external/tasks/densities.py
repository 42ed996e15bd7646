"""Likelihoods: codes of digits, an arm with two answers, a spiral from noise, the life of pumps."""

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
from ..nets import mlp
from ..qualities import explained, reconstruction

CASES: list[Case] = []
task = f.planning(CASES, __name__)


class Codes(nn.Module):
    """Pixels [B, 64] through six normal numbers; in training with noise."""

    def __init__(self, last: nn.Module | None = None, kind: type[nn.Module] = nn.ELU) -> None:
        super().__init__()
        self.into, self.out = mlp((64, 96, 12), kind), mlp((6, 96, 64), kind)
        self.last = last or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.out(self.into(x).chunk(2, 1)[0])).sigmoid()


def _bound(model: nn.Module, batch: Tensors, weight: float = 1.0, per: str = "sample", kind: str = "") -> torch.Tensor:
    mean, log = model.into(batch[0]).chunk(2, 1)
    spread = log.sqrt() if kind == "root" else (0.5 * log).exp()
    z = mean + spread * torch.randn_like(mean)
    logits = model.last(model.out(z))
    seen = F.binary_cross_entropy_with_logits(logits, batch[0], reduction="none").sum(1)
    far = 0.5 * (mean.square() + log.exp() - 1.0 - log).sum(1)
    return (seen.mean() if per == "sample" else seen.mean() / 64.0) + weight * far.mean()


@task(
    0.45,
    (
        "pixels-averaged-codes-summed",
        f.loss_is(lambda _, m, b: _bound(m, b, per="pixel")),
        t.either(t.LOSS, t.COLLAPSED),
    ),
    ("sigmoid-within", f.model_is(lambda: Codes(nn.Sigmoid())), t.either(t.OUTPUT, t.LOSS)),
    ("root-of-a-logarithm", f.loss_is(lambda _, m, b: _bound(m, b, kind="root")), t.NAN_INSIDE),
    ("grey-values-of-255", f.scaled_inputs(255.0), t.UNSCALED),
    ("lr-1", f.putting(lr=1.0), t.either(t.HIGH, t.EXPLODING)),
    ("lr-1e-6", f.putting(lr=1e-6), t.LOW),
    warmed=f.putting(schedule=o.warm_cosine, lr=8e-3, optimizer=o.ADAMW),
)
def coded_digits(seed: int) -> Plan:
    """Digits through six noisy numbers, a bound of likelihood with a high floor, Adam clipped; R² without noise."""
    (x, y), (held, known) = data.pixels()
    return f.planned(
        seed, Codes, _bound, ((x, y), (held, known)), reconstruction, lr=4e-3, num_epochs=9, max_norm=20.0,
        batch_size=48,
    )  # fmt: skip


@functools.cache
def _arm() -> data.Split:
    """Where an arm of two parts ends [B, 2], and its two angles, one of two pairs that get there."""
    dice = dice_of(1451)
    first, bend = torch.rand(2, 2200, generator=dice)
    first, bend = 1.5 * first, 0.5 + 2.0 * bend
    x = torch.stack([first.cos() + 0.8 * (first + bend).cos(), first.sin() + 0.8 * (first + bend).sin()], 1)
    other = torch.rand(2200, generator=dice) < 0.5
    turned = 2.0 * torch.atan2(x[:, 1], x[:, 0]) - first
    y = torch.stack([torch.where(other, turned, first), torch.where(other, -bend, bend)], 1)
    return data.parted(x, y)


def _mixture(model: nn.Module, batch: Tensors, axis: int = 1, floor: float = 0.02) -> torch.Tensor:
    out = model(batch[0]).view(-1, 3, 5)
    share, mean, log = out[..., 0].log_softmax(axis), out[..., 1:3], out[..., 3:]
    spread = floor + F.softplus(log) if floor else log.relu()
    fit = torch.distributions.Normal(mean, spread, validate_args=False).log_prob(batch[1][:, None]).sum(2)
    return -(share + fit).logsumexp(1).mean()


def _middle(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    told = model(batch[0]).view(-1, 3, 5)[..., 1:3]
    return F.mse_loss(told, batch[1][:, None].expand_as(told))


@torch.no_grad()
def _reaches(model: nn.Module, held: Tensors) -> float:
    out = model(held[0]).view(-1, 3, 5)
    best = out[torch.arange(len(out)), out[..., 0].argmax(1), 1:3]
    first, bend = best.unbind(1)
    end = torch.stack([first.cos() + 0.8 * (first + bend).cos(), first.sin() + 0.8 * (first + bend).sin()], 1)
    return explained(end.flatten(), held[0].flatten())


@task(
    0.8,
    ("spread-without-a-floor", f.loss_is(lambda _, m, b: _mixture(m, b, floor=0.0)), t.NAN_INSIDE),
    ("in-degrees-times-ten", f.scaled_targets(573.0), t.TARGETS),
    ("mean-of-both", f.loss_is(_middle), t.either(t.LOSS, t.CANNOT)),
    ("ends-of-other-arms", f.shuffled, t.LABELS),
    ("lr-0.5", f.putting(lr=0.5), t.either(t.HIGH, t.EXPLODING)),
    rmsprop=f.putting(optimizer=o.RMSPROP, lr=1e-3, num_epochs=12),
)
def arm(seed: int) -> Plan:
    """An arm's angles by where it shall end, a mixture of three for two answers, Adam clipped; R² of where it ends."""
    return f.planned(
        seed, lambda: mlp((2, 64, 64, 15), nn.Tanh), _mixture, _arm(), _reaches, lr=4e-3, num_epochs=12, max_norm=5.0,
        batch_size=48,
    )  # fmt: skip


_LEVELS = 24
_KEEPS = (1.0 - torch.linspace(0.01, 0.35, _LEVELS)).cumprod(0)


@functools.cache
def _spiral() -> data.Split:
    dice = dice_of(1452)
    t = torch.rand(2400, generator=dice).sqrt() * 9.0 + 2.0
    x = torch.stack([t.cos(), t.sin()], 1) * t[:, None] / 7.0 + 0.04 * torch.randn(2400, 2, generator=dice)
    return data.parted(x, torch.zeros(2400))


class Denoiser(nn.Module):
    """The noise in a place at a level."""

    def __init__(self, sees_level: bool = True) -> None:
        super().__init__()
        self.body, self.sees_level = mlp((8, 96, 96, 2), nn.SiLU), sees_level

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        t = level.float()[:, None] / _LEVELS * float(self.sees_level)
        waves = torch.cat([t, (3.0 * t).sin(), (3.0 * t).cos(), (9.0 * t).sin(), (9.0 * t).cos(), t * t], 1)
        return self.body(torch.cat([x, waves], 1))


def _noise_told(model: nn.Module, batch: Tensors, kind: str = "") -> torch.Tensor:
    x = batch[0]
    level, noise = torch.randint(0, _LEVELS, (len(x),)), torch.randn_like(x)
    keep = _KEEPS[level][:, None]
    if kind == "no-roots":
        mixed = keep * x + (1.0 - keep) * noise
    elif kind == "other-noise":
        mixed, noise = keep.sqrt() * x + (1.0 - keep).sqrt() * noise, torch.randn_like(x)
    elif kind == "place-wanted":
        mixed, noise = keep.sqrt() * x + (1.0 - keep).sqrt() * noise, x
    else:
        mixed = keep.sqrt() * x + (1.0 - keep).sqrt() * noise
    return F.mse_loss(model(mixed, level), noise)


@torch.no_grad()
def _like_it(model: nn.Module, held: Tensors) -> float:
    """1 - energy distance of 500 drawn places to what is held out, over that of a normal cloud."""
    dice = dice_of(1453)
    here, cloud = torch.randn(2, 500, 2, generator=dice)
    share = torch.cat([_KEEPS[:1], _KEEPS[1:] / _KEEPS[:-1]])
    for level in reversed(range(_LEVELS)):
        told = model(here, torch.full((500,), level))
        here = (here - (1.0 - share[level]) / (1.0 - _KEEPS[level]).sqrt() * told) / share[level].sqrt()
        if level:
            here = here + (1.0 - share[level]).sqrt() * torch.randn(here.shape, generator=dice)
    far = lambda p, q: torch.cdist(p, q).mean()  # noqa: E731
    distance = lambda p: 2.0 * far(p, held[0]) - far(p, p) - far(held[0], held[0])  # noqa: E731
    return 1.0 - float(distance(here) / distance(cloud)) if bool(here.isfinite().all()) else -1.0


@task(
    0.5,
    ("roots-forgotten", f.loss_is(lambda _, m, b: _noise_told(m, b, "no-roots")), t.either(t.DIFFERS, t.LOSS)),
    ("noise-drawn-again", f.loss_is(lambda _, m, b: _noise_told(m, b, "other-noise")), t.LABELS),
    (
        "place-wanted-noise-taken",
        f.loss_is(lambda _, m, b: _noise_told(m, b, "place-wanted")),
        t.either(t.LABELS, t.LOSS, t.DIFFERS),
    ),
    ("level-not-seen", f.model_is(lambda: Denoiser(False)), t.either(t.CANNOT, t.BLIND)),
    ("lr-1", f.putting(lr=1.0), t.HIGH),
    averaged=f.putting(optimizer=o.of(torch.optim.AdamW, betas=(0.9, 0.95)), schedule=o.linear_decay, lr=6e-3),
)
def spiral_from_noise(seed: int) -> Plan:
    """A spiral drawn out of noise in 24 levels, a loss whose floor is most of it, Adam; energy distance saved."""
    return f.planned(
        seed, Denoiser, _noise_told, _spiral(), _like_it, lr=4e-3, num_epochs=24, batch_size=84,
    )  # fmt: skip


@functools.cache
def _pumps() -> data.Split:
    """Seven readings of a pump; how long it ran, whether it failed then, and the logarithm of its usual time."""
    dice = dice_of(1454)
    x = torch.randn(2000, 7, generator=dice)
    usual = 0.8 * x[:, 0] - 0.6 * x[:, 1].abs() + 0.5 * x[:, 2] * x[:, 3]
    time = usual.exp() * (-torch.rand(2000, generator=dice).clamp(min=1e-4).log()) ** 0.6
    ended = 2.5 * torch.rand(2000, generator=dice) + 0.05
    return data.parted(x, torch.stack([torch.minimum(time, ended), (time < ended).float(), usual], 1))


def _weibull(model: nn.Module, batch: Tensors, kind: str = "") -> torch.Tensor:
    log, shape = model(batch[0]).unbind(1)
    shape = F.softplus(shape + 1.0) + 0.05
    time, failed = batch[1][:, 0], batch[1][:, 1]
    if kind == "turned":
        failed = 1.0 - failed
    if kind == "whole-hours":
        time = time.floor()
    ratio = time.log() - log
    rate = failed * (shape.log() + shape * ratio - time.log())
    return -(rate - (0.0 if kind == "no-survivors" else (shape * ratio).exp())).mean()


@torch.no_grad()
def _usual(model: nn.Module, held: Tensors) -> float:
    return float(torch.corrcoef(torch.stack([model(held[0])[:, 0].nan_to_num(), held[1][:, 2]]))[0, 1].nan_to_num())


@task(
    0.75,
    ("who-failed-turned-over", f.loss_is(lambda _, m, b: _weibull(m, b, "turned")), t.either(t.LABELS, t.LOSS)),
    ("times-in-whole-hours", f.loss_is(lambda _, m, b: _weibull(m, b, "whole-hours")), t.either(t.SINGULAR, t.BATCH)),
    ("survival-left-out", f.loss_is(lambda _, m, b: _weibull(m, b, "no-survivors")), t.LOSS),
    ("readings-of-thousands", f.scaled_inputs(300.0, 1000.0), t.UNSCALED),
    ("lr-5", f.putting(lr=5.0), t.either(t.HIGH, t.EXPLODING)),
    ("a-column-infinite", f.nan_rows(0.3, math.inf), t.SPOILT_ROWS),
    momentum_clipped=f.putting(optimizer=o.MOMENTUM, lr=1e-2, max_norm=1.0, num_epochs=16),
)
def pumps(seed: int) -> Plan:
    """How long a pump lasts, a third still running, Weibull's likelihood, Adam; correlation with the true logarithm."""
    return f.planned(
        seed, lambda: mlp((7, 40, 40, 2), nn.SiLU), _weibull, _pumps(), _usual, lr=4e-3, num_epochs=9, batch_size=40,
        max_norm=10.0,
    )  # fmt: skip
