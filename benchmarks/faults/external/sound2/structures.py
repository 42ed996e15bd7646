"""Graphs, sets, mechanics, equations, networks within networks."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from .. import data
from ..case import Case
from ..loop import Watch
from ..nets import mlp
from ..wild.case import dice_of
from . import case as c

CASES: list[Case] = []
setup = functools.partial(c.setup, CASES, __name__)


def _communities(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, a symmetric adjacency and communities of 120 nodes."""
    dice = dice_of(seed)
    label = torch.arange(120) % 4
    chance = torch.where(label[:, None] == label, 0.25, 0.02)
    upper = (torch.rand(120, 120, generator=dice) < chance).float().triu(1)
    features = 0.5 * F.one_hot(label, 8).float() + 0.6 * torch.randn(120, 8, generator=dice)
    return features, upper + upper.T, label


@setup(0.8)
def attention_in_a_graph(watch: Watch) -> float:
    """Graph attention; of 120 nodes twenty are labelled, dropout of 0.6 on features, all of it each step."""
    features, links, label = _communities(550)
    near = (links + torch.eye(120)) > 0

    class Attend(nn.Module):
        def __init__(self, low: int, high: int) -> None:
            super().__init__()
            self.values = nn.Linear(low, high, bias=False)
            self.left, self.right = nn.Linear(high, 1), nn.Linear(high, 1)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            values = self.values(a)
            scores = F.leaky_relu(self.left(values) + self.right(values).T, 0.2)
            return scores.masked_fill(~near, -1e9).softmax(1) @ values

    model = nn.Sequential(nn.Dropout(0.6), Attend(8, 24), nn.ELU(), nn.Dropout(0.6), Attend(24, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    c.train(
        watch,
        model,
        optimizer,
        c.whole(200, features, label),
        lambda a, b: F.cross_entropy(model(a)[:20], b[:20]),
        val_loss=lambda: F.cross_entropy(model(features)[20:], label[20:]),
    )
    return c.share_right(lambda a: model(a)[20:], features, label[20:])


@setup(0.85)
def graphs_by_sums(watch: Watch) -> float:
    """Whole graphs, rings or stars or trees at random sizes, by sums over neighbours; sixteen a step."""
    dice = dice_of(553)
    graphs, labels = [], []
    for number in range(450):
        size, kind = int(torch.randint(6, 13, (), generator=dice)), number % 3
        links = torch.zeros(12, 12)
        for node in range(1, size):
            to = node - 1 if kind == 0 else 0 if kind == 1 else int(torch.randint(node, (), generator=dice))
            links[node, to] = links[to, node] = 1.0
        if kind == 0:
            links[0, size - 1] = links[size - 1, 0] = 1.0
        graphs.append(links)
        labels.append(kind)
    x, y = torch.stack(graphs), torch.tensor(labels)
    order = torch.randperm(450, generator=dice)
    x, y = x[order], y[order]
    layers = nn.ModuleList(mlp((low, 24, 24)) for low in (1, 24))
    head, scale = nn.Linear(24, 3), nn.BatchNorm1d(24)
    model = nn.ModuleList([layers, head, scale])

    def logits(a: torch.Tensor) -> torch.Tensor:
        there = (a.sum(2, keepdim=True) > 0).float()
        state = there
        for layer in layers:
            state = layer(state + a @ state).relu() * there
        return head(scale(state.sum(1)))

    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        c.epochs(8, 16, x[:330], y[:330]),
        c.classify(logits),
    )
    return c.share_right(logits, x[330:], y[330:])


@setup(0.85)
def clouds_of_points(watch: Watch) -> float:
    """Shapes from unordered points: maxima over points, random turns, dropout before the head."""
    dice = dice_of(554)

    def cloud(kind: torch.Tensor) -> torch.Tensor:
        t = torch.rand(len(kind), 32, generator=dice)
        turn = 6.28 * t
        circle = torch.stack([turn.cos(), turn.sin()], 2)
        line = torch.stack([2 * t - 1, torch.zeros_like(t)], 2)
        cross = torch.where((torch.rand(t.shape, generator=dice) < 0.5)[..., None], line, line.flip(2))
        return torch.stack([circle, line, cross])[kind, torch.arange(len(kind))]

    def turned(a: torch.Tensor) -> torch.Tensor:
        angle = 6.28 * torch.rand(len(a))
        spin = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2)
        return a @ spin + 0.05 * torch.randn(a.shape)

    y = torch.randint(0, 3, (700,), generator=dice)
    x = cloud(y)
    each, head = mlp((2, 32, 64)), nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    model = nn.ModuleList([each, head])

    def logits(a: torch.Tensor) -> torch.Tensor:
        return head(each(turned(a)).amax(1))

    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        c.epochs(8, 25, x[:500], y[:500]),
        c.classify(logits),
    )
    return c.share_right(logits, x[500:], y[500:])


