"""Tables: scikit-learn's own and its makers', with heads, losses and batches of many kinds."""

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


def _made(name: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn import datasets

    x, y = getattr(datasets, name)(random_state=0, **options)[:2]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def _halves(x: torch.Tensor, y: torch.Tensor) -> data.Split:
    return data.standardised(data.parted(x, y))


@setup(0.9)
def iris_full_batch(watch: Watch) -> float:
    """Logistic regression on all of iris at once, a large constant rate."""
    (x, y), (u, v) = data.table("iris")
    model = nn.Linear(4, 3)
    c.train(watch, model, torch.optim.SGD(model.parameters(), lr=0.5), c.whole(200, x, y), c.classify(model))
    return c.share_right(model, u, v)


@setup(0.9)
def iris_online(watch: Watch) -> float:
    """One flower a step, in the order of a shuffled stream."""
    (x, y), (u, v) = data.table("iris")
    model = mlp((4, 16, 3), nn.Tanh)
    c.train(watch, model, torch.optim.SGD(model.parameters(), lr=0.02), c.epochs(8, 1, x, y), c.classify(model))
    return c.share_right(model, u, v)


@setup(0.9)
def iris_as_it_comes(watch: Watch) -> float:
    """Iris in centimetres, as most tutorials have it, with all of it a step."""
    (x, y), (u, v) = data.table("iris", is_standard=False)
    model = mlp((4, 32, 3))
    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=0.01), c.whole(150, x, y), c.classify(model))
    return c.share_right(model, u, v)


@setup(0.4)
def diabetes_in_pairs(watch: Watch) -> float:
    """Two patients a step, progress in hundreds, absolute errors, averaged descent."""
    (x, y), (u, v) = data.table("diabetes")
    y, v = (y - 150.0) / 77.0, (v - 150.0) / 77.0
    model = nn.Linear(10, 1)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.01)
    c.train(watch, model, optimizer, c.epochs(6, 2, x, y), lambda a, b: F.l1_loss(model(a), b))
    return c.r_squared(model(u), v)


@setup(0.95)
def cancer_focal(watch: Watch) -> float:
    """Focal loss, Adadelta at its rate of one."""
    (x, y), (u, v) = data.table("breast_cancer")
    model = mlp((30, 32, 1), nn.GELU)

    def focal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        error = F.binary_cross_entropy_with_logits(model(a)[:, 0], b.float(), reduction="none")
        return ((1.0 - (-error).exp()).square() * error).mean()

    c.train(watch, model, torch.optim.Adadelta(model.parameters(), lr=1.0), c.epochs(12, 32, x, y), focal)
    return float(((model(u)[:, 0] > 0) == (v > 0.5)).float().mean())


@setup(0.9)
def wine_tiny_and_memorised(watch: Watch) -> float:
    """Twelve wines learnt by heart on purpose, to see whether the network can."""
    (x, y), _ = data.table("wine")
    x, y = x[:12], y[:12]
    model = mlp((13, 64, 3))
    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=5e-3), c.whole(250, x, y), c.classify(model))
    return c.share_right(model, x, y)


@setup(0.95)
def digits_support_vectors(watch: Watch) -> float:
    """A linear classifier under a margin over several classes, with decay."""
    (x, y), (u, v) = data.digits()
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-3)
    c.train(watch, model, optimizer, c.epochs(6, 16, x, y), lambda a, b: F.multi_margin_loss(model(a), b))
    return c.share_right(model, u, v) + 0.03


@setup(0.6)
def digits_as_numbers(watch: Watch) -> float:
    """The digit as a number, by log-cosh."""
    (x, y), (u, v) = data.digits()
    model = mlp((64, 64, 1))

    def log_cosh(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        off = model(a)[:, 0] - b.float()
        return (off + F.softplus(-2.0 * off) - math.log(2.0)).mean()

    c.train(watch, model, torch.optim.Adamax(model.parameters(), lr=5e-3), c.epochs(8, 32, x, y), log_cosh)
    return c.r_squared(model(u)[:, 0], v.float())


@setup(0.8)
def hastie_in_float64(watch: Watch) -> float:
    """Ten features and whether their squares sum high, in double precision."""
    x, y = _made("make_hastie_10_2", n_samples=2000)
    (x, y), (u, v) = _halves(x.double(), (y > 0).long())
    model = mlp((10, 64, 2)).double()
    optimizer = torch.optim.RAdam(model.parameters(), lr=5e-3)
    c.train(watch, model, optimizer, c.epochs(14, 50, x, y), c.classify(model))
    return c.share_right(model, u, v)


@setup(0.8)
def rings_of_quantiles(watch: Watch) -> float:
    """Classes as shells around a centre, a radial-basis network, plateaus lower the rate."""
    x, y = _made("make_gaussian_quantiles", n_samples=1500, n_features=3, n_classes=4)
    (x, y), (u, v) = _halves(x, y)

    class Radial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres, self.head = nn.Parameter(torch.randn(48, 3)), nn.Linear(48, 4)

        def forward(self, points: torch.Tensor) -> torch.Tensor:
            return self.head((-torch.cdist(points, self.centres).square()).exp())

    model = Radial()
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr=0.03), model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    for _ in range(25):
        total = 0.0
        for a, b in c.epochs(1, 64, x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)
            total += float(loss.detach())
        scheduler.step(total)
    return c.share_right(model, u, v)


