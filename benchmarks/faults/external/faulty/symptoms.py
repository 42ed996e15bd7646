"""Set E: what DeepDiagnosis (Wardat et al., ICSE 2022) and UMLAUT (Schoop et al., CHI 2021) look for, planted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from ..bases import Recipe, maker
from ..case import Case, Make, Truth
from ..harm import worse
from ..loop import Plan, Tensors

BASES = {
    "wine": Recipe("wine", hidden=(24,), optimizer="momentum", lr=2e-2, batch_size=16, num_epochs=30, least=0.9),
    "pixels": Recipe("digits", hidden=(48, 48), optimizer="momentum", lr=3e-2, num_epochs=8, least=0.92),
    "images": Recipe("digit-images", "cnn", hidden=(8,), lr=3e-3, num_epochs=5, least=0.92),
    "norm": Recipe("digits", hidden=(48, 48), batch_norm=True, lr=3e-3, num_epochs=6, least=0.92),
    "friedman": Recipe("friedman", hidden=(48, 48), loss="mse", lr=5e-3, num_epochs=12, least=0.75),
    "tanh": Recipe("digits", hidden=(48, 48), activation="tanh", lr=2e-3, num_epochs=8, least=0.92),
    "waves": Recipe("waves", "gru", hidden=(24,), loss="mse", lr=1e-2, num_epochs=8, least=0.85),
}
_INPUTS = Truth(
    ("data", "setup", "units", "explosion", "nonfinite", "weights", "loss", "output"), ("unnormalised-inputs",)
)
_TARGETS = Truth(("data", "setup", "loss", "output", "explosion", "weights"), ("unnormalised-targets",))
_OUTLIERS = Truth(("data", "loss", "explosion"), ("outliers", "bad-batch", "recurring-bad-batch"))
_NAN = Truth(("nonfinite", "data"), ("bad-batch", "recurring-bad-batch"))
_SINGULAR = Truth(("nonfinite", "loss"), ("singular-operation",))
_STATISTICS = Truth(("loss", "data", "setup"), ("normalisation-statistics",))
_OVERFITTING = Truth(("loss",), ("overfitting",))
_UNSHUFFLED = Truth(("data", "loss", "explosion"), ("unshuffled-data",))
_REPEATED = Truth(("data", "loss"), ("repeated-data", "overfitting"))
_DIFFERS = Truth(("data", "loss", "setup"), ("preprocessing-differs",))
_TOO_HIGH = Truth(("lr", "explosion", "loss", "weights", "units", "nonfinite"), ("learning-rate-too-high",))
_TOO_LOW = Truth(("lr", "loss", "weights"), ("learning-rate-too-low",))
_DROPOUT = Truth(("units", "loss", "setup"), ("dropout-too-high",))
_LABELS = Truth(("data", "loss", "setup"), ("wrong-targets",))

Change = Callable[[Plan], None]


def _case(base: str, fault: str, variant: str, truth: Truth, change: Change | None = None, **words: object) -> Case:
    sound = BASES[base]
    make = maker(sound.but(**words))
    return Case(
        f"E/{base}/{fault}/{variant}",
        "E",
        f"{base}/{fault}",
        f"{fault}: {variant}",
        make if change is None else _and(make, change),
        __name__,
        truth,
        maker(sound),
        worse(),
        place=[*BASES].index(base),
    )


def _and(make: Make, change: Change) -> Make:
    def changed(seed: int) -> Plan:
        plan = make(seed)
        change(plan)
        return plan

    return changed


def _damaged(base: str, fault: str, damage: str, truth: Truth, **words: object) -> Case:
    return _case(base, fault, damage, truth, damage=damage, **words)


def _dead(name: str, bias: float = -20.0) -> Change:
    def change(plan: Plan) -> None:
        with torch.no_grad():
            plan.model.get_submodule(name).bias.fill_(bias)

    return change


def _saturated(name: str) -> Change:
    def change(plan: Plan) -> None:
        with torch.no_grad():
            plan.model.get_submodule(name).weight.mul_(200.0)

    return change


def _log_of_probabilities(plan: Plan) -> None:
    """A cross-entropy written by hand, of probabilities that float32 rounds to zero."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        shares = (20.0 * model(batch[0])).exp()
        shares = shares / shares.sum(1, keepdim=True)
        return -shares.gather(1, batch[1][:, None]).log().mean()

    plan.loss = loss


