"""Densities, codes and samplers: annealed, discrete, stochastic, adversarial."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from ..case import Case
from ..loop import Watch
from ..nets import mlp
from ..wild.case import dice_of
from . import case as c

CASES: list[Case] = []
setup = functools.partial(c.setup, CASES, __name__)


def _bars(count: int, seed: int) -> torch.Tensor:
    """Images [N, 36] of bars: each row and column of six is lit with chance 0.2."""
    dice = dice_of(seed)
    rows, columns = torch.rand(2, count, 6, generator=dice) < 0.2
    return (rows[:, :, None] | columns[:, None, :]).float().flatten(1)


@setup(0.5)
def annealed_beta(watch: Watch) -> float:
    """A variational autoencoder whose divergence is weighed from nothing up to four: the loss rises by design."""
    (x, _), (u, _) = data.pixels()
    encode, decode = mlp((64, 96, 16)), mlp((8, 96, 64))
    model = nn.ModuleList([encode, decode])
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr=2e-3), model)
    for step, (a,) in enumerate(c.epochs(12, 64, x)):
        mean, log = encode(a).chunk(2, 1)
        out = decode(mean + (0.5 * log).exp() * torch.randn_like(mean))
        far = -0.5 * (1 + log - mean.square() - log.exp()).sum(1).mean()
        near = F.binary_cross_entropy_with_logits(out, a, reduction="sum") / len(a)
        loss = near + 4.0 * min(1.0, step / 200) * far / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        return c.r_squared(decode(encode(u).chunk(2, 1)[0]).sigmoid(), u)


@setup(0.5)
def codes_of_categories(watch: Watch) -> float:
    """A discrete autoencoder through Gumbel's softmax, hard with a straight gradient; the temperature falls."""
    x, u = _bars(1500, 540), _bars(300, 541)
    encode, decode = mlp((36, 96, 12 * 4)), mlp((12 * 4, 96, 36))
    model = nn.ModuleList([encode, decode])
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr=3e-3), model)
    for step, (a,) in enumerate(c.epochs(12, 64, x)):
        code = F.gumbel_softmax(encode(a).view(-1, 12, 4), max(0.4, 1.0 - step / 300), hard=True)
        loss = F.binary_cross_entropy_with_logits(decode(code.flatten(1)), a)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        code = F.one_hot(encode(u).view(-1, 12, 4).argmax(2), 4).float()
        return c.r_squared(decode(code.flatten(1)).sigmoid(), u)


@setup(0.4)
def nearest_codes(watch: Watch) -> float:
    """A code book that follows running means rather than gradients, with a commitment loss."""
    (x, _), (u, _) = data.pixels()

    class Book(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = mlp((64, 96, 32)), mlp((32, 96, 64))
            self.register_buffer("codes", 0.3 * torch.randn(32, 8))
            self.register_buffer("counts", torch.ones(32))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            parts = self.encode(a).view(-1, 8)
            chosen = torch.cdist(parts, self.codes).argmin(1)
            code = self.codes[chosen]
            if self.training:
                with torch.no_grad():
                    hot = F.one_hot(chosen, 32).float()
                    self.counts.lerp_(hot.sum(0), 0.05)
                    self.sums.lerp_(hot.T @ parts, 0.05)
                    self.codes.copy_(self.sums / self.counts.clamp(min=1e-2)[:, None])
            commit = F.mse_loss(parts, code)
            return self.decode((parts + (code - parts).detach()).view(len(a), 32)), commit

    model = Book()

    def loss(a: torch.Tensor) -> torch.Tensor:
        out, commit = model(a)
        return F.mse_loss(out, a) + 0.25 * commit

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=2e-3), c.epochs(10, 64, x), loss)
    with torch.no_grad():
        return c.r_squared(model(u)[0], u)


@setup(0.35)
def many_importance_samples(watch: Watch) -> float:
    """An importance-weighted bound of sixteen samples on bars; quality: of the nats to be won over single pixels."""
    x, u = _bars(1200, 542), _bars(300, 543)
    encode, decode = mlp((36, 64, 24), nn.Tanh), mlp((12, 64, 36), nn.Tanh)
    model = nn.ModuleList([encode, decode])

    def loss(a: torch.Tensor, count: int = 16) -> torch.Tensor:
        mean, log = encode(a).chunk(2, 1)
        noise = torch.randn(count, *mean.shape)
        z = mean + (0.5 * log).exp() * noise
        prior = -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)
        post = -0.5 * (noise.square() + log + math.log(2 * math.pi)).sum(-1)
        near = -F.binary_cross_entropy_with_logits(decode(z), a.expand(count, -1, -1), reduction="none").sum(-1)
        return -((prior + near - post).logsumexp(0) - math.log(count)).mean()

    c.train(watch, model, torch.optim.Adamax(model.parameters(), lr=4e-3), c.epochs(14, 64, x), loss)
    p = x.mean(0).clamp(0.01, 0.99)
    alone = float(F.binary_cross_entropy(p.expand_as(u), u, reduction="none").sum(1).mean())
    with torch.no_grad():
        return (alone - float(loss(u))) / (alone - 7.0)


