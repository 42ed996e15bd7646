"""Optimizers, schedules, precisions and scales that are unusual, and work."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors, Watch
from ..qualities import accuracy, r_squared
from ..sound.sequences import everywhere_loss, squared_loss
from .case import dice_of, wild_cases

_cases = functools.partial(wild_cases, __name__)


def digits(seed: int) -> Plan:
    torch.manual_seed(seed)
    return Plan(
        nets.mlp((64, 48, 48, 10)), everywhere_loss, *data.digits(), accuracy, 0.92, lr=3e-3, num_epochs=7, seed=seed
    )


def friedman(seed: int) -> Plan:
    torch.manual_seed(seed)
    return Plan(
        nets.mlp((10, 48, 48, 1), nn.GELU),
        squared_loss,
        *data.friedman(0.2),
        r_squared,
        0.75,
        lr=5e-3,
        num_epochs=14,
        seed=seed,
    )


def rising_long(num_steps: int):
    """A warm-up over half of the run."""
    return lambda step: min(1.0, (step + 1) / (0.5 * num_steps))


def triangular(num_steps: int):
    """Up and down along straight lines, four times, from a twentieth of the rate."""
    return lambda step: 0.05 + 0.95 * (1.0 - abs(2.0 * (4.0 * step / num_steps % 1.0) - 1.0))


def growing_restarts(num_steps: int):
    """Cosines of growing length, one after another."""

    def factor(step: int) -> float:
        at, period = step, max(1, num_steps // 7)
        while at >= period:
            at, period = at - period, 2 * period
        return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * at / period))

    return factor


def inverse_root(num_steps: int):
    """Up over a few steps, then down with the root of their number."""
    return lambda step: min((step + 1) / 20.0, (20.0 / (step + 1)) ** 0.5)


def matrices_and_others(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Muon for what it is made for: matrices."""
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=lr, weight_decay=0.01)


def _in_half(plan: Plan, watch: Watch, *, dtype: torch.dtype) -> None:
    """Autocast, and for float16 a scaler."""
    model = plan.model
    optimizer = watch.wrap(plan.optimizer(model, plan.lr), model, plan.max_norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, enabled=dtype == torch.float16)
    for epoch in range(plan.num_epochs):
        model.train()
        for batch in plan.batches(epoch):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = plan.loss(model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            watch.observe(optimizer, loss=loss.detach())
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype):
            watch.observe(optimizer, val_loss=plan.loss(model, plan.held_out))


def half(seed: int, dtype: torch.dtype = torch.bfloat16) -> Plan:
    """Autocast."""
    plan = digits(seed)
    plan.play = functools.partial(_in_half, dtype=dtype)
    return plan


def summed(seed: int) -> Plan:
    """The loss is a sum over the batch, and the learning rate is divided by its size."""
    plan = friedman(seed)
    plan.loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[1], reduction="sum")
    plan.optimizer, plan.lr = o.MOMENTUM, 3e-2 / plan.batch_size
    return plan


def undone(seed: int) -> Plan:
    """Targets of thousands, which the model is given as multiples of their deviation."""
    x = torch.randn(1500, 6, generator=dice_of(120))
    y = 4000.0 + 900.0 * (x[:, :1] + x[:, 1:2] * x[:, 2:3])
    (x, y), (held_out, wanted) = data.parted(x, y)
    mean, std = y.mean(), y.std()
    torch.manual_seed(seed)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nets.mlp((6, 48, 48, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mean + std * self.layers(x)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.mse_loss((model(batch[0]) - mean) / std, (batch[1] - mean) / std)

    return Plan(Scaled(), loss, (x, y), (held_out, wanted), r_squared, 0.8, lr=5e-3, num_epochs=12, seed=seed)


def large_numbers(seed: int) -> Plan:
    """Squared errors of numbers in the thousands, as a loss, by a linear model whose learning rate fits."""
    x = torch.randn(1200, 5, generator=dice_of(121))
    y = 1000.0 * x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0], [1.5]]) + 100.0 * torch.randn(
        1200, 1, generator=dice_of(122)
    )
    torch.manual_seed(seed)
    return Plan(
        nn.Linear(5, 1),
        squared_loss,
        *data.parted(x, y),
        r_squared,
        0.95,
        lr=2e-2,
        num_epochs=6,
        seed=seed,
        optimizer=o.SGD,
    )


def bright(seed: int) -> Plan:
    """Grey values from 0 to 16 as they are, after a BatchNorm that takes care of them."""
    (x, y), (held_out, wanted) = data.pixels()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.BatchNorm1d(64), nets.mlp((64, 48, 10)))
    return Plan(
        model,
        everywhere_loss,
        (16.0 * x, y),
        (16.0 * held_out, wanted),
        accuracy,
        0.92,
        lr=3e-3,
        num_epochs=5,
        seed=seed,
    )


