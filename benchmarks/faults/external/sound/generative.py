"""Models that make or rebuild: variational autoencoders, denoisers, adversaries; and other objectives of their kind."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case, sound_cases
from ..loop import Plan, Tensors, Watch
from ..qualities import explained, reconstruction

_cases = functools.partial(sound_cases, __name__)


class Variational(nn.Module):
    """A variational autoencoder of 64 pixels; `weight` is that of the divergence, which rises over `num_warm` steps."""

    def __init__(self, num_warm: int = 150, size: int = 8) -> None:
        super().__init__()
        self.encoder = nets.mlp((64, 96, 2 * size))
        self.decoder = nets.mlp((size, 96, 64))
        self.num_warm, self.steps = num_warm, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x).chunk(2, 1)[0])

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        if self.training:
            self.steps += 1
            code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        else:
            code = mean
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).sum(1).mean()
        weight = 0.5 * min(1.0, self.steps / self.num_warm)
        return 0.5 * (self.decoder(code) - x).square().sum(1).mean() + weight * divergence


def variational(seed: int) -> Plan:
    """The divergence's weight rises over the first epochs: so may the loss."""
    torch.manual_seed(seed)
    train, held_out = data.digits()
    return Plan(
        Variational(), lambda model, batch: model.loss(batch[0]), train, held_out, reconstruction, 0.4,
        lr=3e-3, num_epochs=10, seed=seed, judged_by_loss=False,
    )  # fmt: skip


def autoencoder(seed: int) -> Plan:
    """A convolutional autoencoder."""
    torch.manual_seed(seed)
    train, held_out = data.digits(as_images=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1),
    )  # fmt: skip

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), batch[0])

    return Plan(model, loss, train, held_out, reconstruction, 0.6, lr=5e-3, num_epochs=8, seed=seed)


def pixel_likelihood(seed: int) -> Plan:
    """Grey values as probabilities: a binary cross-entropy that cannot come near zero."""
    torch.manual_seed(seed)
    train, held_out = data.pixels()
    model = nets.mlp((64, 64, 12, 64, 64))

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[0], reduction="none").sum(1).mean()

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return explained(model(held_out[0]).sigmoid(), held_out[0])

    return Plan(model, loss, train, held_out, quality, 0.6, lr=3e-3, num_epochs=10, seed=seed)


class Denoiser(nn.Module):
    """The noise in points of the plane, given how noisy they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nets.mlp((4, 64, 64, 2), nn.SiLU)

    def forward(self, points: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([points, time, (3.0 * time).cos()], 1))


def diffusion(seed: int) -> Plan:
    """Noise of any size on the moons, to be guessed: the loss is noise around a floor far from zero."""
    torch.manual_seed(seed)
    train, held_out = data.moons()

    def noisy(points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        time, noise = torch.rand(len(points), 1), torch.randn_like(points)
        angle = 0.5 * math.pi * time
        return angle.cos() * points + angle.sin() * noise, time, noise

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        points, time, noise = noisy(batch[0])
        return F.mse_loss(model(points, time), noise)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        torch.manual_seed(0)
        points, time, noise = noisy(held_out[0].repeat(10, 1))
        return explained(model(points, time), noise)

    return Plan(Denoiser(), loss, train, held_out, quality, 0.5, lr=5e-3, num_epochs=14, seed=seed)


def score_matching(seed: int) -> Plan:
    """The slope of the log-density by denoising: a loss with a floor of its own."""
    torch.manual_seed(seed)
    train, held_out = data.moons()
    size = 0.3

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        noise = torch.randn_like(batch[0])
        return (size * model(batch[0] + size * noise) + noise).square().sum(1).mean()

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        torch.manual_seed(0)
        points = held_out[0].repeat(10, 1)
        noise = torch.randn_like(points)
        return explained(-size * model(points + size * noise), noise)

    model = nets.mlp((2, 64, 64, 2), nn.SiLU)
    return Plan(model, loss, train, held_out, quality, 0.15, lr=5e-3, num_epochs=14, seed=seed)


def _adversarial(plan: Plan, watch: Watch) -> None:
    """Two networks against each other, each with a guard; the critic's slope at real points is held small."""
    maker, critic = plan.model.maker, plan.model.critic
    betas = {"betas": (0.5, 0.9)}
    of_maker = watch.wrap(torch.optim.Adam(maker.parameters(), lr=plan.lr, **betas), maker, plan.max_norm)
    of_critic = watch.wrap(torch.optim.Adam(critic.parameters(), lr=2.0 * plan.lr, **betas), critic, plan.max_norm)
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            real = batch[0]
            made = maker(torch.randn(len(real), 4))
            of_critic.zero_grad()
            at = real.clone().requires_grad_(True)
            judged = critic(at)
            slope = torch.autograd.grad(judged.sum(), at, create_graph=True)[0]
            loss = plan.model.critic_loss(judged, critic(made.detach())) + 0.1 * slope.square().sum(1).mean()
            loss.backward()
            of_critic.step()
            watch.observe(of_critic, loss=loss.detach())
            of_maker.zero_grad()
            loss = plan.model.maker_loss(critic(made))
            loss.backward()
            of_maker.step()
            watch.observe(of_maker, loss=loss.detach())


