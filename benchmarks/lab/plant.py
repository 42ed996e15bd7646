"""Ways to break a training run: each changes a `Setup`, and says from which step on and where."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import torch
from torch import nn

from .training import Batch, Setup, Training, shuffled_batches, warm_up_cosine

_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid)
_WEIGHTED = (nn.Linear, nn.Conv2d, nn.RNNBase)


@dataclass(frozen=True)
class Planted:
    """Where a fault is.

    Attributes:
        step: the first step that it can be seen at.
        layers: the modules to blame, any of which is a right answer; None where it is no layer's fault.
    """

    step: int = 0
    layers: tuple[str, ...] | None = None


Plant = Callable[[Setup, random.Random], Planted]
_Settings = ParamSpec("_Settings")


def with_settings(plant: Callable[Concatenate[Setup, random.Random, _Settings], Planted]) -> Callable[_Settings, Plant]:
    """Of a way to break a run that has settings: what gives a `Plant` for some."""

    @functools.wraps(plant)
    def given(*args: _Settings.args, **settings: _Settings.kwargs) -> Plant:
        return lambda setup, dice: plant(setup, dice, *args, **settings)

    return given


def a_third_in(setup: Setup, dice: random.Random) -> int:
    """A step at about a third of the run."""
    return setup.num_steps // 3 + dice.randrange(setup.num_steps // 8)


def hidden_layers(model: nn.Module) -> list[tuple[str, str]]:
    """(weighted layer, activation right after it) of the model's sequences, by name, in order."""
    pairs = []
    for prefix, sequence in model.named_modules():
        if isinstance(sequence, nn.Sequential):
            weighted = None
            for name, module in sequence.named_children():
                full = f"{prefix}.{name}" if prefix else name
                if isinstance(module, _WEIGHTED):
                    weighted = full
                elif isinstance(module, _ACTIVATIONS) and weighted is not None:
                    pairs.append((weighted, full))
                    weighted = None
    return pairs


def weighted_layers(model: nn.Module) -> list[str]:
    """Names of the linear, convolutional and recurrent layers, in order."""
    return [name for name, module in model.named_modules() if isinstance(module, _WEIGHTED)]


def a_hidden_layer(setup: Setup, dice: random.Random) -> tuple[str, str]:
    """One of the hidden layers, and the activation after it."""
    return dice.choice(hidden_layers(setup.model))


@with_settings
def learning_rate_times(setup: Setup, dice: random.Random, factor: float) -> Planted:
    """The learning rate is `factor` times what it should be, from the start."""
    setup.lr *= factor
    return Planted()


@with_settings
def learning_rate_jump(setup: Setup, dice: random.Random, factor: float) -> Planted:
    """The learning rate is multiplied by `factor` in the middle of the run, and stays."""
    step = a_third_in(setup, dice)

    def jump(training: Training) -> None:
        for group in training.optimizer.param_groups:
            group["lr"] *= factor
        if training.scheduler is not None:
            training.scheduler.base_lrs = [factor * lr for lr in training.scheduler.base_lrs]

    setup.at(step, jump)
    return Planted(step)


def no_warm_up(setup: Setup, dice: random.Random) -> Planted:
    """The learning rate's schedule is left out, and with it the warm-up that this model needs."""
    setup.schedule = None
    return Planted()


@with_settings
def scheduler_not_stepped(setup: Setup, dice: random.Random, num_warm: int = 100) -> Planted:
    """The warm-up is set up, but nothing ever calls `scheduler.step()`."""
    setup.schedule = warm_up_cosine(num_warm, num_warm, 1.0)
    setup.steps_schedule = False
    return Planted()


def accumulation_unscaled(setup: Setup, dice: random.Random) -> Planted:
    """Gradients of several batches are added up, and the loss of each is not divided by their number."""
    setup.divides_loss = False
    return Planted()


