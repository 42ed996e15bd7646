"""What was learnt before is learnt on: thin layers beside those of a network that stays as it is."""

from __future__ import annotations

import copy
import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..fresh3.case import CUT_OR_FROZEN, either
from ..fresh4 import case as f
from ..loop import Plan, Tensors
from ..nets import mlp
from ..qualities import accuracy
from . import case as g

CASES: list[Case] = []
task = g.planning(CASES, __name__)


class LowRank(nn.Module):
    """A layer that stays as it is, and a thin one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 6) -> None:
        super().__init__()
        self.base = copy.deepcopy(base).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@functools.cache
def _learnt_before() -> nn.Sequential:
    """A network that knows upright digits."""
    (x, y), _ = data.digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        model = mlp((64, 64, 48, 10))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(200):
            at = torch.randint(len(x), (64,))
            optimizer.zero_grad()
            F.cross_entropy(model(x[at]), y[at]).backward()
            optimizer.step()
    return model


def _tuned() -> nn.Module:
    return nn.Sequential(*(LowRank(m) if isinstance(m, nn.Linear) else m for m in _learnt_before()))


@functools.cache
def _turned() -> data.Split:
    (x, y), (held, known) = data.digits(as_images=True)
    return (x.rot90(1, (2, 3)).flatten(1), y), (held.rot90(1, (2, 3)).flatten(1), known)


def _both_nothing(model: nn.Module) -> None:
    for layer in model:
        if isinstance(layer, LowRank):
            layer.down.zero_()


def _under_no_grad(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    with torch.no_grad():
        here = model[:4](batch[0])
    return F.cross_entropy(model[4](here), batch[1])


@task(
    0.85,
    ("both-sides-nothing", a.weights(_both_nothing), either(a.NO_GRADIENT, a.POOR)),
    ("first-layers-without-graph", c.loss_is(_under_no_grad), CUT_OR_FROZEN),
    ("half-a-millionth", c.putting(lr=5e-7), c.LOW),
    ("upright-again", lambda plan: vars(plan).update(train=data.digits()[0]), either(a.DIFFERS, a.OVERFITTED)),
    ("mirrored-later", f.inputs_later(lambda x: x.flip(1)), a.DIFFERS),
    higher=c.putting(lr=2e-2),
)
def turned_digits(seed: int) -> Plan:
    """A network for upright digits learns turned ones by thin layers beside its own, AdamW; accuracy."""
    return a.task(
        seed, _tuned, c.cross_entropy, _turned(), accuracy, optimizer=o.of_trainable(torch.optim.AdamW), lr=8e-3,
        num_epochs=9,
    )  # fmt: skip
