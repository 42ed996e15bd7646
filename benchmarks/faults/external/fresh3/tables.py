"""Tables: premiums, blocks of houses, customers, covers of soil, hashed words, cells that are missing."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..loop import Tensors, Watch
from ..nets import mlp
from ..sound2.case import classify, drawn, epochs, r_squared, share_right, whole
from ..wild.case import dice_of
from .case import CUT_OR_FROZEN, LARGE, NOISE, OUTPUT_OR_LOSS, either, entering, erred, fit, fitted

CASES: list[Case] = []
task = entering(CASES, __name__)


@functools.cache
def _premiums() -> tuple[Tensors, Tensors]:
    dice = dice_of(900)
    region, car = torch.randint(0, 12, (2000,), generator=dice), torch.randint(0, 6, (2000,), generator=dice)
    x = torch.randn(2000, 5, generator=dice)
    by_region, by_car = torch.randn(12, generator=dice), torch.randn(6, generator=dice)
    log = 6.0 + 0.6 * by_region[region] + 0.5 * by_car[car] + 0.5 * x[:, 0] * (x[:, 1] > 0) + 0.3 * x[:, 2].abs()
    y = (log + 0.15 * torch.randn(2000, generator=dice)).exp()
    rows = (region, car, x, y)
    return tuple(t[:1500] for t in rows), tuple(t[1500:] for t in rows)


class _Premium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.region, self.car = nn.Embedding(12, 6), nn.Embedding(6, 4)
        self.body = mlp((15, 64, 32, 1), nn.SiLU)

    def forward(self, region: torch.Tensor, car: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.body(torch.cat([self.region(region), self.car(car), x], 1))


@task(0.8, raw_targets=c.TARGETS, broadcast=c.LOSS, lr_100=c.HIGH, lr_1e_6=c.LOW, half_cut=CUT_OR_FROZEN)
def premiums(watch: Watch, fault: str = "") -> float:
    """What an insurance costs, from kinds and numbers: R² of its logarithm, which is standardised for training."""
    train, held = _premiums()
    model = _Premium()
    log, known = train[3].log(), held[3].log()
    mean, std = (0.0, 1.0) if fault == "raw-targets" else (log.mean(), log.std())
    lr = {"lr-100": 1.0, "lr-1e-6": 1e-6}.get(fault, 4e-3)

    def loss(region, car, x, y):
        y = y if fault == "raw-targets" else (y.log() - mean) / std
        if fault == "half-cut":
            with torch.no_grad():
                found = model(region, car, x)
            return F.mse_loss(found + 0.0 * model.body[-1](torch.zeros(1, 32)), y[:, None])
        return F.mse_loss(model(region, car, x), y if fault == "broadcast" else y[:, None])

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, about the shapes of the fault
        fit(watch, model, torch.optim.AdamW(model.parameters(), lr), epochs(8, 32, *train), loss)
    with torch.no_grad():
        found = model(*held[:3])[:, 0]
        found = found.clamp(min=1e-3).log() if fault == "raw-targets" else found * std + mean
    return r_squared(found, known)


@functools.cache
def _blocks() -> tuple[Tensors, Tensors]:
    """Income, age, rooms, people and place, in their own units."""
    dice = dice_of(901)
    n = 2400
    income, age = 1.5 + 6.0 * torch.rand(n, generator=dice).square(), 50.0 * torch.rand(n, generator=dice)
    people, rooms = 200.0 + 3000.0 * torch.rand(n, generator=dice).pow(3), 3.0 + 4.0 * torch.rand(n, generator=dice)
    north, west = 32.0 + 10.0 * torch.rand(n, generator=dice), -124.0 + 10.0 * torch.rand(n, generator=dice)
    coast = torch.exp(-((west + 120.0 + 0.5 * (north - 36.0)) / 2.0).square())
    y = 0.4 * income + 1.2 * coast + 0.1 * (rooms - 5.0) + 0.01 * age + 0.25 * torch.randn(n, generator=dice)
    return data.parted(torch.stack([income, age, rooms, people, north, west], 1), y[:, None])


@task(
    0.72,
    raw_inputs=c.INPUTS,
    ones=a.POOR,
    never_cleared=c.KEPT,
    dead_start=c.DEAD,
    huge_start=LARGE,
    clipped=c.CLIPPED,
)
def blocks(watch: Watch, fault: str = "") -> float:
    """What houses of a block cost: standardised inputs, plain SGD with momentum, one cycle, validated."""
    (x, y), (held, known) = _blocks() if fault == "raw-inputs" else data.standardised(_blocks())
    model = mlp((6, 64, 64, 1), nn.ReLU)
    with torch.no_grad():
        for layer in (m for m in model if isinstance(m, nn.Linear)):
            if fault == "ones":
                nn.init.constant_(layer.weight, 0.1)
                nn.init.zeros_(layer.bias)
            if fault == "huge-start":
                layer.weight.mul_(30.0)
            if fault == "dead-start" and layer.out_features > 1:
                layer.bias.fill_(-6.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    fit(
        watch,
        model,
        optimizer,
        epochs(8, 64, x, y),
        lambda x, y: F.mse_loss(model(x), y),
        max_norm=1e-4 if fault == "clipped" else None,
        schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=8 * math.ceil(len(x) / 64)),
        val=erred(model, held, known),
        clears=fault != "never-cleared",
    )
    with torch.no_grad():
        return r_squared(model(held), known)


@functools.cache
def _customers() -> tuple[Tensors, Tensors]:
    dice = dice_of(902)
    x = torch.randn(2400, 12, generator=dice)
    score = x[:, 0] + x[:, 1] * x[:, 2] + 0.7 * (x[:, 3] > 0.5) - 0.7 + 0.4 * torch.randn(2400, generator=dice)
    return data.parted(x, (score > 0.6).float())


@torch.no_grad()
def _balanced(score: torch.Tensor, y: torch.Tensor) -> float:
    return float((score > 0)[y > 0.5].float().mean() + (score <= 0)[y < 0.5].float().mean()) / 2


@task(
    0.75,
    upside_down=either(c.LOSS, c.LABELS),
    one_class=either(a.UNEVEN, c.LEAK),
    only_bias=CUT_OR_FROZEN,
    few_steps=a.SHORT,
    squashed=c.OUTPUT,
    label_noise=NOISE,
)
def customers(watch: Watch, fault: str = "") -> float:
    """Who leaves, a quarter do: one logit, a dropout, Adam, validated; balanced accuracy, chance 0.5."""
    (x, y), (held, known) = _customers()
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    if fault == "squashed":
        model.append(nn.Sigmoid())
    if fault == "one-class":
        x, y = x[y < 0.5], y[y < 0.5]
    if fault == "label-noise":
        y = torch.where(torch.rand(len(y), generator=dice_of(1)) < 0.5, 1.0 - y, y)
    trained = [model[-1].bias] if fault == "only-bias" else model.parameters()

    def loss(x, y):
        out = model(x)[:, 0]
        if fault == "squashed":  # and the loss has a sigmoid of its own
            return F.binary_cross_entropy_with_logits(out, y)
        if fault == "upside-down":
            return F.binary_cross_entropy_with_logits(-out, y)
        return F.binary_cross_entropy_with_logits(out, y, pos_weight=torch.tensor(2.0))

    steps = epochs(15, 64, x, y) if fault != "few-steps" else drawn(5, 64, x, y)
    val = lambda: F.binary_cross_entropy_with_logits(model(held)[:, 0], known)  # noqa: E731
    fit(watch, model, torch.optim.Adam(trained, 2e-3), steps, loss, val=val)
    return _balanced(model(held)[:, 0] - (0.5 if fault == "squashed" else 0.0), known)


@functools.cache
def _covers() -> tuple[Tensors, Tensors]:
    dice = dice_of(903)
    centres = 1.4 * torch.randn(7, 3, 16, generator=dice)
    y = torch.randint(0, 7, (2400,), generator=dice)
    x = centres[y, torch.randint(0, 3, (2400,), generator=dice)] + torch.randn(2400, 16, generator=dice)
    return data.standardised(data.parted(x, y))


@task(
    0.8,
    next_label=c.LABELS,
    twice_softmax=OUTPUT_OR_LOSS,
    rate_gone=c.SCHEDULE,
    decay=c.DECAY,
    as_numbers=OUTPUT_OR_LOSS,
)
def covers(watch: Watch, fault: str = "") -> float:
    """Seven classes of several clouds: SGD with momentum and steps of the rate; accuracy."""
    (x, y), (held, known) = _covers()
    if fault == "next-label":  # the table was joined one row off in two parts of three
        y = torch.where(torch.arange(len(y)) % 3 > 0, y.roll(1), y)
    model = mlp((16, 64, 64, 1 if fault == "as-numbers" else 7), nn.Tanh)

    def loss(x, y):
        if fault == "as-numbers":
            return F.mse_loss(model(x)[:, 0], y.float())
        return F.cross_entropy(model(x).softmax(1) if fault == "twice-softmax" else model(x), y)

    gamma = 0.8 if fault == "rate-gone" else 0.1
    fit(
        watch,
        model,
        torch.optim.SGD(
            model.parameters(), 3e-3 if fault == "twice-softmax" else 3e-2, 0.9, weight_decay=0.3 * (fault == "decay")
        ),
        epochs(10, 32, x, y),
        loss,
        schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1 if fault == "rate-gone" else 400, gamma),
    )
    if fault == "as-numbers":
        with torch.no_grad():
            return float((model(held)[:, 0].round() == known).float().mean())
    return share_right(model, held, known)


@task(0.3, second_as_first=CUT_OR_FROZEN, log_of_target=c.SINGULAR)
def progression(watch: Watch, fault: str = "") -> float:
    """A year of diabetes: log-cosh, Adamax, strong decay, a small network; R²."""
    (x, y), (held, known) = data.table("diabetes")
    mean, std = y.mean(), y.std()
    model = mlp((10, 24, 1), nn.GELU)
    other = mlp((10, 24, 1), nn.GELU)
    watched = other if fault == "second-as-first" else model
    optimizer = torch.optim.Adamax(watched.parameters(), 5e-3, weight_decay=0.05)

    def loss(x, y):
        off = model(x) - ((y - mean) / std)
        if fault == "log-of-target":
            off = model(x) - ((y - mean) / std).log()
        return (off + F.softplus(-2.0 * off) - math.log(2.0)).mean()

    fit(watch, watched, optimizer, epochs(25, 16, x, y), loss)
    with torch.no_grad():
        return r_squared(model(held) * std + mean, known)


@task(0.1)
def zeros_and_counts(watch: Watch) -> float:
    """Counts that are zero more often than chance has it: a likelihood of two parts; gain in nats over one rate."""
    dice = dice_of(904)
    x = torch.randn(2000, 6, generator=dice)
    rate, some = (1.0 + 0.5 * x[:, 0]).exp(), torch.sigmoid(1.0 + 1.5 * x[:, 1])
    y = torch.poisson(rate, generator=dice) * (torch.rand(2000, generator=dice) < some)
    (x, y), (held, known) = data.parted(x, y)
    model = mlp((6, 32, 2), nn.ReLU)

    def nats(x, y):
        log_rate, logit = model(x).unbind(1)
        log = y * log_rate - log_rate.exp() - torch.lgamma(y + 1.0) + F.logsigmoid(logit)
        return -torch.where(y == 0, torch.logaddexp(log, F.logsigmoid(-logit)), log).mean()

    fit(
        watch,
        model,
        torch.optim.NAdam(model.parameters(), 3e-3),
        epochs(12, 50, x, y),
        nats,
        val=lambda: nats(held, known),
    )
    mean = y.mean()
    plain = -(known * mean.log() - mean - torch.lgamma(known + 1.0)).mean()
    with torch.no_grad():
        return float(plain - nats(held, known))


@task(0.5, all_cells=c.LEAK)
def missing_cells(watch: Watch, fault: str = "") -> float:
    """A table of which a third is blanked and put back: R² of the blanked cells."""
    dice = dice_of(905)
    table = torch.randn(1600, 3, generator=dice) @ torch.randn(3, 14, generator=dice)
    table = table / table.std(0) + 0.2 * torch.randn(table.shape, generator=dice)
    model = nn.Sequential(nn.Linear(28, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 14))

    def look(rows, seen):
        return model(torch.cat([rows * seen, seen], 1))

    def loss(rows):
        seen = (torch.rand(rows.shape) > 0.33).float()
        if fault == "all-cells":  # nothing is blanked, so that it learns to copy
            return F.mse_loss(look(rows, torch.ones_like(seen)), rows)
        return ((look(rows, seen) - rows).square() * (1.0 - seen)).sum() / (1.0 - seen).sum()

    fit(watch, model, torch.optim.Adam(model.parameters(), 2e-3), epochs(14, 64, table[:1200]), loss)
    held, seen = table[1200:], (torch.rand(400, 14, generator=dice) > 0.33).float()
    with torch.no_grad():
        return r_squared(look(held, seen)[seen == 0], held[seen == 0])


@task(0.8)
def hashed_words(watch: Watch) -> float:
    """Bags of hashed words, sparse gradients, Adagrad; accuracy, chance 0.5."""
    dice = dice_of(906)
    tells = torch.randn(300, generator=dice)
    words = (300 * torch.rand(2000, 12, generator=dice).square()).long()
    y = (tells[words].sum(1) > 0).float()
    table = nn.EmbeddingBag(256, 1, mode="sum", sparse=True)
    with torch.no_grad():
        table.weight.zero_()
    optimizer = torch.optim.Adagrad(table.parameters(), 0.3)
    loss = lambda w, y: F.binary_cross_entropy_with_logits(table(w % 251)[:, 0], y)  # noqa: E731
    fit(watch, table, optimizer, epochs(6, 25, words[:1600], y[:1600]), loss)
    with torch.no_grad():
        return float(((table(words[1600:] % 251)[:, 0] > 0) == (y[1600:] > 0.5)).float().mean())


@task(0.85)
def nearest_prototypes(watch: Watch) -> float:
    """Vectors that stand for classes (generalised learning vector quantisation): a loss from -1 to 1."""
    (x, y), (held, known) = data.table("wine")
    model = nn.ParameterList([0.3 * torch.randn(9, 13) + x[:9] * 0.0])
    owner = torch.arange(9) % 3

    def loss(x, y):
        far = torch.cdist(x, model[0]).square()
        mine = owner[None] == y[:, None]
        near, other = far.masked_fill(~mine, 1e9).min(1).values, far.masked_fill(mine, 1e9).min(1).values
        return ((near - other) / (near + other)).mean()

    fit(watch, model, torch.optim.SGD(model.parameters(), 0.5), epochs(15, 16, x, y), loss)
    with torch.no_grad():
        return float((owner[torch.cdist(held, model[0]).argmin(1)] == known).float().mean())


class _Rising(nn.Module):
    """Weights through a softplus: no output falls where an input rises."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Parameter(torch.randn(4, 32) - 1.0), nn.Parameter(torch.randn(32))
        self.last, self.shift = nn.Parameter(torch.randn(32, 1) - 2.0), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ F.softplus(self.first) + self.bias) @ F.softplus(self.last) + self.shift


