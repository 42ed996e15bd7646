"""Faults in how model, loss, optimizer, loop and data are put together: how each is planted, and what proves it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .fault import learns_less, make_fault, spikes, worse
from .plant import Plant, Planted, a_third_in, flipped_bit, still_statistics, with_settings
from .training import Batch, Setup, Training, warm_up_cosine


def with_fields(**fields: Any) -> Plant:
    """Other fields of the `Setup`, from the start."""

    def plant(setup: Setup, dice: random.Random) -> Planted:
        for name, value in fields.items():
            getattr(setup, name)  # raises where there is no such field
            setattr(setup, name, value)
        return Planted()

    return plant


@with_settings
def weights_put_back(setup: Setup, dice: random.Random, every: int) -> Planted:
    """A `load_state_dict` of the first weights was left in the loop: before each of so many steps."""
    first = copy.deepcopy(setup.model.state_dict())

    def put_back(training: Training) -> None:
        training.model.load_state_dict(first)

    for step in range(every, setup.num_steps, every):
        setup.at(step, put_back)
    return Planted(every)


class _Log(nn.Module):
    def forward(self, probabilities: torch.Tensor) -> torch.Tensor:
        return probabilities.clamp_min(1e-30).log()


def softmax_twice(setup: Setup, dice: random.Random) -> Planted:
    """The model ends in a softmax, of which the loss makes another; validation takes the one for what it is."""
    setup.model = nn.Sequential(setup.model, nn.Softmax(-1))
    loss_of = setup.loss_of

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return loss_of(model if model.training else nn.Sequential(model, _Log()), batch)

    setup.loss_of = loss
    return Planted()


@with_settings
def changed_data(
    setup: Setup,
    dice: random.Random,
    change: Callable[[Batch], Batch],
    *,
    training: bool = True,
    validation: bool = True,
) -> Planted:
    """All batches are changed: those of training, of validation, or of both."""
    if training:
        setup.change_batches(lambda number, batch: change(batch))
    if validation:
        setup.held_out = change(setup.held_out)
    return Planted()


def raw_inputs(batch: Batch) -> Batch:
    """Inputs as they would be without normalisation: of mean 76 and standard deviation 37, if they were normalised."""
    return 37.0 * batch[0] + 76.0, batch[1]


@with_settings
def missing_values(setup: Setup, dice: random.Random, value: float, share: float) -> Planted:
    """From a step on a `share` of the batches has an input of `value`, which stands for a missing one."""
    step = a_third_in(setup, dice)

    def change(number: int, batch: Batch) -> Batch:
        chance = random.Random(f"{setup.seed}/{number}").random()
        if number < step or (number > step and chance >= share):
            return batch
        inputs = batch[0].clone()
        inputs.view(-1)[number % inputs.numel()] = value
        return inputs, batch[1]

    setup.change_batches(change)
    return Planted(step)


def same_batch(setup: Setup, dice: random.Random) -> Planted:
    """The iterator is made anew in each step, and gives the first batch."""
    first = setup.batch_at(0)
    setup.batch_at = lambda number: first
    return Planted()


_EPS = with_fields(make_optimizer=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, eps=1.0))
_TIMES_300 = changed_data(lambda batch: (batch[0], 300.0 * batch[1]))
_AS_COLUMN = changed_data(lambda batch: (batch[0], batch[1].unsqueeze(-1)), validation=False)
_ONE_CLASS = changed_data(lambda batch: (batch[0], torch.ones_like(batch[1])), validation=False)
_SHORT = with_fields(schedule=warm_up_cosine(5, 40, floor=0.0))
# fmt: off
SETUP_FAULTS = (
    make_fault("no-zero-grad", "zero_grad() is never called", with_fields(clears_gradients="never"),
               "setup", "missing-zero-grad"),
    make_fault("stale", "zero_grad() between backward() and step()", with_fields(clears_gradients="before the step"),
               "setup", "no-gradient-arrives"),
    make_fault("val-train-mode", "no model.eval() before validation, in a model with dropout",
               with_fields(calls_eval=False), "setup", "train-mode-in-validation", "char-mlp-dropout",
               proof=worse(1.05)),
    make_fault("overwritten", "the first weights loaded again every 10 steps", weights_put_back(10),
               "setup", "weights-overwritten", "numbers-mlp"),
    make_fault("schedule-short", "a schedule that ends at step 40", _SHORT, "setup", "wrong-schedule"),
    make_fault("eps", "AdamW with eps=1", _EPS, "setup", "wrong-optimizer-settings"),
    make_fault("clipped-away", "SGD, clipped to a norm of 0.003", with_fields(max_norm=3e-3),
               "explosion", "clipped-away", "numbers-mlp"),
    make_fault("softmax-twice", "a softmax before cross_entropy", softmax_twice, "output data", "wrong-output-layer"),
    make_fault("wrong-loss", "a squared error between outputs [N] and targets [N, 1]", _AS_COLUMN,
               "output data", "wrong-loss", "regression-mlp"),
    make_fault("inputs-large", "inputs from 0 to 255, not normalised", changed_data(raw_inputs),
               "data", "unnormalised-inputs", "numbers-mlp", proof=worse(1.05)),
    make_fault("targets-large", "a regression with targets × 300", _TIMES_300,
               "data", "unnormalised-targets", "regression-mlp", proof=learns_less(1.2)),
    make_fault("preprocessing", "inputs normalised in training, and not in validation",
               changed_data(raw_inputs, training=False), "data", "preprocessing-differs", "numbers-mlp"),
    make_fault("outliers", "-999 for a missing input, in three of ten batches", missing_values(-999.0, 0.3),
               "data explosion loss", "bad-batch", "numbers-relu-mlp", proof=spikes, kind="spike"),
    make_fault("same-batch", "the iterator made anew in each step: always the first batch", same_batch,
               "data", "repeated-data"),
    make_fault("one-class", "all labels the same", _ONE_CLASS, "data loss", "trivial-targets", "numbers-mlp"),
    make_fault("bit-flip", "one bit of one element of one gradient flips, not clipped", flipped_bit,
               "nonfinite", "hardware-fault", "numbers-mlp", kind="spike"),
    make_fault("batch-norm", "BatchNorm with a momentum of 1e-6", still_statistics,
               "setup", "normalisation-statistics", "normed-mlp"),
)
# fmt: on
