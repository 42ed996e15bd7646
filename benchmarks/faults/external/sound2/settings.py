"""Optimizers, schedules and regimes: automatic rates, very short, very slow, sums, nearly learnt, one after another."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from ..case import Case
from ..loop import Watch
from ..nets import cnn, mlp
from ..wild.case import dice_of
from . import case as c

CASES: list[Case] = []
setup = functools.partial(c.setup, CASES, __name__)


class ScheduleFree(torch.optim.Optimizer):
    """Descent whose weights lie between a fast point and its running mean: after Defazio's idea."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(fast=p.clone(), mean=p.clone(), square=torch.zeros_like(p), count=0)
                state["count"] += 1
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                size = (state["square"] / (1.0 - 0.99 ** state["count"])).sqrt() + 1e-8
                state["fast"].addcdiv_(p.grad, size, value=-group["lr"])
                state["mean"].lerp_(state["fast"], 1.0 / state["count"])
                p.copy_(state["fast"].lerp(state["mean"], 0.9))


class LayerwiseTrust(torch.optim.Optimizer):
    """Adam's direction, in each layer as long as a share of its weights: after LAMB's idea."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad.square(), 0.01)
                way = mean / (square.sqrt() + 1e-6) + 0.01 * p
                trust = p.norm() / way.norm() if p.norm() > 0 and way.norm() > 0 else 1.0
                p.add_(way * trust, alpha=-group["lr"])


class Whitened(torch.optim.Optimizer):
    """Gradients of matrices between the inverse fourth roots of their two second moments: after Shampoo's idea."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                way, state = p.grad, self.state[p]
                for side in range(p.ndim):
                    rows = p.grad.transpose(0, side).reshape(p.shape[side], -1)
                    held = state.setdefault(f"side{side}", 1e-2 * torch.eye(len(rows)))
                    held.add_(rows @ rows.T)
                    values, vectors = torch.linalg.eigh(held)
                    root = vectors @ torch.diag(values.clamp(min=1e-6) ** (-0.5 / p.ndim)) @ vectors.T
                    turned = way.transpose(0, side)
                    way = (root @ turned.reshape(len(root), -1)).view(turned.shape).transpose(0, side)
                p.add_(way, alpha=-group["lr"])


def _plain(seed_free_lr: float, make, **options):
    """A usual network on digits with some optimizer."""

    def script(watch: Watch) -> float:
        (x, y), (u, v) = data.digits()
        model = mlp((64, 64, 10))
        optimizer = make(model.parameters(), lr=seed_free_lr)
        c.train(watch, model, optimizer, c.epochs(7, 64, x, y), c.classify(model), **options)
        return c.share_right(model, u, v)

    return script


for _name, _title, _script in (
    ("without_schedule", "A schedule-free average of fast steps.", _plain(5e-3, ScheduleFree)),
    ("layerwise_trust", "Steps as long as a share of each layer's weights.", _plain(0.02, LayerwiseTrust)),
    ("whitened_steps", "Steps between roots of second moments.", _plain(0.2, Whitened, max_norm=1.0)),
    ("adafactor", "Factored second moments, a relative step.", _plain(0.02, torch.optim.Adafactor)),
    ("slow_resilient", "Rprop on batches of 64 with small steps.", _plain(1e-4, torch.optim.Rprop)),
    ("clipped_to_a_hair", "A limit of 0.01 under Adam at every step.", _plain(3e-3, torch.optim.Adam, max_norm=0.01)),
):
    _script.__name__, _script.__doc__ = _name, _title
    setup(0.88)(_script)


