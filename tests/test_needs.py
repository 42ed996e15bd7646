"""Facts that causes need: True, False, and None where nobody told."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import needs
from fastguard.records import TrainingHistory

from made_runs import falling_losses, run, scaler_run, settings
from records import make_batch, make_record

KINDS = {"Linear": 2}


def told(**facts):
    history = TrainingHistory()
    history.note_model(**facts)
    return history


def clipped():
    history = TrainingHistory()
    history.add(make_record(0, 2.0, clip_coef=0.5))
    return history


def chosen(*ops, num_samples=1, **facts):
    batch = make_batch(num_samples=num_samples)
    return run(
        falling_losses(9), change=lambda step: {"batches": (batch,)}, loss_ops=[f"{op}Backward0" for op in ops], **facts
    )


@pytest.mark.parametrize(
    ("need", "history", "answer"),
    [
        (needs.half_precision, told(), None),
        (needs.half_precision, told(dtypes=["float32"]), False),
        (needs.half_precision, told(dtypes=["float32", "bfloat16"]), True),
        (needs.half_precision, told(dtypes=["float8_e4m3fn"]), True),
        (needs.half_precision, told(dtypes=["float64"], autocast="float16"), True),
        (needs.half_precision, told(dtypes=["float32"], autocast="float32"), False),
        (needs.half_precision, told(dtypes=["float32"], has_scaler=True), True),
        (needs.half_precision, told(dtypes=["float32"], has_scaler=False), False),
        (needs.half_precision, scaler_run(3, ()), True),
        (needs.rectifiers, told(), None),
        (needs.rectifiers, told(module_kinds={**KINDS, "ReLU": 1}), True),
        (needs.rectifiers, told(module_kinds={**KINDS, "Tanh": 1}), False),
        (needs.rectifiers, told(module_kinds={**KINDS, "Tanh": 1, "GELU": 1}), True),
        (needs.rectifiers, told(module_kinds=KINDS), None),  # F.relu, perhaps
        (needs.bounded_units, told(), None),
        (needs.bounded_units, told(module_kinds={**KINDS, "LSTM": 1}), True),
        (needs.bounded_units, told(module_kinds={**KINDS, "ReLU": 1}), False),
        (needs.bounded_units, told(module_kinds=KINDS), None),
        (needs.dropout, told(), None),
        (needs.dropout, told(dropout={"drop": 0.0}), False),
        (needs.dropout, told(dropout={"drop": 0.0, "head": 0.1}), True),
        (needs.dropout, told(names=["w"], module_kinds=KINDS), False),
        (needs.dropout, told(names=["w"], module_kinds={**KINDS, "Dropout": 1}), True),
        (needs.batch_statistics, told(), None),
        (needs.batch_statistics, told(module_kinds={**KINDS, "BatchNorm1d": 1}), True),
        (needs.batch_statistics, told(module_kinds={**KINDS, "LayerNorm": 1}), False),
        (needs.clipping, told(), False),
        (needs.clipping, told(clip_limit=1.0), True),
        (needs.clipping, clipped(), True),
        (needs.scheduler, told(), None),
        (needs.scheduler, told(has_scheduler=False), False),
        (needs.scheduler, told(has_scheduler=True), True),
        (needs.several_passes, told(), None),
        (needs.several_passes, told(backward_per_step=1), False),
        (needs.several_passes, told(backward_per_step=2), True),
        (needs.steps_of_the_gradients_size, told(), None),
        (needs.steps_of_the_gradients_size, told(optimizer_settings=settings("SGD")), True),
        (needs.steps_of_the_gradients_size, told(optimizer_settings=settings("AdamW")), False),
        (needs.steps_of_the_gradients_size, told(optimizer_settings=settings("SomebodysOwn")), None),
        (
            needs.steps_of_the_gradients_size,
            told(optimizer_settings=[*settings("AdamW"), *settings("SGD")]),
            True,
        ),
        (needs.decay, told(), None),
        (needs.decay, told(optimizer_settings=settings(weight_decay=0.0)), False),
        (needs.decay, told(optimizer_settings=settings(weight_decay=0.01)), True),
        (needs.decay, told(optimizer_settings=settings()), None),
        (needs.decay, told(optimizer_settings=settings(weight_decay=math.nan), decay_per_step=0.01), True),
        (needs.validation, told(), False),
        (needs.validation, run(falling_losses(20), val_losses={9: 1.0}), True),
        (needs.descent, told(), None),
        (needs.descent, run(falling_losses(20)), None),
        (needs.descent, run([1.0, -0.1, 0.5]), False),
        (needs.descent, run([1.0, -0.1, 0.5], objective="minimise"), True),
        (needs.descent, run(falling_losses(20), objective="game"), False),
        (needs.descent, run(falling_losses(20), objective="reward"), False),
        (needs.descent, told(num_foreign_parameters=2), None),
        (needs.descent, told(num_foreign_parameters=3), False),
        (needs.descent, told(num_foreign_parameters=3, objective="minimise"), True),
        (needs.reinforces, chosen("Mul", "Neg", "Log", "Select"), True),
        (needs.reinforces, chosen("Sum", "Cat", "Mul", "Neg", "Squeeze", "Gather", "Sub"), True),
        (needs.reinforces, chosen("Mul", "Neg", "Gather", num_samples=32), False),  # a mask, perhaps
        (needs.reinforces, chosen("Neg", "Mean", "Gather"), False),
        (needs.reinforces, chosen("Mul", "NllLoss", "Select"), False),
        (needs.reinforces, chosen("Mul", "Neg", "Addmm", "Select"), False),
        (needs.reinforces, chosen("Mul", "Neg", "Gather", objective="minimise"), False),
        (needs.descent, chosen("Mul", "Neg", "Gather"), False),
    ],
)
def test_needs(need, history, answer):
    assert need(history) is answer
