"""The faults: how each is planted, what it must be found as, and how it shows that training really suffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import plant
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


def jumps(run: Outcome, sound: Outcome, planted: Planted) -> bool:
    """The loss of the fault's step is at least twice what it would have been."""
    return run.losses[planted.step] >= 2.0 * sound.losses[planted.step]


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
    task: str = "char-mlp"


# Names are those of `fastguard.diagnosis.CAUSES`; families those of its rules.
_TOO_HIGH = ("learning-rate-too-high",)
_ALL = (
    Fault(
        "lr",
        "learning rate × 10 from the start",
        "slow",
        plant.learning_rate_times(10),
        ("lr", "explosion", "loss", "weights"),
        _TOO_HIGH,
        worse(),
    ),
    Fault(
        "lr-x100",
        "learning rate × 100 from the start",
        "slow",
        plant.learning_rate_times(100),
        ("lr", "explosion", "loss", "weights"),
        _TOO_HIGH,
        worse(1.2),
    ),
    Fault(
        "lr-jump",
        "learning rate × 100 from a step on",
        "spike",
        plant.learning_rate_jump(100),
        ("lr", "explosion", "loss", "weights"),
        _TOO_HIGH,
        worse(1.2),
        "char-lstm",
    ),
    Fault(
        "warm-up",
        "no warm-up where one is needed",
        "slow",
        plant.no_warm_up,
        ("lr", "explosion", "loss", "weights"),
        _TOO_HIGH,
        worse(),
        "hot-char-mlp",
    ),
    Fault(
        "lr-small",
        "learning rate ÷ 1000",
        "slow",
        plant.learning_rate_times(1e-3),
        ("lr", "loss", "weights"),
        ("learning-rate-too-low",),
        worse(1.5),
    ),
    Fault(
        "scheduler",
        "a warm-up whose scheduler is never stepped",
        "slow",
        plant.scheduler_not_stepped(),
        ("lr", "loss", "weights"),
        ("scheduler-not-stepped",),
        worse(1.2),
        "char-transformer",
    ),
    Fault(
        "accumulation",
        "gradients of 8 batches added up, the loss not divided by 8",
        "slow",
        plant.accumulation_unscaled,
        ("lr", "explosion", "loss", "weights"),
        ("unscaled-accumulation", *_TOO_HIGH),
        worse(),
        "char-mlp-accumulating",
    ),
    Fault(
        "nan",
        "one NaN in one batch",
        "non-finite",
        plant.nan_in_batch,
        ("nonfinite",),
        ("bad-batch",),
        not_finite,
        "char-transformer",
    ),
    Fault(
        "inf-weights",
        "one row of one layer's weights Inf",
        "non-finite",
        plant.inf_in_weights,
        ("nonfinite",),
        ("corrupted-weights",),
        not_finite,
        "char-transformer",
    ),
    Fault(
        "fp16",
        "activations leave float16's range, no loss scaling",
        "non-finite",
        plant.fp16_overflow(scaled=False),
        ("nonfinite",),
        ("half-precision-overflow",),
        not_finite,
    ),
    Fault(
        "fp16-scaled",
        "activations leave float16's range under a GradScaler",
        "non-finite",
        plant.fp16_overflow(scaled=True),
        ("nonfinite",),
        ("half-precision-overflow",),
        loses_scale,
    ),
    Fault(
        "rnn",
        "recurrent weights × 4, no clipping",
        "slow",
        plant.exploding_recurrence(4),
        ("explosion", "units", "weights"),
        ("exploding-gradients", "poor-initialisation"),
        worse(),
        "char-rnn",
    ),
    Fault(
        "sigmoid",
        "30 layers of sigmoid",
        "slow",
        plant.deep_sigmoid(),
        ("vanishing",),
        ("vanishing-gradients",),
        worse(1.2),
    ),
    Fault(
        "dead-relu",
        "biases of one layer minus 30",
        "slow",
        plant.killed_relu,
        ("units", "vanishing"),
        ("dead-units",),
        worse(1.2),
    ),
    Fault(
        "tanh",
        "one tanh layer's weights × 100",
        "slow",
        plant.saturated_tanh,
        ("units", "weights"),
        ("saturated-units", "poor-initialisation"),
        worse(1.05),
    ),
    Fault(
        "init-small",
        "all weights × 0.01 at the start",
        "slow",
        plant.all_weights(0.01),
        ("weights", "vanishing"),
        ("poor-initialisation",),
        worse(),
    ),
    Fault(
        "init-large",
        "all weights × 8 at the start",
        "slow",
        plant.all_weights(8.0),
        ("weights", "explosion"),
        ("poor-initialisation",),
        worse(),
    ),
    Fault(
        "layer-large",
        "one layer's weights × 100 at the start",
        "slow",
        plant.large_layer(100.0),
        ("weights", "explosion"),
        ("poor-initialisation",),
        worse(1.05),
    ),
    Fault(
        "frozen",
        "one hidden layer left with requires_grad=False",
        "slow",
        plant.frozen_layer,
        ("weights",),
        ("frozen-parameters",),
        never_learns,
    ),
    Fault(
        "missing",
        "one layer's parameters not in the optimizer",
        "slow",
        plant.missing_parameters,
        ("weights",),
        ("parameters-missing-from-optimizer",),
        never_learns,
    ),
    Fault(
        "weight-decay",
        "weight decay 30",
        "slow",
        plant.weight_decay(30.0),
        ("weights", "loss"),
        ("weight-decay-too-high",),
        worse(1.2),
    ),
    Fault(
        "dropout",
        "dropout 0.95",
        "slow",
        plant.dropout(0.95),
        ("loss", "units"),
        ("dropout-too-high",),
        worse(1.2),
    ),
    Fault(
        "overfit",
        "100 samples again and again",
        "slow",
        plant.few_samples(100, 400),
        ("loss",),
        ("overfitting",),
        overfits,
    ),
    Fault(
        "labels",
        "each sample with another's label",
        "slow",
        plant.shuffled_targets,
        ("loss", "data"),
        ("wrong-targets",),
        worse(1.2),
    ),
    Fault(
        "bad-epoch",
        "the same batch of each epoch corrupted",
        "spike",
        plant.corrupted_batch_an_epoch(plant.garbage),
        ("data", "loss", "explosion"),
        ("recurring-bad-batch",),
        jumps,
        "small-char-mlp",
    ),
    Fault(
        "bad-batch",
        "one corrupted batch",
        "spike",
        plant.one_bad_batch(plant.garbage),
        ("data", "loss", "explosion"),
        ("bad-batch",),
        jumps,
    ),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