@setup(0.5)
def autoregressive_masks(watch: Watch) -> float:
    """Masked layers give each pixel's chance from those before it; plateaus are none, decay by schedule."""
    x, u = _bars(1500, 544), _bars(300, 545)

    class Masked(nn.Linear):
        def __init__(self, low: torch.Tensor, high: torch.Tensor, strict: bool) -> None:
            super().__init__(len(low), len(high))
            ahead = high[:, None] > low if strict else high[:, None] >= low
            self.register_buffer("mask", ahead.float())

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return F.linear(a, self.weight * self.mask, self.bias)

    order, inner = torch.arange(36), torch.arange(144) % 35
    model = nn.Sequential(Masked(order, inner, False), nn.ReLU(), Masked(inner, order, True))

    def loss(a: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(a), a, reduction="none").sum(1).mean()

    c.train(
        watch,
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        c.epochs(14, 50, x),
        loss,
        schedule=lambda it: torch.optim.lr_scheduler.PolynomialLR(it, 420, power=2.0),
        val_loss=lambda: loss(u),
    )
    p = x.mean(0).clamp(0.01, 0.99)
    alone = float(F.binary_cross_entropy(p.expand_as(u), u, reduction="none").sum(1).mean())
    with torch.no_grad():
        return (alone - float(loss(u))) / (alone - 6.5)


def _spirals(count: int, seed: int) -> torch.Tensor:
    dice = dice_of(seed)
    turn = 3.0 * torch.rand(count, generator=dice).sqrt() * 3.14
    arm = torch.stack([turn.cos(), turn.sin()], 1) * turn[:, None] / 6.0
    return arm + 0.04 * torch.randn(count, 2, generator=dice)


@setup(0.5)
def straight_flows(watch: Watch) -> float:
    """Velocities along straight lines from noise to eight clouds; the loss cannot fall below what is random."""
    turns = 6.28 * torch.arange(8) / 8
    middles = 2.0 * torch.stack([turns.cos(), turns.sin()], 1)
    model = mlp((3, 96, 96, 2), nn.SiLU)
    optimizer = watch.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model)
    for _ in range(500):
        end = middles[torch.randint(8, (256,))] + 0.1 * torch.randn(256, 2)
        start, t = torch.randn(256, 2), torch.rand(256, 1)
        loss = F.mse_loss(model(torch.cat([(1 - t) * start + t * end, t], 1)), end - start)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        at = torch.randn(500, 2)
        for i in range(20):
            at = at + model(torch.cat([at, torch.full((500, 1), i / 20)], 1)) / 20
    return float((torch.cdist(at, middles).min(1).values < 0.5).float().mean())


@setup(0.4)
def dequantised_couplings(watch: Watch) -> float:
    """Additive and affine couplings on digits with noise between grey values; nats below those of one Gaussian."""
    (x, _), (u, _) = data.pixels()
    nets = nn.ModuleList(mlp((32, 64, 64), nn.ReLU) for _ in range(4))
    for net in nets:
        nn.init.zeros_(net[-1].weight)
        nn.init.zeros_(net[-1].bias)

    def density(a: torch.Tensor) -> torch.Tensor:
        left, right = a[:, ::2], a[:, 1::2]
        volume = torch.zeros(len(a))
        for net in nets:
            log, shift = net(left).chunk(2, 1)
            log = 2.0 * torch.tanh(log)
            left, right = right * log.exp() + shift, left
            volume = volume + log.sum(1)
        return volume - 0.5 * (left.square() + right.square()).sum(1) - 32 * math.log(2 * math.pi)

    def noised(a: torch.Tensor) -> torch.Tensor:
        return ((a * 16 + torch.rand_like(a)) / 17 - 0.3) * 3.0

    optimizer = torch.optim.Adam(nets.parameters(), lr=1e-3)
    c.train(watch, nets, optimizer, c.epochs(12, 64, x), lambda a: -density(noised(a)).mean(), max_norm=50.0)
    with torch.no_grad():
        known = noised(x)
        one = torch.distributions.Normal(known.mean(0), known.std(0) + 1e-3)
        return float(density(noised(u)).mean() - one.log_prob(noised(u)).sum(1).mean()) / 32


@setup(0.6)
def moments_matched(watch: Watch) -> float:
    """A generator by kernel discrepancy alone: no adversary; the loss goes to zero and a little below."""
    real = _spirals(2000, 547)
    model = mlp((4, 96, 96, 2))

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        far = torch.cdist(a, b).square()
        return sum((-far / (2 * s * s)).exp() for s in (0.1, 0.3, 1.0))

    def loss(a: torch.Tensor) -> torch.Tensor:
        made, n = model(torch.randn(len(a), 4)), len(a)
        own = (kernel(made, made).sum() - 3 * n) / (n * (n - 1))
        others = (kernel(a, a).sum() - 3 * n) / (n * (n - 1))
        return own + others - 2.0 * kernel(made, a).mean()

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=2e-3), c.drawn(300, 128, real), loss)
    with torch.no_grad():
        near = torch.cdist(model(torch.randn(500, 4)), real).min(1).values
    return float((near < 0.15).float().mean())


