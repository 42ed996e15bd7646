"""Tables: glass, houses, cards, flowers, cells."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import operators as f
from .. import optimizers as o
from .. import truths as t
from ..case import Case
from ..damage import outliers, unbalanced
from ..data import dice_of
from ..loop import Plan, Tensors
from ..nets import mlp
from ..qualities import accuracy, r_squared

CASES: list[Case] = []
task = f.planning(CASES, __name__)


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
    ("weights-turned-over", f.loss_is(lambda _, m, b: _weighed(m, b, 3.0)), t.either(t.LOSS, t.UNEVEN)),
    ("lr-12", f.putting(lr=12.0), t.HIGH),
    ("lr-1e-5", f.putting(lr=1e-5), t.LOW),
    ("as-weighed", f.scaled_inputs(40.0, 400.0), t.UNSCALED),
    ("summed-over-samples", f.loss_is(lambda _, m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum")), t.SUMMED),
    ("weights-put-back", f.put_back(9), t.OVERWRITTEN),
    ("momentum-0.999", f.putting(optimizer=o.of(torch.optim.SGD, momentum=0.999)), t.FOREIGN_HIGH),
    adam_smoothed=f.all_of(
        f.putting(optimizer=o.ADAM, lr=5e-3),
        f.loss_is(lambda _, m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1)),
    ),
)
def glass(seed: int) -> Plan:
    """Six kinds of glass, the rarest one in twenty, momentum, classes weighed; mean accuracy by class."""
    return f.planned(
        seed, lambda: mlp((9, 48, 48, 6)), _weighed, _glass(), balanced, optimizer=o.MOMENTUM, lr=4e-2, num_epochs=14,
    )  # fmt: skip


@functools.cache
def _houses() -> data.Split:
    x, y = data._of_sklearn("make_friedman2", n_samples=1600, noise=40.0, random_state=21)
    y = y.float()[:, None]
    return data.standardised(data.parted(x, (y - y.mean()) / y.std()))


@task(
    0.9,
    ("in-thousands", f.scaled_targets(3000.0, 20000.0), t.TARGETS),
    ("two-shapes", f.loss_is(lambda _, m, b: (m(b[0]) - b[1][:, 0]).square().mean()), t.LOSS),
    ("warm-up-not-stepped", f.putting(play=f.schedule_forgotten), t.NOT_STEPPED),
    ("rate-by-batch", f.putting(play=f.rate_each_batch), t.SCHEDULE),
    ("a-tenth-spoilt", f.damaged(outliers(0.08, 60.0)), t.either(t.OUTLIERS, t.TARGETS)),
    ("model-copied", f.putting(play=f.replaced_model), t.either(t.NO_GRADIENT, t.FIXED)),
    ("decay-60", f.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=60.0)), t.DECAY),
    ("clipped-at-1e-4", f.putting(optimizer=o.MOMENTUM, lr=2e-2, max_norm=1e-4), t.CLIPPED),
    ("without-bends", f.model_is(lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))), t.CANNOT),
    decayed_by_steps=f.putting(optimizer=o.NESTEROV, lr=2e-2, schedule=o.halving),
)
def houses(seed: int) -> Plan:
    """What a house costs by four numbers, RAdam, validated; R²."""
    return f.planned(
        seed, lambda: mlp((4, 48, 48, 1), nn.GELU), f.squared_error, _houses(), r_squared, optimizer=o.RADAM, lr=6e-3,
        num_epochs=12, **f.VALIDATED,
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
    ("weight-left-out", f.loss_is(lambda _, m, b: _rare(m, b, 1.0)), t.either(t.UNEVEN, t.LOSS)),
    ("squashed-twice", f.ending_in(nn.Sigmoid()), t.OUTPUT_OR_LOSS),
    ("few-and-slow", f.putting(num_epochs=1, lr=2e-5), t.CUT_SHORT),
    ("rows-of-others", f.shuffled, t.LABELS),
    focal=f.loss_is(
        lambda _, m, b: (lambda bce: ((1.0 - (-bce).exp()).square() * bce * (1.0 + 24.0 * b[1].float())).mean())(
            F.binary_cross_entropy_with_logits(m(b[0])[:, 0], b[1].float(), reduction="none")
        )
    ),
)
def cards(seed: int) -> Plan:
    """Which payment is a fraud, one in thirty, the rare weighed, Adam; mean accuracy by class."""
    return f.planned(
        seed, lambda: mlp((8, 48, 48, 1), nn.SiLU), _rare, _cards(), balanced, lr=4e-3, num_epochs=7, batch_size=64,
    )  # fmt: skip


_KEPT = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0])


@task(
    0.88,
    ("in-order", f.all_of(f.in_order, f.putting(lr=0.1, num_epochs=4)), t.SORTED),
    ("labels-by-chance", f.random_labels(0.92, 3), t.NOISE),
    ("lr-40", f.putting(lr=40.0), t.HIGH),
    ("five-sigmoids", f.model_is(lambda: mlp((4, *[6] * 5, 3), nn.Sigmoid)), t.DEEP),
    ("likelihood-of-logits", f.loss_is(lambda _, m, b: F.nll_loss(m(b[0]), b[1])), t.LOSS),
    ("two-epochs", f.putting(num_epochs=2, lr=2e-3), t.CUT_SHORT),
    four_units=f.putting(batch_size=4),
)
def flowers(seed: int) -> Plan:
    """Fisher's irises by six units, plain SGD; accuracy."""
    return f.planned(
        seed, lambda: mlp((4, 6, 3), nn.Tanh), f.cross_entropy, data.table("iris"), accuracy, optimizer=o.SGD, lr=0.1,
        num_epochs=50, batch_size=10,
    )  # fmt: skip


@task(
    0.92,
    ("one-kind-gone", f.damaged(unbalanced(0.985)), t.UNEVEN),
    (
        "dropped-nearly-all",
        f.model_is(lambda: nn.Sequential(nn.Dropout(0.93), *mlp((30, 16, 2), nn.ReLU, lambda _: nn.Dropout(0.9)))),
        t.DROPPED,
    ),
    ("eps-of-ten", f.putting(optimizer=o.of(torch.optim.AdamW, eps=10.0), num_epochs=8), t.FOREIGN_LOW),
    ("labels-turned-over", f.targets_as(lambda y: 1 - y), t.LABELS),
    strongly_decayed=f.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=1.0), lr=3e-3),
)
def cells(seed: int) -> Plan:
    """Benign or not by sixteen units, AdamW, validated; mean accuracy by class."""
    return f.planned(
        seed, lambda: mlp((30, 16, 2)), f.cross_entropy, data.table("breast_cancer"), balanced, optimizer=o.ADAMW,
        lr=5e-3, num_epochs=12, **f.VALIDATED,
    )  # fmt: skip
