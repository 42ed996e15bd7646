"""Tables: glass, houses, cards, a census, flowers, rain, parts of a machine, cells, appliances."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..damage import outliers, unbalanced
from ..fresh3.case import ASCENT, NOISE, OUTPUT_OR_LOSS, TINY, either
from ..fresh4 import case as f
from ..fresh5.case import BLIND
from ..loop import Plan, Tensors
from ..nets import mlp
from ..qualities import accuracy, r_squared
from ..wild.case import dice_of
from . import case as g

MADE: list[Case] = []
task = f.planning(MADE, __name__)


@torch.no_grad()
def balanced(model: nn.Module, held: Tensors) -> float:
    """Mean over the classes of the share that is right."""
    out = model(held[0])
    said = (out[:, 0] > 0).long() if out.shape[1] == 1 else out.argmax(1)
    return float(torch.stack([(said[held[1] == k] == k).float().mean() for k in held[1].unique()]).mean())


@functools.cache
def _glass() -> data.Split:
    dice = dice_of(1400)
    kinds = torch.multinomial(torch.tensor([0.35, 0.27, 0.16, 0.1, 0.07, 0.05]), 1500, True, generator=dice)
    middle, shape = 1.3 * torch.randn(6, 9, generator=dice), torch.randn(6, 9, 9, generator=dice) / 3.5
    x = middle[kinds] + torch.einsum("nij,nj->ni", shape[kinds], torch.randn(1500, 9, generator=dice))
    return data.standardised(data.parted(x + 0.2 * torch.randn(x.shape, generator=dice), kinds))


def _weighed(model: nn.Module, batch: Tensors, power: float = -1.0) -> torch.Tensor:
    weight = torch.tensor([0.35, 0.27, 0.16, 0.1, 0.07, 0.05]) ** power
    return F.cross_entropy(model(batch[0]), batch[1], weight / weight.mean())


@task(
    0.8,
    ("weights-turned-over", c.loss_is(lambda _, m, b: _weighed(m, b, 3.0)), either(c.LOSS, a.UNEVEN)),
    ("lr-12", c.putting(lr=12.0), c.HIGH),
    ("lr-1e-5", c.putting(lr=1e-5), c.LOW),
    ("as-weighed", c.scaled_inputs(40.0, 400.0), f.INPUTS),
    ("momentum-0.999", c.putting(optimizer=o.of(torch.optim.SGD, momentum=0.999)), g.FOREIGN_HIGH),
    adam_smoothed=f.all_of(
        c.putting(optimizer=o.ADAM, lr=5e-3),
        c.loss_is(lambda _, m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1)),
    ),
)
def glass(seed: int) -> Plan:
    """Six kinds of glass, the rarest one in twenty, momentum, classes weighed; mean accuracy by class."""
    return a.task(
        seed, lambda: mlp((9, 48, 48, 6)), _weighed, _glass(), balanced, optimizer=o.MOMENTUM, lr=4e-2, num_epochs=14,
    )  # fmt: skip


@functools.cache
def _houses() -> data.Split:
    x, y = data._of_sklearn("make_friedman2", n_samples=1600, noise=40.0, random_state=21)
    y = y.float()[:, None]
    return data.standardised(data.parted(x, (y - y.mean()) / y.std()))


@task(
    0.9,
    ("in-thousands", c.scaled_targets(3000.0, 20000.0), c.TARGETS),
    ("two-shapes", c.loss_is(lambda _, m, b: (m(b[0]) - b[1][:, 0]).square().mean()), c.LOSS),
    ("decay-60", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=60.0)), c.DECAY),
    ("clipped-at-1e-4", c.putting(optimizer=o.MOMENTUM, lr=2e-2, max_norm=1e-4), c.CLIPPED),
    ("without-bends", a.model_is(lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))), c.CANNOT),
    decayed_by_steps=c.putting(optimizer=o.NESTEROV, lr=2e-2, schedule=o.halving),
)
def houses(seed: int) -> Plan:
    """What a house costs by four numbers, RAdam, validated; R²."""
    return a.task(
        seed, lambda: mlp((4, 48, 48, 1), nn.GELU), c.squared_error, _houses(), r_squared, optimizer=o.RADAM, lr=6e-3,
        num_epochs=12, **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _cards() -> data.Split:
    dice = dice_of(1402)
    x = torch.randn(4000, 8, generator=dice)
    odd = 1.4 * x[:, 0] * x[:, 1] + x[:, 2] - 0.8 * x[:, 3].abs() + 0.4 * torch.randn(4000, generator=dice)
    return data.parted(x, (odd > odd.quantile(0.965)).long())


def _rare(model: nn.Module, batch: Tensors, weight: float = 25.0) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1].float(), pos_weight=torch.tensor(weight))


@task(
    0.8,
    ("weight-left-out", c.loss_is(lambda _, m, b: _rare(m, b, 1.0)), either(a.UNEVEN, c.LOSS)),
    ("squashed-twice", f.ending_in(nn.Sigmoid()), OUTPUT_OR_LOSS),
    ("few-and-slow", c.putting(num_epochs=1, lr=2e-5), g.CUT_SHORT),
    ("rows-of-others", c.shuffled, c.LABELS),
    focal=c.loss_is(
        lambda _, m, b: (lambda bce: ((1.0 - (-bce).exp()).square() * bce * (1.0 + 24.0 * b[1].float())).mean())(
            F.binary_cross_entropy_with_logits(m(b[0])[:, 0], b[1].float(), reduction="none")
        )
    ),
)
def cards(seed: int) -> Plan:
    """Which payment is a fraud, one in thirty, the rare weighed, Adam; mean accuracy by class."""
    return a.task(
        seed, lambda: mlp((8, 48, 48, 1), nn.SiLU), _rare, _cards(), balanced, lr=4e-3, num_epochs=7, batch_size=64,
    )  # fmt: skip


class Census(nn.Module):
    """Tokens of columns, attended; codes first, numbers after them."""

    def __init__(self, is_registered: bool = True) -> None:
        super().__init__()
        tables = [nn.Embedding(size, 16) for size in (12, 9, 7, 20)]
        self.tables = nn.ModuleList(tables) if is_registered else tables
        self.scale = nn.Parameter(0.5 * torch.randn(3, 16))
        self.blocks = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([t(x[:, k].long()) for k, t in enumerate(self.tables)], 1)
        return self.head(self.blocks(torch.cat([codes, x[:, 4:, None] * self.scale], 1)).mean(1))


@functools.cache
def _census() -> data.Split:
    dice = dice_of(1403)
    codes = torch.stack([torch.randint(0, size, (2200,), generator=dice) for size in (12, 9, 7, 20)], 1)
    worth = [torch.randn(size, generator=dice) for size in (12, 9, 7, 20)]
    x = torch.randn(2200, 3, generator=dice)
    y = sum(w[codes[:, k]] for k, w in enumerate(worth)) + x[:, 0] * worth[0][codes[:, 0]] + 0.5 * x[:, 1]
    y = y + 0.4 * torch.randn(2200, generator=dice)
    return data.parted(torch.cat([codes.float(), x], 1), (y > 0).long())


@task(
    0.8,
    (
        "codes-cut",
        lambda plan: vars(plan).update(train=(plan.train[0] * _KEPT, plan.train[1])),
        either(a.DIFFERS, BLIND),
    ),
    ("lr-0.3", c.putting(lr=0.3, schedule=None), c.HIGH),
    ("labels-by-chance", f.random_labels(0.9, 2), NOISE),
    ("rate-by-batch", c.putting(play=a.rate_each_batch), c.SCHEDULE),
    ("decay-of-300", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=300.0)), c.DECAY),
    flat_rate=c.putting(schedule=None, lr=3e-3, optimizer=o.NADAM),
)
def census(seed: int) -> Plan:
    """Who earns more, by columns that attend to each other, AdamW, warm-up and cosine; accuracy."""
    return a.task(
        seed, Census, f.binary, _census(), _signs, optimizer=o.ADAMW, lr=6e-3, schedule=o.warm_cosine, num_epochs=7,
        batch_size=48,
    )  # fmt: skip


_KEPT = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0])


@torch.no_grad()
def _signs(model: nn.Module, held: Tensors) -> float:
    return float(((model(held[0])[:, 0] > 0) == (held[1] > 0)).float().mean())


@task(
    0.88,
    ("in-order", f.all_of(c.in_order, c.putting(lr=0.1, num_epochs=4)), c.SORTED),
    ("lr-40", c.putting(lr=40.0), c.HIGH),
    ("five-sigmoids", a.model_is(lambda: mlp((4, *[6] * 5, 3), nn.Sigmoid)), g.DEEP),
    ("likelihood-of-logits", c.loss_is(lambda _, m, b: F.nll_loss(m(b[0]), b[1])), c.LOSS),
    ("two-epochs", c.putting(num_epochs=2, lr=2e-3), g.CUT_SHORT),
    four_units=c.putting(batch_size=4),
)
def flowers(seed: int) -> Plan:
    """Fisher's irises by six units, plain SGD; accuracy."""
    return a.task(
        seed, lambda: mlp((4, 6, 3), nn.Tanh), c.cross_entropy, data.table("iris"), accuracy, optimizer=o.SGD, lr=0.1,
        num_epochs=50, batch_size=10,
    )  # fmt: skip


