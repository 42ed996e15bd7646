"""Tables and points in the plane: classification and regression of several kinds."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case, sound_cases
from ..loop import Plan, Tensors
from ..qualities import accuracy, explained, r_squared, sign_accuracy

_cases = functools.partial(sound_cases, __name__)


def class_loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def squared_loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Mean squared error."""
    return F.mse_loss(model(batch[0]), batch[1])


def _plan(split: data.Split, model: nn.Module, seed: int, loss, quality, least: float, **options) -> Plan:
    return Plan(model, loss, *split, quality, least, seed=seed, **options)


def cancer(seed: int) -> Plan:
    torch.manual_seed(seed)
    model = nets.mlp((30, 16, 2))
    return _plan(data.table("breast_cancer"), model, seed, class_loss, accuracy, 0.93, lr=5e-3, num_epochs=15)


def cancer_logistic(seed: int) -> Plan:
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1].float())

    split = data.table("breast_cancer")
    return _plan(split, nn.Linear(30, 1), seed, loss, sign_accuracy(), 0.93, lr=1e-2, num_epochs=25)


def cancer_hinge(seed: int) -> Plan:
    """A linear support vector machine: the hinge's gradient is really zero for most samples in the end."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        sides = 2.0 * batch[1].float() - 1.0
        return F.relu(1.0 - sides * model(batch[0]).squeeze(1)).mean()

    split = data.table("breast_cancer")
    return _plan(split, nn.Linear(30, 1), seed, loss, sign_accuracy(), 0.92, lr=1e-2, num_epochs=25)


def wine(seed: int) -> Plan:
    torch.manual_seed(seed)
    model = nets.mlp((13, 24, 3), nn.Tanh)
    return _plan(data.table("wine"), model, seed, class_loss, accuracy, 0.92, lr=1e-2, num_epochs=40, batch_size=16)


def iris(seed: int) -> Plan:
    torch.manual_seed(seed)
    plan = _plan(data.table("iris"), nn.Linear(4, 3), seed, class_loss, accuracy, 0.85, lr=3e-2, num_epochs=60)
    plan.batch_size = 16
    return plan


def diabetes(seed: int) -> Plan:
    """A linear model of targets from 25 to 346, as they are."""
    torch.manual_seed(seed)
    split = data.table("diabetes")
    return _plan(split, nn.Linear(10, 1), seed, squared_loss, r_squared, 0.35, lr=3.0, num_epochs=40)


def friedman(seed: int, scale: float = 1.0, lr: float = 1e-2) -> Plan:
    torch.manual_seed(seed)
    split = data.friedman(scale)
    return _plan(split, nets.mlp((10, 48, 48, 1)), seed, squared_loss, r_squared, 0.8, lr=lr, num_epochs=14)


def friedman_small_targets(seed: int) -> Plan:
    """The same with targets a thousandth as large: losses around 1e-6."""
    plan = friedman(seed, 1e-3, 3e-3)
    plan.num_epochs = 20
    return plan


def friedman_huber(seed: int) -> Plan:
    plan = friedman(seed)
    plan.loss = lambda model, batch: F.huber_loss(model(batch[0]), batch[1])
    return plan


def friedman_batch_norm(seed: int) -> Plan:
    plan = friedman(seed)
    torch.manual_seed(seed)
    plan.model = nets.mlp((10, 48, 48, 1), nn.ReLU, nn.BatchNorm1d)
    return plan


def moons(seed: int) -> Plan:
    torch.manual_seed(seed)
    model = nets.mlp((2, 24, 24, 2), nn.Tanh)
    return _plan(data.moons(), model, seed, class_loss, accuracy, 0.95, lr=1e-2, num_epochs=15)


def circles(seed: int) -> Plan:
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1].float())

    model = nets.mlp((2, 16, 16, 1))
    return _plan(data.circle(), model, seed, loss, sign_accuracy(), 0.75, lr=1e-2, num_epochs=20)


def blobs_hinge(seed: int) -> Plan:
    """A hinge of several classes on clouds that lie well apart: nothing is left to learn in the end."""
    torch.manual_seed(seed)
    features, labels = data.blob()[0][0], None
    dice = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 4, (900,), generator=dice)
    centres = 3.0 * torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    features = centres[labels] + 0.8 * torch.randn(900, 2, generator=dice)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.multi_margin_loss(model(batch[0]), batch[1])

    split = data.parted(features, labels)
    return _plan(split, nets.mlp((2, 16, 4)), seed, loss, accuracy, 0.97, lr=5e-3, num_epochs=20)


def poisson(seed: int) -> Plan:
    """Counts: the loss is a likelihood and goes below zero."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.poisson_nll_loss(model(batch[0]), batch[1])

    def quality(model: nn.Module, held_out: Tensors) -> float:
        with torch.no_grad():
            return explained(model(held_out[0]).exp(), held_out[1])

    split = data.counts()
    return _plan(split, nets.mlp((6, 24, 1)), seed, loss, quality, 0.35, lr=5e-3, num_epochs=15)


