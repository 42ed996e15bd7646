"""What a fault is, and how it shows that training really suffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .plant import Plant, Planted
from .training import Outcome

Kind = Literal["non-finite", "spike", "slow"]
# Of the faulty run, of the same run without the fault, and of where it was planted: whether training suffers.
Proof = Callable[[Outcome, Outcome, Planted], bool]


def worse(ratio: float = 1.1) -> Proof:
    """The last validation loss is at least `ratio` times that of the sound run."""
    return lambda run, sound, planted: run.final_val_loss >= ratio * sound.final_val_loss


def not_finite(run: Outcome, sound: Outcome, planted: Planted) -> bool:
    """The step at which the fault was planted had to be skipped."""
    return planted.step in run.skipped_steps and not sound.skipped_steps


def loses_scale(run: Outcome, sound: Outcome, planted: Planted) -> bool:
    """Step after step was skipped from the fault on."""
    return all(step in run.skipped_steps for step in range(planted.step, planted.step + 10))


def learns_less(ratio: float) -> Proof:
    """Of the first loss at least `ratio` times as large a share is left: where losses are of another scale."""

    def proof(run: Outcome, sound: Outcome, planted: Planted) -> bool:
        return run.final_val_loss / run.losses[0] >= ratio * sound.final_val_loss / sound.losses[0]

    return proof


def jumps(run: Outcome, sound: Outcome, planted: Planted) -> bool:
    """The loss of the fault's step is at least twice what it would have been."""
    return run.losses[planted.step] >= 2.0 * sound.losses[planted.step]


def spikes(run: Outcome, sound: Outcome, planted: Planted) -> bool:
    """From the fault on, the largest loss is at least twice what it would have been."""
    return max(run.losses[planted.step :]) >= 2.0 * max(sound.losses[planted.step :])


def overfits(run: Outcome, sound: Outcome, planted: Planted) -> bool:
    """The validation loss has risen from its best by a fifth, and the training loss is far below it."""
    best = min(loss for _, loss in run.val_losses)
    return run.final_val_loss >= 1.2 * best and run.final_loss < 0.5 * run.final_val_loss


def never_learns(run: Outcome, sound: Outcome, planted: Planted) -> bool:
    """The layer's parameters are what they were before the first step, and no others."""
    layers = planted.layers or ()
    return bool(run.unchanged) and all(any(name.startswith(f"{at}.") for at in layers) for name in run.unchanged)


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted.

    Attributes:
        name: as `--fault` takes it.
        title: what is done to the run.
        kind: what its delay is held against: "non-finite" and "spike" show at one step, "slow" ones over many.
        plant: does it.
        families: symptom families one of which must be found.
        causes: root causes, any of which is right when it comes first. There are two where the fault is both: of SGD
            a loss not divided and a learning rate not divided are the same thing; large weights are an initialisation.
        proof: whether training really suffers.
        task: where the demo plants it.
    """

    name: str
    title: str
    kind: Kind
    plant: Plant
    families: tuple[str, ...]
    causes: tuple[str, ...]
    proof: Proof
    task: str


_WORSE = worse(1.2)


def make_fault(
    name: str,
    title: str,
    plant: Plant,
    families: str,
    causes: str,
    task: str = "char-mlp",
    *,
    proof: Proof = _WORSE,
    kind: Kind = "slow",
) -> Fault:
    """A `Fault`; `families` and `causes` are names with blanks between them."""
    return Fault(name, title, kind, plant, tuple(families.split()), tuple(causes.split()), proof, task)