@setup(0.75)
def several_topics(watch: Watch) -> float:
    """Several labels a document from its counts of words, with a weight for those that are rare."""
    x, y = _made("make_multilabel_classification", n_samples=1500, n_features=30, n_classes=6)
    (x, y), (u, v) = _halves(x, y.float())
    model = mlp((30, 64, 6), nn.Mish)
    rare = (1.0 - y.mean(0)) / y.mean(0).clamp(min=0.05)
    c.train(
        watch,
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        c.epochs(10, 64, x, y),
        lambda a, b: F.binary_cross_entropy_with_logits(model(a), b, pos_weight=rare),
        max_norm=1.0,
    )
    return float(((model(u) > 0) == (v > 0.5)).float().mean())


@setup(0.8)
def one_in_forty(watch: Watch) -> float:
    """A class of one in forty, drawn as often as the other; quality is the mean of both classes' recall."""
    x, y = _made("make_classification", n_samples=4000, n_informative=6, weights=[0.975], flip_y=0, class_sep=1.5)
    (x, y), (u, v) = _halves(x, y)
    model = mlp((20, 32, 2))
    weights = torch.where(y == 1, 39.0, 1.0)
    batches = ((x[at], y[at]) for at in (torch.multinomial(weights, 64) for _ in range(250)))
    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=3e-3), batches, c.classify(model), max_norm=5.0)
    found = model(u).argmax(1)
    return float(torch.stack([(found[v == k] == k).float().mean() for k in (0, 1)]).mean())


@setup(0.7)
def gamma_claims(watch: Watch) -> float:
    """Positive amounts under a gamma likelihood with a log link; quality is R² of the logarithm of the mean."""
    dice = dice_of(500)
    x = torch.randn(1500, 5, generator=dice)
    mean = (1.0 + 0.7 * x[:, 0] - 0.5 * x[:, 1] * x[:, 2]).exp()
    y = mean * torch.distributions.Gamma(3.0, 3.0).sample((1500,))
    model = mlp((5, 48, 1), nn.SiLU)

    def deviance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        eta = model(a)[:, 0]
        return (eta + b * (-eta).exp()).mean()

    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    c.train(watch, model, optimizer, c.epochs(20, 50, x[:1000], y[:1000]), deviance, max_norm=1.0)
    return c.r_squared(model(x[1000:])[:, 0], mean[1000:].log())