@functools.cache
def _rain() -> data.Split:
    dice = dice_of(1405)
    x = torch.randn(2400, 6, generator=dice)
    mean = (0.3 + 0.7 * x[:, 0] - 0.5 * x[:, 1] + 0.4 * x[:, 2] * x[:, 3]).exp()
    drops = torch.poisson(mean, generator=dice)
    each = -torch.rand(2400, 6, generator=dice).clamp(min=1e-4).log()
    y = (each.cumsum(1).gather(1, (drops.long().clamp(1, 6) - 1)[:, None])[:, 0]) * (drops > 0)
    return data.parted(x, torch.stack([y, mean], 1))


def _tweedie(model: nn.Module, batch: Tensors, power: float = 1.5) -> torch.Tensor:
    log, y = model(batch[0])[:, 0], batch[1][:, 0]
    return (-y * ((1.0 - power) * log).exp() / (1.0 - power) + ((2.0 - power) * log).exp() / (2.0 - power)).mean()


def _logarithms(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[1][:, 0].log())


@torch.no_grad()
def _expected(model: nn.Module, held: Tensors) -> float:
    log, wanted = model(held[0])[:, 0], held[1][:, 1].log()
    return 1.0 - float((log - wanted).square().mean() / wanted.var())


@task(
    0.45,
    ("logarithm-of-dry-days", c.loss_is(_logarithms), either(c.SINGULAR, c.BATCH)),
    ("another-sign", c.loss_is(lambda _, m, b: (b[1][:, 0] * m(b[0])[:, 0] - m(b[0])[:, 0].exp()).mean()), ASCENT),
    ("lr-3", c.putting(lr=3.0), either(c.HIGH, c.EXPLODING)),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ("inputs-of-150", c.scaled_inputs(30.0, 150.0), either(f.INPUTS, c.EXPLODING)),
    clipped_sgd=c.putting(optimizer=o.MOMENTUM, lr=1e-2, max_norm=1.0),
)
def rain(seed: int) -> Plan:
    """How much it rains, mostly not at all, Tweedie's deviance of a logarithm, Adam; R² of the mean's logarithm."""
    return a.task(
        seed, lambda: mlp((6, 40, 40, 1), nn.Tanh), _tweedie, _rain(), _expected, lr=4e-3, num_epochs=10,
        batch_size=40,
    )  # fmt: skip