@setup(0.85)
def climbed(watch: Watch) -> float:
    """The log-likelihood is maximised by an optimizer told to maximise; the guard is told what is maximised."""
    (x, y), (u, v) = data.digits()
    model = mlp((64, 48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, maximize=True)
    c.train(watch, model, optimizer, c.epochs(5, 64, x, y), lambda a, b: -F.cross_entropy(model(a), b))
    return c.share_right(model, u, v)


@setup(0.75)
def twenty_steps(watch: Watch) -> float:
    """Twenty steps of large batches: a smoke test of a pipeline."""
    (x, y), (u, v) = data.digits()
    model = mlp((64, 128, 10))
    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=0.01), c.drawn(20, 256, x, y), c.classify(model))
    return c.share_right(model, u, v)


@setup(0.9)
def plateau_of_parity(watch: Watch) -> float:
    """Parity of three bits among ten noisy ones: hundreds of steps at chance, then a fall."""
    dice = dice_of(570)
    x = torch.randint(0, 2, (2000, 10), generator=dice).float() * 2 - 1
    y = (x[:, :3].prod(1) > 0).long()
    model = mlp((10, 64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    c.train(watch, model, optimizer, c.drawn(900, 32, x[:1500], y[:1500]), c.classify(model))
    return c.share_right(model, x[1500:], y[1500:])


@setup(0.9)
def sums_of_squares(watch: Watch) -> float:
    """Losses as sums over all pixels of a batch: large numbers that stay large, as some examples report them."""
    (x, _), (u, _) = data.pixels()
    x, u = 16 * x, 16 * u
    model = mlp((64, 128, 32, 128, 64), nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    c.train(
        watch,
        model,
        optimizer,
        c.epochs(18, 64, x),
        lambda a: F.mse_loss(model(a), a, reduction="sum"),
        val_loss=lambda: F.mse_loss(model(u), u, reduction="sum"),
    )
    return c.r_squared(model(u).detach(), u)


@setup(0.95)
def nearly_learnt(watch: Watch) -> float:
    """A trained network of convolutions goes on at a tenth of its rate: a loss that is low and stays so."""
    (x, y), (u, v) = data.digits(as_images=True)
    model = cnn(batch_norm=True)
    first = torch.optim.Adam(model.parameters(), lr=3e-3)
    for a, b in c.epochs(6, 64, x, y):
        first.zero_grad()
        F.cross_entropy(model(a), b).backward()
        first.step()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    c.train(watch, model, optimizer, c.epochs(3, 32, x, y), c.classify(model), max_norm=1.0)
    return c.share_right(model, u, v)


@setup(0.8)
def tasks_kept_in_mind(watch: Watch) -> float:
    """Five pairs of digits one after another, the old ones held by a replay of a few and a penalty on moved weights."""
    (x, y), (u, v) = data.digits()
    model = mlp((64, 96, 10))
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr=2e-3), model)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for pair in range(5):
        chosen = (y // 2) == pair
        anchor = copy.deepcopy(model).requires_grad_(False)
        for a, b in c.epochs(5, 32, x[chosen], y[chosen]):
            loss = F.cross_entropy(model(a), b)
            if kept:
                old = [torch.cat(rows) for rows in zip(*kept)]
                at = torch.randint(len(old[0]), (64,))
                loss = loss + 2.0 * F.cross_entropy(model(old[0][at]), old[1][at])
                loss = loss + 0.01 * sum(
                    (p - q).square().sum() for p, q in zip(model.parameters(), anchor.parameters())
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)
        kept.append((x[chosen][:40], y[chosen][:40]))
    return c.share_right(model, u, v)


@setup(0.85)
def two_teach_each_other(watch: Watch) -> float:
    """A third of the labels are wrong; each of two networks learns from what the other finds easy."""
    (x, y), (u, v) = data.digits()
    dice = dice_of(571)
    y = torch.where(torch.rand(len(y), generator=dice) < 0.33, torch.randint(0, 10, y.shape, generator=dice), y)
    models = [mlp((64, 64, 10)) for _ in range(2)]
    optimizers = [watch.wrap(torch.optim.Adam(m.parameters(), lr=2e-3), m) for m in models]
    for step, (a, b) in enumerate(c.epochs(8, 64, x, y)):
        kept = max(1, int(len(a) * (1.0 - 0.33 * min(1.0, step / 60))))
        with torch.no_grad():
            easy = [F.cross_entropy(m(a), b, reduction="none").argsort()[:kept] for m in models]
        for model, optimizer, at in zip(models, optimizers, reversed(easy)):
            loss = F.cross_entropy(model(a[at]), b[at])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)
    return c.share_right(models[0], u, v)


@setup(0.75)
def weighed_by_doubt(watch: Watch) -> float:
    """A classification and a regression weighed by learnt log-variances: the loss goes below zero."""
    (x, y), (u, v) = data.digits()
    ink, held = x.mean(1, keepdim=True), u.mean(1, keepdim=True)
    body = mlp((64, 64, 11))
    logs = nn.Parameter(torch.zeros(2))
    model = nn.ModuleDict({"body": body, "logs": nn.ParameterList([logs])})

    def loss(a: torch.Tensor, b: torch.Tensor, amount: torch.Tensor) -> torch.Tensor:
        out = body(a)
        parts = torch.stack([F.cross_entropy(out[:, :10], b), F.mse_loss(out[:, 10:], amount)])
        return ((-2 * logs).exp() * parts + logs).sum()

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=3e-3), c.epochs(8, 64, x, y, ink), loss)
    return min(c.share_right(lambda a: body(a)[:, :10], u, v), c.r_squared(body(u)[:, 10:].detach(), held))


