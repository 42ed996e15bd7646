"""A fault in a set-up, and what faults are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tasks import TASKS
from ..tasks.planned import Lambda, Planned, column, load, narrow, opt


@dataclass(frozen=True)
class Planted:
    """A fault in a set-up.

    Attributes:
        name: "fault@task".
        source: "A", "B", "C" or "D".
        causes: the names that are right.
        make: the set-up; called after the random generators were seeded.
    """

    name: str
    source: str
    causes: tuple[str, ...]
    make: Callable[[], Planned]

    @property
    def kind(self) -> str:
        """The fault, without the task."""
        return self.name.partition("@")[0]


FAULTS: list[Planted] = []
OUTPUT, LOSS, INIT = "wrong-output-layer", "wrong-loss", "poor-initialisation"
HIGH, LOW, SETTINGS = "learning-rate-too-high", "learning-rate-too-low", "wrong-optimizer-settings"


def fault(source: str, name: str, causes: str, tasks: str, change: Callable[[Planned], Any]) -> None:
    """Enters a fault, once for each of `tasks` (names with blanks between them)."""
    for task in tasks.split():

        def make(task: str = task) -> Planned:
            planned = TASKS[task]()
            return change(planned) or planned

        FAULTS.append(Planted(f"{name}@{task}", source, tuple(causes.split()), make))


def made(source: str, name: str, causes: str, make: Callable[[], Planned]) -> None:
    """Enters a fault with a set-up of its own."""
    FAULTS.append(Planted(name, source, tuple(causes.split()), make))


def replaced(model: nn.Module, old: type[nn.Module], new: Callable[[], nn.Module]) -> None:
    """Puts `new()` in the place of every module of the class `old`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, old):
                setattr(parent, name, new())


def changing(**fields: Any) -> Callable[[Planned], None]:
    """A change of fields."""

    def change(planned: Planned) -> None:
        for name, value in fields.items():
            setattr(planned, name, value)

    return change


def ending(module: Callable[[], nn.Module]) -> Callable[[Planned], None]:
    """One more module at the end of the model."""

    def change(planned: Planned) -> None:
        planned.model = nn.Sequential(*planned.model, module())  # type: ignore[misc]

    return change


def weights(init: Callable[[Tensor], Any]) -> Callable[[Planned], None]:
    """All weight matrices initialised anew."""

    def change(planned: Planned) -> None:
        for p in planned.model.parameters():
            if p.dim() >= 2:
                init(p)

    return change


def exponential() -> nn.Module:
    """exp."""
    return Lambda(torch.exp)


def deep(act: Callable[[], nn.Module], num: int, data: str, init: Callable[[Tensor], Any] | None = None) -> Planned:
    """One of AUTOTRAINER's deep narrow nets."""
    x, y = load(data)
    if data == "blobs":
        planned = Planned(narrow(num, act, 2, 3), x, y, nn.CrossEntropyLoss(), opt("Adam", lr=1e-3), 32)
    else:
        loss = column(F.binary_cross_entropy_with_logits)
        planned = Planned(narrow(num, act, 2, 1), x, y.float(), loss, opt("Adam", lr=1e-3), 32)
    if init is not None:
        weights(init)(planned)
    return planned


def dead(num: int, data: str) -> Planned:
    """A net whose units are dead from the start, as it comes about in one initialisation out of two."""
    for _ in range(200):
        planned = deep(nn.ReLU, num, data)
        if not bool(planned.model[:-1](planned.inputs[:96]).any()):  # type: ignore[index]
            return planned
    raise RuntimeError("no initialisation with dead units was found")


def binary_loss(planned: Planned) -> None:
    """A binary cross-entropy for several classes: each against the rest."""
    planned.loss_fn = nn.BCELoss()
    planned.model = nn.Sequential(planned.model, nn.Softmax(1))
    planned.targets = F.one_hot(planned.targets).float()


def squares_of_probabilities(loss: Callable[..., Tensor]) -> Callable[[Planned], None]:
    """A loss of numbers, of the probabilities against one-hot targets."""

    def change(planned: Planned) -> None:
        planned.model = nn.Sequential(planned.model, nn.Softmax(1))
        planned.targets = F.one_hot(planned.targets).float()
        planned.loss_fn = loss

    return change


def another_end(module: Callable[[], nn.Module] | None) -> Callable[[Planned], None]:
    """The last module replaced, or left out."""

    def change(planned: Planned) -> None:
        rest = list(planned.model)[:-1]  # type: ignore[arg-type]
        planned.model = nn.Sequential(*rest, *([] if module is None else [module()]))

    return change
