"""Slow ways to divergence: each changes a run so that it goes wrong little by little, from a step or the start on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.lab.plant import weighted_layers
from benchmarks.lab.training import Setup, Training

NUM_STEPS = 400
_START = 80

Change = Callable[[Setup, float, random.Random], None]
Suits = Callable[[Setup], bool]


@dataclass(frozen=True)
class Drift:
    """One way.

    Attributes:
        name, title: what is done.
        change: does it, with a strength.
        strengths: which are tried; only runs that diverge count.
        start: the step from which on it is at work.
        suits: whether a run can have it.
    """

    name: str
    title: str
    change: Change
    strengths: tuple[float, ...]
    start: int = _START
    suits: Suits = lambda setup: True


def _with_schedule(setup: Setup, factor: Callable[[int], float]) -> None:
    before = setup.schedule
    setup.schedule = factor if before is None else lambda step: before(step) * factor(step)


def _ramp(setup: Setup, rate: float, dice: random.Random) -> None:
    """The learning rate grows by a share each step, without clipping."""
    setup.max_norm, setup.schedule = None, None
    _with_schedule(setup, lambda step: (1.0 + rate) ** max(0, step - _START))


def _clipped_ramp(setup: Setup, rate: float, dice: random.Random) -> None:
    """The same under a clip limit."""
    limit = setup.max_norm or 1.0
    _ramp(setup, rate, dice)
    setup.max_norm = limit


def _momentum(setup: Setup, factor: float, dice: random.Random) -> None:
    """SGD with momentum 0.99, warmed up to a rate that is somewhat too high for it."""
    setup.lr, setup.max_norm = 0.03 * factor, None
    setup.make_optimizer = lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.99)
    setup.schedule = lambda step: min(1.0, (step + 1) / 200)


def _warm_up(setup: Setup, factor: float, dice: random.Random) -> None:
    """A warm-up that goes on to a rate which the model does not stand."""
    setup.lr, setup.max_norm = setup.lr * factor, None
    setup.schedule = lambda step: min(1.0, (step + 1) / 250)


def _beta2(setup: Setup, factor: float, dice: random.Random) -> None:
    """Adam with a second moment that forgets too fast, and no eps to speak of."""
    setup.lr, setup.max_norm = 3e-3 * factor, None
    setup.make_optimizer = lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, betas=(0.95, 0.8), eps=1e-15)
    setup.schedule = lambda step: min(1.0, (step + 1) / 150)


def _bfloat16(setup: Setup, factor: float, dice: random.Random) -> None:
    """Parameters and AdamW's moments in bfloat16, whose second moment does not follow small changes."""
    setup.model.to(torch.bfloat16)
    setup.lr, setup.max_norm = setup.lr * factor, None
    setup.schedule = lambda step: min(1.0, (step + 1) / 200)
    inner = setup.loss_of

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return inner(model, (_as_bfloat16(batch[0]), _as_bfloat16(batch[1])))

    setup.loss_of = loss


def _as_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16) if x.is_floating_point() else x


def _negative_decay(setup: Setup, rate: float, dice: random.Random) -> None:
    """Weight decay with the wrong sign: all weights grow by a share each step."""

    def turn(training: Training) -> None:
        for group in training.optimizer.param_groups:
            group["weight_decay"] = -rate / group["lr"] * (1.0 - group.get("momentum", 0.0))

    for step in range(_START, setup.num_steps):
        setup.at(step, turn)


def _grow(setup: Setup, rate: float, names: list[str]) -> None:
    def grow(training: Training) -> None:
        with torch.no_grad():
            for name in names:
                for parameter in training.model.get_submodule(name).parameters():
                    parameter.mul_(1.0 + rate)

    for step in range(_START, setup.num_steps):
        setup.at(step, grow)


def _last_layer(setup: Setup, rate: float, dice: random.Random) -> None:
    """Logits grow: the last layer's weights are multiplied by a little more than one each step."""
    _grow(setup, rate, weighted_layers(setup.model)[-1:])


def _one_layer(setup: Setup, rate: float, dice: random.Random) -> None:
    """The same of another layer: of attention, of a recurrence, of an MLP."""
    names = weighted_layers(setup.model)[:-1]
    preferred = [name for name in names if name.endswith(("qkv", "recurrent"))]
    _grow(setup, rate, [dice.choice(preferred or names)])


def _inputs(setup: Setup, rate: float, dice: random.Random) -> None:
    """Inputs drift: batch by batch they become larger."""

    def change(number: int, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        step = number // setup.num_micro
        return batch[0] * (1.0 + rate) ** max(0, step - _START), batch[1]

    setup.change_batches(change)


def _has_numbers(setup: Setup) -> bool:
    return setup.batch_at(0)[0].is_floating_point()


# fmt: off
DRIFTS: dict[str, Drift] = {drift.name: drift for drift in (
    Drift("ramp", "learning rate × 1.02 or 1.04 a step, not clipped", _ramp, (0.02, 0.04)),
    Drift("clipped-ramp", "the same under a clip limit", _clipped_ramp, (0.02, 0.04)),
    Drift("momentum", "SGD with momentum 0.99 and a rate somewhat too high", _momentum, (1.0, 4.0), 0),
    Drift("warm-up", "a warm-up to a rate that is too high", _warm_up, (5.0, 20.0), 0),
    Drift("beta2", "Adam with beta2=0.8 and eps=1e-15", _beta2, (5.0, 30.0), 0),
    Drift("bfloat16", "parameters and moments in bfloat16", _bfloat16, (3.0, 15.0), 0),
    Drift("negative-decay", "weight decay with the wrong sign", _negative_decay, (0.01, 0.02)),
    Drift("last-layer", "the last layer's weights × 1.01 or 1.03 a step", _last_layer, (0.01, 0.03)),
    Drift("one-layer", "another layer's weights × 1.02 or 1.05 a step", _one_layer, (0.02, 0.05)),
    Drift("inputs", "inputs × 1.01 or 1.03 a step", _inputs, (0.01, 0.03), suits=_has_numbers),
)}
# fmt: on
