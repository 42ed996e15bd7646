"""Adversaries, codes, estimates, energies and layouts: no classifiers, and losses without a floor of zero."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..loop import Watch
from ..nets import mlp
from ..sound2.case import drawn, epochs, r_squared
from ..wild.case import dice_of
from .case import LARGE, either, entering, fit

CASES: list[Case] = []
task = entering(CASES, __name__)


def _ring(count: int, dice: torch.Generator | None = None) -> torch.Tensor:
    angle = torch.randint(0, 6, (count,), generator=dice) * math.pi / 3.0
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.08 * torch.randn(count, 2, generator=dice)


@task(0.3, judge_too_fast=a.WON, both_too_fast=c.HIGH)
def ring_by_comparison(watch: Watch, fault: str = "") -> float:
    """A relativistic pair, where the judge says which of two is real; 1 - sliced distance from a ring of six."""
    maker, judge = mlp((4, 48, 48, 2), nn.ReLU), mlp((2, 48, 48, 1), nn.LeakyReLU)
    rates = {"judge-too-fast": (1e-5, 2e-2), "both-too-fast": (0.3, 0.3)}.get(fault, (1e-3, 1e-3))
    makes = watch.wrap(torch.optim.Adam(maker.parameters(), rates[0], betas=(0.5, 0.9)), maker)
    judges = watch.wrap(torch.optim.Adam(judge.parameters(), rates[1], betas=(0.5, 0.9)), judge)
    for _ in range(400):
        real, made = _ring(64), maker(torch.randn(64, 4))
        loss = F.softplus(judge(made.detach()) - judge(real)).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        watch.observe(judges, loss=loss)
        loss = F.softplus(judge(real) - judge(made)).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
        watch.observe(makes, loss=loss)
    dice = dice_of(960)
    with torch.no_grad():
        made, ways = maker(torch.randn(600, 4, generator=dice)), F.normalize(torch.randn(2, 32, generator=dice), dim=0)
        off = ((made @ ways).sort(0).values - (_ring(600, dice) @ ways).sort(0).values).abs().mean()
    return 1.0 - float(off) / 0.6


@task(0.6)
def moons_with_a_penalty(watch: Watch) -> float:
    """A plain game with a penalty on the judge's slope at real points; 1 - distance of means and spreads."""
    real_points = data.moons()[0][0]
    maker, judge = mlp((2, 48, 48, 2), nn.SiLU), mlp((2, 48, 48, 1), nn.SiLU)
    makes = watch.wrap(torch.optim.RMSprop(maker.parameters(), 1e-3), maker)
    judges = watch.wrap(torch.optim.RMSprop(judge.parameters(), 1e-3), judge)
    for (real,) in drawn(350, 64, real_points):
        real = real.clone().requires_grad_()
        made = maker(torch.randn(64, 2))
        said = judge(real)
        (slope,) = torch.autograd.grad(said.sum(), real, create_graph=True)
        loss = F.softplus(-said).mean() + F.softplus(judge(made.detach())).mean() + 0.5 * slope.square().sum(1).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        watch.observe(judges, loss=loss)
        loss = F.softplus(-judge(made)).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
        watch.observe(makes, loss=loss)
    with torch.no_grad():
        made = maker(torch.randn(600, 2, generator=dice_of(961)))
    return 1.0 - float((made.mean(0) - real_points.mean(0)).norm() + (made.std(0) - real_points.std(0)).norm()) / 2.0


@task(0.45, sum_of_code=either(c.COLLAPSED, c.LOSS), log_of_zero=c.SINGULAR, huge_start=LARGE)
def digits_coded(watch: Watch, fault: str = "") -> float:
    """A variational autoencoder with a floor for each code, Bernoulli pixels, validated; R² of the pixels."""
    (x, _), (held, _) = data.pixels()
    enter, leave = mlp((64, 64, 16), nn.ReLU), mlp((8, 64, 64), nn.ReLU)
    model = nn.ModuleList([enter, leave])
    if fault == "huge-start":
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(12.0)

    def loss(x):
        mean, log = enter(x).chunk(2, 1)
        out = leave(mean + (0.5 * log).exp() * torch.randn_like(mean))
        if fault == "log-of-zero":
            p = out.clamp(0.0, 1.0)
            pixels = -(x * p.log() + (1.0 - x) * (1.0 - p).log()).sum(1)
        else:
            pixels = F.binary_cross_entropy_with_logits(out, x, reduction="none").sum(1)
        code = 0.5 * (mean.square() + log.exp() - log - 1.0)
        return (pixels + (60.0 * code if fault == "sum-of-code" else code.clamp(min=0.1)).sum(1)).mean()

    fit(watch, model, torch.optim.Adam(model.parameters(), 3e-3), epochs(8, 48, x), loss, val=lambda: loss(held))
    with torch.no_grad():
        return r_squared(leave(enter(held)[:, :8]).sigmoid(), held)