def nan_in_batch(setup: Setup, dice: random.Random) -> Planted:
    """One element of one batch is NaN; of a text, whose bytes cannot be, the embedding of one byte."""
    step = a_third_in(setup, dice)
    if setup.batch_at(0)[0].is_floating_point():

        def change(number: int, batch: Batch) -> Batch:
            if number // setup.num_micro != step:
                return batch
            inputs = batch[0].clone()
            inputs.view(-1)[dice.randrange(inputs.numel())] = torch.nan
            return inputs, batch[1]

        setup.change_batches(change)
        return Planted(step)

    def event(training: Training) -> None:
        def poison(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            handle.remove()
            output = output.clone()
            output.view(-1)[dice.randrange(output.numel())] = torch.nan
            return output

        handle = training.model.get_submodule("tokens").register_forward_hook(poison)

    setup.at(step, event)
    return Planted(step)


def inf_in_weights(setup: Setup, dice: random.Random) -> Planted:
    """One row of one layer's weights becomes Inf: of a single one, a ReLU might hide the effect."""
    step = a_third_in(setup, dice)
    name = dice.choice(weighted_layers(setup.model))

    def event(training: Training) -> None:
        weight = next(training.model.get_submodule(name).parameters())
        with torch.no_grad():
            weight[dice.randrange(len(weight))] = torch.inf

    setup.at(step, event)
    return Planted(step, (name,))


@with_settings
def fp16_overflow(setup: Setup, dice: random.Random, *, scaled: bool) -> Planted:
    """In float16 one layer's weights grow so large that its output leaves float16's range; with or without a scaler."""
    setup.autocast, setup.scales_loss = torch.float16, scaled
    step = a_third_in(setup, dice)
    name, activation = a_hidden_layer(setup, dice)

    def event(training: Training) -> None:
        with torch.no_grad():
            for parameter in training.model.get_submodule(name).parameters():
                parameter.mul_(1e5)

    setup.at(step, event)
    return Planted(step, (name, activation))


def flipped_bit(setup: Setup, dice: random.Random) -> Planted:
    """The top bit of the exponent of one element in the last layer's gradient flips, and nothing is clipped."""
    setup.max_norm = None
    step = a_third_in(setup, dice)
    name = weighted_layers(setup.model)[-1]

    def event(training: Training) -> None:
        weight = training.model.get_parameter(f"{name}.weight")

        def flip(parameter: torch.Tensor) -> None:
            handle.remove()
            assert parameter.grad is not None
            largest = parameter.grad.abs().argmax()
            parameter.grad.view(-1).view(torch.int32)[largest] ^= 1 << 30

        handle = weight.register_post_accumulate_grad_hook(flip)

    setup.at(step, event)
    return Planted(step, (name,))


def killed_relu(setup: Setup, dice: random.Random) -> Planted:
    """The biases before one ReLU become so negative that it never fires again."""
    step = a_third_in(setup, dice)
    name, activation = a_hidden_layer(setup, dice)

    def event(training: Training) -> None:
        with torch.no_grad():
            training.model.get_parameter(f"{name}.bias").sub_(30.0)

    setup.at(step, event)
    return Planted(step, (name, activation))


def saturated_tanh(setup: Setup, dice: random.Random) -> Planted:
    """A tanh network, one layer of which begins with weights so large that its units are stuck at ±1."""
    torch.manual_seed(setup.seed)
    setup.model = setup.build(activation=nn.Tanh)
    name, activation = a_hidden_layer(setup, dice)
    _scale(setup.model, name, 100.0)
    return Planted(0, (name, activation))


@with_settings
def large_layer(setup: Setup, dice: random.Random, factor: float) -> Planted:
    """One hidden layer's weights begin `factor` times too large."""
    name, activation = a_hidden_layer(setup, dice)
    _scale(setup.model, name, factor)
    return Planted(0, (name, activation))


@with_settings
def all_weights(setup: Setup, dice: random.Random, factor: float) -> Planted:
    """All layers' weights and biases begin `factor` times as large as they should."""
    for name in weighted_layers(setup.model):
        _scale(setup.model, name, factor)
    return Planted()


def _scale(model: nn.Module, name: str, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.get_submodule(name).parameters():
            parameter.mul_(factor)


def still_statistics(setup: Setup, dice: random.Random) -> Planted:
    """A BatchNorm with a momentum of 1e-6: its running statistics stay where they began."""
    names = []
    for name, module in setup.model.named_modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1e-6
            names.append(name)
    return Planted(0, tuple(names))


@with_settings
def deep_sigmoid(setup: Setup, dice: random.Random, depth: int = 30) -> Planted:
    """So many sigmoid layers that hardly any gradient reaches the first ones."""
    torch.manual_seed(setup.seed)
    setup.model = setup.build(depth=depth, activation=nn.Sigmoid)
    return Planted()


@with_settings
def exploding_recurrence(setup: Setup, dice: random.Random, gain: float) -> Planted:
    """Recurrent weights that multiply the state by more than 1 a step, and no clipping."""
    setup.max_norm = None
    recurrent = setup.model.get_submodule("recurrent")
    with torch.no_grad():
        for name, parameter in recurrent.named_parameters():
            if name.startswith("weight_hh"):
                parameter.mul_(gain)
    return Planted(0, ("recurrent",))


def frozen_layer(setup: Setup, dice: random.Random) -> Planted:
    """`requires_grad` of one hidden layer's parameters was left False."""
    name, _ = a_hidden_layer(setup, dice)
    for parameter in setup.model.get_submodule(name).parameters():
        parameter.requires_grad_(False)
    return Planted(0, (name,))


def missing_parameters(setup: Setup, dice: random.Random) -> Planted:
    """One layer was replaced after the optimizer had been made, so the optimizer does not have it."""
    name = dice.choice(weighted_layers(setup.model))

    def replace(training: Training) -> None:
        torch.manual_seed(setup.seed + 2)
        layer: Any = training.model.get_submodule(name)
        layer.reset_parameters()
        gone = {id(p) for p in layer.parameters()}
        for group in training.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in gone]

    setup.after_start.append(replace)
    return Planted(0, (name,))


@with_settings
def weight_decay(setup: Setup, dice: random.Random, value: float) -> Planted:
    """AdamW with a weight decay of `value`."""
    setup.make_optimizer = lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=value)
    return Planted()