@setup(0.8)
def adapted_in_few_steps(watch: Watch) -> float:
    """Second-order meta-learning of sines: one inner step, an outer loss; error before five steps / after them."""
    model = mlp((1, 40, 40, 1))
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr=2e-3), model)

    def task(count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        size, shift = 0.5 + 4 * torch.rand(count, 1, 1), 3.14 * torch.rand(count, 1, 1)
        x = 10 * torch.rand(count, 20, 1) - 5
        return x, size * (x + shift).sin()

    def adapted(x: torch.Tensor, y: torch.Tensor, steps: int, graph: bool) -> dict[str, torch.Tensor]:
        parameters = dict(model.named_parameters())
        for _ in range(steps):
            loss = F.mse_loss(functional_call(model, parameters, (x[:10],)), y[:10])
            slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=graph)
            parameters = {name: p - 0.02 * g for (name, p), g in zip(parameters.items(), slopes)}
        return parameters

    for _ in range(250):
        xs, ys = task(6)
        loss = torch.stack(
            [F.mse_loss(functional_call(model, adapted(x, y, 1, True), (x[10:],)), y[10:]) for x, y in zip(xs, ys)]
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    torch.manual_seed(5)
    errors = [  # before, after
        (
            F.mse_loss(model(x[10:]), y[10:]),
            F.mse_loss(functional_call(model, adapted(x, y, 5, False), (x[10:],)), y[10:]),
        )
        for x, y in zip(*task(60))
    ]
    before, after = (sum(float(e.detach()) for e in row) for row in zip(*errors))
    return before / after - 0.4


@setup(0.5)
def first_order_meta(watch: Watch) -> float:
    """Reptile: the gradient that the optimizer sees is start minus end of an inner training, written by hand."""
    model = mlp((1, 32, 32, 1), nn.Tanh)
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), lr=0.3), model)

    def task() -> tuple[torch.Tensor, torch.Tensor]:
        x = 10 * torch.rand(20, 1) - 5
        return x, (0.5 + torch.rand(())) * (x + 1.5 * torch.rand(())).sin()

    def inner(x: torch.Tensor, y: torch.Tensor, steps: int) -> tuple[dict[str, torch.Tensor], float]:
        fast = {name: p.detach().clone().requires_grad_(True) for name, p in model.named_parameters()}
        for _ in range(steps):
            loss = F.mse_loss(functional_call(model, fast, (x,)), y)
            slopes = torch.autograd.grad(loss, list(fast.values()))
            fast = {k: (p - 0.03 * g).detach().requires_grad_(True) for (k, p), g in zip(fast.items(), slopes)}
        return fast, float(loss.detach())

    for _ in range(200):
        fast, last = inner(*task(), 8)
        for name, p in model.named_parameters():
            p.grad = p.detach() - fast[name].detach()
        optimizer.step()
        watch.observe(optimizer, loss=last)
    torch.manual_seed(5)
    found = []
    for _ in range(30):
        x, y = task()
        fast, _ = inner(x[:10], y[:10], 10)
        with torch.no_grad():
            found.append(c.r_squared(functional_call(model, fast, (x[10:],)), y[10:]))
    return sorted(found)[15]


