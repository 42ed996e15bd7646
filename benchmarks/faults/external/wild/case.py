"""A case of this group, and in which half it is: one to tune on, one that is only counted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from ..case import Case, Make, changed

GROUP = "wild"
GROUPS = (GROUP, "afresh", "afresh2", "sound2", "fresh3", "fresh4")
APART = "apart"


class WildCase(Case):
    """A case of such a group; its halves are "tune" and "apart", so that the report half stays what it is."""

    @property
    def half(self) -> str:
        """By the parity of a hash of the task's name: a fault is in the half of its task."""
        return half_of_task(self.kind.partition("/")[0], self.set)


def half_of_task(task: str, group: str = GROUP) -> str:
    """The half of a task."""
    return ("tune", APART)[hashlib.sha256(f"{group}/{task}".encode()).digest()[0] % 2]


def wild_cases(home: str, kind: str, title: str, make: Make, **variants: Mapping[str, Any]) -> list[Case]:
    """A sound run for each of the `variants`, names with what is changed in the plan, each with another seed."""
    return [
        WildCase(
            f"{GROUP}/{kind}/{name.replace('_', '-')}", GROUP, kind, title, changed(make, **changes), home, seed=seed
        )
        for seed, (name, changes) in enumerate(variants.items())
    ]


def dice_of(seed: int) -> torch.Generator:
    """Random numbers for data, which are the same whatever the seed of the run."""
    return torch.Generator().manual_seed(seed)