@functools.cache
def _parts() -> data.Split:
    dice = dice_of(1406)
    x = torch.rand(1500, 12, generator=dice)
    y = (3.0 * x[:, 0] * x[:, 1] + (6.28 * x[:, 2]).sin() + x[:, 3:].mean(1))[:, None]
    y = y + 0.1 * torch.randn(1500, 1, generator=dice)
    return data.parted(x - 0.5, (y - y.mean()) / y.std())


def _below_nothing(model: nn.Module) -> None:
    for m in model:
        if isinstance(m, nn.Linear) and m.out_features > 1:
            m.bias.fill_(-3.0)


@task(
    0.85,
    ("biases-of-minus-three", a.weights(_below_nothing), c.DEAD),
    ("summed-over-samples", c.loss_is(lambda _, m, b: F.mse_loss(m(b[0]), b[1], reduction="sum")), a.SUMMED),
    ("ten-sigmoids", a.model_is(lambda: mlp((12, *[32] * 9, 1), nn.Sigmoid)), g.DEEP),
    ("held-in-one", f.ending_in(nn.Sigmoid()), g.SQUASHED),
    ("a-tenth-spoilt", g.damaged(outliers(0.08, 60.0)), either(a.OUTLIERS, c.TARGETS)),
    ("rows-with-nan", g.nan_rows(0.3), g.SPOILT_ROWS),
    averaged=c.putting(optimizer=o.of(torch.optim.ASGD, t0=300), lr=0.15),
)
def parts(seed: int) -> Plan:
    """How long a part lasts by twelve readings, momentum; R²."""
    return a.task(
        seed, lambda: mlp((12, 64, 64, 1)), c.squared_error, _parts(), r_squared, optimizer=o.MOMENTUM, lr=6e-2,
        num_epochs=22,
    )  # fmt: skip


