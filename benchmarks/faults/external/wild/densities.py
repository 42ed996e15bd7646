"""Likelihoods, energies and residuals: losses below zero, with floors of their own, or that rise by schedule."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors
from ..qualities import explained, r_squared, reconstruction
from .case import dice_of, wild_cases

_cases = functools.partial(wild_cases, __name__)
LOG_ROOT = 0.5 * math.log(2.0 * math.pi)


def _fit(model: nn.Module, loss, split, quality, least: float, seed: int, **options) -> Plan:
    return Plan(model, loss, *split, quality, least, seed=seed, **options)


def _gain_over(baseline: float, loss):
    """A quality: how far the loss of what is held out lies below `baseline`."""

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return baseline - float(loss(model, held_out))

    return quality


def _features(count: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(count, size, generator=dice_of(seed))


def narrow_normal(seed: int) -> Plan:
    """Mean and deviation of small numbers by likelihood: a loss that ends far below zero."""
    x = _features(1500, 4, 50)
    spread = 0.02 + 0.02 * x[:, 1:2].sigmoid()
    y = 0.2 * x[:, :1].sin() + spread * torch.randn(1500, 1, generator=dice_of(51))
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        mean, log_spread = model(batch[0]).chunk(2, 1)
        return (0.5 * ((batch[1] - mean) * (-log_spread).exp()).square() + log_spread + LOG_ROOT).mean()

    plan = _fit(nets.mlp((4, 32, 2)), loss, data.parted(x, y), _gain_over(-0.5, loss), 0.5, seed)
    plan.lr, plan.num_epochs = 5e-3, 14
    return plan


def gaussian_loss(seed: int) -> Plan:
    """torch's GaussianNLLLoss with a variance from a softplus."""
    x = _features(1500, 5, 52)
    y = x[:, :1] * x[:, 1:2] + (0.1 + 0.3 * x[:, 2:3].sigmoid()) * torch.randn(1500, 1, generator=dice_of(53))
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        mean, raw = model(batch[0]).chunk(2, 1)
        return F.gaussian_nll_loss(mean, batch[1], F.softplus(raw) + 1e-4)

    return _fit(
        nets.mlp((5, 48, 48, 2), nn.SiLU),
        loss,
        data.parted(x, y),
        _gain_over(0.5, loss),
        0.4,
        seed,
        lr=5e-3,
        num_epochs=14,
    )


def heavy_tails(seed: int) -> Plan:
    """A likelihood of Student's t: targets far out now and then."""
    x = _features(1500, 5, 54)
    noise = torch.randn(1500, 1, generator=dice_of(55)) / torch.rand(1500, 1, generator=dice_of(56)).sqrt()
    y = x[:, :1] - x[:, 1:2].square() + 0.2 * noise
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        far = (batch[1] - model(batch[0])) / 0.2
        return 1.5 * torch.log1p(far.square() / 2.0).mean()

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        off, spread = (
            (model(held_out[0]) - held_out[1]).abs().median(),
            (held_out[1] - held_out[1].median()).abs().median(),
        )
        return float(1.0 - off / spread)

    return _fit(nets.mlp((5, 32, 32, 1)), loss, data.parted(x, y), quality, 0.5, seed, lr=5e-3, num_epochs=12)


def quantiles(seed: int) -> Plan:
    """Three quantiles at once by the pinball loss, which has a floor far from zero."""
    x = _features(1500, 3, 57)
    y = x[:, :1] + (0.5 + x[:, 1:2].abs()) * torch.randn(1500, 1, generator=dice_of(58))
    levels = torch.tensor([0.1, 0.5, 0.9])
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        above = batch[1] - model(batch[0])
        return torch.maximum(levels * above, (levels - 1.0) * above).mean()

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        shares = (held_out[1] < model(held_out[0])).float().mean(0)
        return float(1.0 - 5.0 * (shares - levels).abs().max())

    return _fit(nets.mlp((3, 32, 3)), loss, data.parted(x, y), quality, 0.5, seed, lr=1e-2, num_epochs=14)