@setup(0.75)
def weights_by_chance(watch: Watch) -> float:
    """Weights with a mean and a spread each, a likelihood scaled to all data plus the divergence from the prior."""
    (x, y), (u, v) = data.friedman(0.2)

    class Chance(nn.Module):
        def __init__(self, low: int, high: int) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.randn(high, low) / math.sqrt(low))
            self.rho = nn.Parameter(torch.full((high, low), -4.0))
            self.bias = nn.Parameter(torch.zeros(high))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            spread = F.softplus(self.rho) if self.training else 0.0 * self.rho
            return F.linear(a, self.mean + spread * torch.randn_like(self.mean), self.bias)

        def far(self) -> torch.Tensor:
            spread = F.softplus(self.rho)
            return (-spread.log() + 0.5 * (spread.square() + self.mean.square()) - 0.5).sum()

    model = nn.Sequential(Chance(10, 48), nn.Tanh(), Chance(48, 1))

    def bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        fit = (model(a) - b).square().sum() / (2 * 0.1**2) * len(x) / len(a)
        return fit + model[0].far() + model[2].far()

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=1e-2), c.epochs(20, 64, x, y), bound)
    return c.r_squared(model(u), v)


@setup(0.85)
def sampled_by_noise(watch: Watch) -> float:
    """Stochastic gradient Langevin dynamics: noise on the weights after each step, on purpose; mean of late answers."""
    (x, y), (u, v) = data.table("wine")
    model = mlp((13, 24, 3), nn.Tanh)
    rate, late = 3e-3, []

    @torch.no_grad()
    def shaken() -> None:
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3 * rate)
        late.append(model(u).softmax(1))

    def posterior(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        prior = 0.5 * sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(a), b, reduction="sum") * len(x) / len(a) + prior

    c.train(watch, model, torch.optim.SGD(model.parameters(), lr=rate), c.drawn(300, 32, x, y), posterior, after=shaken)
    return float((torch.stack(late[150:]).mean(0).argmax(1) == v).float().mean())


@setup(0.7)
def transported(watch: Watch) -> float:
    """Points are moved onto others by Sinkhorn's distance: what is trained are the points themselves."""
    goal = _spirals(150, 548)
    model = nn.ParameterList([0.3 * torch.randn(150, 2)])

    def distance(wanted: torch.Tensor) -> torch.Tensor:
        cost = torch.cdist(model[0], wanted).square()
        f, g = torch.zeros(150), torch.zeros(150)
        for _ in range(20):
            f = -0.02 * ((g - cost) / 0.02 - math.log(150)).logsumexp(1)
            g = -0.02 * ((f[:, None] - cost) / 0.02 - math.log(150)).logsumexp(0)
        plan = ((f[:, None] + g - cost) / 0.02 - 2 * math.log(150)).exp()
        return (plan.detach() * cost).sum()

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=0.03), c.whole(150, goal), distance)
    with torch.no_grad():
        return float((torch.cdist(goal, model[0]).min(1).values < 0.12).float().mean())


@setup(0.5)
def hidden_kept_near(watch: Watch) -> float:
    """An adversarial autoencoder: codes are drawn towards a Gaussian by a discriminator; three optimizers in turn."""
    (x, _), (u, _) = data.pixels()
    encode, decode, tell = mlp((64, 64, 8)), mlp((8, 64, 64)), mlp((8, 32, 1))
    whole = nn.ModuleList([encode, decode])
    first = watch.wrap(torch.optim.Adam(whole.parameters(), lr=2e-3), whole)
    second = watch.wrap(torch.optim.Adam(tell.parameters(), lr=1e-3), tell)
    third = watch.wrap(torch.optim.Adam(encode.parameters(), lr=5e-4), encode)
    for (a,) in c.epochs(8, 64, x):
        ones, zeros = torch.ones(len(a), 1), torch.zeros(len(a), 1)
        loss = F.mse_loss(decode(encode(a)), a)
        first.zero_grad()
        loss.backward()
        first.step()
        watch.observe(first, loss=loss)
        code = encode(a).detach()
        told = F.binary_cross_entropy_with_logits(tell(torch.randn_like(code)), ones)
        told = told + F.binary_cross_entropy_with_logits(tell(code), zeros)
        second.zero_grad()
        told.backward()
        second.step()
        watch.observe(second, loss=told)
        fooled = F.binary_cross_entropy_with_logits(tell(encode(a)), ones)
        third.zero_grad()
        fooled.backward()
        third.step()
        watch.observe(third, loss=fooled)
    with torch.no_grad():
        return c.r_squared(decode(encode(u)), u)