@task(0.8, variance_below_zero=c.SINGULAR, sign=c.LOSS)
def five_that_doubt(watch: Watch, fault: str = "") -> float:
    """Five networks that say mean and variance, a loss below zero; the less of R² and the share in two deviations."""
    dice = dice_of(962)
    x = 4.0 * torch.rand(1200, 1, generator=dice) - 2.0
    y = (2.0 * x).sin() * 0.5 + (0.02 + 0.05 * x.abs()) * torch.randn(1200, 1, generator=dice)
    (x, y), (held, known) = data.parted(x, y)
    model = nn.ModuleList([mlp((1, 24, 24, 2), nn.Tanh) for _ in range(5)])

    def loss(x, y):
        mean, log = torch.stack([one(x) for one in model]).chunk(2, -1)
        if fault == "variance-below-zero":
            return (0.5 * (mean - y).square() / log + 0.5 * log.log()).mean()
        if fault == "sign":
            return (0.5 * (mean - y).square() * (-log).exp() - 0.5 * log).mean()
        return (0.5 * (mean - y).square() * (-log).exp() + 0.5 * log).mean()

    fit(
        watch,
        model,
        torch.optim.Adam(model.parameters(), 1e-2),
        epochs(15, 48, x, y),
        loss,
        val=lambda: loss(held, known),
    )
    with torch.no_grad():
        mean, log = torch.stack([one(held) for one in model]).chunk(2, -1)
        mean, spread = mean.mean(0), log.exp().mean(0).sqrt()
        inside = float(((mean - known).abs() < 2.0 * spread).float().mean())
        return min(inside, r_squared(mean, known))


@task(0.9)
def sources_unmixed(watch: Watch) -> float:
    """Independent components by their likelihood, whose log-determinant has no floor; mean correlation with sources."""
    dice = dice_of(963)
    sources = torch.empty(2000, 4).exponential_(generator=dice) * (
        2.0 * torch.randint(0, 2, (2000, 4), generator=dice) - 1.0
    )
    x = sources @ torch.randn(4, 4, generator=dice)
    x = x / x.std()
    model = nn.ParameterList([torch.eye(4) + 0.1 * torch.randn(4, 4)])

    def loss(x):
        s = x @ model[0]
        return (2.0 * F.softplus(2.0 * s) - 2.0 * s).sum(1).mean() - model[0].slogdet().logabsdet

    fit(watch, model, torch.optim.SGD(model.parameters(), 0.1), drawn(500, 100, x), loss)
    with torch.no_grad():
        both = torch.corrcoef(torch.cat([x @ model[0], sources], 1).T)[:4, 4:].abs()
    return float(both.max(1).values.mean())


@task(0.95)
def axes_of_most_spread(watch: Watch) -> float:
    """Principal axes by the trace that they keep, orthogonal by QR after each step: a loss below zero; share kept."""
    dice = dice_of(964)
    x = torch.randn(1000, 20, generator=dice) * 0.8 ** torch.arange(20.0)
    x = x @ torch.linalg.qr(torch.randn(20, 20, generator=dice))[0]
    model = nn.ParameterList([torch.linalg.qr(torch.randn(20, 4))[0]])
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), 0.05), model)
    for (rows,) in drawn(300, 64, x):
        loss = -(rows @ model[0]).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model[0].copy_(torch.linalg.qr(model[0])[0])
        watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        best = torch.linalg.svdvals(x)[:4].square().sum()
        return float((x @ model[0]).square().sum() / best)


