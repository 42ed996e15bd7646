"""Ways of training: from a trained state, in few or in single samples, on several tasks, on what drifts or is noise."""

from __future__ import annotations

import copy
import functools
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors, Watch
from ..qualities import accuracy, explained, r_squared
from ..sound.sequences import everywhere_loss, squared_loss
from .case import dice_of, wild_cases

_cases = functools.partial(wild_cases, __name__)


def _trained(kept: int, seed: int) -> nn.Sequential:
    """A network that knows the first `kept` digits."""
    torch.manual_seed(100 + seed)
    (x, y), _ = data.digits()
    x, y = x[y < kept], y[y < kept]
    model = nets.mlp((64, 64, 32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for at in itertools.chain.from_iterable(torch.randperm(len(x)).split(64) for _ in range(6)):
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        optimizer.step()
    return model


def frozen_trunk(seed: int) -> Plan:
    """All but the last layer of a trained network is frozen, and left in the optimizer."""
    model = _trained(6, seed)
    for p in itertools.islice(model.parameters(), 4):
        p.requires_grad_(False)
    torch.manual_seed(seed)
    return Plan(model, everywhere_loss, *data.digits(), accuracy, 0.85, lr=1e-2, num_epochs=6, seed=seed)


def go_on(seed: int) -> Plan:
    """A network that knows nearly all is trained a little further, with a small learning rate."""
    model = _trained(10, seed)
    torch.manual_seed(seed)
    return Plan(model, everywhere_loss, *data.digits(), accuracy, 0.93, lr=1e-4, num_epochs=5, seed=seed)


class LowRank(nn.Module):
    """A frozen linear layer, and a product of two narrow ones beside it of which the second begins at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 4.0 * self.up(self.down(x))


def low_rank(seed: int) -> Plan:
    """Low-rank adapters in a frozen network, for four classes that it did not know."""
    model = _trained(6, seed)
    torch.manual_seed(seed)
    adapted = nn.Sequential(*(LowRank(m) if isinstance(m, nn.Linear) else m for m in model))
    return Plan(
        adapted,
        everywhere_loss,
        *data.digits(),
        accuracy,
        0.9,
        lr=5e-3,
        num_epochs=6,
        seed=seed,
        optimizer=o.of_trainable(torch.optim.AdamW),
    )


def distilled(seed: int) -> Plan:
    """A small network after a large one's softened answers: the divergence between the two, times four."""
    teacher = _trained(10, seed)
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        with torch.no_grad():
            wanted = (teacher(batch[0]) / 3.0).log_softmax(1)
        return 9.0 * F.kl_div((model(batch[0]) / 3.0).log_softmax(1), wanted, reduction="batchmean", log_target=True)

    return Plan(nets.mlp((64, 24, 10)), loss, *data.digits(), accuracy, 0.9, lr=5e-3, num_epochs=8, seed=seed)


def mixed_smoothed(seed: int) -> Plan:
    """Mixup and label smoothing together: the training loss stays high above the validation loss."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        x, y = batch
        if model.training:
            share, other = float(torch.rand(())), torch.randperm(len(x))
            out = model(share * x + (1.0 - share) * x[other])
            return share * F.cross_entropy(out, y, label_smoothing=0.1) + (1.0 - share) * F.cross_entropy(
                out, y[other], label_smoothing=0.1
            )
        return F.cross_entropy(model(x), y)

    return Plan(nets.mlp((64, 96, 10)), loss, *data.digits(), accuracy, 0.93, lr=3e-3, num_epochs=8, seed=seed)


def easy_first(seed: int) -> Plan:
    """A curriculum: clear samples first, ever noisier ones after them, so that the loss rises on the way."""
    torch.manual_seed(seed)
    num_epochs = 8

    def harder(epoch: int, place: int, batch: Tensors) -> Tensors:
        return batch[0] + 1.5 * epoch / num_epochs * torch.randn_like(batch[0]), batch[1]

    return Plan(
        nets.mlp((64, 64, 10)),
        everywhere_loss,
        *data.digits(),
        accuracy,
        0.93,
        lr=3e-3,
        num_epochs=num_epochs,
        seed=seed,
        change=harder,
        judged_by_loss=False,
    )


def _drifting(plan: Plan, watch: Watch) -> None:
    """A stream whose rule turns slowly: each batch is seen once."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    for step in range(plan.num_epochs):
        loss = squared_loss(plan.model, _of_stream(step, plan.batch_size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss.detach())


def _of_stream(step: int, count: int, dice: torch.Generator | None = None) -> Tensors:
    x = torch.randn(count, 5, generator=dice)
    angle = torch.tensor(step / 150.0)
    y = angle.cos() * x[:, :1] + angle.sin() * x[:, 1:2] + 0.5 * x[:, 2:3] * x[:, 3:4]
    return x, y + 0.2 * torch.randn(count, 1, generator=dice)


def drift(seed: int) -> Plan:
    """Online learning of what changes."""
    torch.manual_seed(seed)
    held_out = _of_stream(500, 1000, dice_of(90))
    return Plan(
        nets.mlp((5, 32, 1)),
        squared_loss,
        held_out,
        held_out,
        r_squared,
        0.6,
        lr=1e-2,
        num_epochs=500,
        batch_size=16,
        seed=seed,
        play=_drifting,
        judged_by_loss=False,
    )


def single(seed: int) -> Plan:
    """One sample a step: losses that jump from nothing to much."""
    torch.manual_seed(seed)
    return Plan(
        nets.mlp((13, 16, 3), nn.Tanh),
        everywhere_loss,
        *data.table("wine"),
        accuracy,
        0.9,
        lr=1e-2,
        num_epochs=6,
        batch_size=1,
        seed=seed,
        optimizer=o.SGD,
        judged_by_loss=False,
    )


def by_heart(seed: int) -> Plan:
    """Sixteen samples, to be known by heart: no held-out data, and no validation."""
    x, y = torch.randn(16, 10, generator=dice_of(91)), torch.randint(4, (16,), generator=dice_of(92))
    torch.manual_seed(seed)
    return Plan(
        nets.mlp((10, 48, 4)),
        everywhere_loss,
        (x, y),
        (x, y),
        accuracy,
        0.99,
        lr=5e-3,
        num_epochs=200,
        batch_size=16,
        seed=seed,
        judged_by_loss=False,
    )


def _faint(seed: int, share: float, least: float) -> Plan:
    x = torch.randn(3000, 6, generator=dice_of(93))
    signal = (x[:, :1] + 0.7 * x[:, 1:2]) / 1.22
    y = share**0.5 * signal + (1.0 - share) ** 0.5 * torch.randn(3000, 1, generator=dice_of(94))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return Plan(
        model,
        squared_loss,
        *data.parted(x, y),
        r_squared,
        least,
        lr=5e-3,
        num_epochs=8,
        batch_size=64,
        seed=seed,
    )


def faint(seed: int) -> Plan:
    """A tenth of the variance can be explained, and no more, by construction."""
    return _faint(seed, 0.1, 0.06)


def coin(seed: int) -> Plan:
    """Yes or no with a bias that hangs on the inputs a little: the best loss is 0.62, chance is 0.69."""
    x = torch.randn(3000, 6, generator=dice_of(95))
    logit = 0.9 * x[:, 0] - 0.5 * x[:, 1]
    y = (torch.rand(3000, generator=dice_of(96)) < logit.sigmoid()).float()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return float(((model(held_out[0])[:, 0] > 0.0) == (held_out[1] > 0.5)).float().mean())

    return Plan(
        nets.mlp((6, 12, 1)), loss, *data.parted(x, y), quality, 0.62, lr=5e-3, num_epochs=8, batch_size=64, seed=seed
    )


def rare(seed: int) -> Plan:
    """One sample in twelve is of the class that matters, which weighs ten times as much."""
    x = torch.randn(2000, 8, generator=dice_of(97))
    y = (x[:, 0] + 0.7 * x[:, 1] * x[:, 2] > 1.9).float()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1], pos_weight=torch.tensor(10.0))

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        right = (model(held_out[0])[:, 0] > 0.0) == (held_out[1] > 0.5)
        return float(0.5 * right[held_out[1] > 0.5].float().mean() + 0.5 * right[held_out[1] < 0.5].float().mean())

    return Plan(
        nets.mlp((8, 32, 1)),
        loss,
        *data.parted(x, y),
        quality,
        0.8,
        lr=5e-3,
        num_epochs=10,
        seed=seed,
        judged_by_loss=False,
    )


class Weighed(nn.Module):
    """Two answers from one trunk; the weight of each task's loss is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nets.mlp((10, 48, 48)), nn.Linear(48, 4)
        self.log_spreads = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads(F.relu(self.trunk(x)))


def two_tasks(seed: int) -> Plan:
    """A number and a class, each weighed by its uncertainty: a loss that ends below zero."""
    (x, y), (held_out, wanted) = data.friedman(0.2)
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        out, s = model(batch[0]), model.log_spreads
        number = F.mse_loss(out[:, :1], batch[1])
        kind = F.cross_entropy(out[:, 1:], (batch[0][:, 0] > 0.3).long() + (batch[0][:, 1] > 0.3).long())
        return 0.5 * number * (-2.0 * s[0]).exp() + s[0] + kind * (-s[1]).exp() + s[1]

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return explained(model(held_out[0])[:, :1], held_out[1])

    return Plan(
        Weighed(),
        loss,
        (x, y),
        (held_out, wanted),
        quality,
        0.7,
        lr=5e-3,
        num_epochs=12,
        seed=seed,
        judged_by_loss=False,
    )


def _adapted(plan: Plan, watch: Watch) -> None:
    """Sines of which a few points are seen: one inner step, and the loss after it."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    for _ in range(plan.num_epochs):
        loss = torch.stack([_after_one_step(plan.model) for _ in range(4)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss.detach())


def _after_one_step(model: nn.Module, dice: torch.Generator | None = None, steps: int = 1) -> torch.Tensor:
    phase, size = 3.0 * torch.rand((), generator=dice), 0.5 + 1.5 * torch.rand((), generator=dice)
    x = 6.0 * torch.rand(2, 10, 1, generator=dice) - 3.0
    y = size * torch.sin(x + phase)
    weights = dict(model.named_parameters())
    for _ in range(steps):
        loss = F.mse_loss(torch.func.functional_call(model, weights, (x[0],)), y[0])
        slopes = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
        weights = {name: w - 0.05 * g for (name, w), g in zip(weights.items(), slopes)}
    return F.mse_loss(torch.func.functional_call(model, weights, (x[1],)), y[1])


def inner_steps(seed: int) -> Plan:
    """Model-agnostic meta-learning: gradients through a step."""
    torch.manual_seed(seed)

    def quality(model: nn.Module, held_out: Tensors) -> float:
        dice = dice_of(98)
        return 1.0 - float(torch.stack([_after_one_step(model, dice, 3).detach() for _ in range(60)]).mean()) / 0.9

    nothing = (torch.zeros(1),)
    return Plan(
        nets.mlp((1, 32, 32, 1), nn.Tanh),
        squared_loss,
        nothing,
        nothing,
        quality,
        0.2,
        lr=5e-3,
        num_epochs=180,
        seed=seed,
        play=_adapted,
        judged_by_loss=False,
    )


def _accumulated(plan: Plan, watch: Watch, *, averages: bool) -> None:
    """Four backward passes a step, each of a quarter of the loss; or an average of the weights that is judged."""
    model = plan.model
    optimizer = watch.wrap(plan.optimizer(model, plan.lr), model, plan.max_norm)
    average = copy.deepcopy(model)
    for epoch in range(plan.num_epochs):
        model.train()
        for batch in plan.batches(epoch):
            optimizer.zero_grad()
            total = torch.zeros(())
            for part in zip(*(t.chunk(1 if averages else 4) for t in batch)):
                loss = plan.loss(model, part) / (1 if averages else 4)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            watch.observe(optimizer, loss=total)
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters()):
                    old.lerp_(new, 0.05)
        judged = average if averages else model
        judged.eval()
        with torch.no_grad():
            watch.observe(optimizer, val_loss=plan.loss(judged, plan.held_out))
    if averages:
        model.load_state_dict(average.state_dict())


def accumulated(seed: int, averages: bool = False) -> Plan:
    """Gradients of four parts of a batch are added up."""
    torch.manual_seed(seed)
    play = functools.partial(_accumulated, averages=averages)
    return Plan(
        nets.mlp((64, 64, 10)),
        everywhere_loss,
        *data.digits(),
        accuracy,
        0.92,
        lr=3e-3,
        num_epochs=6,
        batch_size=32,
        seed=seed,
        play=play,
    )


def averaged(seed: int) -> Plan:
    """Validation is of an average of the weights, which lags."""
    return accumulated(seed, averages=True)


def noisy_labels(seed: int) -> Plan:
    """A third of the training labels is wrong, and what is learnt is right all the same."""
    (x, y), held_out = data.digits()
    wrong = torch.rand(len(y), generator=dice_of(99)) < 0.3
    y = torch.where(wrong, torch.randint(10, y.shape, generator=dice_of(100)), y)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 10))
    return Plan(model, everywhere_loss, (x, y), held_out, accuracy, 0.85, lr=2e-3, num_epochs=8, seed=seed)