@with_settings
def dropout(setup: Setup, dice: random.Random, share: float) -> Planted:
    """Dropout that leaves hardly anything."""
    torch.manual_seed(setup.seed)
    setup.model = setup.build(dropout=share)
    return Planted()


@with_settings
def few_samples(setup: Setup, dice: random.Random, count: int, num_steps: int) -> Planted:
    """The run sees the same `count` samples again and again."""
    size = len(setup.batch_at(0)[0])
    batches: list[Batch] = []
    have = 0
    while have < count:
        batches.append(setup.batch_at(len(batches)))
        have += size
    data = tuple(torch.cat(parts)[:count] for parts in zip(*batches))
    setup.batch_at = shuffled_batches((data[0], data[1]), min(size, count), setup.seed)
    setup.num_batches = max(1, count // size)
    setup.num_steps = num_steps
    return Planted()


def shuffled_targets(setup: Setup, dice: random.Random) -> Planted:
    """Each sample has another sample's target, drawn anew for each batch."""

    def change(number: int, batch: Batch) -> Batch:
        order = torch.randperm(len(batch[1]), generator=torch.Generator().manual_seed(setup.seed + number))
        return batch[0], batch[1][order]

    setup.change_batches(change)
    return Planted()


@with_settings
def corrupted_batch_an_epoch(setup: Setup, dice: random.Random, corrupt: Callable[[Batch], Batch]) -> Planted:
    """One batch of each epoch but the first is corrupted: always the one at the same place."""
    epoch = setup.num_batches
    place = dice.randrange(epoch)

    def change(number: int, batch: Batch) -> Batch:
        return corrupt(batch) if number >= epoch and number % epoch == place else batch

    setup.change_batches(change)
    return Planted(epoch + place)


@with_settings
def one_bad_batch(setup: Setup, dice: random.Random, corrupt: Callable[[Batch], Batch]) -> Planted:
    """One batch of the whole run is corrupted."""
    step = a_third_in(setup, dice)
    setup.change_batches(lambda number, batch: corrupt(batch) if number == step else batch)
    return Planted(step)


def garbage(batch: Batch) -> Batch:
    """Noise thirty times as loud as the inputs; of a text, bytes for targets that no text has."""
    noise = torch.Generator().manual_seed(0)
    if batch[0].is_floating_point():
        return 30.0 * torch.randn(batch[0].shape, generator=noise), batch[1]
    return batch[0], torch.randint(128, 256, batch[1].shape, generator=noise)