def outliers_huber(seed: int) -> Plan:
    """One target in twenty is nonsense: a Huber loss lives with it."""
    x = _features(1500, 4, 59)
    y = x[:, :1] * 2.0 + x[:, 1:2].sin()
    bad = torch.rand(1500, 1, generator=dice_of(60)) < 0.05
    y = torch.where(bad, 10.0 * torch.randn(1500, 1, generator=dice_of(61)), y)
    (x, y), (held_out, _) = data.parted(x, y)
    clean = held_out[:, :1] * 2.0 + held_out[:, 1:2].sin()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.huber_loss(model(batch[0]), batch[1], delta=0.5)

    return _fit(nets.mlp((4, 32, 1)), loss, ((x, y), (held_out, clean)), r_squared, 0.9, seed, lr=5e-3, num_epochs=12)


def events(seed: int) -> Plan:
    """Counts with torch's Poisson loss, which leaves out a term and so ends below zero."""
    x = _features(1500, 4, 62)
    rate = (1.2 + 0.7 * x[:, :1] - 0.5 * x[:, 1:2]).exp()
    y = torch.poisson(rate, generator=dice_of(63))
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.poisson_nll_loss(model(batch[0]), batch[1])

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return explained(model(held_out[0]).exp(), held_out[1])

    return _fit(nets.mlp((4, 32, 1)), loss, data.parted(x, y), quality, 0.5, seed, lr=5e-3, num_epochs=10)


class Mixed(nn.Module):
    """A density of y given x: four normal ones, with their shares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nets.mlp((1, 32, 12), nn.Tanh)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shares, means, logs = self.layers(x).chunk(3, 1)
        each = -0.5 * ((y - means) * (-logs).exp()).square() - logs - LOG_ROOT
        return (shares.log_softmax(1) + each).logsumexp(1)


def two_answers(seed: int) -> Plan:
    """An inverse problem with two answers, by a mixture density network."""
    y = 2.0 * torch.rand(1500, 1, generator=dice_of(64)) - 1.0
    x = y.square() + 0.05 * torch.randn(1500, 1, generator=dice_of(65))
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return -model(*batch).mean()

    return _fit(Mixed(), loss, data.parted(x, y), _gain_over(0.9, loss), 0.7, seed, lr=1e-2, num_epochs=14)


def flow(seed: int) -> Plan:
    """A normalising flow of points that lie close together: log-densities above zero."""
    (points, _), (held_out, _) = data.moons()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return -(model(10.0 * batch[0]) + 2.0 * math.log(10.0)).mean()

    quality = _gain_over(-1.7, loss)
    split = ((0.1 * points,), (0.1 * held_out,))
    return _fit(nets.Flow(24), loss, split, quality, 0.2, seed, lr=5e-3, num_epochs=8)


class Energy(nn.Module):
    """An energy of points of the plane, with the logarithm of its normaliser as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.normaliser = nets.mlp((2, 48, 48, 1), nn.SiLU), nn.Parameter(torch.zeros(()))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return -self.layers(points)[:, 0] - self.normaliser


@torch.no_grad()
def _prefers_real(model: nn.Module, held_out: Tensors) -> float:
    """How often a real point is likelier than one of the same spread."""
    points = held_out[0]
    other = torch.randn(points.shape, generator=dice_of(66)) * points.std(0) + points.mean(0)
    return float((model(points) > model(other)).float().mean())