@setup(0.9)
def fixed_points(watch: Watch) -> float:
    """A layer whose output is where an iteration stands still; the gradient goes through one last step of it."""
    (x, y), (u, v) = data.digits()

    class Implicit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.again, self.head = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 10)
            with torch.no_grad():
                self.again.weight.mul_(0.5)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            given = self.enter(a)
            with torch.no_grad():
                state = torch.zeros_like(given)
                for _ in range(20):
                    state = (self.again(state) + given).tanh()
            return self.head((self.again(state) + given).tanh())

    model = Implicit()
    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=2e-3), c.epochs(6, 64, x, y), c.classify(model))
    return c.share_right(model, u, v)


def _swing(state: torch.Tensor) -> torch.Tensor:
    angle, turn = state.unbind(-1)
    return torch.stack([turn, -angle.sin() - 0.1 * turn], -1)


def _rolled(field, state: torch.Tensor, steps: int, size: float = 0.1) -> torch.Tensor:
    rows = [state]
    for _ in range(steps):
        k1 = field(state)
        k2 = field(state + 0.5 * size * k1)
        k3 = field(state + 0.5 * size * k2)
        state = state + size / 6 * (k1 + 2 * k2 + 2 * k3 + field(state + size * k3))
        rows.append(state)
    return torch.stack(rows, 1)


@setup(0.9)
def swings_integrated(watch: Watch) -> float:
    """A field of velocities learnt through eight Runge-Kutta steps of a damped pendulum."""
    dice = dice_of(555)
    paths = _rolled(_swing, 4 * torch.rand(200, 2, generator=dice) - 2, 20)
    model = mlp((2, 48, 2), nn.Tanh)

    def loss(a: torch.Tensor) -> torch.Tensor:
        at = int(torch.randint(0, 12, ()))
        return F.l1_loss(_rolled(model, a[:, at], 8), a[:, at : at + 9])

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=5e-3), c.drawn(150, 32, paths[:150]), loss)
    with torch.no_grad():
        return c.r_squared(_rolled(model, paths[150:, 0], 20), paths[150:])


@setup(0.9)
def kept_energy(watch: Watch) -> float:
    """Motion from the gradient of a learnt energy: second derivatives in the backward pass."""
    dice = dice_of(556)
    x = 4 * torch.rand(800, 2, generator=dice) - 2
    flow = torch.stack([x[:, 1], -x[:, 0].sin()], 1)
    model = mlp((2, 48, 1), nn.Tanh)

    def moved(a: torch.Tensor) -> torch.Tensor:
        a = a.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(a).sum(), a, create_graph=True)
        return torch.stack([slope[:, 1], -slope[:, 0]], 1)

    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        c.drawn(250, 64, x[:600], flow[:600]),
        lambda a, b: F.mse_loss(moved(a), b),
    )
    return c.r_squared(moved(x[600:]).detach(), flow[600:])