def deep(seed: int) -> Plan:
    """Twelve residual blocks whose second layers begin at zero."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            nn.init.zeros_(self.second.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(F.relu(self.first(x)))

    plan = digits(seed)
    torch.manual_seed(seed)
    plan.model = nn.Sequential(nn.Linear(64, 32), *(Block() for _ in range(12)), nn.Linear(32, 10))
    plan.num_epochs = 5
    return plan


_HALF = {"play": functools.partial(_in_half, dtype=torch.float16)}
_FAST = {"optimizer": o.of(torch.optim.SGD, momentum=0.99, nesterov=True)}
CASES: tuple[Case, ...] = (
    *_cases(
        "heavy-momentum",
        "momentum of 0.99",
        digits,
        sgd={**_FAST, "lr": 2e-3},
        clipped={**_FAST, "lr": 2e-3, "max_norm": 2.0},
    ),
    *_cases(
        "short-memory",
        "Adam with betas of 0.5 and 0.9",
        digits,
        adam={"optimizer": o.of(torch.optim.Adam, betas=(0.5, 0.9))},
        large_eps={"optimizer": o.of(torch.optim.Adam, betas=(0.5, 0.9), eps=1e-3)},
    ),
    *_cases(
        "factored",
        "Adafactor",
        friedman,
        adafactor={"optimizer": o.of(torch.optim.Adafactor), "lr": 2e-2},
        clipped={"optimizer": o.of(torch.optim.Adafactor), "lr": 2e-2, "max_norm": 1.0},
    ),
    *_cases(
        "signs",
        "steps of one size",
        digits,
        sign={"optimizer": o.SIGN, "lr": 1e-3},
        decay={"optimizer": o.of(o.SignDescent, weight_decay=1.0), "lr": 1e-3},
    ),
    *_cases(
        "orthogonal",
        "Muon",
        digits,
        muon={"optimizer": matrices_and_others, "lr": 2e-2},
        clipped={"optimizer": matrices_and_others, "lr": 2e-2, "max_norm": 0.1},
    ),
    *_cases(
        "strong-decay",
        "much weight decay",
        digits,
        adamw={"optimizer": o.of(torch.optim.AdamW, weight_decay=2.0)},
        sgd={"optimizer": o.of(torch.optim.SGD, momentum=0.9, weight_decay=1e-2), "lr": 3e-2},
    ),
    *_cases(
        "line-search",
        "LBFGS",
        friedman,
        lbfgs={"optimizer": o.LBFGS, "lr": 1.0, "batch_size": 840, "num_epochs": 25},
        no_search={"optimizer": o.of(torch.optim.LBFGS, max_iter=5), "lr": 0.3, "batch_size": 840, "num_epochs": 40},
    ),
    *_cases(
        "resilient",
        "Rprop, all data a step",
        friedman,
        rprop={"optimizer": o.of(torch.optim.Rprop), "lr": 1e-3, "batch_size": 840, "num_epochs": 150},
        adagrad={"optimizer": o.ADAGRAD, "lr": 5e-2},
    ),
    *_cases(
        "high-rate",
        "rates beyond what is usual",
        friedman,
        sgd={"optimizer": o.SGD, "lr": 0.3},
        adadelta={"optimizer": o.ADADELTA, "lr": 3.0},
    ),
    *_cases(
        "always-clipped",
        "a clip limit that always bites",
        digits,
        adam={"max_norm": 1e-3},
        sgd={"optimizer": o.MOMENTUM, "lr": 2.0, "max_norm": 0.02},
    ),
    *_cases(
        "long-warm-up",
        "half of the run",
        digits,
        adamw={"optimizer": o.ADAMW, "schedule": rising_long},
        sgd={"optimizer": o.MOMENTUM, "lr": 5e-2, "schedule": rising_long},
    ),
    *_cases(
        "triangular-rate",
        "up and down",
        friedman,
        sgd={"optimizer": o.MOMENTUM, "lr": 5e-2, "schedule": triangular},
        adam={"lr": 2e-2, "schedule": triangular},
    ),
    *_cases(
        "growing-restarts",
        "warm restarts",
        friedman,
        adam={"lr": 1e-2, "schedule": growing_restarts},
        sgd={"optimizer": o.NESTEROV, "lr": 3e-2, "schedule": growing_restarts},
    ),
    *_cases(
        "inverse-root",
        "down with the root",
        digits,
        adam={"lr": 1e-2, "schedule": inverse_root},
        adamw={"optimizer": o.ADAMW, "lr": 1e-2, "schedule": inverse_root},
    ),
    *_cases("half-brain", "bfloat16 autocast", half, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 3e-2}),
    *_cases("half-scaled", "float16 with a scaler", half, adam={**_HALF}, clipped={**_HALF, "max_norm": 1.0}),
    *_cases("summed-loss", "a sum over the batch", summed, sgd={}, adam={"optimizer": o.ADAM, "lr": 5e-3}),
    *_cases("scaled-targets", "thousands, as deviations", undone, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 2e-2}),
    *_cases(
        "large-numbers", "squared errors of millions", large_numbers, sgd={}, adam={"optimizer": o.ADAM, "lr": 50.0}
    ),
    *_cases(
        "bright-pixels",
        "inputs of sixteen, normalised inside",
        bright,
        adam={},
        sgd={"optimizer": o.MOMENTUM, "lr": 3e-2},
    ),
    *_cases(
        "deep-residual", "twelve blocks that begin as nothing", deep, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 2e-2}
    ),
)
