"""Small models as recipes, and the faults of others' seeders: a table of base x operator x variant for each set.

A: AUTOTRAINER's training problems (Zhang et al., ICSE 2021), on its Blob and Circle, and on digits for MNIST.
B: DeepFD's seeded faults (Cao et al., ICSE 2022): learning rate, loss, epochs, optimizer, last activation.
C: the mutation operators of DeepCrime (Humbatova et al., ISSTA 2021) and DEFault (ICSE 2025), one at a time.
E: damages to the data that DeepDiagnosis (ICSE 2022) and UMLAUT (CHI 2021) look for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import truths as t
from .bases import Recipe, head_of, maker
from .case import Case, Truth
from .harm import worse

Row = tuple[str, str, str, Truth, dict[str, Any]]  # base, operator, variant, truth, what changes in the recipe

_BLOB = Recipe(
    "blob", hidden=(5,) * 5, activation="tanh", init="he-uniform", lr=1e-2, batch_size=64, num_epochs=30, least=0.75
)
BASES: dict[str, dict[str, Recipe]] = {
    "A": {
        "blob": _BLOB,
        "circle": _BLOB.but(data="circle", loss="bce-logits", least=0.75, num_epochs=40),
        "digits": Recipe("digits", hidden=(64, 32), activation="relu", lr=3e-3, num_epochs=12, least=0.9),
    },
    "B": {
        "blob": Recipe("blob", hidden=(16, 16), lr=1e-2, num_epochs=15, least=0.75),
        "circle": Recipe("circle", hidden=(24, 16), loss="bce-logits", lr=1e-2, num_epochs=20, least=0.75),
        "digits": Recipe("digits", hidden=(64,), lr=3e-3, num_epochs=10, least=0.9),
        "wine": Recipe("wine", hidden=(16,), activation="tanh", lr=1e-2, batch_size=16, num_epochs=30, least=0.9),
        "images": Recipe("digit-images", "cnn", hidden=(8,), lr=3e-3, num_epochs=6, least=0.9),
        "friedman": Recipe("friedman", hidden=(32, 32), loss="mse", lr=1e-2, num_epochs=12, least=0.75),
    },
    "C": {
        "moons": Recipe("moons", hidden=(24, 24), lr=1e-2, num_epochs=12, least=0.95),
        "cancer": Recipe("cancer", hidden=(24,), loss="bce-logits", lr=5e-3, num_epochs=12, least=0.93),
        "pixels": Recipe("digits", hidden=(48, 48), lr=3e-3, num_epochs=8, least=0.92),
        "images": Recipe("digit-images", "cnn", hidden=(8,), lr=5e-3, num_epochs=5, least=0.93),
        "friedman": Recipe("friedman", hidden=(48,), activation="tanh", loss="mse", lr=1e-2, num_epochs=12, least=0.7),
        "waves": Recipe("waves", "lstm", hidden=(24,), loss="mse", lr=1e-2, num_epochs=8, least=0.85),
        "copy": Recipe("copy-short", "gru", hidden=(48,), lr=1e-2, max_norm=1.0, num_epochs=8, least=0.9),
    },
}
BASES["E"] = {name: BASES["C"][name] for name in ("moons", "pixels", "friedman", "waves", "cancer")}
_EXPLODE = Truth(("explosion", "nonfinite", "loss", "output", "units"), ("exploding-gradients", "singular-operation"))
_DYING = Truth(("units", "vanishing", "loss"), ("dead-units",))
_VANISH = Truth(("vanishing", "units", "loss"), ("vanishing-gradients",))
_VANISH_BY_INIT = Truth(("weights", "vanishing", "loss"), ("poor-initialisation", "vanishing-gradients"))
_INIT = Truth(("weights", "vanishing", "explosion", "units", "loss", "setup"), ("poor-initialisation",))
_OSCILLATE = Truth(("loss", "explosion", "lr"), ("learning-rate-too-high",))
_BATCH_TOO_LARGE = Truth(("loss", "setup", "data"), ("stopped-too-early",))
_TOO_SHORT = Truth(("loss", "setup"), ("stopped-too-early",))
_UNBALANCED = Truth(("data", "loss"), ("imbalanced-targets",))
_NOISE = Truth(("data", "loss"), ("preprocessing-differs", "overfitting"))
_OPTIMIZER = Truth(("lr", "loss", "weights", "setup"), ("learning-rate-too-low", "wrong-optimizer-settings"))
_WRONG_LOSS = Truth(("output", "setup", "loss", "explosion", "nonfinite"), ("wrong-loss",))


def _output(recipe: Recipe) -> Truth:
    return Truth(("output", "setup", "loss", "units", "vanishing"), ("wrong-output-layer",), head_of(recipe))


def _rows(bases: str, operator: str, variant: str, truth: Truth, **changes: Any) -> list[Row]:
    """The same row for each of the bases."""
    return [(base, operator, variant, truth, changes) for base in bases.split()]


def _each(field: str, operator: str, truth: Truth | None, **values: str) -> list[Row]:
    """Rows in which one field of the recipe takes each of the values, by base; without a truth it is of the output."""
    return [
        (base, operator, value, truth or Truth((), ()), {field: value})
        for base, some in values.items()
        for value in some.split()
    ]


_A = [
    *(row for depth in (8, 9, 11) for row in _rows("blob", "explode", f"exp-x{depth}", _EXPLODE, hidden=(5,) * depth,
                                                   activation="exp")),
    *(row for depth in (8, 10) for row in _rows("circle", "explode", f"exp-x{depth}", _EXPLODE, hidden=(5,) * depth,
                                                activation="exp")),
    *(row for depth in (4, 6) for row in _rows("digits", "explode", f"exp-x{depth}", _EXPLODE, hidden=(32,) * depth,
                                               activation="exp")),
    *(row for depth in (15, 16, 17) for row in _rows("blob circle", "dying-relu", f"relu-x{depth}", _DYING,
                                                     hidden=(5,) * depth, activation="relu")),
    *(row for depth in (11, 13) for row in _rows("blob circle", "vanish", f"sigmoid-x{depth}", _VANISH,
                                                 hidden=(5,) * depth, activation="sigmoid")),
    *(row for depth in (7, 9) for row in _rows("digits", "vanish", f"sigmoid-x{depth}", _VANISH, hidden=(32,) * depth,
                                               activation="sigmoid")),
    *(row for depth in (8, 9) for row in _rows("blob circle", "vanish-by-init", f"relu-x{depth}", _VANISH_BY_INIT,
                                               hidden=(5,) * depth, activation="relu", init="uniform")),
    *_rows("digits", "vanish-by-init", "relu-x9", _VANISH_BY_INIT, hidden=(32,) * 9, init="uniform"),
    *_rows("blob", "oscillate", "batch-1", _OSCILLATE, optimizer="momentum", lr=0.01, batch_size=1, num_epochs=6),
    *_rows("circle", "oscillate", "batch-1", _OSCILLATE, optimizer="momentum", lr=0.05, batch_size=1, num_epochs=6),
    *_rows("blob", "oscillate", "batch-2", _OSCILLATE, optimizer="momentum", lr=0.03, batch_size=2, num_epochs=8),
    *_rows("digits", "oscillate", "batch-2", _OSCILLATE, optimizer="momentum", lr=0.05, batch_size=2, num_epochs=6),
    *_rows("blob circle", "slow", "adam-1e-6", t.LOW, lr=1e-6),
    *_rows("blob", "slow", "sgd-1e-6", t.LOW, optimizer="sgd", lr=1e-6),
    *_rows("digits", "slow", "adam-1e-7", t.LOW, lr=1e-7),
]  # fmt: skip
_B = [
    *(row for base, lr in (("blob", 5.0), ("circle", 3.0), ("digits", 7.0), ("wine", 9.0), ("images", 2.0),
                           ("friedman", 4.0)) for row in _rows(base, "lr", f"{lr:g}", t.HIGH, lr=lr)),
    *(row for base, lr in (("blob", 1e-12), ("circle", 1e-10), ("digits", 1e-13), ("wine", 1e-11), ("images", 1e-10),
                           ("friedman", 1e-10)) for row in _rows(base, "lr", f"{lr:g}", t.LOW, lr=lr)),
    *_each("loss", "loss", _WRONG_LOSS, blob="mape mae nll", circle="mape mae", digits="mape nll minus-ce", wine="mape",
           images="mape nll", friedman="bce-logits mape broadcast-mse"),
    *_rows("blob circle digits wine images friedman", "epoch", "1", _TOO_SHORT, num_epochs=1),
    *_each("optimizer", "optimizer", _OPTIMIZER, blob="adadelta adagrad", circle="sgd adadelta",
           digits="adadelta adagrad sgd", wine="adadelta sgd", images="adadelta sgd", friedman="adadelta"),
    *_each("output", "activation", None, blob="relu sigmoid softsign", circle="relu softplus softmax",
           digits="relu softsign softmax", wine="relu softmax", images="relu", friedman="sigmoid tanh softmax"),
]  # fmt: skip
_C = [
    *_rows("moons", "labels", "half-wrong-labels", t.LABELS, damage="half-wrong-labels"),
    *_rows("pixels", "labels", "most-wrong-labels", t.LABELS, damage="most-wrong-labels"),
    *_rows("images cancer friedman waves", "labels", "shuffled-labels", t.LABELS, damage="shuffled-labels"),
    *_rows("moons pixels images friedman", "constant-labels", "all", t.LEAK, damage="constant-labels"),
    *_rows("pixels images", "delete", "most-deleted", t.OVERFITTED, damage="most-deleted", num_epochs=60),
    *_rows("friedman", "delete", "most-deleted", t.OVERFITTED, damage="most-deleted", num_epochs=80),
    *_rows("waves", "delete", "nearly-all", t.OVERFITTED, damage="nearly-all-deleted", num_epochs=80),
    *_rows("cancer pixels images moons", "unbalance", "very", _UNBALANCED, damage="very-unbalanced"),
    *_rows("moons pixels friedman", "noise", "very-noisy", _NOISE, damage="very-noisy-inputs"),
    *_rows("moons images cancer", "overlap", "overlapping", t.LABELS, damage="overlapping"),
    *_rows("pixels images", "batch-size", "1024", _BATCH_TOO_LARGE, batch_size=1024, num_epochs=4),
    *_rows("waves", "batch-size", "512", _BATCH_TOO_LARGE, batch_size=512),
    *_rows("friedman copy moons", "no-batches", "whole", _BATCH_TOO_LARGE, batch_size=10_000),
    *_rows("pixels", "epochs", "1", _TOO_SHORT, num_epochs=1, lr=1e-3),
    *_rows("copy", "epochs", "2", _TOO_SHORT, num_epochs=2),
    *_rows("waves", "epochs", "1", _TOO_SHORT, num_epochs=1),
    *_rows("moons images waves", "learning-rate", "1e-5", t.LOW, lr=1e-5),
    *_rows("copy", "learning-rate", "3e-5", t.LOW, lr=3e-5),
    *_rows("pixels waves", "high-learning-rate", "1", t.HIGH, lr=1.0),
    *_rows("copy", "high-learning-rate", "0.5", t.HIGH, lr=0.5),
    *_rows("images", "high-learning-rate", "0.3", t.HIGH, lr=0.3),
    *_rows("moons friedman", "remove-activation", "linear", t.CANNOT, activation="linear"),
    *_rows("moons", "change-activation", "sigmoid-deep", _VANISH, activation="sigmoid", hidden=(24,) * 6),
    *_rows("pixels friedman", "change-activation", "sigmoid-deep", _VANISH, activation="sigmoid", hidden=(48,) * 7),
    *_rows("moons cancer pixels images friedman", "initialiser", "zeros", _INIT, init="zeros"),
    *_rows("pixels moons", "initialiser", "ones", _INIT, init="ones"),
    *_rows("friedman", "initialiser", "large-normal", _INIT, init="large-normal"),
    *_rows("pixels images", "initialiser", "tiny", _INIT, init="tiny"),
    *_rows("friedman", "saturating", "first", t.SATURATED, init="large-normal", init_of="first"),
    *_rows("pixels", "saturating", "tanh", t.SATURATED, activation="tanh", init="large-normal"),
    *_rows("images waves", "optimizer", "sgd", _OPTIMIZER, optimizer="sgd", lr=1e-3),
    *_rows("copy", "optimizer", "sgd", _OPTIMIZER, optimizer="sgd"),
    *_rows("pixels", "optimizer-settings", "eps-10", t.SETTINGS, eps=10.0),
    *_rows("images waves", "optimizer-settings", "eps-3", t.SETTINGS, eps=3.0),
    *_rows("copy", "optimizer-settings", "beta1-0.9999", t.SETTINGS, betas=(0.9999, 0.999)),
    *_rows("pixels", "gradient-clip", "1e-5-sgd", t.CLIPPED, optimizer="sgd", lr=0.1, max_norm=1e-5),
    *_rows("friedman", "gradient-clip", "1e-4-sgd", t.CLIPPED, optimizer="sgd", lr=0.05, max_norm=1e-4),
    *_rows("images copy", "gradient-clip", "1e-9", t.CLIPPED, max_norm=1e-9),
    *_rows("pixels", "bias", "removed-narrow", t.CANNOT, bias=False, hidden=(2,)),
    *_rows("moons", "layer-removed", "no-hidden", t.CANNOT, hidden=()),
    *_rows("images", "layer-removed", "one-filter", t.CANNOT, hidden=(1,), activation="sigmoid"),
    *_rows("copy", "layer-removed", "width-2", t.CANNOT, hidden=(2,)),
    *_rows("pixels images friedman", "dropout", "0.95", t.DROPPED, dropout=0.95),
    *_rows("pixels friedman", "decay", "l2-1", t.DECAY, decay=1.0),
    *_rows("images waves", "decay", "l1-0.1", t.DECAY, l1=0.1),
    *_rows("copy", "decay", "l2-0.1", t.DECAY, decay=0.1),
    *_each("loss", "loss", _WRONG_LOSS, pixels="nll", images="mape", cancer="mape", copy="mape",
           waves="bce-logits broadcast-mse", friedman="minus-mse", moons="minus-ce"),
    *_each("output", "last-activation", None, pixels="softmax-over-batch", cancer="softmax relu", moons="sigmoid"),
]  # fmt: skip
_E = [
    *_rows("pixels friedman cancer", "input-scale", "x1000", t.UNSCALED, damage="inputs-x1000"),
    *_rows("moons cancer", "input-scale", "as-bytes", t.UNSCALED, damage="inputs-as-bytes"),
    *_rows("moons pixels", "input-scale", "x0.0001", t.UNSCALED, damage="inputs-x0.0001"),
    *_rows("moons friedman", "input-shift", "100", t.UNSCALED, damage="inputs-shifted"),
    *_rows("friedman cancer", "one-feature", "large", t.UNSCALED, damage="one-feature-large"),
    *_rows("pixels cancer friedman", "preparation", "x30-in-training", t.DIFFERS, damage="scaled-in-training"),
    *_rows("friedman waves", "targets", "x1000", t.TARGETS, damage="targets-x1000"),
    *_rows("friedman waves", "targets", "shifted", t.TARGETS, damage="targets-shifted"),
    *_rows("friedman waves", "outliers", "in-3-percent", t.OUTLIERS, damage="outliers"),
    *_rows("moons pixels friedman", "nan", "in-30-percent", t.SPOILT_ROWS, damage="nan-inputs"),
    *_rows("moons pixels cancer", "order", "sorted-by-class", t.SORTED, damage="sorted-by-class"),
    *_rows("pixels friedman", "order", "one-batch", t.FEW, damage="one-batch"),
    *_rows("pixels moons", "labels", "one-as-another", t.LABELS, damage="one-label-as-another"),
]


def _cases(group: str, rows: Iterable[Row]) -> list[Case]:
    found = []
    for place, (base, recipe) in enumerate(BASES[group].items()):
        found.append(Case(f"{group}/{base}", group, base, f"{base}, sound", maker(recipe), __name__))
        for _, operator, variant, truth, changes in (row for row in rows if row[0] == base):
            faulty, kind = recipe.but(**changes), f"{base}/{operator}"
            right = truth if truth.causes else _output(faulty)
            found.append(
                Case(
                    f"{group}/{kind}/{variant}",
                    group,
                    kind,
                    f"{operator}: {variant}",
                    maker(faulty),
                    __name__,
                    right,
                    maker(recipe),
                    worse(4),
                    place=place,
                )
            )
    return found


CASES = [case for group, rows in (("A", _A), ("B", _B), ("C", _C), ("E", _E)) for case in _cases(group, rows)]
