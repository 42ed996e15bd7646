"""What sits in a model, beside plain weights: trained with a guard as other people's optimizers are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .training import Way
from .trial import Verdict, judge

NUM_WORDS = 11


def _words(x: torch.Tensor) -> torch.Tensor:
    """Four words a row, some of them twice."""
    return (x[:, :4].abs() * 5).long().clamp(max=NUM_WORDS - 1)


class LowRank(nn.Module):
    """A frozen layer with a trained product of two thin matrices beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A = nn.Linear(width, 2, bias=False)
        self.lora_B = nn.Linear(2, width, bias=False)
        nn.init.normal_(self.lora_B.weight, std=0.1)  # zeros, as they are begun with, would have no gradient to judge

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


class Words(nn.Module):
    """Words looked up, and a head, tied to the table or its own."""

    def __init__(self, width: int, *, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, width, sparse=sparse)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, NUM_WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.mix(self.table(_words(x))).tanh().mean(1))
        return nn.functional.pad(scores, (0, self.width - NUM_WORDS))


class Experts(nn.Module):
    """Three experts, of which a batch goes to one, so that the others have no gradient; a fourth is never asked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.experts[int(x[0, 0].abs() * 10) % 3](x))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """Layers whose outputs are computed once more in the backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda h, layer=layer: layer(h).tanh(), x, use_reentrant=False)
        return x


class InHalf(nn.Module):
    """Weights and gradients in bfloat16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.bfloat16()).float()  # type: ignore[no-any-return]


def _normed(width: int) -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(width, width)), nn.BatchNorm1d(width))


def _low_rank(width: int) -> nn.Module:
    return nn.Sequential(LowRank(width), nn.Tanh(), LowRank(width))


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that sits in a model.

    Args:
        name: as the table has it.
        model: of a width.
        optimizers: by the name that the table has; made of the parameters that are to be trained.
    """

    name: str
    model: Callable[[int], nn.Module]
    optimizers: dict[str, Callable[[list[torch.Tensor]], Any]]


def _adamw(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def _fused(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def _sgd(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


_BOTH = {"AdamW": _adamw, "fused AdamW": _fused}
CASES = (
    Case("LoRA, the base frozen", _low_rank, _BOTH),
    Case("tied embedding and head", functools.partial(Words, tied=True), _BOTH),
    Case("embedding with dense gradients", Words, _BOTH),
    Case("embedding with sparse gradients, dense layers", functools.partial(Words, sparse=True), {"SGD": _sgd}),
    Case("experts without gradients", Experts, _BOTH),
    Case("weight norm and batch norm", _normed, _BOTH),
    Case("activation checkpointing", Checkpointed, _BOTH),
    Case("bfloat16 weights", InHalf, _BOTH),
)


def _made(make: Callable[[list[torch.Tensor]], Any], model: nn.Module) -> Any:
    return make([p for p in model.parameters() if p.requires_grad])


def verdicts(cases: Iterable[Case] = CASES) -> Iterator[tuple[str, str, Verdict]]:
    """The name of each case, that of the optimizer, and what came of it. Cost: half a second each."""
    for case in cases:
        for name, make in case.optimizers.items():
            way = Way(functools.partial(_made, make), model=case.model)
            yield case.name, name, judge(type(make([nn.Parameter(torch.ones(1))])), way)
