"""A case of this group: a script that trains something, sound or with a fault, and says how good it became."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case, Make, Truth
from ..harm import worse
from ..loop import Plan, Tensors, Watch
from ..wild.case import WildCase

GROUP = "fresh3"
Script = Callable[..., float]


def either(*truths: Truth) -> Truth:
    """Any of them is right."""
    return Truth(
        tuple(dict.fromkeys(family for truth in truths for family in truth.families)),
        tuple(dict.fromkeys(cause for truth in truths for cause in truth.causes)),
    )


CUT_OR_FROZEN = either(c.CUT, a.FROZEN, c.LEFT_OUT)
OUTPUT_OR_LOSS = either(c.OUTPUT, c.LOSS)
ASCENT = Truth((*c.LOSS.families, "lr", "weights"), ("wrong-loss", "learning-rate-too-high"))
NOISE = either(c.LABELS, a.OVERFITTED)
LARGE = either(a.POOR, c.SATURATED, c.EXPLODING)
TINY = either(a.VANISHING, a.POOR, c.LOW)
PARTED = either(c.LEAK, a.DIFFERS, a.OVERFITTED)


def entering(cases: list[Case], home: str) -> Callable[..., Callable[[Script], Script]]:
    """What enters scripts into `cases`: the quality that the sound one has to reach, and what is right of each fault.

    A script is given what guards optimizers and the name of its fault, empty in the sound run; it returns its quality.
    """

    def task(least: float, **faults: Truth) -> Callable[[Script], Script]:
        def enter(script: Script) -> Script:
            kind, title = script.__name__.strip("_").replace("_", "-"), script.__doc__ or ""
            sound = of_script(script, least, "")
            cases.append(WildCase(f"{GROUP}/{kind}", GROUP, kind, title, sound, home))
            for word, truth in faults.items():
                fault = word.replace("_", "-")
                cases.append(
                    WildCase(
                        f"{GROUP}/{kind}/{fault}",
                        GROUP,
                        f"{kind}/{fault}",
                        f"{kind}, {fault}",
                        of_script(script, least, fault),
                        home,
                        truth,
                        sound,
                        worse(2),
                    )
                )
            return script

        return enter

    return task


def of_script(script: Script, least: float, fault: str) -> Make:
    """The plan of a script that is given `fault`, unless that is empty."""

    def make(seed: int) -> Plan:
        reached = [-1.0]  # where the guard ends the run

        def play(plan: Plan, watch: Watch) -> None:
            reached.append(script(watch, fault) if fault else script(watch))

        def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
            raise NotImplementedError("a script has losses of its own")

        return Plan(
            nn.Identity(), loss, (), (), lambda *_: reached[-1], least, play=play, judged_by_loss=False, seed=seed
        )

    return make


def fit(
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss_of: Callable[..., torch.Tensor],
    *,
    max_norm: float | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    val: Callable[[], torch.Tensor] | None = None,
    every: int = 40,
    clears: bool = True,
    trains: bool = True,
) -> nn.Module:
    """The loop of most scripts; a validation, where there is one, after each `every` steps."""
    watch.wrap(optimizer, model, max_norm)
    scheduler = None if schedule is None else schedule(optimizer)
    model.train(trains)
    for step, batch in enumerate(batches, 1):
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        watch.observe(optimizer, loss=loss)
        if val is not None and step % every == 0:
            model.eval()
            with torch.no_grad():
                watch.observe(optimizer, val_loss=val())
            model.train(trains)
    return model.eval()


def fitted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A validation by cross-entropy."""
    return lambda: F.cross_entropy(model(x), y)


def erred(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A validation by squared error."""
    return lambda: F.mse_loss(model(x), y)