@setup(0.95)
def oscillator_by_residual(watch: Watch) -> float:
    """A damped oscillator from its equation and two initial values, weighed twentyfold, in double precision."""
    model = mlp((1, 32, 32, 1), nn.Tanh).double()
    t = torch.linspace(0, 2, 40, dtype=torch.float64)[:, None]
    start = torch.zeros(1, 1, dtype=torch.float64)

    def derivatives(at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        at = at.clone().requires_grad_(True)
        y = model(at)
        (dy,) = torch.autograd.grad(y.sum(), at, create_graph=True)
        (ddy,) = torch.autograd.grad(dy.sum(), at, create_graph=True)
        return y, dy, ddy

    def loss(at: torch.Tensor) -> torch.Tensor:
        y, dy, ddy = derivatives(at)
        y0, dy0, _ = derivatives(start)
        residual = (ddy + 0.4 * dy + 4.0 * y).square().mean()
        return residual + 20.0 * ((y0 - 1.0).square() + dy0.square()).sum()

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    c.train(
        watch,
        model,
        optimizer,
        c.whole(500, t),
        loss,
        schedule=lambda it: torch.optim.lr_scheduler.StepLR(it, 150, 0.5),
    )
    w = math.sqrt(4 - 0.04)
    true = (-0.2 * t).exp() * ((w * t).cos() + 0.2 / w * (w * t).sin())
    return c.r_squared(model(t).detach(), true)


@setup(0.9)
def operator_of_functions(watch: Watch) -> float:
    """Integrals of random functions, by a branch that sees the function and a trunk that sees the place."""
    dice = dice_of(557)
    grid = torch.linspace(0, 1, 25)
    waves = torch.stack([(math.pi * k * grid).cos() for k in range(5)])
    f = torch.randn(300, 5, generator=dice) @ waves
    wanted = f.cumsum(1) / 25
    branch, trunk = mlp((25, 48, 24), nn.GELU), mlp((1, 48, 24), nn.GELU)
    model = nn.ModuleList([branch, trunk])

    def integral(a: torch.Tensor) -> torch.Tensor:
        return branch(a) @ trunk(grid[:, None]).T

    c.train(
        watch,
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        c.epochs(40, 40, f[:240], wanted[:240]),
        lambda a, b: ((integral(a) - b).norm(dim=1) / b.norm(dim=1)).mean(),
    )
    return c.r_squared(integral(f[240:]).detach(), wanted[240:])


@setup(0.85)
def in_frequencies(watch: Watch) -> float:
    """Heat after a while, by layers that multiply the lowest frequencies by learnt complex numbers."""
    dice = dice_of(558)
    spectrum = torch.randn(300, 17, dtype=torch.complex64, generator=dice) / (1 + torch.arange(17))
    x = torch.fft.irfft(spectrum, 32) * 16
    y = torch.fft.irfft(torch.fft.rfft(x) * (-0.02 * torch.arange(17.0).square()).exp(), 32) ** 2

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.Parameter(torch.randn(12, 12, 10, dtype=torch.complex64) / 12)
            self.beside = nn.Conv1d(12, 12, 1)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            low = torch.einsum("bik,iok->bok", torch.fft.rfft(a)[..., :10], self.factors)
            return F.gelu(torch.fft.irfft(low, 32) + self.beside(a))

    model = nn.Sequential(nn.Conv1d(1, 12, 1), Spectral(), Spectral(), nn.Conv1d(12, 1, 1))
    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        c.epochs(20, 30, x[:240, None], y[:240, None]),
        lambda a, b: F.mse_loss(model(a), b),
        schedule=lambda it: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(it, 80),
    )
    return c.r_squared(model(x[240:, None]).detach(), y[240:, None])


@setup(0.9)
def splines_on_edges(watch: Watch) -> float:
    """Learnt functions on the edges instead of weights: sums of bumps, by quasi-Newton steps with line search."""
    dice = dice_of(559)
    x = 2 * torch.rand(400, 2, generator=dice) - 1
    y = ((3.14 * x[:, 0]).sin() + x[:, 1].square()).exp()[:, None] / 3

    class Edges(nn.Module):
        def __init__(self, low: int, high: int) -> None:
            super().__init__()
            self.register_buffer("centres", torch.linspace(-1.5, 1.5, 8))
            self.heights = nn.Parameter(0.1 * torch.randn(low, 8, high))
            self.plain = nn.Linear(low, high)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            bumps = (-((a[..., None] - self.centres) / 0.4).square()).exp()
            return torch.einsum("bik,iko->bo", bumps, self.heights) + self.plain(F.silu(a))

    model = nn.Sequential(Edges(2, 5), Edges(5, 1))
    optimizer = watch.wrap(torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=5), model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[:300]), y[:300])
        loss.backward()
        return loss

    for _ in range(25):
        watch.observe(optimizer, loss=optimizer.step(closure))
    return c.r_squared(model(x[300:]).detach(), y[300:])


