"""Set C: the mutation operators of DeepCrime (Humbatova et al., ISSTA 2021) and DEFault (ICSE 2025), one at a time."""

from __future__ import annotations

from ..bases import Recipe, head_of, maker
from ..case import Case, Truth
from ..harm import killed

BASES = {
    "moons": Recipe("moons", hidden=(24, 24), lr=1e-2, num_epochs=12, least=0.95),
    "cancer": Recipe("cancer", hidden=(24,), loss="bce-logits", lr=5e-3, num_epochs=12, least=0.93),
    "pixels": Recipe("digits", hidden=(48, 48), lr=3e-3, num_epochs=8, least=0.92),
    "images": Recipe("digit-images", "cnn", hidden=(8,), lr=5e-3, num_epochs=5, least=0.93),
    "friedman": Recipe("friedman", hidden=(48,), activation="tanh", loss="mse", lr=1e-2, num_epochs=12, least=0.7),
    "waves": Recipe("waves", "lstm", hidden=(24,), loss="mse", lr=1e-2, num_epochs=8, least=0.85),
    "copy": Recipe("copy-short", "gru", hidden=(48,), lr=1e-2, max_norm=1.0, num_epochs=8, least=0.9),
}
_WRONG_TARGETS = Truth(("loss", "data"), ("wrong-targets",))
_TRIVIAL = Truth(("data", "loss", "vanishing"), ("trivial-targets",))
_FEW = Truth(("loss", "data"), ("overfitting",))
_UNBALANCED = Truth(("data", "loss"), ("imbalanced-targets",))
_NOISE = Truth(("data", "loss"), ("preprocessing-differs", "overfitting"))
_OVERLAP = Truth(("data", "loss"), ("wrong-targets",))
_BATCH_TOO_LARGE = Truth(("loss", "setup", "data"), ("batch-size", "stopped-too-early"))
_TOO_SHORT = Truth(("loss", "setup"), ("stopped-too-early",))
_TOO_LOW = Truth(("lr", "loss", "weights"), ("learning-rate-too-low",))
_TOO_HIGH = Truth(("lr", "explosion", "loss", "weights", "nonfinite", "units"), ("learning-rate-too-high",))
_OPTIMIZER = Truth(("lr", "loss", "weights", "setup"), ("learning-rate-too-low", "wrong-optimizer-settings"))
_CANNOT_FIT = Truth(("loss", "setup", "output"), ("model-cannot-fit",))
_CLIPPED = Truth(("explosion", "lr", "loss", "weights"), ("clipped-away", "gradients-too-large-to-clip"))
_DROPOUT = Truth(("units", "loss", "setup"), ("dropout-too-high",))
_DECAY = Truth(("weights", "loss", "vanishing", "units"), ("weight-decay-too-high",))
_WRONG_LOSS = Truth(("output", "setup", "loss", "explosion"), ("wrong-loss",))
_ENDLESS_LOSS = Truth((*_WRONG_LOSS.families, "nonfinite"), ("wrong-loss",))
_SETTINGS = Truth(("lr", "loss", "weights", "setup", "explosion"), ("wrong-optimizer-settings",))
_VANISH = Truth(("vanishing", "units", "loss"), ("vanishing-gradients",))
_SATURATED = Truth(("units", "weights", "vanishing", "loss"), ("saturated-units", "poor-initialisation"))


def _case(base: str, operator: str, variant: str, truth: Truth, **changes: object) -> Case:
    sound = BASES[base]
    return Case(
        f"C/{base}/{operator}/{variant}",
        "C",
        f"{base}/{operator}",
        f"{operator}: {variant}",
        maker(sound.but(**changes)),
        __name__,
        truth,
        maker(sound),
        killed(),
        place=[*BASES].index(base),
    )


def _damaged(base: str, operator: str, damage: str, truth: Truth, **changes: object) -> Case:
    return _case(base, operator, damage, truth, damage=damage, **changes)


def _init(base: str, init: str, init_of: str = "all") -> Case:
    families = ("weights", "vanishing", "explosion", "units", "loss", "setup")
    layers = head_of(BASES[base]) if init_of == "last" else ("0",) if init_of == "first" else None
    truth = Truth(families, ("poor-initialisation",), layers)
    return _case(base, "initialiser", f"{init}-{init_of}", truth, init=init, init_of=init_of)


