"""A case of this group: a script that trains something and says how good it became."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..case import Case, Make
from ..loop import Plan, Tensors, Watch
from ..wild.case import WildCase

GROUP = "sound2"
Loss = Callable[..., torch.Tensor]
Script = Callable[[Watch], float]


def setup(cases: list[Case], home: str, least: float) -> Callable[[Script], Script]:
    """Enters a script into `cases`: it is given what guards optimizers, and returns the quality that it reached."""

    def enter(script: Script) -> Script:
        kind = script.__name__.replace("_", "-")
        cases.append(WildCase(f"{GROUP}/{kind}", GROUP, kind, script.__doc__ or "", _made(script, least), home))
        return script

    return enter


def _made(script: Script, least: float) -> Make:
    def make(seed: int) -> Plan:
        reached = [-1.0]  # where the guard ends the run

        def play(plan: Plan, watch: Watch) -> None:
            reached.append(script(watch))

        def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
            raise NotImplementedError("a script has losses of its own")

        return Plan(
            nn.Identity(), loss, (), (), lambda *_: reached[-1], least, play=play, judged_by_loss=False, seed=seed
        )

    return make


def train(
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss_of: Callable[..., torch.Tensor],
    *,
    max_norm: float | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    after: Callable[[], object] | None = None,
    val_loss: Callable[[], torch.Tensor] | None = None,
) -> nn.Module:
    """The loop of most scripts; a validation, where there is one, after each fiftieth step."""
    watch.wrap(optimizer, model, max_norm)
    scheduler = None if schedule is None else schedule(optimizer)
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if after is not None:
            after()
        watch.observe(optimizer, loss=loss)
        if val_loss is not None and step % 50 == 0:
            model.eval()
            with torch.no_grad():
                watch.observe(optimizer, val_loss=val_loss())
            model.train()
    return model.eval()


def epochs(count: int, size: int, *tensors: torch.Tensor) -> Iterator[Tensors]:
    """Batches of `size`, in a new order each epoch."""
    for _ in range(count):
        for at in torch.randperm(len(tensors[0])).split(size):
            yield tuple(t[at] for t in tensors)


def drawn(count: int, size: int, *tensors: torch.Tensor) -> Iterator[Tensors]:
    """`count` batches of `size`, drawn with replacement."""
    for _ in range(count):
        at = torch.randint(len(tensors[0]), (size,))
        yield tuple(t[at] for t in tensors)


def whole(count: int, *tensors: torch.Tensor) -> Iterator[Tensors]:
    """All of it, `count` times."""
    for _ in range(count):
        yield tensors


@torch.no_grad()
def share_right(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> float:
    """Accuracy of logits [N, C] against labels."""
    return float((model(x).argmax(-1) == y).float().mean())


@torch.no_grad()
def r_squared(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """1 - mean squared error / variance."""
    return float(1.0 - (found - wanted).square().mean() / wanted.var(correction=0))


def classify(model: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Cross-entropy of a model's logits."""
    return lambda x, y: F.cross_entropy(model(x), y)