@task(0.8)
def only_rising(watch: Watch) -> float:
    """A function that rises in each input, by a network that can do no other; R²."""
    dice = dice_of(907)
    x = torch.rand(1200, 4, generator=dice) * 2.0 - 1.0
    y = (3.0 * x[:, :1]).tanh() + x[:, 1:2] ** 3 + 0.5 * x[:, 2:3] + 0.1 * torch.randn(1200, 1, generator=dice)
    (x, y), (held, known) = data.parted(x, y)
    model = _Rising()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-2)
    fit(watch, model, optimizer, epochs(15, 32, x, y), lambda x, y: F.mse_loss(model(x), y), max_norm=5.0)
    with torch.no_grad():
        return r_squared(model(held), known)


@task(0.6)
def in_dollars(watch: Watch) -> float:
    """Targets of half a million: the model works on standardised ones, validation is told in dollars."""
    (x, y), (held, known) = data.standardised(_blocks())
    y, known = 2e5 * y, 2e5 * known
    mean, std = y.mean(), y.std()
    model = mlp((6, 48, 1), nn.ELU)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    val = lambda: (model(held) * std + mean - known).abs().mean()  # noqa: E731
    fit(watch, model, optimizer, epochs(8, 48, x, y), lambda x, y: F.mse_loss(model(x), (y - mean) / std), val=val)
    with torch.no_grad():
        return r_squared(model(held) * std + mean, known)