class MeanAndSpread(nn.Module):
    """A mean and a variance [B, 2] for each x."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nets.mlp((1, 32, 32, 2), nn.Tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.layers(x).chunk(2, -1)
        return torch.cat([mean, F.softplus(spread) + 1e-3], -1)


def gaussian(seed: int) -> Plan:
    """A mean and a variance for each x: the loss goes far below zero."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        mean, variance = model(batch[0]).chunk(2, -1)
        return F.gaussian_nll_loss(mean, batch[1], variance)

    def quality(model: nn.Module, held_out: Tensors) -> float:
        with torch.no_grad():
            return explained(model(held_out[0])[:, :1], held_out[1])

    return _plan(data.noisy_sine(), MeanAndSpread(), seed, loss, quality, 0.9, lr=5e-3, num_epochs=20)


def quantiles(seed: int) -> Plan:
    """The tenth, half and nine tenths: what lies below each must be that share."""
    torch.manual_seed(seed)
    shares = torch.tensor([0.1, 0.5, 0.9])

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        error = batch[1] - model(batch[0])
        return torch.maximum(shares * error, (shares - 1.0) * error).mean()

    def quality(model: nn.Module, held_out: Tensors) -> float:
        with torch.no_grad():
            return 1.0 - float(((held_out[1] < model(held_out[0])).float().mean(0) - shares).abs().max())

    model = nets.mlp((1, 32, 3), nn.Tanh)
    return _plan(data.noisy_sine(), model, seed, loss, quality, 0.88, lr=1e-2, num_epochs=20)


class TwoHeads(nn.Module):
    """A number and a yes or no [B, 2] from one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
        self.number, self.answer = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.trunk(x)
        return torch.cat([self.number(seen), self.answer(seen)], 1)


def two_tasks(seed: int) -> Plan:
    """Regression, and whether the value lies above its middle."""
    torch.manual_seed(seed)
    (x, y), (held_out, wanted) = data.friedman(0.2)
    middle = float(y.median())

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        number, answer = model(batch[0]).chunk(2, 1)
        above = (batch[1] > middle).float()
        return F.mse_loss(number, batch[1]) + 0.5 * F.binary_cross_entropy_with_logits(answer, above)

    def quality(model: nn.Module, data: Tensors) -> float:
        with torch.no_grad():
            number, answer = model(data[0]).chunk(2, 1)
        right = ((answer > 0) == (data[1] > middle)).float().mean()
        return min(explained(number, data[1]), float(right))

    return _plan(((x, y), (held_out, wanted)), TwoHeads(), seed, loss, quality, 0.8, lr=5e-3, num_epochs=14)


def roll_autoencoder(seed: int) -> Plan:
    """A rolled-up sheet through a bottleneck of two."""
    torch.manual_seed(seed)
    model = nn.Sequential(nets.mlp((3, 32, 2), nn.Tanh), nets.mlp((2, 48, 48, 3), nn.Tanh))

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), batch[0])

    def quality(model: nn.Module, held_out: Tensors) -> float:
        with torch.no_grad():
            return explained(model(held_out[0]), held_out[0])

    return _plan(data.swiss_roll(), model, seed, loss, quality, 0.75, lr=5e-3, num_epochs=15)


def density(seed: int) -> Plan:
    """A normalising flow on the moons: minus the mean log-density."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return -model(batch[0]).mean()

    def quality(model: nn.Module, held_out: Tensors) -> float:
        with torch.no_grad():
            return float(model(held_out[0]).mean()) + 2.84  # that of a normal density of the same spread

    return _plan(data.moons(), nets.Flow(), seed, loss, quality, 0.3, lr=3e-3, num_epochs=12)


