"""The faults: how each is planted, what it must be found as, and how it shows that training really suffers."""

from __future__ import annotations

from . import plant
from .fault import Fault, jumps, loses_scale, make_fault, never_learns, not_finite, overfits, worse
from .setup_faults import SETUP_FAULTS

# Names are those of `fastguard.diagnosis.CAUSES`; families those of its rules.
# fmt: off
_ALL = (
    make_fault("lr", "learning rate × 10 from the start", plant.learning_rate_times(10),
               "lr explosion loss weights", "learning-rate-too-high", proof=worse()),
    make_fault("lr-x100", "learning rate × 100 from the start", plant.learning_rate_times(100),
               "lr explosion loss weights", "learning-rate-too-high"),
    make_fault("lr-jump", "learning rate × 100 from a step on", plant.learning_rate_jump(100),
               "lr explosion loss weights", "learning-rate-too-high", "char-lstm", kind="spike"),
    make_fault("warm-up", "no warm-up where one is needed", plant.no_warm_up,
               "lr explosion loss weights", "learning-rate-too-high", "hot-char-mlp", proof=worse()),
    make_fault("lr-small", "learning rate ÷ 1000", plant.learning_rate_times(1e-3),
               "lr loss weights", "learning-rate-too-low", proof=worse(1.5)),
    make_fault("scheduler", "a warm-up whose scheduler is never stepped", plant.scheduler_not_stepped(),
               "lr loss weights", "scheduler-not-stepped", "char-transformer"),
    make_fault("accumulation", "gradients of 8 batches added up, the loss not divided by 8",
               plant.accumulation_unscaled, "lr explosion loss weights",
               "unscaled-accumulation learning-rate-too-high", "char-mlp-accumulating", proof=worse()),
    make_fault("nan", "one NaN in one batch", plant.nan_in_batch,
               "nonfinite", "bad-batch", "char-transformer", kind="non-finite", proof=not_finite),
    make_fault("inf-weights", "one row of one layer's weights Inf", plant.inf_in_weights,
               "nonfinite", "corrupted-weights", "char-transformer", kind="non-finite", proof=not_finite),
    make_fault("fp16", "activations leave float16's range, no loss scaling", plant.fp16_overflow(scaled=False),
               "nonfinite", "half-precision-overflow", kind="non-finite", proof=not_finite),
    make_fault("fp16-scaled", "activations leave float16's range under a GradScaler", plant.fp16_overflow(scaled=True),
               "nonfinite", "half-precision-overflow", kind="non-finite", proof=loses_scale),
    make_fault("rnn", "recurrent weights × 4, no clipping", plant.exploding_recurrence(4),
               "explosion units weights", "exploding-gradients poor-initialisation", "char-rnn", proof=worse()),
    make_fault("sigmoid", "30 layers of sigmoid", plant.deep_sigmoid(),
               "vanishing", "vanishing-gradients"),
    make_fault("dead-relu", "biases of one layer minus 30", plant.killed_relu,
               "units vanishing", "dead-units"),
    make_fault("tanh", "one tanh layer's weights × 100", plant.saturated_tanh,
               "units weights", "saturated-units poor-initialisation", proof=worse(1.05)),
    make_fault("init-small", "all weights × 0.01 at the start", plant.all_weights(0.01),
               "weights vanishing", "poor-initialisation", proof=worse()),
    make_fault("init-large", "all weights × 8 at the start", plant.all_weights(8.0),
               "weights explosion", "poor-initialisation", proof=worse()),
    make_fault("layer-large", "one layer's weights × 100 at the start", plant.large_layer(100.0),
               "weights explosion", "poor-initialisation", proof=worse(1.05)),
    make_fault("frozen", "one hidden layer left with requires_grad=False", plant.frozen_layer,
               "weights", "frozen-parameters", proof=never_learns),
    make_fault("missing", "one layer's parameters not in the optimizer", plant.missing_parameters,
               "weights", "parameters-missing-from-optimizer", proof=never_learns),
    make_fault("weight-decay", "weight decay 30", plant.weight_decay(30.0),
               "weights loss", "weight-decay-too-high"),
    make_fault("dropout", "dropout 0.95", plant.dropout(0.95), "loss units", "dropout-too-high"),
    make_fault("overfit", "100 samples again and again", plant.few_samples(100, 400),
               "loss", "overfitting", proof=overfits),
    make_fault("labels", "each sample with another's label", plant.shuffled_targets,
               "loss data", "wrong-targets"),
    make_fault("bad-epoch", "the same batch of each epoch corrupted", plant.corrupted_batch_an_epoch(plant.garbage),
               "data loss explosion", "bad-batch", "small-char-mlp", kind="spike", proof=jumps),
    make_fault("bad-batch", "one corrupted batch", plant.one_bad_batch(plant.garbage),
               "data loss explosion", "bad-batch", "numbers-relu-mlp", kind="spike", proof=jumps),
)
# fmt: on
FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*_ALL, *SETUP_FAULTS)}
