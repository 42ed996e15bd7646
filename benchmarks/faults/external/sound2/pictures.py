"""Digits by networks, losses and regularisers that the other groups do not have."""

from __future__ import annotations

import copy
import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..case import Case
from ..loop import Watch
from ..nets import cnn, mlp
from ..wild.case import dice_of
from . import case as c

CASES: list[Case] = []
setup = functools.partial(c.setup, CASES, __name__)


@setup(0.95)
def separable_hardswish(watch: Watch) -> float:
    """Depthwise and pointwise convolutions with BatchNorm and hard swish; Nesterov, cosine, smoothing, cut-out."""
    (x, y), (u, v) = data.digits(as_images=True)

    def block(low: int, high: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(low, low, 3, stride, 1, groups=low, bias=False),
            nn.BatchNorm2d(low),
            nn.Conv2d(low, high, 1, bias=False),
            nn.BatchNorm2d(high),
            nn.Hardswish(),
        ]

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), *block(16, 32, 1), *block(32, 48, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model.append(nn.Linear(48, 10))

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        top, left = torch.randint(0, 6, (2,)).tolist()
        a = a.clone()
        a[:, :, top : top + 3, left : left + 3] = 0.0
        return F.cross_entropy(model(a), b, label_smoothing=0.1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    c.train(
        watch,
        model,
        optimizer,
        c.epochs(9, 64, x, y),
        loss,
        schedule=lambda it: torch.optim.lr_scheduler.CosineAnnealingLR(it, 9 * 20),
        val_loss=lambda: c.classify(model)(u, v),
    )
    return c.share_right(model, u, v)


@setup(0.75)
def half_dice(watch: Watch) -> float:
    """A small U of convolutions marks the bright strokes in noise, by the dice coefficient; quality is that too."""
    (clean, _), (held_out, _) = data.pixels()
    dice = dice_of(520)

    class Shape(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.deep = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, 2, 1)
            self.up, self.out = nn.ConvTranspose2d(24, 12, 2, 2), nn.Conv2d(24, 1, 1)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            high = self.down(a).relu()
            return self.out(torch.cat([high, self.up(self.deep(high).relu()).relu()], 1)).sigmoid()

    def pair(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        image = rows.view(-1, 1, 8, 8)
        return image + 0.3 * torch.randn(image.shape, generator=dice), (image > 0.5).float()

    model = Shape()

    def missing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = model(a)
        return 1.0 - (2.0 * (out * b).sum() + 1.0) / (out.sum() + b.sum() + 1.0)

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=3e-3), c.epochs(6, 32, *pair(clean)), missing)
    with torch.no_grad():
        return 1.0 - float(missing(*pair(held_out)))


class Binarised(torch.autograd.Function):
    """The sign, whose gradient passes where the input lies between -1 and 1."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1.0)


@setup(0.88)
def binary_weights(watch: Watch) -> float:
    """Weights and activations are signs, with a straight-through gradient, BatchNorm between; weights are clamped."""
    (x, y), (u, v) = data.digits()

    class Signs(nn.Linear):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return F.linear(a, Binarised.apply(self.weight))

    class Sign(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return Binarised.apply(a)

    model = nn.Sequential(
        Signs(64, 128, bias=False), nn.BatchNorm1d(128), Sign(), Signs(128, 10, bias=False), nn.BatchNorm1d(10)
    )

    @torch.no_grad()
    def clamp() -> None:
        for layer in (model[0], model[3]):
            layer.weight.clamp_(-1.0, 1.0)

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    c.train(watch, model, optimizer, c.epochs(10, 64, x, y), c.classify(model), after=clamp)
    return c.share_right(model, u, v)


@setup(0.85)
def spikes_in_time(watch: Watch) -> float:
    """Leaky units that fire over ten ticks, with a surrogate gradient; the rate of the output is read."""
    (x, y), (u, v) = data.pixels()
    first, second = nn.Linear(64, 100), nn.Linear(100, 10)
    model = nn.ModuleList([first, second])

    def fire(level: torch.Tensor) -> torch.Tensor:
        soft = (5.0 * (level - 1.0)).sigmoid()
        return soft + ((level > 1.0).float() - soft).detach()

    def rates(a: torch.Tensor) -> torch.Tensor:
        inner, total = torch.zeros(len(a), 100), torch.zeros(len(a), 10)
        for _ in range(10):
            inner = 0.8 * inner + first(torch.bernoulli(a.clamp(0, 1)))
            out = fire(inner)
            inner, total = inner - out.detach(), total + second(out)
        return total / 10

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=5e-3), c.epochs(6, 64, x, y), c.classify(rates))
    return c.share_right(rates, u, v)


@setup(0.9)
def quantised_training(watch: Watch) -> float:
    """Weights and activations go through 4-bit rounding with learnt scales; from a trained network, a small rate."""
    (x, y), (u, v) = data.digits()
    plain = mlp((64, 48, 10))
    quick = torch.optim.Adam(plain.parameters(), lr=3e-3)
    for a, b in c.epochs(8, 64, x, y):
        quick.zero_grad()
        F.cross_entropy(plain(a), b).backward()
        quick.step()

    class Rounded(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer, self.scale = layer, nn.Parameter(layer.weight.detach().abs().max() / 7)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            whole = (self.layer.weight / self.scale).clamp(-8, 7)
            whole = whole + (whole.round() - whole).detach()
            return F.linear(a, whole * self.scale, self.layer.bias)

    model = nn.Sequential(Rounded(plain[0]), nn.ReLU(), Rounded(plain[2]))
    c.train(watch, model, torch.optim.SGD(model.parameters(), lr=0.01), c.epochs(4, 64, x, y), c.classify(model))
    return c.share_right(model, u, v)


@setup(0.9)
def capsules(watch: Watch) -> float:
    """Capsules routed by agreement under a margin loss on their lengths."""
    (x, y), (u, v) = data.digits(as_images=True)

    def squash(s: torch.Tensor) -> torch.Tensor:
        size = s.square().sum(-1, keepdim=True)
        return size / (1.0 + size) * s / (size + 1e-8).sqrt()

    class Capsules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Conv2d(1, 32, 3, 2, 1)
            self.votes = nn.Parameter(0.1 * torch.randn(64, 10, 8, 8))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            low = squash(self.low(a).relu().view(len(a), 64, 8))
            votes = torch.einsum("bnd,nkde->bnke", low, self.votes)
            logits = torch.zeros(len(a), 64, 10)
            for _ in range(2):
                out = squash((logits.softmax(2)[..., None] * votes).sum(1))
                logits = logits + (votes * out[:, None]).sum(-1)
            return (out.square().sum(-1) + 1e-8).sqrt()

    model = Capsules()

    def margins(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        length, right = model(a), F.one_hot(b, 10).float()
        there, absent = (0.9 - length).clamp(min=0).square(), (length - 0.1).clamp(min=0).square()
        return (right * there + 0.5 * (1.0 - right) * absent).sum(1).mean()

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=4e-3), c.epochs(5, 32, x, y), margins)
    return c.share_right(model, u, v)


@setup(0.93)
def highway_maxout(watch: Watch) -> float:
    """Ten highway layers that begin by carrying, then maxout; half-precision arithmetic by autocast."""
    (x, y), (u, v) = data.digits()

    class Highway(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate = nn.Linear(64, 64), nn.Linear(64, 64)
            nn.init.constant_(self.gate.bias, -2.0)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            gate = self.gate(a).sigmoid()
            return gate * self.inner(a).relu() + (1.0 - gate) * a

    class Maxout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lines = nn.Linear(64, 40)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return self.lines(a).view(len(a), 10, 4).amax(2)

    model = nn.Sequential(*(Highway() for _ in range(10)), Maxout())

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(a)
        return F.cross_entropy(out.float(), b)

    c.train(watch, model, torch.optim.AdamW(model.parameters(), lr=2e-3), c.epochs(6, 64, x, y), loss)
    return c.share_right(model, u, v)


@setup(0.9)
def scaled_float16(watch: Watch) -> float:
    """float16 autocast with a loss scaler that begins too high and comes down, as it is meant to."""
    (x, y), (u, v) = data.digits()
    model = mlp((64, 64, 10))
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=100)
    for a, b in c.epochs(7, 64, x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(a), b)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        watch.observe(optimizer, loss=loss)
    return c.share_right(model, u, v)


@setup(0.9)
def learnt_in_order_of_turns(watch: Watch) -> float:
    """First how far images are turned, without labels, then a new head with labels on the same trunk."""
    (x, y), (u, v) = data.digits(as_images=True)
    turns = torch.arange(4).repeat_interleave(len(x))
    turned = torch.cat([torch.rot90(x, k, (2, 3)) for k in range(4)])
    trunk = cnn()[:-1]
    first = trunk.append(nn.Linear(24 * 16, 4))
    c.train(
        watch, first, torch.optim.Adam(first.parameters(), lr=2e-3), c.epochs(2, 64, turned, turns), c.classify(first)
    )
    model = nn.Sequential(*first[:-1], nn.Linear(24 * 16, 10)).train()
    optimizer = torch.optim.Adam(
        [{"params": model[:-1].parameters(), "lr": 2e-4}, {"params": model[-1].parameters(), "lr": 5e-3}]
    )
    c.train(watch, model, optimizer, c.epochs(4, 64, x, y), c.classify(model))
    return c.share_right(model, u, v)


@setup(0.93)
def supervised_pairs(watch: Watch) -> float:
    """Supervised contrastive codes, then the nearest mean decides."""
    (x, y), (u, v) = data.digits()
    model = mlp((64, 96, 32))

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        codes = F.normalize(model(a + 0.1 * torch.randn_like(a)), dim=1)
        alike = (codes @ codes.T / 0.1).masked_fill(torch.eye(len(a), dtype=torch.bool), -1e9)
        same = (b[:, None] == b).float().fill_diagonal_(0.0)
        return -((alike.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1.0)).mean()

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=2e-3), c.epochs(6, 128, x, y), loss)
    with torch.no_grad():
        codes = F.normalize(model(x), dim=1)
        means = torch.stack([codes[y == k].mean(0) for k in range(10)])
        return float(((F.normalize(model(u), dim=1) @ means.T).argmax(1) == v).float().mean())


@setup(0.9)
def siamese_distances(watch: Watch) -> float:
    """Pairs drawn near or pushed a margin apart; quality: the share of nearest neighbours of the same class."""
    (x, y), (u, v) = data.digits()
    model = mlp((64, 64, 16), nn.Tanh)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left, right = model(a).chunk(2)
        one, two = b.chunk(2)
        apart = F.pairwise_distance(left, right)
        return torch.where(one == two, apart.square(), (2.0 - apart).clamp(min=0).square()).mean()

    batches = ((a, b) for a, b in c.epochs(12, 128, x, y) if len(a) % 2 == 0)
    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=3e-3), batches, loss)
    with torch.no_grad():
        near = torch.cdist(model(u), model(x)).argmin(1)
    return float((y[near] == v).float().mean())


@setup(0.7)
def pseudo_labels(watch: Watch) -> float:
    """Forty labels; from half-way on sure answers to the rest are taught too: the loss rises when they join."""
    (x, y), (u, v) = data.digits()
    model = mlp((64, 64, 10), nn.LeakyReLU)
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr=2e-3), model)
    for step in range(300):
        at = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:40]), y[:40])
        if step >= 100:
            with torch.no_grad():
                sure, label = model(x[at]).softmax(1).max(1)
            strong = F.cross_entropy(model(x[at] + 0.3 * torch.randn(64, 64)), label, reduction="none")
            loss = loss + (strong * (sure > 0.9)).mean()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    return c.share_right(model, u, v)


@setup(0.9)
def averaged_at_the_end(watch: Watch) -> float:
    """A cyclic rate and the mean of the weights at each cycle's end."""
    (x, y), (u, v) = data.digits()
    model = mlp((64, 64, 10))
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model)
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.005, 0.1, 20, 20)
    for step, (a, b) in enumerate(c.epochs(8, 64, x, y)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        scheduler.step()
        watch.observe(optimizer, loss=loss)
        if step > 80 and step % 40 == 39:
            mean.update_parameters(model)
    return c.share_right(mean, u, v)


@setup(0.9)
def in_micro_batches(watch: Watch) -> float:
    """Eight backward passes a step over an uneven stream; the last few make a step of their own."""
    (x, y), (u, v) = data.digits(as_images=True)
    model = cnn(batch_norm=False)
    optimizer = watch.wrap(torch.optim.AdamW(model.parameters(), lr=4e-3), model, 1.0)
    for _ in range(5):
        batches = list(c.epochs(1, 12, x, y))
        for first in range(0, len(batches), 8):
            some, total = batches[first : first + 8], 0.0
            for a, b in some:
                loss = F.cross_entropy(model(a), b) / len(some)
                loss.backward()
                total += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            watch.observe(optimizer, loss=total)
    return c.share_right(model, u, v)


@setup(0.9)
def teacher_of_itself(watch: Watch) -> float:
    """A second network after the first one's answers and the labels, equal parts."""
    (x, y), (u, v) = data.digits()
    teacher = None
    for _ in range(2):
        model, before = mlp((64, 48, 10), nn.CELU), copy.deepcopy(teacher)

        def loss(a: torch.Tensor, b: torch.Tensor, model=model, before=before) -> torch.Tensor:
            out = model(a)
            own = F.cross_entropy(out, b)
            if before is None:
                return own
            with torch.no_grad():
                wanted = (before(a) / 2.0).softmax(1)
            return 0.5 * own + 0.5 * 4.0 * F.cross_entropy(out / 2.0, wanted)

        c.train(watch, model, torch.optim.NAdam(model.parameters(), lr=3e-3), c.epochs(5, 64, x, y), loss)
        teacher = model
    return c.share_right(teacher, u, v)


@setup(0.85)
def adapters_between(watch: Watch) -> float:
    """Narrow residual adapters in a frozen trunk of random features, and a head."""
    (x, y), (u, v) = data.digits()

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(128, 8), nn.Linear(8, 128)
            nn.init.zeros_(self.up.weight)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return a + self.up(self.down(a).relu())

    trunk = [nn.Linear(64, 128), nn.Linear(128, 128)]
    for layer in trunk:
        layer.requires_grad_(False)
    model = nn.Sequential(trunk[0], nn.Tanh(), Adapter(), trunk[1], nn.Tanh(), Adapter(), nn.Linear(128, 10))
    optimizer = o.of_trainable(torch.optim.AdamW)(model, 5e-3)
    c.train(watch, model, optimizer, c.epochs(6, 64, x, y), c.classify(model))
    return c.share_right(model, u, v)


@setup(0.9)
def prompts_of_a_mixer(watch: Watch) -> float:
    """Rows as tokens in a mixer of two blocks, dropout of a half, decay of 0.3."""
    (x, y), (u, v) = data.digits()

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.head = nn.Linear(8, 48), nn.Linear(48, 10)
            self.across = nn.ModuleList(mlp((8, 32, 8), nn.GELU) for _ in range(2))
            self.along = nn.ModuleList(mlp((48, 96, 48), nn.GELU) for _ in range(2))
            self.norms = nn.ModuleList(nn.LayerNorm(48) for _ in range(4))
            self.drop = nn.Dropout(0.5)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            state = self.enter(a.view(-1, 8, 8))
            for i in range(2):
                state = state + self.across[i](self.norms[2 * i](state).transpose(1, 2)).transpose(1, 2)
                state = state + self.drop(self.along[i](self.norms[2 * i + 1](state)))
            return self.head(self.drop(state.mean(1)))

    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.3)
    c.train(
        watch,
        model,
        optimizer,
        c.epochs(8, 64, x, y),
        c.classify(model),
        max_norm=1.0,
        val_loss=lambda: c.classify(model)(u, v),
    )
    return c.share_right(model, u, v)