def noise_contrast(seed: int) -> Plan:
    """Noise-contrastive estimation of a density."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        other = torch.randn_like(batch[0])
        of_noise = [-0.5 * p.square().sum(1) - 2.0 * LOG_ROOT for p in (batch[0], other)]
        return F.softplus(of_noise[0] - model(batch[0])).mean() + F.softplus(model(other) - of_noise[1]).mean()

    return _fit(Energy(), loss, data.moons(), _prefers_real, 0.65, seed, lr=2e-2, num_epochs=20)


def contrastive_divergence(seed: int) -> Plan:
    """An energy that is pulled down at data and up at what a few Langevin steps find: a difference of either sign."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        with torch.enable_grad():
            points = batch[0] + 0.3 * torch.randn_like(batch[0])
            for _ in range(5):
                points = points.detach().requires_grad_(True)
                slope = torch.autograd.grad(model(points).sum(), points)[0]
                points = points + 0.05 * slope.clamp(-3.0, 3.0) + 0.15 * torch.randn_like(points)
        real, made = model(batch[0]), model(points.detach())
        return made.mean() - real.mean() + 0.05 * (real.square() + made.square()).mean()

    plan = _fit(Energy(), loss, data.moons(), _prefers_real, 0.62, seed, lr=5e-3, num_epochs=20, batch_size=64)
    plan.judged_by_loss = False
    return plan


class Coded(nn.Module):
    """A variational autoencoder of 64 grey values; `weigh` gives the divergence's weight at a step."""

    def __init__(self, weigh) -> None:
        super().__init__()
        self.encoder, self.decoder = nets.mlp((64, 64, 12)), nets.mlp((6, 64, 64))
        self.weigh, self.steps = weigh, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x).chunk(2, 1)[0]).sigmoid()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        self.steps += self.training
        noise = torch.randn_like(mean) if self.training else 0.0
        out = self.decoder(mean + noise * (0.5 * log_variance).exp())
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).sum(1).mean()
        error = F.binary_cross_entropy_with_logits(out, x, reduction="none").sum(1).mean()
        return error + self.weigh(self.steps) * divergence


def annealed(seed: int, weigh=lambda step: min(1.0, step / 200.0)) -> Plan:
    """The weight of the divergence rises over 200 steps; the likelihood is a sum over pixels."""
    torch.manual_seed(seed)
    plan = _fit(
        Coded(weigh),
        lambda model, batch: model.loss(batch[0]),
        data.pixels(),
        reconstruction,
        0.25,
        seed,
        lr=3e-3,
        num_epochs=8,
    )
    plan.judged_by_loss = False
    return plan


def cyclic(seed: int) -> Plan:
    """The weight of the divergence goes up and falls back to zero, three times: so does the loss."""
    return annealed(seed, lambda step: min(1.0, step % 120 / 60.0))