class Adversaries(nn.Module):
    """One makes points of a cloud, the other tells them from real ones: by likelihood, or by a hinge."""

    def __init__(self, *, hinge: bool = False) -> None:
        super().__init__()
        self.maker, self.critic = (
            nets.mlp((4, 48, 48, 2)),
            nets.mlp((2, 48, 48, 1), functools.partial(nn.LeakyReLU, 0.2)),
        )
        self.hinge = hinge

    def critic_loss(self, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        if self.hinge:
            return F.relu(1.0 - real).mean() + F.relu(1.0 + made).mean()
        return F.softplus(-real).mean() + F.softplus(made).mean()

    def maker_loss(self, made: torch.Tensor) -> torch.Tensor:
        return -made.mean() if self.hinge else F.softplus(-made).mean()


def _gan(seed: int, *, hinge: bool) -> Plan:
    torch.manual_seed(seed)
    centre, mixing = torch.tensor([1.5, -1.0]), torch.tensor([[0.8, 0.5], [0.0, 0.4]])
    cloud = torch.randn(1500, 2) @ mixing + centre

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        torch.manual_seed(0)
        made, real = model.maker(torch.randn(1000, 4)), cloud
        off = (made.mean(0) - real.mean(0)).abs().max(), (made.std(0) - real.std(0)).abs().max()
        return 1.0 - float(max(off))

    split = (cloud[:1200],), (cloud[1200:],)
    model = Adversaries(hinge=hinge)
    return Plan(
        model, lambda *_: torch.zeros(()), *split, quality, 0.5,
        lr=1e-3, num_epochs=18, batch_size=64, play=_adversarial, seed=seed, judged_by_loss=False,
    )  # fmt: skip


def gan(seed: int) -> Plan:
    """A generative adversarial network with the likelihood of its paper."""
    return _gan(seed, hinge=False)


def hinge_gan(seed: int) -> Plan:
    """The same with a hinge: the maker's loss is a plain mean of either sign."""
    return _gan(seed, hinge=True)


class Solution(nn.Module):
    """u(x) with u(0) = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nets.mlp((1, 24, 24, 1), nn.Tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.0 + x * self.layers(x)


def equation(seed: int) -> Plan:
    """u' = -2 u + cos(3 x), by the residual of the equation: gradients through gradients."""
    torch.manual_seed(seed)
    x = torch.linspace(0.0, 2.0, 400)[:, None]

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        with torch.enable_grad():
            at = batch[0].clone().requires_grad_(True)
            u = model(at)
            slope = torch.autograd.grad(u.sum(), at, create_graph=True)[0]
            return (slope + 2.0 * u - (3.0 * at).cos()).square().mean()

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        at = held_out[0]
        exact = (2 * (3 * at).cos() + 3 * (3 * at).sin()) / 13 + (11 / 13) * (-2 * at).exp()
        return explained(model(at), exact)

    return Plan(Solution(), loss, (x,), (x[::7],), quality, 0.95, lr=5e-3, num_epochs=20, seed=seed)


_CLIPPED = {"max_norm": 1.0}
CASES: tuple[Case, ...] = (
    *_cases(
        "digits-vae",
        "variational autoencoder, divergence warmed up",
        variational,
        adam={},
        adamw_cosine={"optimizer": o.ADAMW, "schedule": o.cosine},
        clipped={"max_norm": 5.0},
    ),
    *_cases(
        "digits-conv-autoencoder",
        "convolutional autoencoder",
        autoencoder,
        adam={},
        radam={"optimizer": o.RADAM, "lr": 1e-2},
    ),
    *_cases("pixels-likelihood", "autoencoder of grey values", pixel_likelihood, adam={}, clipped={**_CLIPPED}),
    *_cases(
        "moons-diffusion",
        "noise to be guessed",
        diffusion,
        adam={},
        adamw_warm={"optimizer": o.ADAMW, "schedule": o.warm_cosine},
    ),
    *_cases("moons-score", "denoising score matching", score_matching, adam={}, clipped={**_CLIPPED}),
    *_cases("cloud-gan", "adversaries, likelihood", gan, adam={}, fast={"lr": 2e-3}),
    *_cases("cloud-hinge-gan", "adversaries, hinge", hinge_gan, adam={}, clipped={**_CLIPPED}),
    *_cases(
        "equation",
        "a differential equation by its residual",
        equation,
        adam={},
        lbfgs={"optimizer": o.LBFGS, "lr": 0.5, "batch_size": 400, "num_epochs": 60},
    ),
)