@task(0.6)
def neighbours_laid_out(watch: Watch) -> float:
    """A map of digits in the plane that keeps neighbours (t-SNE): places alone are trained; share with their label."""
    x, y = data.digits()[0][0][:300], data.digits()[0][1][:300]
    far = torch.cdist(x, x).square().fill_diagonal_(1e9)
    near = torch.softmax(-far / far.topk(12, largest=False).values[:, -1:], 1)
    near = ((near + near.T) / 600.0).clamp(min=1e-12)
    model = nn.ParameterList([1e-2 * torch.randn(300, 2)])
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), 100.0, momentum=0.8), model)
    for step in range(300):
        close = 1.0 / (1.0 + torch.cdist(model[0], model[0]).square())
        close = close * (1.0 - torch.eye(300))
        wanted = near * (4.0 if step < 80 else 1.0)  # exaggerated at first
        loss = (wanted * (wanted.log() - (close / close.sum()).clamp(min=1e-12).log())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        nearest = torch.cdist(model[0], model[0]).fill_diagonal_(1e9).argmin(1)
    return float((y[nearest] == y).float().mean())


@task(0.85)
def clusters_sharpened(watch: Watch) -> float:
    """Clouds told apart without labels: targets are made of the model's own answers, sharpened; purity, chance 0.35."""
    dice = dice_of(965)
    y = torch.randint(0, 3, (900,), generator=dice)
    x = 2.5 * torch.randn(3, 10, generator=dice)[y] + torch.randn(900, 10, generator=dice)
    enter, leave = mlp((10, 24, 3), nn.ReLU), mlp((3, 24, 10), nn.ReLU)
    model = nn.ModuleList([enter, leave])
    fit(
        watch,
        model,
        torch.optim.Adam(model.parameters(), 5e-3),
        epochs(5, 50, x),
        lambda x: F.mse_loss(leave(enter(x)), x),
    )
    with torch.no_grad():
        h, at = enter(x), [0]
        for _ in range(2):
            at.append(int(torch.cdist(h, h[at]).min(1).values.argmax()))
        centre = h[at]
        for _ in range(20):
            own = torch.cdist(h, centre).argmin(1)
            centre = torch.stack([h[own == i].mean(0) for i in range(3)])
    centres = nn.Parameter(centre)
    both = nn.ModuleList([enter, nn.ParameterList([centres])])

    def shares(x):
        close = 1.0 / (1.0 + torch.cdist(enter(x), centres).square())
        return close / close.sum(1, keepdim=True)

    def loss(x):
        q = shares(x)
        p = (q.square() / q.sum(0)).detach()
        p = p / p.sum(1, keepdim=True)
        return (p * (p.log() - q.log())).sum(1).mean()

    fit(watch, both, torch.optim.SGD(both.parameters(), 0.05, momentum=0.9), epochs(6, 100, x), loss)
    with torch.no_grad():
        own = shares(x).argmax(1)
    return sum(float(torch.bincount(y[own == i], minlength=3).max()) for i in range(3)) / 900


@task(0.9, step_too_far=c.HIGH, rough_units=either(c.INPUTS, c.TARGETS, c.HIGH, c.LOW))
def springs_identified(watch: Watch, fault: str = "") -> float:
    """Stiffness and friction of a swinging mass, by gradients through its simulation; 1 - relative error."""
    true = torch.tensor([2.0, 0.3])
    unit = 100.0 if fault == "rough-units" else 1.0

    def way(stiff, friction, start):
        x, v, rows = start[:, 0], start[:, 1], []
        for _ in range(40):
            v = v + 0.1 * (-stiff * x - friction * v)
            x = x + 0.1 * v
            rows.append(x)
        return torch.stack(rows, 1)

    model = nn.ParameterList([torch.tensor([0.5, 1.0])])
    lr = 3.0 if fault == "step-too-far" else 2e-2
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr), model, None if fault else 10.0)
    for _ in range(150):
        start = torch.randn(16, 2)
        seen = way(*true, start) + 0.01 * torch.randn(16, 40)
        loss = F.mse_loss(unit * way(*model[0] / unit, start), unit * seen)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    return 1.0 - float(((model[0].detach() / unit - true) / true).abs().max())


