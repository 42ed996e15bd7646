"""Set A: AUTOTRAINER's training problems (Zhang et al., ICSE 2021), on its Blob and Circle, and on digits for MNIST.

Layers of five units, weights He-uniform unless said. Digits: LeNet's dense layers, of 32 units here.
"""

from __future__ import annotations

from collections.abc import Callable

from ..bases import Recipe, head_of, maker
from ..case import Case, Proof, Truth
from ..harm import is_slow, loses_accuracy, oscillates

BLOB = Recipe(
    "blob", hidden=(5,) * 5, activation="tanh", init="he-uniform", lr=1e-2, batch_size=64, num_epochs=30, least=0.75
)
CIRCLE = BLOB.but(data="circle", loss="bce-logits", least=0.75, num_epochs=40)
DIGITS = Recipe("digits", hidden=(64, 32), activation="relu", lr=3e-3, num_epochs=12, least=0.9)
BASES = {"blob": BLOB, "circle": CIRCLE, "digits": DIGITS}

_EXPLODE = Truth(("explosion", "nonfinite", "loss", "output", "units"), ("exploding-gradients", "singular-operation"))
_DYING = Truth(("units", "vanishing", "loss"), ("dead-units",))
_VANISH = Truth(("vanishing", "units", "loss"), ("vanishing-gradients",))
_VANISH_BY_INIT = Truth(("weights", "vanishing", "loss"), ("poor-initialisation", "vanishing-gradients"))
_OSCILLATE = Truth(("loss", "explosion", "lr"), ("batch-size", "learning-rate-too-high"))
_SLOW = Truth(("lr", "loss", "weights"), ("learning-rate-too-low",))


def _case(
    base: str, fault: str, variant: str, truth: Truth, harm: Callable[[Case], Proof], seed: int = 0, **changes: object
) -> Case:
    sound = BASES[base]
    title = f"{fault}: {variant}"
    name = f"A/{base}/{fault}/{variant}"
    recipe = sound.but(**changes)
    place = [*BASES].index(base)
    return Case(name, "A", f"{base}/{fault}", title, maker(recipe), __name__, truth, maker(sound), harm, seed, place)


def _deep(base: str, activation: str, depth: int, **more: object) -> dict[str, object]:
    width = 32 if base == "digits" else 5
    return {"hidden": (width,) * depth, "activation": activation, **more}


def _explode(base: str, depth: int) -> Case:
    return _case(base, "explode", f"exp-x{depth}", _EXPLODE, loses_accuracy, **_deep(base, "exp", depth))


def _dying(base: str, depth: int, seed: int) -> Case:
    changes = _deep(base, "relu", depth)
    return _case(base, "dying-relu", f"relu-x{depth}-{seed}", _DYING, loses_accuracy, seed, **changes)


def _vanish(base: str, depth: int) -> Case:
    return _case(base, "vanish", f"sigmoid-x{depth}", _VANISH, loses_accuracy, **_deep(base, "sigmoid", depth))


def _vanish_by_init(base: str, depth: int) -> Case:
    changes = _deep(base, "relu", depth, init="uniform")
    return _case(base, "vanish-by-init", f"relu-x{depth}", _VANISH_BY_INIT, loses_accuracy, **changes)


def _oscillate(base: str, variant: str, **changes: object) -> Case:
    return _case(base, "oscillate", variant, _OSCILLATE, oscillates, **changes)


def _slow(base: str, variant: str, **changes: object) -> Case:
    return _case(base, "slow", variant, _SLOW, is_slow, **changes)


def _improper_activation(base: str, output: str, **changes: object) -> Case:
    recipe = BASES[base].but(output=output, **changes)
    truth = Truth(("output", "setup", "loss", "units", "vanishing"), ("wrong-output-layer",), head_of(recipe))
    return _case(base, "improper-activation", output, truth, loses_accuracy, output=output, **changes)


CASES: tuple[Case, ...] = (
    *(_explode("blob", depth) for depth in (8, 9, 11)),
    *(_explode("circle", depth) for depth in (8, 10)),
    *(_explode("digits", depth) for depth in (4, 6)),
    *(_dying("blob", depth, seed) for depth, seed in ((15, 0), (15, 1), (16, 2), (17, 3))),
    *(_dying("circle", depth, seed) for depth, seed in ((15, 0), (16, 1), (17, 2))),
    *(_vanish("blob", depth) for depth in (11, 13)),
    *(_vanish("circle", depth) for depth in (11, 13)),
    *(_vanish("digits", depth) for depth in (7, 9)),
    *(_vanish_by_init("blob", depth) for depth in (8, 9)),
    *(_vanish_by_init("circle", depth) for depth in (8, 9)),
    *(_vanish_by_init("digits", depth) for depth in (9, 16)),
    _oscillate("blob", "batch-1", optimizer="momentum", lr=0.01, batch_size=1, num_epochs=6),
    _oscillate("circle", "batch-1", optimizer="momentum", lr=0.05, batch_size=1, num_epochs=6),
    _oscillate("blob", "batch-2", optimizer="momentum", lr=0.03, batch_size=2, num_epochs=8),
    _oscillate("digits", "batch-2", optimizer="momentum", lr=0.05, batch_size=2, num_epochs=6),
    _slow("blob", "adam-1e-6", lr=1e-6),
    _slow("blob", "sgd-1e-6", optimizer="sgd", lr=1e-6),
    _slow("circle", "adam-1e-6", lr=1e-6),
    _slow("digits", "adam-1e-7", lr=1e-7),
    _improper_activation("blob", "relu", lr=1e-3),
    _improper_activation("digits", "relu", init="uniform", init_of="last"),
)