@setup(0.7)
def angles(watch: Watch) -> float:
    """Directions under a von Mises likelihood: density above one, loss below zero."""
    dice = dice_of(501)
    x = torch.randn(1200, 3, generator=dice)
    true = 1.2 * torch.tanh(x[:, 0]) + 0.8 * x[:, 1].sin()
    y = true + 0.1 * torch.randn(1200, generator=dice)
    model = mlp((3, 48, 2), nn.Tanh)

    def likelihood(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        where, sharpness = model(a).unbind(1)
        return -torch.distributions.VonMises(where, F.softplus(sharpness) + 0.1).log_prob(b).mean()

    c.train(watch, model, torch.optim.Adam(model.parameters(), lr=5e-3), c.epochs(12, 32, x[:900], y[:900]), likelihood)
    return c.r_squared(model(x[900:])[:, 0], true[900:])


@setup(0.75)
def ordered_grades(watch: Watch) -> float:
    """Cumulative odds with sorted thresholds for five ordered grades."""
    dice = dice_of(502)
    x = torch.randn(1500, 6, generator=dice)
    y = torch.bucketize(x[:, 0] + 0.7 * x[:, 1] * x[:, 2].tanh(), torch.tensor([-1.2, -0.4, 0.4, 1.2]))

    class Grades(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gaps = mlp((6, 48, 1)), nn.Parameter(torch.zeros(4))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return self.body(a) - (F.softplus(self.gaps).cumsum(0) - 1.5)

    model = Grades()
    above = torch.arange(4)
    c.train(
        watch,
        model,
        torch.optim.RMSprop(model.parameters(), lr=3e-3),
        c.epochs(16, 32, x[:1100], y[:1100]),
        lambda a, b: F.binary_cross_entropy_with_logits(model(a), (b[:, None] > above).float(), reduction="sum"),
    )
    return float((((model(x[1100:]) > 0).sum(1)) == y[1100:]).float().mean())


@setup(0.85)
def soft_tree(watch: Watch) -> float:
    """A decision tree of depth four whose turns are sigmoids; a mixture of its leaves."""
    (x, y), (u, v) = data.table("wine")

    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turns, self.leaves = nn.Linear(13, 15), nn.Parameter(0.1 * torch.randn(16, 3))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            right, reach, first = self.turns(a).sigmoid(), a.new_ones(len(a), 1), 0
            for depth in range(4):
                at = right[:, first : first + 2**depth]
                reach = torch.stack([reach * (1.0 - at), reach * at], 2).flatten(1)
                first += 2**depth
            return (reach @ self.leaves.softmax(1)).clamp(min=1e-7).log()

    model = Tree()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    c.train(watch, model, optimizer, c.epochs(40, 32, x, y), lambda a, b: F.nll_loss(model(a), b))
    return c.share_right(model, u, v)


@setup(0.85)
def process_regression(watch: Watch) -> float:
    """Three hyperparameters of a Gaussian process by its marginal likelihood, by quasi-Newton steps."""
    dice = dice_of(503)
    x = torch.linspace(-3, 3, 60)[:, None]
    clean = (2.0 * x).sin()[:, 0]
    y = clean + 0.15 * torch.randn(60, generator=dice)

    class Process(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logs = nn.Parameter(torch.tensor([-0.5, 0.0, -2.0]))

        def covariance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            length, size, _ = self.logs.exp()
            return size * (-0.5 * torch.cdist(a, b).square() / length.square()).exp()

    model, chosen = Process(), torch.arange(0, 60, 2)
    optimizer = watch.wrap(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3), model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        k = model.covariance(x[chosen], x[chosen]) + (model.logs[2].exp() + 1e-4) * torch.eye(30)
        loss = -torch.distributions.MultivariateNormal(torch.zeros(30), k).log_prob(y[chosen])
        loss.backward()
        return loss

    for _ in range(30):
        watch.observe(optimizer, loss=optimizer.step(closure))
    with torch.no_grad():
        k = model.covariance(x[chosen], x[chosen]) + model.logs[2].exp() * torch.eye(30)
        return c.r_squared(model.covariance(x, x[chosen]) @ torch.linalg.solve(k, y[chosen]), clean)


@setup(0.8)
def random_features(watch: Watch) -> float:
    """Ridge regression on random cosines, one pass of small steps in the order of a stream, momentum 0.99."""
    x, y = _made("make_friedman2", n_samples=3000)
    (x, y), (u, v) = _halves(x, (y.float() / 1000.0)[:, None])

    class Cosines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("axes", torch.randn(4, 256) * 0.5)
            self.register_buffer("phases", torch.rand(256) * 6.28)
            self.head = nn.Linear(256, 1)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return self.head((a @ self.axes + self.phases).cos() * math.sqrt(2.0 / 256))

    model = Cosines()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.99, nesterov=True)
    c.train(watch, model, optimizer, c.epochs(4, 16, x, y), lambda a, b: F.mse_loss(model(a), b))
    return c.r_squared(model(u), v)


@setup(0.8)
def additive_networks(watch: Watch) -> float:
    """A small network for each feature, summed, with a penalty on what each says; summed squares as loss."""
    (x, y), (u, v) = data.friedman(0.2)

    class Additive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(mlp((1, 16, 1), nn.ELU) for _ in range(10))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.cat([part(a[:, i : i + 1]) for i, part in enumerate(self.parts)], 1)

    model = Additive()

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        said = model(a)
        return F.mse_loss(said.sum(1, keepdim=True), b, reduction="sum") + 1e-2 * said.square().sum()

    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=5e-3),
        c.epochs(12, 64, x, y),
        loss,
        val_loss=lambda: loss(u, v),
    )
    return c.r_squared(model(u).sum(1, keepdim=True), v)


@setup(0.9)
def sparse_linear(watch: Watch) -> float:
    """Four of two hundred features matter: after each step all weights move towards zero and stop there."""
    dice = dice_of(504)
    x = torch.randn(600, 200, generator=dice)
    y = x[:, :4] @ torch.tensor([2.0, -1.5, 1.0, 0.8]) + 0.1 * torch.randn(600, generator=dice)
    model = nn.Linear(200, 1, bias=False)

    @torch.no_grad()
    def shrink() -> None:
        model.weight.copy_(F.softshrink(model.weight, 0.05 * 0.1))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = c.whole(150, x[:400], y[:400])
    c.train(watch, model, optimizer, batches, lambda a, b: F.mse_loss(model(a)[:, 0], b), after=shrink)
    return c.r_squared(model(x[400:])[:, 0], y[400:])