def _root_of_zero(plan: Plan) -> None:
    """A root mean square error a sample, whose slope at zero is infinite: targets are copied where they are small."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        out = model(batch[0])
        wanted = torch.where(batch[1] < batch[1].median(), out.detach(), batch[1])
        return (out - wanted).square().sum(1).sqrt().mean()

    plan.loss = loss


def _norm_of_nothing(plan: Plan) -> None:
    """A layer that divides by the norm of its inputs, some of which are all zero."""

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        inputs = batch[0].clone()
        inputs[::8] = 0.0
        return F.mse_loss(model(inputs / inputs.norm(dim=1, keepdim=True)), batch[1])

    plan.loss = loss


def _still_statistics(plan: Plan) -> None:
    for module in plan.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1e-6


def _train_mode(plan: Plan) -> None:
    """The model is validated, and used, in training mode: dropout of nine tenths goes on."""
    plan.eval_mode = False
    quality = plan.quality

    def in_training_mode(model: nn.Module, held_out: Tensors) -> float:
        torch.manual_seed(0)
        model.train()
        return quality(model, held_out)

    plan.quality = in_training_mode


def _off_by_one(plan: Plan) -> None:
    """Labels are those of the sample before: the two arrays were filtered differently."""
    plan.train = (plan.train[0], plan.train[1].roll(1, 0))


def _few(count: int, num_epochs: int) -> Change:
    def change(plan: Plan) -> None:
        plan.train = tuple(tensor[:count] for tensor in plan.train)
        plan.num_epochs = num_epochs

    return change


CASES: tuple[Case, ...] = (
    *(
        _damaged(base, "inputs", damage, _INPUTS)
        for base, damage in (
            ("wine", "inputs-x1000"),
            ("wine", "one-feature-large"),
            ("pixels", "inputs-as-bytes"),
            ("pixels", "inputs-x1000"),
            ("tanh", "inputs-x1000"),
            ("tanh", "inputs-shifted"),
            ("images", "inputs-x1000"),
            ("friedman", "inputs-x1000"),
            ("friedman", "one-feature-large"),
            ("wine", "inputs-x0.0001"),
            ("pixels", "inputs-x0.0001"),
        )
    ),
    _damaged("friedman", "targets", "targets-shifted", _TARGETS),
    _damaged("friedman", "targets", "targets-x1000", _TARGETS),
    _damaged("waves", "targets", "targets-x1000", _TARGETS),
    _damaged("waves", "targets", "targets-shifted", _TARGETS),
    _damaged("friedman", "outliers", "outliers", _OUTLIERS),
    _damaged("waves", "outliers", "outliers", _OUTLIERS),
    _damaged("friedman", "nan", "nan-inputs", _NAN),
    _damaged("images", "nan", "nan-inputs", _NAN),
    _damaged("wine", "nan", "nan-inputs", _NAN),
    _damaged("waves", "nan", "nan-inputs", _NAN),
    _case("pixels", "numerical", "log-of-probabilities", _SINGULAR, _log_of_probabilities),
    _case("friedman", "numerical", "root-of-zero", _SINGULAR, _root_of_zero),
    _case("waves", "numerical", "root-of-zero", _SINGULAR, _root_of_zero),
    _case("friedman", "numerical", "norm-of-nothing", _SINGULAR, _norm_of_nothing),
    *(
        _case(base, "dead", f"bias-of-{name}", Truth(("units", "vanishing"), ("dead-units",), layers), _dead(name))
        for base, name, layers in (
            ("pixels", "0", ("0", "1", "2")),
            ("pixels", "2", ("0", "1", "2", "3")),
            ("images", "2", ("0", "1", "2", "3")),
            ("friedman", "0", ("0", "1", "2")),
        )
    ),
    *(
        _case(
            base,
            "saturated",
            f"weights-of-{name}",
            Truth(("units", "weights", "vanishing"), ("saturated-units", "poor-initialisation"), (name, after)),
            _saturated(name),
        )
        for base, name, after in (("tanh", "0", "1"), ("tanh", "2", "3"))
    ),
    _case("norm", "statistics", "never-follow", _STATISTICS, _still_statistics),
    _case(
        "pixels",
        "train-mode",
        "dropout",
        Truth(("setup", "loss"), ("train-mode-in-validation",)),
        _train_mode,
        dropout=0.8,
    ),
    _case("pixels", "overfit", "60-samples", _OVERFITTING, _few(60, 150), optimizer="adam", lr=3e-3),
    _case("friedman", "overfit", "50-samples", _OVERFITTING, _few(50, 150)),
    _case("images", "overfit", "40-samples", _OVERFITTING, _few(40, 120)),
    _case("waves", "overfit", "40-samples", _OVERFITTING, _few(40, 120)),
    _damaged("pixels", "unshuffled", "sorted-by-class", _UNSHUFFLED),
    _damaged("images", "unshuffled", "sorted-by-class", _UNSHUFFLED),
    _damaged("wine", "unshuffled", "sorted-by-class", _UNSHUFFLED, lr=0.1),
    _damaged("pixels", "repeated", "one-batch", _REPEATED),
    _damaged("images", "repeated", "one-batch", _REPEATED),
    _damaged("friedman", "repeated", "one-batch", _REPEATED),
    _damaged("pixels", "differs", "scaled-in-training", _DIFFERS, optimizer="adam", lr=3e-3),
    _damaged("images", "differs", "scaled-in-training", _DIFFERS),
    _damaged("friedman", "differs", "scaled-in-training", _DIFFERS),
    _case("images", "misaligned", "off-by-one", _LABELS, _off_by_one),
    _case("tanh", "misaligned", "off-by-one", _LABELS, _off_by_one),
    _case("pixels", "step-size", "3", _TOO_HIGH, lr=3.0),
    _case("friedman", "step-size", "0.5", _TOO_HIGH, lr=0.5),
    _case("tanh", "step-size", "0.3", _TOO_HIGH, lr=0.3),
    _case("wine", "small-step-size", "1e-5", _TOO_LOW, lr=1e-5),
    _case("tanh", "small-step-size", "3e-7", _TOO_LOW, lr=3e-7),
    _case("waves", "small-step-size", "1e-6", _TOO_LOW, lr=1e-6),
    _case("tanh", "dropout", "0.95", _DROPOUT, dropout=0.95),
    _case("norm", "dropout", "0.97", _DROPOUT, dropout=0.97),
    _case("wine", "dropout", "0.95", _DROPOUT, dropout=0.95),
)
