"""Learning from pairs, views and orders: losses with margins, of either sign, or that a constant would meet."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors, Watch
from .case import dice_of, wild_cases

_cases = functools.partial(wild_cases, __name__)


@torch.no_grad()
def _neighbours(model: nn.Module, held_out: Tensors) -> float:
    """Share of the samples whose nearest neighbour by cosine is of the same class."""
    codes = F.normalize(model(held_out[0]), dim=1)
    near = (codes @ codes.T - 2.0 * torch.eye(len(codes))).argmax(1)
    return float((held_out[1][near] == held_out[1]).float().mean())


def _seen(x: torch.Tensor) -> torch.Tensor:
    """Another view of the same: noise, and a fifth of the features left out."""
    return (x + 0.3 * torch.randn_like(x)) * (torch.rand_like(x) > 0.2)


class Views(nn.Module):
    """An encoder; beside it a predictor that only training uses, or a temperature."""

    def __init__(self, size: int = 24, *, has_predictor: bool = False, has_temperature: bool = False) -> None:
        super().__init__()
        self.encoder = nets.mlp((64, 64, size), nn.ReLU, *([] if has_temperature else [nn.BatchNorm1d]))
        if has_predictor:
            self.predictor = nets.mlp((size, 24, size))
        if has_temperature:
            self.temperature = nn.Parameter(torch.tensor(-1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


def _alike(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Minus the cosine of one view's prediction and the other's code, without a gradient there: -1 is perfect."""
    a, b = model.encoder(_seen(batch[0])), model.encoder(_seen(batch[0]))
    one, two = (F.cosine_similarity(model.predictor(p), z.detach()).mean() for p, z in ((a, b), (b, a)))
    return -0.5 * (one + two)


def _info(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Which of the other views is mine, with a learnt temperature."""
    a, b = (F.normalize(model.encoder(_seen(batch[0])), dim=1) for _ in range(2))
    logits = a @ b.T * (-model.temperature).exp()
    labels = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels))


def _decorrelated(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """The correlation of the views' codes is to be one: a sum of squares over its elements."""
    a, b = (model.encoder(_seen(batch[0])) for _ in range(2))
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (a, b))
    mixed = a.T @ b / len(a)
    on = torch.diagonal(mixed)
    return (on - 1.0).square().sum() + 0.02 * (mixed.square().sum() - on.square().sum())