def clean_digits(seed: int) -> Plan:
    """Noise of any size in images, to be guessed: a diffusion model's loss."""
    torch.manual_seed(seed)

    def noisy(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle, noise = 0.5 * math.pi * torch.rand(len(images), 1), torch.randn_like(images)
        return torch.cat([angle.cos() * (2.0 * images - 1.0) + angle.sin() * noise, angle], 1), noise

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        seen, noise = noisy(batch[0])
        return F.mse_loss(model(seen), noise)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        torch.manual_seed(0)
        seen, noise = noisy(held_out[0].repeat(3, 1))
        return explained(model(seen), noise)

    return _fit(nets.mlp((65, 128, 64), nn.SiLU), loss, data.pixels(), quality, 0.4, seed, lr=5e-3, num_epochs=9)


def heat(seed: int) -> Plan:
    """u_t = 0.3 u_xx on a rod by the residual, with what is known at its ends and at the beginning."""
    torch.manual_seed(seed)
    where = torch.rand(600, 2, generator=dice_of(67))  # x, t

    def exact(at: torch.Tensor) -> torch.Tensor:
        return (math.pi * at[:, :1]).sin() * (-0.3 * math.pi**2 * at[:, 1:]).exp()

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        with torch.enable_grad():
            at = batch[0].clone().requires_grad_(True)
            slope = torch.autograd.grad(model(at).sum(), at, create_graph=True)[0]
            bend = torch.autograd.grad(slope[:, 0].sum(), at, create_graph=True)[0][:, :1]
            left, right = at.detach() * torch.tensor([0.0, 1.0]), at.detach() * torch.tensor([0.0, 1.0])
            right[:, 0] = 1.0
            begin = at.detach() * torch.tensor([1.0, 0.0])
            known = model(left).square() + model(right).square() + (model(begin) - exact(begin)).square()
            return (slope[:, 1:] - 0.3 * bend).square().mean() + 10.0 * known.mean()

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return explained(model(held_out[0]), exact(held_out[0]))

    model = nets.mlp((2, 24, 24, 1), nn.Tanh)
    return _fit(model, loss, data.parted(where, where), quality, 0.8, seed, lr=1e-2, num_epochs=16)


class Field(nn.Module):
    """A field whose flow is followed by eight Runge-Kutta steps."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nets.mlp((2, 32, 2), nn.Tanh)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            middle = state + 0.0625 * self.slope(state)
            state = state + 0.125 * self.slope(middle)
        return state


def spiral(seed: int) -> Plan:
    """Where points of a spiral are after a while: a differential equation that is learnt."""
    start = 2.0 * torch.rand(1000, 2, generator=dice_of(68)) - 1.0
    turn = torch.linalg.matrix_exp(torch.tensor([[-0.3, 2.0], [-2.0, -0.3]]))
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return _fit(Field(), loss, data.parted(start, start @ turn.T), r_squared, 0.95, seed, lr=1e-2, num_epochs=12)


def survival(seed: int) -> Plan:
    """Cox's partial likelihood over batches: a floor that hangs on the size of the batch."""
    x = _features(1200, 6, 69)
    risk = x[:, :1] - 0.8 * x[:, 1:2] + 0.5 * x[:, 2:3].square()
    time = -torch.rand(1200, 1, generator=dice_of(70)).log() / risk.exp()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        order = batch[1][:, 0].argsort(descending=True)
        score = model(batch[0])[:, 0][order]
        return (score.logcumsumexp(0) - score).mean()

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        score, when = model(held_out[0])[:, 0], held_out[1][:, 0]
        is_before = when[:, None] < when[None]
        return float((score[:, None] > score[None])[is_before].float().mean())

    return _fit(nets.mlp((6, 32, 1)), loss, data.parted(x, time), quality, 0.75, seed, lr=5e-3, num_epochs=14)


_CLIPPED = {"max_norm": 1.0}
_WARM = {"optimizer": o.ADAMW, "schedule": o.warm_cosine}
CASES: tuple[Case, ...] = (
    *_cases("narrow-normal", "a likelihood far below zero", narrow_normal, adam={}, clipped={**_CLIPPED}),
    *_cases("gaussian-loss", "mean and variance", gaussian_loss, adam={}, adamw_warm={**_WARM}),
    *_cases("heavy-tails", "Student's t", heavy_tails, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 5e-3}),
    *_cases("quantiles", "pinball loss", quantiles, adam={}, momentum={"optimizer": o.MOMENTUM, "lr": 5e-2}),
    *_cases("outliers-huber", "a robust loss", outliers_huber, adam={}, clipped={**_CLIPPED}),
    *_cases("events-poisson", "counts", events, adam={}, adamw_warm={**_WARM}),
    *_cases("two-answers", "mixture density", two_answers, adam={}, clipped={**_CLIPPED}),
    *_cases("close-flow", "normalising flow", flow, adam={}, clipped={**_CLIPPED}),
    *_cases("noise-contrast", "a density against noise", noise_contrast, adam={}, adamw_warm={**_WARM}),
    *_cases("contrastive-divergence", "an energy", contrastive_divergence, adam={}, clipped={**_CLIPPED}),
    *_cases("pixels-annealed", "VAE, sum over pixels", annealed, adam={}, clipped={"max_norm": 20.0}),
    *_cases("pixels-cyclic", "VAE, cyclic divergence", cyclic, adam={}, adamw={"optimizer": o.ADAMW}),
    *_cases("clean-digits", "diffusion of images", clean_digits, adam={}, adamw_warm={**_WARM}),
    *_cases("heat-residual", "a rod by its equation", heat, adam={}, cosine={"schedule": o.cosine}),
    *_cases("spiral-flow", "a learnt differential equation", spiral, adam={}, nadam={"optimizer": o.NADAM}),
    *_cases("survival", "Cox's partial likelihood", survival, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 2e-2}),
)