@task(0.05)
def mostly_noise(watch: Watch) -> float:
    """A tenth of the variance can be told at all: R², which a mean has as 0."""
    dice = dice_of(908)
    x = torch.randn(3000, 8, generator=dice)
    y = x[:, :1] + 3.0 * torch.randn(3000, 1, generator=dice)
    (x, y), (held, known) = data.parted(x, y / y.std())
    model = mlp((8, 16, 1), nn.ReLU)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.1)
    fit(
        watch,
        model,
        optimizer,
        epochs(5, 64, x, y),
        lambda x, y: F.mse_loss(model(x), y),
        val=erred(model, held, known),
    )
    with torch.no_grad():
        return r_squared(model(held), known)


@task(0.9)
def wines_by_heart(watch: Watch) -> float:
    """All rows in each batch, until the loss is nearly nothing, and on; accuracy."""
    (x, y), (held, known) = data.table("wine")
    model = mlp((13, 32, 3), nn.Tanh)
    fit(watch, model, torch.optim.Adam(model.parameters(), 1e-2), whole(500, x, y), classify(model))
    return share_right(model, held, known)


@task(0.88)
def thirty_steps(watch: Watch) -> float:
    """Thirty steps over all rows with a large rate: the loss still falls when it is good enough; accuracy."""
    (x, y), (held, known) = data.table("breast_cancer")
    model = mlp((30, 16, 2), nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    fit(watch, model, optimizer, whole(30, x, y), classify(model), val=fitted(model, held, known), every=10)
    return share_right(model, held, known)


@task(0.85)
def in_ones_and_twos(watch: Watch) -> float:
    """Batches of two, plain SGD: a loss that jumps from step to step; accuracy."""
    (x, y), (held, known) = data.table("breast_cancer")
    model = mlp((30, 24, 2), nn.ReLU)
    fit(watch, model, torch.optim.SGD(model.parameters(), 5e-3), epochs(3, 2, x, y), classify(model))
    return share_right(model, held, known)