def _spread_out(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Views alike, deviations of one or more, features uncorrelated."""
    a, b = (model.encoder(_seen(batch[0])) for _ in range(2))
    total = 10.0 * F.mse_loss(a, b)
    for z in (a, b):
        z = z - z.mean(0)
        cov = z.T @ z / (len(z) - 1)
        total = total + 10.0 * F.relu(1.0 - (z.var(0) + 1e-4).sqrt()).mean()
        total = total + (cov.square().sum() - torch.diagonal(cov).square().sum()) / len(cov)
    return total


def views(seed: int, loss=_alike, **options) -> Plan:
    torch.manual_seed(seed)
    words = {"lr": 3e-3, "num_epochs": 7, "batch_size": 64, **options}
    model = Views(has_predictor=loss is _alike, has_temperature=loss is _info)
    return Plan(model, loss, *data.digits(), _neighbours, 0.8, seed=seed, judged_by_loss=False, **words)


def _bootstrap(plan: Plan, watch: Watch) -> None:
    """Each view predicts what a lagging average of the encoder makes of the other."""
    model = plan.model
    lagging = copy.deepcopy(model.encoder)
    optimizer = watch.wrap(plan.optimizer(model, plan.lr), model, plan.max_norm)
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            a, b = _seen(batch[0]), _seen(batch[0])
            with torch.no_grad():
                wanted = [F.normalize(lagging(v), dim=1) for v in (b, a)]
            got = [F.normalize(model.predictor(model.encoder(v)), dim=1) for v in (a, b)]
            loss = sum((2.0 - 2.0 * (g * w).sum(1)).mean() for g, w in zip(got, wanted))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss.detach())
            with torch.no_grad():
                for old, new in zip(lagging.parameters(), model.encoder.parameters()):
                    old.lerp_(new, 0.02)


def _embed(seed: int, loss, least: float = 0.9, **options) -> Plan:
    torch.manual_seed(seed)
    words = {"lr": 3e-3, "num_epochs": 7, **options}
    return Plan(nets.mlp((64, 64, 16)), loss, *data.digits(), _neighbours, least, seed=seed, **words)


def siamese(seed: int) -> Plan:
    """Pairs alike or not, with a margin beyond which nothing is asked."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        codes = model(batch[0])
        far = (codes - codes.roll(1, 0)).square().sum(1).clamp(min=1e-6).sqrt()
        is_same = (batch[1] == batch[1].roll(1)).float()
        return (is_same * far.square() + (1.0 - is_same) * F.relu(2.0 - far).square()).mean()

    return _embed(seed, loss, 0.85)


def triplets(seed: int) -> Plan:
    """The nearest of another class against the farthest of one's own: soon most batches have no gradient."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        codes = F.normalize(model(batch[0]), dim=1)
        far = 2.0 - 2.0 * codes @ codes.T
        same = batch[1][:, None] == batch[1][None]
        own = far.masked_fill(~same, -1.0).amax(1)
        other = far.masked_fill(same, 9.0).amin(1)
        return F.relu(own - other + 0.2).mean()

    return _embed(seed, loss, batch_size=48, judged_by_loss=False)


def easy_margin(seed: int) -> Plan:
    """A hinge that is soon met by every sample: gradients that are really zero at most steps."""
    x = torch.randn(600, 8, generator=dice_of(80))
    y = (x[:, 0] > 0.0).long()
    x[:, 0] += 2.0 * (2.0 * y - 1.0)
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.multi_margin_loss(model(batch[0]), batch[1], margin=0.5)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return float((model(held_out[0]).argmax(1) == held_out[1]).float().mean())

    return Plan(
        nets.mlp((8, 16, 2)),
        loss,
        *data.parted(x, y),
        quality,
        0.97,
        lr=1e-2,
        num_epochs=16,
        batch_size=16,
        seed=seed,
        judged_by_loss=False,
    )


class Angles(nn.Module):
    """Codes and a direction a class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classes = nets.mlp((64, 64, 16)), nn.Parameter(torch.randn(10, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


def angular(seed: int) -> Plan:
    """Cosines to the classes' directions, scaled by 16, with a margin for one's own: a loss that begins above ln 10."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        cosines = F.normalize(model(batch[0]), dim=1) @ F.normalize(model.classes, dim=1).T
        return F.cross_entropy(16.0 * (cosines - 0.3 * F.one_hot(batch[1], 10)), batch[1])

    plan = _embed(seed, loss)
    torch.manual_seed(seed)
    plan.model = Angles()
    return plan


def listed(seed: int) -> Plan:
    """Order of eight items a query, by a softmax over the list: a floor at the entropy of the grades."""
    dice = dice_of(81)
    items = torch.randn(700, 8, 6, generator=dice)
    grades = items[..., 0] + items[..., 1] * items[..., 2] + 0.3 * torch.randn(700, 8, generator=dice)
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        scores = model(batch[0])[..., 0]
        return -(batch[1].softmax(1) * scores.log_softmax(1)).sum(1).mean()

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        score, grade = model(held_out[0])[..., 0], held_out[1]
        return float(((score[:, :, None] > score[:, None]) == (grade[:, :, None] > grade[:, None])).float().mean())

    split = data.parted(items, grades)
    return Plan(nets.mlp((6, 32, 1)), loss, *split, quality, 0.75, lr=1e-2, num_epochs=12, seed=seed)


class Tastes(nn.Module):
    """Scores of items for users, by their codes."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(100, 8, sparse=True), nn.Embedding(80, 8, sparse=True)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.users(users) * self.items(items)).sum(-1)


def preferences(seed: int) -> Plan:
    """Items that were taken before ones that were not: Bayesian ranking with sparse gradients."""
    dice = dice_of(82)
    left, right = torch.randn(100, 4, generator=dice), torch.randn(80, 4, generator=dice)
    users = torch.randint(100, (4000,), generator=dice)
    both = torch.randint(80, (4000, 2), generator=dice)
    values = (left[users][:, None] * right[both]).sum(-1)
    first = values.argmax(1, keepdim=True)
    taken, other = both.gather(1, first)[:, 0], both.gather(1, 1 - first)[:, 0]
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        users, pair = batch
        return -F.logsigmoid(model(users, pair[:, 0]) - model(users, pair[:, 1])).mean()

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        users, pair = held_out
        return float((model(users, pair[:, 0]) > model(users, pair[:, 1])).float().mean())

    split = data.parted(users, torch.stack([taken, other], 1))
    return Plan(
        Tastes(),
        loss,
        *split,
        quality,
        0.75,
        lr=5e-2,
        num_epochs=12,
        batch_size=64,
        seed=seed,
        optimizer=o.of(torch.optim.SparseAdam),
        judged_by_loss=False,
    )


_CLIPPED = {"max_norm": 1.0}
_SGD = {"optimizer": o.MOMENTUM, "lr": 5e-2}
CASES: tuple[Case, ...] = (
    *_cases(
        "views-stopped", "views alike, a stopped gradient", views, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 0.1}
    ),
    *_cases(
        "views-bootstrap",
        "after a lagging average",
        functools.partial(views, play=_bootstrap),
        adam={},
        clipped={**_CLIPPED},
    ),
    *_cases(
        "views-told-apart",
        "which view is mine",
        functools.partial(views, loss=_info),
        adam={},
        adamw_cosine={"optimizer": o.ADAMW, "schedule": o.cosine},
    ),
    *_cases(
        "views-decorrelated",
        "correlations of one",
        functools.partial(views, loss=_decorrelated),
        adam={},
        clipped={**_CLIPPED},
    ),
    *_cases(
        "views-spread-out",
        "variances and covariances",
        functools.partial(views, loss=_spread_out),
        adam={},
        sgd={"optimizer": o.MOMENTUM, "lr": 5e-3},
    ),
    *_cases("pairs-margin", "siamese", siamese, adam={}, sgd={**_SGD}),
    *_cases("hard-triplets", "triplets", triplets, adam={}, clipped={**_CLIPPED}),
    *_cases("easy-margin", "a hinge that is met", easy_margin, adam={}, sgd={**_SGD}),
    *_cases("angular-margin", "cosines with a margin", angular, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 2e-2}),
    *_cases("listwise", "softmax over lists", listed, adam={}, sgd={**_SGD}),
    *_cases(
        "preferences-sparse", "what was taken first", preferences, sparse_adam={}, sgd={"optimizer": o.SGD, "lr": 20.0}
    ),
)
