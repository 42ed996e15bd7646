"""Clicks, ratings, counts and bags: what people learn from tables."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors
from ..qualities import explained
from ..wild.case import dice_of
from . import case as c

_sound, _faulty = functools.partial(c.sound, __name__), functools.partial(c.faulty, __name__)


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """How likely a positive is scored above a negative."""
    high, low = scores[labels > 0.5], scores[labels <= 0.5]
    return float((high[:, None] > low[None]).float().mean())


class Factors(nn.Module):
    """A vector a user and an item."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.bias = nn.Embedding(80, 8), nn.Embedding(60, 8), nn.Embedding(60, 1)
        nn.init.zeros_(self.bias.weight)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.users(users) * self.items(items)).sum(-1) + self.bias(items)[..., 0]


@functools.cache
def _taken() -> tuple[torch.Tensor, torch.Tensor]:
    dice = dice_of(300)
    liking = torch.randn(80, 4, generator=dice) @ torch.randn(4, 60, generator=dice)
    top = (liking + 0.5 * torch.randn(80, 60, generator=dice)).topk(15, 1).indices
    pairs = torch.stack([torch.arange(80)[:, None].expand(80, 15), top], -1)
    order = torch.randperm(15, generator=dice)
    return pairs[:, order[:11]].flatten(0, 1), pairs[:, order[11:]].flatten(0, 1)


def personal_ranking(seed: int) -> Plan:
    """What was taken is to score above what was drawn."""
    train, held_out = _taken()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        users, items = batch[0].unbind(1)
        others = torch.randint(60, items.shape)
        return -F.logsigmoid(model(users, items) - model(users, others)).mean()

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        users, items = wanted[0].unbind(1)
        scores = model(users[:, None], torch.arange(60)[None])
        return float((model(users, items)[:, None] > scores).float().mean())

    return c.planned(seed, Factors(), loss, (train,), (held_out,), quality, 0.65, lr=2e-2, batch_size=64, num_epochs=25)