def _output(base: str, output: str, **changes: object) -> Case:
    recipe = BASES[base].but(output=output, **changes)
    truth = Truth(("output", "setup", "loss", "units", "vanishing"), ("wrong-output-layer",), head_of(recipe))
    return _case(base, "last-activation", output, truth, output=output, **changes)


def _loss(base: str, loss: str, **changes: object) -> Case:
    return _case(base, "loss", loss, _ENDLESS_LOSS if "minus" in loss else _WRONG_LOSS, loss=loss, **changes)


CASES: tuple[Case, ...] = (
    _damaged("moons", "labels", "half-wrong-labels", _WRONG_TARGETS),
    _damaged("pixels", "labels", "most-wrong-labels", _WRONG_TARGETS),
    _damaged("images", "labels", "shuffled-labels", _WRONG_TARGETS),
    _damaged("cancer", "labels", "shuffled-labels", _WRONG_TARGETS),
    _damaged("friedman", "labels", "shuffled-labels", _WRONG_TARGETS),
    _damaged("waves", "labels", "shuffled-labels", _WRONG_TARGETS),
    _damaged("moons", "constant-labels", "constant-labels", _TRIVIAL),
    _damaged("pixels", "constant-labels", "constant-labels", _TRIVIAL),
    _damaged("images", "constant-labels", "constant-labels", _TRIVIAL),
    _damaged("friedman", "constant-labels", "constant-labels", _TRIVIAL),
    _damaged("pixels", "delete", "most-deleted", _FEW, num_epochs=60),
    _damaged("images", "delete", "most-deleted", _FEW, num_epochs=50),
    _damaged("friedman", "delete", "most-deleted", _FEW, num_epochs=80),
    _damaged("waves", "delete", "nearly-all-deleted", _FEW, num_epochs=80),
    _damaged("cancer", "unbalance", "very-unbalanced", _UNBALANCED),
    _damaged("pixels", "unbalance", "very-unbalanced", _UNBALANCED),
    _damaged("images", "unbalance", "very-unbalanced", _UNBALANCED),
    _damaged("moons", "unbalance", "very-unbalanced", _UNBALANCED),
    _damaged("moons", "noise", "very-noisy-inputs", _NOISE),
    _damaged("pixels", "noise", "very-noisy-inputs", _NOISE, num_epochs=12),
    _damaged("friedman", "noise", "very-noisy-inputs", _NOISE),
    _damaged("moons", "overlap", "overlapping", _OVERLAP),
    _damaged("images", "overlap", "overlapping", _OVERLAP),
    _damaged("cancer", "overlap", "overlapping", _OVERLAP),
    _case("pixels", "batch-size", "1024", _BATCH_TOO_LARGE, batch_size=1024, num_epochs=4),
    _case("images", "batch-size", "1024", _BATCH_TOO_LARGE, batch_size=1024, num_epochs=5),
    _case("waves", "batch-size", "512", _BATCH_TOO_LARGE, batch_size=512),
    _case("friedman", "no-batches", "whole", _BATCH_TOO_LARGE, batch_size=10_000),
    _case("copy", "no-batches", "whole", _BATCH_TOO_LARGE, batch_size=10_000),
    _case("moons", "no-batches", "whole", _BATCH_TOO_LARGE, batch_size=10_000),
    _case("pixels", "epochs", "1", _TOO_SHORT, num_epochs=1, lr=1e-3),
    _case("copy", "epochs", "2", _TOO_SHORT, num_epochs=2),
    _case("waves", "epochs", "1", _TOO_SHORT, num_epochs=1),
    _case("moons", "learning-rate", "1e-5", _TOO_LOW, lr=1e-5),
    _case("images", "learning-rate", "1e-5", _TOO_LOW, lr=1e-5),
    _case("copy", "learning-rate", "3e-5", _TOO_LOW, lr=3e-5),
    _case("waves", "learning-rate", "1e-5", _TOO_LOW, lr=1e-5),
    _case("pixels", "high-learning-rate", "1", _TOO_HIGH, lr=1.0),
    _case("copy", "high-learning-rate", "0.5", _TOO_HIGH, lr=0.5),
    _case("waves", "high-learning-rate", "1", _TOO_HIGH, lr=1.0),
    _case("images", "high-learning-rate", "0.3", _TOO_HIGH, lr=0.3),
    _case("moons", "remove-activation", "linear", _CANNOT_FIT, activation="linear"),
    _case("friedman", "remove-activation", "linear", _CANNOT_FIT, activation="linear"),
    _case("moons", "change-activation", "sigmoid-deep", _VANISH, activation="sigmoid", hidden=(24,) * 6),
    _case("pixels", "change-activation", "sigmoid-deep", _VANISH, activation="sigmoid", hidden=(48,) * 7),
    _case("friedman", "change-activation", "sigmoid-deep", _VANISH, activation="sigmoid", hidden=(48,) * 7),
    _init("moons", "zeros"),
    _init("cancer", "zeros"),
    _init("pixels", "zeros"),
    _init("images", "zeros"),
    _init("pixels", "ones"),
    _init("moons", "ones"),
    _init("friedman", "large-normal"),
    _init("pixels", "tiny"),
    _init("images", "tiny"),
    _init("friedman", "zeros"),
    _case("friedman", "saturating-initialiser", "tanh-normal-3", _SATURATED, init="large-normal", init_of="first"),
    _case("pixels", "saturating-initialiser", "tanh", _SATURATED, activation="tanh", init="large-normal"),
    _case("images", "optimizer", "sgd", _OPTIMIZER, optimizer="sgd", lr=1e-3),
    _case("waves", "optimizer", "sgd", _OPTIMIZER, optimizer="sgd", lr=1e-3),
    _case("copy", "optimizer", "sgd", _OPTIMIZER, optimizer="sgd"),
    _case("pixels", "optimizer-settings", "eps-10", _SETTINGS, eps=10.0),
    _case("images", "optimizer-settings", "eps-1", _SETTINGS, eps=3.0),
    _case("copy", "optimizer-settings", "beta1-0.9999", _SETTINGS, betas=(0.9999, 0.999)),
    _case("waves", "optimizer-settings", "eps-1", _SETTINGS, eps=3.0),
    _case("pixels", "gradient-clip", "1e-5-sgd", _CLIPPED, optimizer="sgd", lr=0.1, max_norm=1e-5),
    _case("friedman", "gradient-clip", "1e-5-sgd", _CLIPPED, optimizer="sgd", lr=0.05, max_norm=1e-4),
    _case("images", "gradient-clip", "1e-9", _CLIPPED, max_norm=1e-9),
    _case("copy", "gradient-clip", "1e-9", _CLIPPED, max_norm=1e-9),
    _case("pixels", "bias", "removed-narrow", _CANNOT_FIT, bias=False, hidden=(2,)),
    _case("moons", "layer-removed", "no-hidden", _CANNOT_FIT, hidden=()),
    _case("images", "layer-removed", "one-filter", _CANNOT_FIT, hidden=(1,), activation="sigmoid"),
    _case("copy", "layer-removed", "width-2", _CANNOT_FIT, hidden=(2,)),
    _case("pixels", "dropout", "0.95", _DROPOUT, dropout=0.95),
    _case("images", "dropout", "0.97", _DROPOUT, dropout=0.97),
    _case("friedman", "dropout", "0.9", _DROPOUT, dropout=0.9),
    _case("pixels", "decay", "l2-1", _DECAY, decay=1.0),
    _case("friedman", "decay", "l2-1", _DECAY, decay=1.0),
    _case("images", "decay", "l1-0.1", _DECAY, l1=0.1),
    _case("copy", "decay", "l2-0.1", _DECAY, decay=0.1),
    _case("waves", "decay", "l1-0.1", _DECAY, l1=0.1),
    _loss("pixels", "nll"),
    _loss("images", "mape"),
    _loss("cancer", "mape"),
    _loss("copy", "mape"),
    _loss("waves", "bce-logits"),
    _loss("friedman", "minus-mse"),
    _loss("moons", "minus-ce"),
    _loss("waves", "broadcast-mse"),
    _output("pixels", "softmax-over-batch"),
    _output("cancer", "softmax"),
    _output("images", "softmax", lr=1e-3, num_epochs=3),
    _output("friedman", "relu", init="large-normal", init_of="last"),
    _output("moons", "sigmoid", num_epochs=4),
    _output("cancer", "relu"),
)