_CLIPPED = {"max_norm": 1.0}
CASES: tuple[Case, ...] = (
    *_cases(
        "cancer-mlp",
        "breast cancer, one hidden layer",
        cancer,
        adam={},
        sgd_momentum={"optimizer": o.MOMENTUM, "lr": 0.02},
        adadelta={"optimizer": o.ADADELTA, "lr": 1.0},
        rmsprop_clipped={"optimizer": o.RMSPROP, "lr": 2e-3, **_CLIPPED},
    ),
    *_cases(
        "cancer-logistic",
        "breast cancer, logistic regression",
        cancer_logistic,
        adam={},
        sgd={"optimizer": o.SGD, "lr": 0.1},
        lbfgs={"optimizer": o.LBFGS, "lr": 0.3, "batch_size": 398},
    ),
    *_cases(
        "cancer-hinge",
        "breast cancer, linear support vector machine",
        cancer_hinge,
        sgd={"optimizer": o.SGD, "lr": 0.05},
        adam={},
        cosine={"schedule": o.cosine, "lr": 2e-2},
    ),
    *_cases(
        "wine-tanh",
        "wine, one hidden tanh layer",
        wine,
        adamw={"optimizer": o.ADAMW},
        nesterov={"optimizer": o.NESTEROV, "lr": 0.02},
        sign={"optimizer": o.SIGN, "lr": 3e-3},
    ),
    *_cases(
        "iris-softmax",
        "iris, softmax regression",
        iris,
        adam={},
        adagrad={"optimizer": o.ADAGRAD, "lr": 0.3},
        sgd={"optimizer": o.SGD, "lr": 0.1},
    ),
    *_cases(
        "diabetes-linear",
        "diabetes, targets in the hundreds",
        diabetes,
        adam={},
        sgd={"optimizer": o.SGD, "lr": 0.02},
        adam_clipped={"lr": 3.0, **_CLIPPED},
    ),
    *_cases(
        "friedman-mlp",
        "regression of a known function",
        friedman,
        adam={},
        radam={"optimizer": o.RADAM},
        one_cycle={"schedule": o.one_cycle, "lr": 2e-2, "max_norm": 5.0},
    ),
    *_cases(
        "friedman-small-targets",
        "targets a thousandth as large",
        friedman_small_targets,
        adam={},
        halving={"schedule": o.halving, "lr": 6e-3},
    ),
    *_cases("friedman-huber", "Huber loss", friedman_huber, adam={}, nadam={"optimizer": o.NADAM}),
    *_cases(
        "friedman-batch-norm",
        "BatchNorm between",
        friedman_batch_norm,
        adam={},
        momentum={"optimizer": o.MOMENTUM, "lr": 0.01},
        adamw_cosine={"optimizer": o.ADAMW, "schedule": o.cosine},
    ),
    *_cases(
        "moons-tanh",
        "moons, two tanh layers",
        moons,
        adam={},
        lbfgs={"optimizer": o.LBFGS, "lr": 0.3, "batch_size": 840, "num_epochs": 40},
        momentum={"optimizer": o.MOMENTUM, "lr": 0.1},
    ),
    *_cases(
        "circles-relu",
        "circles, one output",
        circles,
        adam={},
        adam_clipped={"max_norm": 0.1},
        nadam={"optimizer": o.NADAM},
    ),
    *_cases(
        "blobs-hinge",
        "clouds far apart, hinge of four classes",
        blobs_hinge,
        adam={},
        momentum={"optimizer": o.MOMENTUM, "lr": 0.02},
        clipped={**_CLIPPED},
    ),
    *_cases(
        "counts-poisson",
        "counts, Poisson likelihood",
        poisson,
        adam={},
        adamw_warm={"optimizer": o.ADAMW, "schedule": o.warm_cosine},
    ),
    *_cases(
        "sine-gaussian",
        "mean and variance, Gaussian likelihood",
        gaussian,
        adam={},
        adam_clipped={**_CLIPPED},
        rmsprop={"optimizer": o.RMSPROP, "lr": 2e-3},
    ),
    *_cases(
        "sine-quantiles",
        "three quantiles, pinball loss",
        quantiles,
        adam={},
        momentum={"optimizer": o.MOMENTUM, "lr": 0.1},
    ),
    *_cases("friedman-two-tasks", "two heads, two losses", two_tasks, adam={}, restarts={"schedule": o.restarts}),
    *_cases(
        "roll-autoencoder",
        "autoencoder of points in space",
        roll_autoencoder,
        adam={},
        adamw={"optimizer": o.ADAMW, "lr": 1e-2},
    ),
    *_cases("moons-flow", "normalising flow", density, adam={}, adam_clipped={**_CLIPPED}),
)
