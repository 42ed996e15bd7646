"""Pictures of digits: patches, batch statistics, depth, pairs, two views, noise, places, experts, half precision."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..afresh import case as c
from ..case import Case
from ..loop import Plan, Tensors
from ..qualities import accuracy, explained, reconstruction
from ..wild.case import dice_of
from . import case as a

_faulty = functools.partial(a.faulty, __name__)


@functools.cache
def _few(count: int = 700) -> data.Split:
    (x, y), held_out = data.digits(as_images=True)
    return (x[:count], y[:count]), held_out


class Patches(nn.Module):
    """Sixteen patches of a picture, attending to one another; attention by torch's function."""

    def __init__(self, width: int = 32, p: float = 0.0) -> None:
        super().__init__()
        self.cut, self.places = nn.Linear(4, width), nn.Parameter(0.02 * torch.randn(16, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.mlps = nn.ModuleList(nets.mlp((width, 64, width), nn.GELU) for _ in range(2))
        self.head, self.drop = nn.Linear(width, 10), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.cut(F.unfold(x, 2, stride=2).transpose(1, 2)) + self.places
        for k, (qkv, mlp) in enumerate(zip(self.qkv, self.mlps)):
            q, key, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in qkv(self.norms[2 * k](h)).chunk(3, -1))
            h = h + self.drop(F.scaled_dot_product_attention(q, key, v).transpose(1, 2).flatten(2))
            h = h + self.drop(mlp(self.norms[2 * k + 1](h)))
        return self.head(h.mean(1))


def patches(seed: int) -> Plan:
    """A small vision transformer."""
    return a.task(
        seed, Patches, c.cross_entropy, _few(), accuracy, optimizer=o.ADAMW, lr=3e-3, num_epochs=9, max_norm=1.0
    )


def _endless_warm_up(num_steps: int):
    return lambda step: (step + 1) / (2000.0 * num_steps)


def _normed() -> nn.Module:
    return nets.cnn(width=8, batch_norm=True)


def normed(seed: int) -> Plan:
    """Convolutions with batch statistics, validated."""
    return a.task(
        seed, _normed, c.cross_entropy, _few(500), accuracy, optimizer=o.MOMENTUM, lr=2e-2, num_epochs=7, **a.VALIDATED
    )


def _statistics(**fields: float) -> c.Change:
    def change(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for name, value in fields.items():
                    setattr(module, name, value)

    return a.weights(change)


def _never_normed_alike(plan: Plan) -> None:
    """Pictures from 0 to 255 in training, from 0 to 1 where it counts."""
    plan.train = (255.0 * plan.train[0], plan.train[1])


class Deep(nn.Module):
    """Ten layers on top of one another, with an activation as a function."""

    def __init__(self, act=F.relu, std: float | None = None, bias: float = 0.0, skips: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64 if k == 0 else 32, 32) for k in range(10))
        self.head, self.act, self.skips = nn.Linear(32, 10), act, skips
        for layer in self.layers:
            if std is None:
                nn.init.kaiming_normal_(layer.weight)
            else:
                nn.init.normal_(layer.weight, std=std)
            nn.init.constant_(layer.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.flatten(1)
        for layer in self.layers:
            h = self.act(layer(h)) + (h if self.skips and h.shape[1] == 32 else 0.0)
        return self.head(h)


def deep(seed: int) -> Plan:
    """Ten layers, well begun."""
    return a.task(seed, Deep, c.cross_entropy, _few(), accuracy, lr=1e-3, num_epochs=12)


def _zeros(model: nn.Module) -> None:
    for p in model.parameters():
        p.zero_()


class Codes(nn.Module):
    """A code of unit length."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nets.mlp((64, 48, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.flatten(1))


@torch.no_grad()
def _same_neighbours(model: nn.Module, wanted: Tensors) -> float:
    codes = model(wanted[0])
    codes = codes + 1e-4 * codes.std().clamp(min=1e-12) * torch.randn(codes.shape, generator=dice_of(1))
    near = torch.cdist(codes, codes).fill_diagonal_(float("inf")).argmin(1)
    return float((wanted[1][near] == wanted[1]).float().mean()) if codes.std() > 1e-6 else 0.1


def _pairs(model: nn.Module, batch: Tensors, margin: float = 2.0, only_same: bool = False, sign: float = 1.0):
    one, other = model(batch[0]), model(batch[0].roll(1, 0))
    same = (batch[1] == batch[1].roll(1, 0)).float()
    apart = (one - other).square().sum(1).add(1e-6).sqrt()
    pushed = 0.0 if only_same else (1.0 - same) * F.relu(margin - apart).square()
    return (same * apart.square() + sign * pushed).mean() if sign > 0 else ((1.0 - same) * apart.square()).mean()


def pairs(seed: int) -> Plan:
    """Two of a class near, others apart by a margin; quality: whether the nearest is of the same class."""
    return a.task(
        seed, Codes, _pairs, _few(), _same_neighbours, optimizer=o.NESTEROV, lr=2e-2, batch_size=64, num_epochs=15
    )


class Views(nn.Module):
    """An encoder and a predictor."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.predict = nets.mlp((64, 64, 16), nn.ReLU), nets.mlp((16, 32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x.flatten(1))


def _spread(z: torch.Tensor) -> torch.Tensor:
    return F.relu(1.0 - z.var(0).add(1e-4).sqrt()).mean()


def _two_views(model: nn.Module, batch: Tensors, spread: float = 4.0) -> torch.Tensor:
    first, second = (model(batch[0] + 0.4 * torch.randn_like(batch[0])) for _ in range(2))
    return (model.predict(first) - second).square().mean() + spread * (_spread(first) + _spread(second))


def views(seed: int) -> Plan:
    """Two noisy views of a digit answer alike, and codes are kept apart by their variance."""
    return a.task(seed, Views, _two_views, _few(), _same_neighbours, lr=2e-3, batch_size=64, num_epochs=12)


class Denoise(nn.Module):
    """A narrow way through."""

    def __init__(self, code: int = 16, last=None, cuts: bool = False) -> None:
        super().__init__()
        self.down, self.up = nets.mlp((64, 64, code)), nets.mlp((code, 64, 64))
        self.last, self.cuts = last, cuts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.down(x.flatten(1))
        out = self.up(code.detach() if self.cuts else code)
        return (out if self.last is None else self.last(out)).view_as(x)


def _restored(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.smooth_l1_loss(model(batch[0] + 0.2 * torch.randn_like(batch[0])), batch[0])


def denoise(seed: int) -> Plan:
    """A digit back from a noisy one."""
    return a.task(seed, Denoise, _restored, _few(), reconstruction, optimizer=o.RADAM, lr=3e-3, num_epochs=12)


@functools.cache
def _spots() -> data.Split:
    dice = dice_of(520)
    place = torch.rand(900, 2, generator=dice) * 2.0 - 1.0
    axis = torch.linspace(-1.0, 1.0, 10)
    rows = (-((axis - place[:, :1]) ** 2) / 0.05).exp()
    columns = (-((axis - place[:, 1:]) ** 2) / 0.05).exp()
    pictures = rows[:, :, None] * columns[:, None, :] + 0.1 * torch.randn(900, 10, 10, generator=dice)
    return data.parted(pictures[:, None], place)


class Finder(nn.Module):
    """Where a spot is: convolutions, then a softmax over places, whose mean place is the answer."""

    def __init__(self, axis: int = -1, grow: float = 1.0) -> None:
        super().__init__()
        self.heat = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
        self.axis, self.grow = axis, grow
        where = torch.linspace(-1.0, 1.0, 10)
        self.register_buffer("where", torch.stack(torch.meshgrid(where, where, indexing="ij"), -1).view(100, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heat = (self.grow * self.heat(x).flatten(1)).softmax(self.axis)
        return heat @ self.where


def spots(seed: int) -> Plan:
    """Where the bright spot is."""

    @torch.no_grad()
    def quality(model: nn.Module, wanted: Tensors) -> float:
        return explained(model(wanted[0]), wanted[1])

    return a.task(seed, Finder, c.squared_error, _spots(), quality, lr=1e-2, num_epochs=12)


class Routed(nn.Module):
    """Four experts, one chosen for each digit; the router is told to share the load."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(64, 4), nn.Linear(10, 10)
        self.experts = nn.ModuleList(nets.mlp((64, 3, 10)) for _ in range(4))
        with torch.no_grad():
            self.router.bias[0] += bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        gate = self.router(x).softmax(1)
        self.load = gate.mean(0)
        share, chosen = gate.max(1)
        out = torch.zeros(len(x), 10)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, share[mine, None] * expert(x[mine]))
        return self.head(out)


def _balanced(model: nn.Module, batch: Tensors, weight: float = 1.0) -> torch.Tensor:
    return c.cross_entropy(model, batch) + weight * 4.0 * model.load.square().sum()


def routed(seed: int) -> Plan:
    """One of four narrow experts for each digit."""
    return a.task(seed, Routed, _balanced, _few(1000), accuracy, lr=1e-2, num_epochs=10)


class Autocast(nn.Module):
    """Hidden layers in float16, the head in float32; the loss is made in float32."""

    def __init__(self, grow: float = 1.0, shrink: float = 1.0) -> None:
        super().__init__()
        self.hidden, self.head, self.grow, self.shrink = nn.Linear(64, 64), nn.Linear(64, 10), grow, shrink

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            h = F.relu(self.hidden(x.flatten(1))) * self.grow
            out = self.head(h / self.grow)
        return out.float()


def half(seed: int) -> Plan:
    """Under autocast to float16."""
    return a.task(seed, Autocast, c.cross_entropy, _few(), accuracy, optimizer=o.MOMENTUM, lr=5e-2, num_epochs=8)


def _all_half(plan: Plan) -> None:
    """The whole model in float16, with Adam, whose eps is 0 there."""
    plan.model, plan.optimizer, plan.lr = nn.Sequential(nn.Flatten(), nets.mlp((64, 64, 10))).half(), o.ADAM, 1e-3
    plan.train = (plan.train[0].half(), plan.train[1])
    plan.held_out = (plan.held_out[0].half(), plan.held_out[1])


def _grows(plan: Plan) -> None:
    """Weights that let what passes grow, under plain descent."""
    plan.model, plan.optimizer = Deep(std=0.6), o.SGD


def _one_chosen(plan: Plan) -> None:
    """The router begins with a favourite, and nothing shares the load."""
    plan.model = Routed(8.0)
    plan.loss = c.cross_entropy


CASES: tuple[Case, ...] = (
    *_faulty(
        "patches",
        patches,
        ("lr-0.3", c.putting(lr=0.3), c.HIGH),
        ("decay", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=100.0)), c.DECAY),
        ("dropout", a.model_is(lambda: Patches(p=0.97)), c.DROPPED),
        ("endless-warm-up", c.putting(schedule=_endless_warm_up), c.SCHEDULE),
        ("clipped-sgd", c.putting(optimizer=o.SGD, lr=0.1, max_norm=1e-4), c.CLIPPED),
    ),
    *_faulty(
        "normed",
        normed,
        ("batch-of-two", lambda plan: (setattr(plan, "batch_size", 2), setattr(plan, "lr", 0.1)), a.SMALL_BATCH),
        ("statistics-of-last", _statistics(momentum=1e-4), a.STATISTICS),
        ("bytes-in-training", _never_normed_alike, a.DIFFERS),
        ("in-order", c.in_order, c.SORTED),
        ("sixty-samples", c.putting(train=tuple(t[:40] for t in _few(500)[0]), num_epochs=60, lr=0.05), a.OVERFITTED),
    ),
    *_faulty(
        "deep",
        deep,
        ("sigmoids", a.model_is(lambda: Deep(torch.sigmoid)), a.VANISHING),
        ("small-start", a.model_is(lambda: Deep(std=1e-3)), a.POOR),
        ("large-tanh", a.model_is(lambda: Deep(torch.tanh, std=3.0)), c.SATURATED),
        ("negative-biases", a.model_is(lambda: Deep(bias=-3.0)), c.DEAD),
        ("large-start", a.model_is(lambda: Deep(std=2.0)), c.EXPLODING),
        ("zeros", a.weights(_zeros), a.POOR),
        ("exploding-sgd", _grows, c.EXPLODING),
    ),
    *_faulty(
        "pairs",
        pairs,
        ("only-same", c.loss_is(lambda former, m, b: _pairs(m, b, only_same=True)), c.COLLAPSED),
        ("turned-round", c.loss_is(lambda former, m, b: _pairs(m, b, sign=-1.0)), c.LOSS),
        ("shuffled", c.shuffled, c.LABELS),
        ("frozen", a.weights(lambda model: [p.requires_grad_(False) for p in list(model.parameters())[:2]]), a.FROZEN),
    ),
    *_faulty(
        "views",
        views,
        ("nothing-apart", c.loss_is(lambda former, m, b: _two_views(m, b, 0.0)), c.COLLAPSED),
        ("lr-3", c.putting(lr=3.0), c.HIGH),
    ),
    *_faulty(
        "denoise",
        denoise,
        ("sigmoid", a.model_is(lambda: Denoise(last=torch.sigmoid)), c.OUTPUT),
        ("one-number", a.model_is(lambda: Denoise(1)), c.CANNOT),
        ("cut", a.model_is(lambda: Denoise(cuts=True)), c.CUT),
        ("zero-at-end", a.model_is(lambda: Denoise(last=lambda x: F.relu(x - 8.0))), (c.OUTPUT)),
        ("rate-each-batch", c.putting(play=a.rate_each_batch), c.SCHEDULE),
    ),
    *_faulty(
        "spots",
        spots,
        ("softmax-over-batch", a.model_is(lambda: Finder(0)), c.OUTPUT),
        ("in-pixels", c.scaled_targets(5.0, 5.0), c.TARGETS),
        ("sharp", a.model_is(lambda: Finder(grow=1e4)), a.POOR),
        ("one-row-off", a.rolled, c.LABELS),
    ),
    *_faulty(
        "routed",
        routed,
        ("one-chosen", _one_chosen, a.EXPERTS),
        ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ),
    *_faulty(
        "half",
        half,
        ("overflow", a.model_is(lambda: Autocast(grow=3e4)), a.HALF),
        ("underflow", c.loss_is(lambda former, m, b: 1e-7 * former(m, b)), a.HALF),
        ("all-half", _all_half, a.HALF),
    ),
)  # fmt: skip