@task(0.95)
def membrane_of_least_energy(watch: Watch) -> float:
    """A loaded membrane by its energy, which ends below zero (deep Ritz); R² against the exact one."""
    model = mlp((1, 32, 32, 1), nn.Tanh)
    shape = lambda x: x * (1.0 - x) * model(x)  # noqa: E731

    def loss(x):
        x = x.clone().requires_grad_()
        u = shape(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (0.5 * slope.square() - 10.0 * (math.pi * x).sin() * u).mean()

    points = ((torch.rand(128, 1),) for _ in range(300))
    fit(watch, model, torch.optim.Adam(model.parameters(), 5e-3), points, loss)
    x = torch.linspace(0.0, 1.0, 101)[:, None]
    with torch.no_grad():
        return r_squared(shape(x), 10.0 * (math.pi * x).sin() / math.pi**2)


@task(0.85)
def shared_information(watch: Watch) -> float:
    """How much two numbers tell of each other, by a bound that is raised; share of the true information."""
    tie = 0.9
    model = mlp((2, 48, 48, 1), nn.ReLU)
    batches = ((torch.randn(256, 1), torch.randn(256, 1)) for _ in range(350))

    def loss(x, noise):
        y = tie * x + math.sqrt(1.0 - tie**2) * noise
        apart = model(torch.cat([x, y.roll(1, 0)], 1))
        return apart.logsumexp(0).squeeze() - math.log(len(x)) - model(torch.cat([x, y], 1)).mean()

    fit(watch, model, torch.optim.Adam(model.parameters(), 3e-3), batches, loss)
    dice = dice_of(966)
    with torch.no_grad():
        found = -loss(torch.randn(6000, 1, generator=dice), torch.randn(6000, 1, generator=dice))
    true = -0.5 * math.log(1.0 - tie**2)
    return 1.0 - abs(float(found) - true) / true


@task(0.9)
def map_in_four_colours(watch: Watch) -> float:
    """A map coloured by softened colours that grow hard; share of the borders with two colours, by chance 0.75."""
    dice = dice_of(967)
    place = torch.rand(60, 2, generator=dice)
    far = torch.cdist(place, place).fill_diagonal_(9.0)
    ends = (far < far.topk(4, largest=False).values[:, -1:]).nonzero().T
    model = nn.ParameterList([0.1 * torch.randn(60, 4)])
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), 5e-2), model)
    for step in range(250):
        colour = (model[0] * (1.0 + step / 50.0)).softmax(1)
        loss = (colour[ends[0]] * colour[ends[1]]).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    colour = model[0].detach().argmax(1)
    return float((colour[ends[0]] != colour[ends[1]]).float().mean())


@task(0.8)
def codes_against_a_judge(watch: Watch) -> float:
    """An autoencoder whose codes a judge must take for normal ones, three losses, two optimizers; R² of the pixels."""
    (x, _), (held, _) = data.pixels()
    enter, leave, judge = mlp((64, 64, 10), nn.ReLU), mlp((10, 64, 64), nn.ReLU), mlp((10, 48, 1), nn.LeakyReLU)
    model = nn.ModuleList([enter, leave])
    builds = watch.wrap(torch.optim.Adam(model.parameters(), 3e-3), model)
    judges = watch.wrap(torch.optim.Adam(judge.parameters(), 1e-3), judge)
    for (rows,) in epochs(10, 48, x):
        code = enter(rows)
        loss = F.softplus(-judge(torch.randn_like(code))).mean() + F.softplus(judge(code.detach())).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        watch.observe(judges, loss=loss)
        loss = F.mse_loss(leave(code), rows) + 2e-3 * F.softplus(-judge(code)).mean()
        builds.zero_grad()
        loss.backward()
        builds.step()
        watch.observe(builds, loss=loss)
    with torch.no_grad():
        return r_squared(leave(enter(held)), held)


@task(0.7)
def posterior_bent(watch: Watch) -> float:
    """A bent density by planar layers: minus its evidence, which has a floor of its own; 1 - error."""
    ways = nn.ParameterList([0.1 * torch.randn(3, 12, 2)[i] for i in range(3)])
    shift = nn.Parameter(torch.zeros(12))
    model = nn.ModuleList([ways, nn.ParameterList([shift])])

    def bend(z):
        log = torch.zeros(len(z))
        for u, w, s in zip(ways[0], ways[1], shift):
            dot = w @ u
            u = u + (F.softplus(dot) - 1.0 - dot) * w / (w @ w + 1e-6)
            inner = (z @ w + s).tanh()
            log = log + (1.0 + (1.0 - inner.square()) * (w @ u)).abs().clamp(min=1e-6).log()
            z = z + inner[:, None] * u
        return z, log

    def energy(z):
        return 0.5 * (z[:, 0] / 1.5).square() + 2.0 * (z[:, 1] - 0.5 * z[:, 0].square()).square()

    def loss(noise):
        z, log = bend(noise)
        return (energy(z) - log - 0.5 * noise.square().sum(1) - math.log(2.0 * math.pi)).mean()

    noise = ((torch.randn(96, 2),) for _ in range(350))
    fit(watch, model, torch.optim.Adam(model.parameters(), 1e-2), noise, loss)
    with torch.no_grad():
        found = loss(torch.randn(4000, 2, generator=dice_of(968)))
    exact = -math.log(2.0 * math.pi * 1.5 / 2.0)
    return 1.0 - abs(float(found) - exact) / 1.5