@setup(0.9)
def every_other_frozen(watch: Watch) -> float:
    """Blocks are trained in alternation: the body, then the head, and so on, by switching what wants a gradient."""
    (x, y), (u, v) = data.digits()
    model = mlp((64, 64, 32, 10))
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for turn in range(10):
        for place, layer in enumerate(m for m in model if isinstance(m, nn.Linear)):
            layer.requires_grad_((place == 2) == bool(turn % 2))
        for a, b in c.epochs(1, 32, x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)
    return c.share_right(model, u, v)


@setup(0.9)
def grown_on_the_way(watch: Watch) -> float:
    """Half-way through the network is made wider, its old units kept, under a new optimizer."""
    (x, y), (u, v) = data.digits()
    small = mlp((64, 24, 10))
    c.train(watch, small, torch.optim.Adam(small.parameters(), lr=3e-3), c.epochs(3, 64, x, y), c.classify(small))
    large = mlp((64, 96, 10))
    with torch.no_grad():
        large[0].weight[:24], large[0].bias[:24] = small[0].weight, small[0].bias
        large[2].weight.mul_(0.1)
        large[2].weight[:, :24], large[2].bias[:] = small[2].weight, small[2].bias
    c.train(watch, large, torch.optim.Adam(large.parameters(), lr=3e-3), c.epochs(4, 64, x, y), c.classify(large))
    return c.share_right(large, u, v)


@setup(0.7)
def moving_target(watch: Watch) -> float:
    """Temporal differences of a known chain with a linear model: targets move with the model, noise never ends."""
    dice = dice_of(572)
    features = torch.randn(12, 6, generator=dice)
    turn = torch.rand(12, 12, generator=dice).square().softmax(1)
    pay = features @ torch.randn(6, generator=dice)
    true = torch.linalg.solve(torch.eye(12) - 0.8 * turn, pay)
    model = nn.Linear(6, 1)
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), lr=0.03), model)
    for _ in range(700):
        at = torch.randint(0, 12, (8,))
        to = torch.multinomial(turn[at], 1)[:, 0]
        with torch.no_grad():
            wanted = pay[at] + torch.randn(8) + 0.8 * model(features[to])[:, 0]
        loss = F.mse_loss(model(features[at])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    return float(torch.corrcoef(torch.stack([model(features).detach()[:, 0], true]))[0, 1])


@setup(0.85)
def many_at_once(watch: Watch) -> float:
    """Five networks as one, their weights stacked and mapped over; the loss is the sum of theirs."""
    (x, y), (u, v) = data.digits()
    parts = [mlp((64, 32, 10)) for _ in range(5)]
    stacked, _ = torch.func.stack_module_state(parts)
    model = nn.ParameterDict({name.replace(".", "-"): nn.Parameter(p.detach()) for name, p in stacked.items()})
    base = mlp((64, 32, 10)).to("meta")

    def logits(a: torch.Tensor) -> torch.Tensor:
        named = {name.replace("-", "."): p for name, p in model.items()}
        return torch.func.vmap(lambda one: torch.func.functional_call(base, one, (a,)))(named)

    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        c.epochs(5, 64, x, y),
        lambda a, b: sum(F.cross_entropy(out, b) for out in logits(a)),
    )
    return c.share_right(lambda a: logits(a).softmax(-1).mean(0), u, v)