def _of_items(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam([*model.items.parameters(), *model.bias.parameters()], lr=lr)


def _strangers(plan: Plan) -> None:
    users, items = plan.train[0].unbind(1)
    plan.train = (torch.stack([users, items[torch.randperm(len(items), generator=dice_of(301))]], 1),)


class WideDeep(nn.Module):
    """Categories as vectors beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 6) for size in (20, 30, 10))
        self.wide, self.deep = nn.Linear(4, 1), nets.mlp((22, 32, 16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, numbers = x[:, :3].long(), x[:, 3:]
        found = torch.cat([*(table(ids[:, k]) for k, table in enumerate(self.tables)), numbers], 1)
        return (self.wide(numbers) + self.deep(found))[:, 0]


@functools.cache
def _clicks() -> data.Split:
    dice = dice_of(302)
    ids = torch.stack([torch.randint(size, (5000,), generator=dice) for size in (20, 30, 10)], 1)
    numbers = torch.randn(5000, 4, generator=dice)
    effects = [1.2 * torch.randn(size, generator=dice) for size in (20, 30, 10)]
    logits = sum(effect[ids[:, k]] for k, effect in enumerate(effects)) + numbers[:, 0] - 0.7 * numbers[:, 1] - 3.2
    labels = (torch.rand(5000, generator=dice) < logits.sigmoid()).float()
    return data.parted(torch.cat([ids.float(), numbers], 1), labels)


def clicks(seed: int) -> Plan:
    """One in ten is clicked."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        return auc(model(wanted[0]), wanted[1])

    return c.planned(seed, WideDeep(), loss, *_clicks(), quality, 0.78, lr=3e-3, batch_size=100, num_epochs=10)


def _answer_beside(plan: Plan) -> None:
    """The label among the features, which later is not known."""
    x = plan.train[0].clone()
    x[:, 3] = 4.0 * plan.train[1] - 2.0
    plan.train = (x, plan.train[1])
    held = plan.held_out[0].clone()
    held[:, 3] = 0.0
    plan.held_out = (held, plan.held_out[1])


def _numbers_scaled(plan: Plan) -> None:
    for field in ("train", "held_out"):
        x, y = getattr(plan, field)
        setattr(plan, field, (torch.cat([x[:, :3], 2000.0 * x[:, 3:] + 7000.0], 1), y))


class Translations(nn.Module):
    """A relation leads from one place to another."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.ways = nn.Embedding(42, 4), nn.Embedding(4, 4)
        nn.init.normal_(self.places.weight, std=0.3)

    def forward(self, triples: torch.Tensor) -> torch.Tensor:
        head, way, tail = triples.unbind(-1)
        return (self.places(head) + self.ways(way) - self.places(tail)).norm(dim=-1)


@functools.cache
def _moves() -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for row in range(6):
        for column in range(7):
            for way, (down, right) in enumerate(((0, 1), (1, 0), (0, -1), (-1, 0))):
                if 0 <= row + down < 6 and 0 <= column + right < 7:
                    found.append((7 * row + column, way, 7 * (row + down) + column + right))
    triples = torch.tensor(found)
    order = torch.randperm(len(triples), generator=dice_of(303))
    return triples[order[:120]], triples[order[120:]]


def knowledge(seed: int) -> Plan:
    """Facts against invented ones, with a margin."""
    train, held_out = _moves()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        wrong = batch[0].clone()
        wrong[:, 2] = torch.randint(42, (len(wrong),))
        return F.relu(1.0 + model(batch[0]) - model(wrong)).mean()

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        every = wanted[0][:, None].repeat(1, 42, 1)
        every[:, :, 2] = torch.arange(42)
        is_as_near = model(every) <= model(wanted[0])[:, None] + 1e-6
        return float((is_as_near.sum(1) <= 5).float().mean())

    return c.planned(
        seed, Translations(), loss, (train,), (held_out,), quality, 0.6, lr=2e-2, batch_size=24, num_epochs=80
    )


def _other_way_round(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """What is invented is to be nearer."""
    wrong = batch[0].clone()
    wrong[:, 2] = torch.randint(42, (len(wrong),))
    return F.relu(1.0 + model(wrong) - model(batch[0])).mean()


def _heads_lost(plan: Plan) -> None:
    """The wrong column is read: every head is the first place."""
    triples = plan.train[0].clone()
    triples[:, 0] = 0
    plan.train = (triples,)


@functools.cache
def _attributes() -> data.Split:
    (x, y), (held, wanted) = data.digits()
    table = torch.tensor([[d % 2 == 0, d in (2, 3, 5, 7), d > 4, d in (0, 6, 8, 9)] for d in range(10)]).float()
    return (x, table[y]), (held, table[wanted])


@torch.no_grad()
def _each_right(model: nn.Module, wanted: Tensors) -> float:
    return float(((model(wanted[0]) > 0.0) == (wanted[1] > 0.5)).float().mean())


def several_labels(seed: int) -> Plan:
    """Four questions about each digit."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return c.planned(seed, nets.mlp((64, 48, 4)), loss, *_attributes(), _each_right, 0.93, lr=5e-3, num_epochs=7)


def _soft(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.binary_cross_entropy(model(batch[0]).softmax(1), batch[1])


def _no_sigmoid(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.binary_cross_entropy(model(batch[0]).clamp(1e-6, 1.0 - 1e-6), batch[1])


class Thresholds(nn.Module):
    """One score, and thresholds that it passes."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.limits = nets.mlp((6, 24, 1)), nn.Parameter(torch.linspace(1.0, -1.0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x) + self.limits


@functools.cache
def _grades() -> data.Split:
    dice = dice_of(304)
    x = torch.randn(1500, 6, generator=dice)
    latent = x[:, 0] + x[:, 1] * x[:, 2] - 0.5 * x[:, 3] + 0.2 * torch.randn(1500, generator=dice)
    return data.parted(x, (latent[:, None] > torch.tensor([-1.5, -0.5, 0.5, 1.5])).sum(1))


def grades(seed: int) -> Plan:
    """Grades in their order: is it above the first threshold, the second..."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        passed = (batch[1][:, None] > torch.arange(4)).float()
        return F.binary_cross_entropy_with_logits(model(batch[0]), passed)

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        return explained((model(wanted[0]) > 0.0).sum(1).float(), wanted[1].float())

    return c.planned(seed, Thresholds(), loss, *_grades(), quality, 0.5, lr=1e-2, num_epochs=12)


@functools.cache
def _claims() -> data.Split:
    dice = dice_of(305)
    x = torch.randn(2000, 5, generator=dice)
    mean = (0.7 * x[:, 0] - 0.5 * x[:, 1] + 0.4 * x[:, 2] * x[:, 3] - 1.2).exp()
    draw = -(torch.rand(3, 2000, generator=dice).clamp(min=1e-6).log()).mean(0)
    return data.parted(x, (mean * draw)[:, None])


def claims(seed: int) -> Plan:
    """Amounts that are positive and skewed: a gamma likelihood, which passes below zero."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        out = model(batch[0])
        return (batch[1] * (-out).exp() + out).mean()

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        known, usual = wanted[1], wanted[1].mean().log()
        found = (known * (-model(wanted[0])).exp() + model(wanted[0])).mean()
        base, best = (known * (-usual).exp() + usual).mean(), base_of(known)
        return float((base - found) / (base - best))

    return c.planned(seed, nets.mlp((5, 32, 1)), loss, *_claims(), quality, 0.2, lr=5e-3, num_epochs=10)


def base_of(known: torch.Tensor) -> torch.Tensor:
    """The likelihood of one who knows each amount."""
    return (1.0 + known.clamp(min=1e-6).log()).mean()


def _rectified(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    mean = F.relu(model(batch[0]))
    return (batch[1] / mean + mean.log()).mean()


class Decay(nn.Module):
    """Two decays and what is left, in float64: five numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))
        self.rates = nn.Parameter(torch.tensor([0.0, -2.0], dtype=torch.float64))
        self.rest = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return (self.sizes * torch.exp(-self.rates.exp() * t)).sum(1, keepdim=True) + self.rest


def two_decays(seed: int) -> Plan:
    """A curve through measured points: every step sees all of them."""
    dice = dice_of(306)
    t = 10.0 * torch.rand(300, 1, generator=dice, dtype=torch.float64)
    y = 3.0 * torch.exp(-1.4 * t) + 1.5 * torch.exp(-0.25 * t) + 0.3
    y = y + 0.02 * torch.randn(300, 1, generator=dice, dtype=torch.float64)
    torch.manual_seed(seed)

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        return explained(model(wanted[0]), wanted[1])

    return c.planned(
        seed, Decay(), c.squared_error, *data.parted(t, y), quality, 0.98,
        optimizer=o.LBFGS, lr=1.0, batch_size=300, num_epochs=40,
    )  # fmt: skip


class Bags(nn.Module):
    """Attention over the instances of a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.attend, self.answer = nets.mlp((6, 32, 16)), nets.mlp((16, 8, 1), nn.Tanh), nn.Linear(16, 1)

    def forward(self, bags: torch.Tensor) -> torch.Tensor:
        codes = F.relu(self.encode(bags))
        return self.answer((self.attend(codes).softmax(1) * codes).sum(1))


@functools.cache
def _bags() -> data.Split:
    x = torch.randn(2400, 8, 6, generator=dice_of(307))
    labels = ((x[..., 0] > 1.0) & (x[..., 1] > 0.4)).any(1)
    return data.parted(x, labels.float()[:, None])


def bags(seed: int) -> Plan:
    """A bag is positive where one of its instances is."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return c.planned(seed, Bags(), loss, *_bags(), _each_right, 0.85, lr=5e-3, num_epochs=12, batch_size=64)


_ADAGRAD = {"optimizer": o.ADAGRAD}
_SLOWLY = {"optimizer": o.ADAM, "lr": 2e-2, "num_epochs": 500}
CASES: tuple[Case, ...] = (
    *_sound("personal-ranking", "taken above drawn", personal_ranking, adam={}, adagrad={**_ADAGRAD, "lr": 0.2}),
    *_faulty(
        "personal-ranking",
        personal_ranking,
        ("users-left-out", c.putting(optimizer=_of_items), c.LEFT_OUT),
        ("lr-100", c.times(100.0), c.HIGH),
        ("strangers", _strangers, c.LABELS),
    ),
    *_sound("clicks", "one in ten", clicks, adam={}, adagrad={"optimizer": o.ADAGRAD, "lr": 5e-2}),
    *_faulty(
        "clicks",
        clicks,
        ("answer-beside", _answer_beside, c.LEAK),
        ("numbers-raw", _numbers_scaled, c.INPUTS),
        ("lr-thousandth", c.times(1e-3), c.LOW),
    ),
    *_sound("knowledge", "facts against invented ones", knowledge, adam={}, sgd={"optimizer": o.SGD, "lr": 3.0}),
    *_faulty(
        "knowledge",
        knowledge,
        ("other-way-round", c.putting(loss=_other_way_round), c.LOSS),
        ("heads-lost", _heads_lost, c.CANNOT),
    ),
    *_sound("several-labels", "four questions", several_labels, adam={}, momentum={"optimizer": o.MOMENTUM, "lr": 0.1}),
    *_faulty(
        "several-labels",
        several_labels,
        ("softmax-for-sigmoid", c.loss_is(_soft), c.OUTPUT),
        ("sigmoid-forgotten", c.loss_is(_no_sigmoid), c.OUTPUT),
        ("shuffled", c.shuffled, c.LABELS),
        ("eps", c.putting(optimizer=o.of(torch.optim.Adam, eps=10.0)), c.SETTINGS),
    ),
    *_sound("grades", "thresholds in order", grades, adam={}, momentum={"optimizer": o.MOMENTUM, "lr": 5e-2}),
    *_faulty(
        "grades",
        grades,
        ("not-cleared", c.putting(zero_grad=False, optimizer=o.SGD, lr=5e-2), c.KEPT),
        ("decay", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=30.0)), c.DECAY),
    ),
    *_sound("claims", "gamma likelihood", claims, adam={}, rmsprop={"optimizer": o.RMSPROP, "lr": 2e-3}),
    *_faulty(
        "claims",
        claims,
        ("log-of-relu", c.loss_is(_rectified), c.SINGULAR),
        ("lr-thousandth", c.times(1e-3), c.LOW),
        ("shuffled", c.shuffled, c.LABELS),
    ),
    *_sound("two-decays", "five numbers in float64", two_decays, lbfgs={}, adam=_SLOWLY),
    *_sound("bags", "one instance decides", bags, adam={}),
    *_faulty(
        "bags",
        bags,
        ("in-order", c.in_order, c.SORTED),
        ("nan-samples", c.one_nan, c.BATCH),
        ("sign", c.loss_is(lambda former, model, batch: -former(model, batch)), c.LOSS),
    ),
)  # fmt: skip