@setup(0.85)
def weights_made_for_each(watch: Watch) -> float:
    """A network makes the weights of another from which sine is meant; embeddings of tasks are learnt with it."""
    dice = dice_of(560)
    shift = 6.28 * torch.rand(24, generator=dice)
    x = 2 * torch.rand(1500, 1, generator=dice) - 1
    task = torch.randint(0, 24, (1500,), generator=dice)
    y = (3 * x[:, 0] + shift[task]).sin()
    codes, makes = nn.Embedding(24, 6), mlp((6, 48, 33))
    model = nn.ModuleList([codes, makes])

    def answer(a: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        w = makes(codes(which))
        inner = (a * w[:, :16] + w[:, 16:32]).tanh()
        return (inner * w[:, :16].roll(1, 1)).sum(1) + w[:, 32]

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = c.epochs(16, 50, x[:1200], task[:1200], y[:1200])
    c.train(watch, model, optimizer, batches, lambda a, k, b: F.mse_loss(answer(a, k), b), max_norm=1.0)
    return c.r_squared(answer(x[1200:], task[1200:]).detach(), y[1200:])


@setup(0.85)
def cells_that_grow(watch: Watch) -> float:
    """A cellular automaton grows a digit from one cell in twelve ticks, updates dropped at random, gradients scaled."""
    (x, _), _ = data.pixels()
    goal = x[0].view(1, 1, 8, 8)
    rule = nn.Sequential(nn.Conv2d(8, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 8, 1, bias=False))
    nn.init.zeros_(rule[2].weight)
    optimizer = watch.wrap(torch.optim.Adam(rule.parameters(), lr=3e-3), rule)

    def grown(count: int) -> torch.Tensor:
        state = torch.zeros(count, 8, 8, 8)
        state[:, :, 4, 4] = 1.0
        for _ in range(12):
            state = state + rule(state) * (torch.rand(count, 1, 8, 8) < 0.7)
        return state[:, :1]

    for _ in range(180):
        optimizer.zero_grad()
        loss = F.mse_loss(grown(8), goal.expand(8, -1, -1, -1))
        loss.backward()
        for p in rule.parameters():
            p.grad /= p.grad.norm() + 1e-8
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    return c.r_squared(grown(8).detach(), goal.expand(8, -1, -1, -1))


@setup(0.7)
def unrolled_shrinking(watch: Watch) -> float:
    """Sparse codes by six unrolled shrinkage steps with learnt matrices and thresholds."""
    dice = dice_of(561)
    atoms = F.normalize(torch.randn(20, 40, generator=dice), dim=0)
    codes = torch.randn(1500, 40, generator=dice) * (torch.rand(1500, 40, generator=dice) < 0.08)
    seen = codes @ atoms.T

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(20, 40, bias=False)
            self.again = nn.Linear(40, 40, bias=False)
            self.limits = nn.Parameter(torch.full((6,), 0.1))
            with torch.no_grad():
                self.enter.weight.copy_(atoms.T / 3)
                self.again.weight.copy_(torch.eye(40) - atoms.T @ atoms / 3)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            given = self.enter(a)
            state = torch.zeros_like(given)
            for limit in self.limits:
                state = self.again(state) + given
                state = state.sign() * (state.abs() - limit).clamp(min=0)
            return state

    model = Unrolled()
    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3),
        c.epochs(12, 50, seen[:1200], codes[:1200]),
        lambda a, b: F.mse_loss(model(a), b),
    )
    return c.r_squared(model(seen[1200:]).detach(), codes[1200:])


@setup(0.8)
def two_rare_halves(watch: Watch) -> float:
    """Tables of users and of items with sparse gradients by lazy Adam, the towers above them by Adam."""
    dice = dice_of(562)
    left, right = torch.randn(80, 3, generator=dice), torch.randn(60, 3, generator=dice)
    pairs = torch.cartesian_prod(torch.arange(80), torch.arange(60))[torch.randperm(4800, generator=dice)]
    liked = ((left[pairs[:, 0]] * right[pairs[:, 1]]).sum(1) > 0).float()
    tables = nn.ModuleList([nn.Embedding(80, 12, sparse=True), nn.Embedding(60, 12, sparse=True)])
    head = mlp((36, 32, 1))
    one = watch.wrap(torch.optim.SparseAdam(list(tables.parameters()), lr=1e-2), tables)
    two = watch.wrap(torch.optim.Adam(head.parameters(), lr=3e-3), head)

    def score(at: torch.Tensor) -> torch.Tensor:
        a, b = tables[0](at[:, 0]), tables[1](at[:, 1])
        return head(torch.cat([a, b, a * b], 1))[:, 0]

    for at, b in c.epochs(9, 100, pairs[:3800], liked[:3800]):
        loss = F.binary_cross_entropy_with_logits(score(at), b)
        for optimizer in (one, two):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (one, two):
            optimizer.step()
            watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        return float(((score(pairs[3800:]) > 0) == (liked[3800:] > 0.5)).float().mean())