@setup(0.6)
def in_a_penalised_dual(watch: Watch) -> float:
    """A rate of false alarms held below a tenth by a multiplier that climbs while the model descends."""
    (x, y), (u, v) = data.table("breast_cancer")
    model, multiplier = nn.Linear(30, 1), nn.Parameter(torch.zeros(1))
    down = watch.wrap(torch.optim.Adam(model.parameters(), lr=0.02), model)
    up = torch.optim.SGD([multiplier], lr=0.2, maximize=True)
    for a, b in c.epochs(12, 64, x, y):
        out = model(a)[:, 0]
        missed = F.softplus(-out[b == 1]).mean()
        false = out[b == 0].sigmoid().mean()
        loss = missed + F.softplus(multiplier)[0] * (false - 0.1)
        for optimizer in (down, up):
            optimizer.zero_grad()
        loss.backward()
        down.step()
        up.step()
        watch.observe(down, loss=loss)
    found = model(u)[:, 0] > 0
    return float(found[v == 1].float().mean()) - max(0.0, float(found[v == 0].float().mean()) - 0.15)


@setup(0.6)
def rare_and_heavy(watch: Watch) -> float:
    """Heavy-tailed noise on the targets under Student's likelihood with learnt scale; single losses are far off."""
    dice = dice_of(573)
    x = torch.randn(1500, 4, generator=dice)
    clean = x[:, 0] * 2 + (2 * x[:, 1]).sin() + x[:, 2] * x[:, 3]
    y = clean + 0.3 * torch.randn(1500, generator=dice) / torch.rand(1500, generator=dice).clamp(min=0.01)
    model = nn.ModuleDict({"body": mlp((4, 48, 1), nn.Softplus), "scale": nn.ParameterList([torch.zeros(1)])})

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        spread = model["scale"][0].exp()
        return (1.5 * torch.log1p(((model["body"](a)[:, 0] - b) / spread).square() / 2) + spread.log()).mean()

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=8e-3), c.epochs(16, 40, x[:1200], y[:1200]), loss)
    return c.r_squared(model["body"](x[1200:])[:, 0].detach(), clean[1200:])


@setup(0.9)
def held_by_a_norm(watch: Watch) -> float:
    """Weights are put back onto the sphere after each step, and logits are cosines times a learnt factor."""
    (x, y), (u, v) = data.digits()
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.SELU(), nn.Linear(64, 10, bias=False))
    factor = nn.Parameter(torch.tensor(8.0))

    def logits(a: torch.Tensor) -> torch.Tensor:
        inner = F.normalize(model[:2](a), dim=1)
        return factor * F.linear(inner, F.normalize(model[2].weight, dim=1))

    @torch.no_grad()
    def back() -> None:
        for layer in (model[0], model[2]):
            layer.weight.copy_(F.normalize(layer.weight, dim=1))

    whole = nn.ModuleDict({"net": model, "factor": nn.ParameterList([factor])})
    optimizer = torch.optim.Adam(whole.parameters(), lr=5e-3)
    c.train(watch, whole, optimizer, c.epochs(7, 64, x, y), c.classify(logits), after=back)
    return c.share_right(logits, u, v)
