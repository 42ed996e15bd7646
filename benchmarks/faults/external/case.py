"""What a run of this suite is: its plan, what is true of it, and in which half it counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .loop import Plan

Make = Callable[[int], Plan]
HALVES = ("tune", "report")
TASKS = "tasks"
SETS = ("A", "B", "C", "E", TASKS)


@dataclass(frozen=True)
class Truth:
    """What a right answer says of a faulty run.

    Attributes:
        families: symptom families, any of which is right: files of `fastguard/diagnosis/rules`.
        causes: names of causes, any of which is right when it comes first: several only where the fault is both.
        layers: modules or parameters to blame, any of which is right; None where it is no layer's fault.
    """

    families: tuple[str, ...]
    causes: tuple[str, ...]
    layers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Proof:
    """Whether a run is what it is meant to be.

    Attributes:
        holds: whether it counts.
        figures: what that was decided on.
    """

    holds: bool
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One training of the suite.

    Attributes:
        name: unique: "set/kind/variant".
        set: one of `SETS`.
        kind: task and, where there is one, fault: what the halves are split by.
        title: what is done, in a few words.
        make: the plan, by seed.
        home: the module that it is written in; the cache forgets the run when that changes.
        truth, twin, harm: of a faulty run: what is right, the same run without the fault, and the test that it hurts.
        seed: of the run that is recorded.
        place: of the task in its set's table; for the split.
    """

    name: str
    set: str
    kind: str
    title: str
    make: Make
    home: str
    truth: Truth | None = None
    twin: Make | None = None
    harm: Callable[[Case], Proof] | None = None
    seed: int = 0
    place: int = 0

    @property
    def half(self) -> str:
        """The half that its kind belongs to; in the set of tasks all faults of a task are in its half."""
        if self.set == TASKS:
            # By the set's name when its halves were drawn, so that the counted half stays counted.
            return HALVES[hashlib.sha256(f"fresh6/{self.kind.partition('/')[0]}".encode()).digest()[0] % 2]
        return half_of(self.set, self.kind, self.place)


def half_of(group: str, kind: str, place: int = 0) -> str:
    """The half of a kind, which stays where it is when others are added.

    Of "task" it is the parity of a hash; of "task/fault" that of the fault's hash and the task's place in the set's
    table, as on a chessboard: a fault that is planted in several tasks is in both halves, on other tasks.
    """
    what = kind.rpartition("/")[2]
    return HALVES[(hashlib.sha256(f"{group}/{what}".encode()).digest()[0] + place) % 2]