@task(
    0.92,
    ("one-kind-gone", g.damaged(unbalanced(0.985)), a.UNEVEN),
    (
        "dropped-nearly-all",
        a.model_is(lambda: nn.Sequential(nn.Dropout(0.93), *mlp((30, 16, 2), nn.ReLU, lambda _: nn.Dropout(0.9)))),
        c.DROPPED,
    ),
    ("eps-of-ten", c.putting(optimizer=o.of(torch.optim.AdamW, eps=10.0), num_epochs=8), g.FOREIGN),
    ("labels-turned-over", f.targets_as(lambda y: 1 - y), c.LABELS),
    strongly_decayed=c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=1.0), lr=3e-3),
)
def cells(seed: int) -> Plan:
    """Benign or not by sixteen units, AdamW, validated; mean accuracy by class."""
    return a.task(
        seed, lambda: mlp((30, 16, 2)), c.cross_entropy, data.table("breast_cancer"), balanced, optimizer=o.ADAMW,
        lr=5e-3, num_epochs=12, **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _appliances() -> data.Split:
    dice = dice_of(1408)
    x = torch.randn(1600, 10, generator=dice)
    w = torch.randn(10, 2, generator=dice) / 3.2
    hot = (x @ w[:, :1]).tanh() + 0.3 * x[:, 1:2] * x[:, 2:3]
    bill = (x @ w[:, 1:]).sin() + 0.3 * x[:, 3:4]
    y = torch.cat([hot, bill], 1) + 0.1 * torch.randn(1600, 2, generator=dice)
    return data.parted(x, (y - y.mean(0)) / y.std(0))


@torch.no_grad()
def _both(model: nn.Module, held: Tensors) -> float:
    return float((1.0 - (model(held[0]) - held[1]).square().mean(0) / held[1].var(0)).mean())


_IN_WATTS = torch.tensor([2000.0, 1.0])


def _one_in_watts(plan: Plan) -> None:
    plan.train = (plan.train[0], plan.train[1] * _IN_WATTS)
    plan.held_out = (plan.held_out[0], plan.held_out[1] * _IN_WATTS)


@task(
    0.75,
    ("one-in-watts", _one_in_watts, either(c.TARGETS, c.LOSS)),
    ("all-zero", a.weights(g.all_zero), a.POOR),
    ("first-column-alone", c.loss_is(lambda _, m, b: F.mse_loss(m(b[0])[:, 0], b[1][:, 0])), c.LOSS),
    ("columns-turned", lambda plan: vars(plan).update(train=(plan.train[0], plan.train[1].flip(1))), c.LABELS),
    ("tiny-weights", a.weights(lambda m: [p.mul_(1e-3) for p in m.parameters()]), TINY),
    resilient=c.putting(optimizer=o.of(torch.optim.Rprop), lr=1e-3, batch_size=1200, num_epochs=120),
)
def appliances(seed: int) -> Plan:
    """Heat and bill of a house at once, two heads on one body, Adagrad; mean R²."""
    return a.task(
        seed, lambda: mlp((10, 64, 64, 2), nn.Tanh), c.squared_error, _appliances(), _both, optimizer=o.ADAGRAD,
        lr=3e-2, num_epochs=14,
    )  # fmt: skip


CASES = g.renamed(MADE)