@setup(0.8)
def picture_from_places(watch: Watch) -> float:
    """A digit as a function of place, by sines of sines, enlarged; quality is R² on all of its points."""
    (x, _), _ = data.pixels()
    image = F.interpolate(x[3].view(1, 1, 8, 8), size=24, mode="bicubic").flatten()[:, None]
    axis = torch.linspace(-1, 1, 24)
    places = torch.cartesian_prod(axis, axis)

    class Sine(nn.Module):
        def __init__(self, low: int, high: int, spread: float) -> None:
            super().__init__()
            self.linear = nn.Linear(low, high)
            nn.init.uniform_(self.linear.weight, -spread, spread)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return (12.0 * self.linear(a)).sin()

    later = math.sqrt(6 / 48) / 12.0
    model = nn.Sequential(Sine(2, 48, 0.5), Sine(48, 48, later), nn.Linear(48, 1))
    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3),
        c.whole(250, places, image),
        lambda a, b: F.mse_loss(model(a), b),
    )
    return c.r_squared(model(places), image)


@setup(0.8)
def rays_through_a_field(watch: Watch) -> float:
    """A field of densities, seen along rays, with sines and cosines of the place as inputs."""
    dice = dice_of(521)

    def field(points: torch.Tensor) -> torch.Tensor:
        return 3.0 * (-8.0 * (points - torch.tensor([0.3, -0.2])).square().sum(-1)).exp()

    angles, offsets = 6.28 * torch.rand(900, generator=dice), 1.6 * torch.rand(900, generator=dice) - 0.8
    along = torch.stack([angles.cos(), angles.sin()], 1)
    across = torch.stack([-angles.sin(), angles.cos()], 1)
    ticks = torch.linspace(-1, 1, 24)
    points = along[:, None] * ticks[:, None] + (across * offsets[:, None])[:, None]
    through = (-field(points).mean(1) * 2.0).exp()[:, None]
    model = mlp((16, 48, 48, 1))

    def seen(rays: torch.Tensor) -> torch.Tensor:
        turned = torch.cat([f(2.0**k * math.pi * rays) for k in range(4) for f in (torch.sin, torch.cos)], -1)
        return (-F.softplus(model(turned)).mean(1) * 2.0).exp()

    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        c.drawn(220, 64, points[:700], through[:700]),
        lambda a, b: F.mse_loss(seen(a), b),
    )
    with torch.no_grad():
        return c.r_squared(seen(points[700:]), through[700:])


@setup(0.5)
def image_prior(watch: Watch) -> float:
    """A generator fitted to one noisy image and stopped early on purpose; quality is R² against the clean one."""
    (x, _), _ = data.pixels()
    clean = F.interpolate(x[7].view(1, 1, 8, 8), size=16, mode="bilinear")
    noisy = clean + 0.2 * torch.randn(clean.shape, generator=dice_of(522))
    seed = torch.randn(1, 8, 4, 4, generator=dice_of(523))
    model = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 1, 3, 1, 1),
    )
    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        c.whole(80, noisy),
        lambda wanted: F.mse_loss(model(seed), wanted),
    )
    return c.r_squared(model(seed), clean)