_CLIPPED = {"max_norm": 1.0}
_SGD = {"optimizer": o.MOMENTUM, "lr": 2e-2}
CASES: tuple[Case, ...] = (
    *_cases("digits-frozen-trunk", "a new end on a frozen network", frozen_trunk, adam={}, sgd={**_SGD}),
    *_cases("digits-go-on", "a trained network, trained on", go_on, adam={}, sgd={"optimizer": o.SGD, "lr": 1e-3}),
    *_cases("digits-low-rank", "low-rank adapters", low_rank, adamw={}, clipped={**_CLIPPED}),
    *_cases("digits-softened", "after a larger network", distilled, adam={}, sgd={**_SGD}),
    *_cases("digits-mixed-smoothed", "mixup, label smoothing", mixed_smoothed, adam={}, cosine={"schedule": o.cosine}),
    *_cases("digits-easy-first", "a curriculum", easy_first, adam={}, sgd={**_SGD}),
    *_cases("stream-drift", "online, what changes", drift, adam={}, sgd={"optimizer": o.SGD, "lr": 3e-2}),
    *_cases("wine-single", "one sample a step", single, sgd={}, clipped={**_CLIPPED}),
    *_cases(
        "sixteen-by-heart", "sixteen samples by heart", by_heart, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 0.1}
    ),
    *_cases("faint-signal", "a tenth of the variance", faint, adam={}, sgd={"optimizer": o.SGD, "lr": 2e-2}),
    *_cases("faint-coin", "little can be known", coin, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 2e-2}),
    *_cases("rare-class", "weights against rarity", rare, adam={}, clipped={**_CLIPPED}),
    *_cases("weighed-tasks", "learnt weights of two tasks", two_tasks, adam={}, clipped={**_CLIPPED}),
    *_cases("inner-steps", "meta-learning", inner_steps, adam={}, clipped={"max_norm": 5.0}),
    *_cases("digits-in-parts", "accumulation", accumulated, adam={}, sgd={**_SGD}),
    *_cases("digits-averaged", "an average of the weights", averaged, adam={}, sgd={**_SGD}),
    *_cases("digits-noisy-labels", "a third of the labels wrong", noisy_labels, adam={}, sgd={**_SGD}),
)
