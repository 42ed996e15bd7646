"""Where the rules on the loss and on steps begin and end: runs, and what each sign says of them."""

from __future__ import annotations

import math
import random

from made_runs import (
    batch,
    batches_run,
    bend,
    ended,
    falling_losses,
    flat_losses,
    game,
    noisy_norms,
    run,
    settings,
    validated,
    weights_run,
)

LINEAR = "AddmmBackward0"
CROSS = ("NllLossBackward0", "LogSoftmaxBackward0")
ACTOR_CRITIC = ("SubBackward0", "AddBackward0", "NegBackward0", "MeanBackward0")
VALUES = ("SmoothL1LossBackward0", "SelectBackward0", "GatherBackward0", LINEAR)
FLAT, FALLING, FALLING_LONG = flat_losses(100), falling_losses(100), falling_losses(300)
HUBER = ("HuberLossBackward0",)
SPIKED = [norm * (50.0 if step == 200 else 1.0) for step, norm in enumerate(noisy_norms(300))]
LOST = [*falling_losses(240, pace=20.0), *flat_losses(60, level=2.0)]


def rates(*parts, **notes):
    """A run with these learning rates, each for so many steps."""
    return run(falling_losses(sum(n for _, n in parts)), lrs=[lr for lr, n in parts for _ in range(n)], **notes)


def clipped(coef, losses, kind=None):
    notes = {} if kind is None else {"optimizer_settings": settings(kind)}
    return run(losses, change=lambda step: {"clip_coef": coef}, **notes)


def spiky(*steps, losses=FALLING_LONG, **notes):
    return run(bend(losses, steps, lambda value: value + 3.0), **notes)


def standing(first, level, num=160, **notes):
    """A loss that comes down to a level soon, and stands there."""
    return run([*falling_losses(40, pace=8.0, start=first, floor=level), *flat_losses(num, level=level)], **notes)


def of_classes(losses, **notes):
    """A cross-entropy over ten classes."""
    known = {"loss_kind": "cross-entropy", "loss_ops": CROSS}
    return batches_run(losses, batch(output_width=10), **{**known, **notes})


def sized(kind="Adam", lr=1e-3, std=0.1, losses=None, num_steps=60, **notes):
    """A run of one weight matrix with the settings of its optimizer."""
    losses = flat_losses(num_steps) if losses is None else losses
    known = {"optimizer_settings": settings(kind, lr=lr), "initialization": {"w": (std, 0.1)}}
    return run(losses, lrs=[lr] * len(losses), **{**known, **notes})


def line(fall, num_steps=200, first=2.3):
    """A loss that falls by so much each step."""
    return [level + first - 2.3 - fall * step for step, level in enumerate(flat_losses(num_steps))]


def rising(num_steps, begin=1e-5, losses=None):
    return run(losses or flat_losses(num_steps), lrs=[begin * (step + 1) for step in range(num_steps)])


def held(first, then, num=90):
    """Ten losses of one level, and those of another."""
    return [first] * 10 + [then] * num


def updates(ratio, losses=None, num_steps=140, **notes):
    return weights_run(lambda step, name: ratio, losses, num_steps=num_steps, **notes)


BY_HEART = falling_losses(400, floor=0.005, noise=0.0, pace=15.0)
RISING_TWICE = [n * 1.02**step for step, n in enumerate(noisy_norms(300))]
TURNS = [(1.38 if s % 2 else 0.68) + random.Random(s).gauss(0.0, 0.01) for s in range(200)]
LATE = [*falling_losses(100, noise=0.01, pace=15.0), *(0.3 + 0.02 * step for step in range(90))]
LATE_NORMS = [1.0] * 100 + [1.0 + 0.1 * step for step in range(90)]
RUNAWAY = tuple(0.7 - 0.02 * s**2 for s in range(80))


def runaway(losses=RUNAWAY, rate=1.05, cosine=0.98, **notes):
    norms = [rate**s for s in range(len(losses))]
    return run(losses, norms, change=lambda s: {"grad_cosine": cosine if s else None}, **notes)


MINUS = ("NegBackward0", *CROSS)


def negated(**notes):
    return run([-2.3 - 0.1 * s for s in range(60)], **{"loss_ops": MINUS, **notes})


def lasting(level, **notes):
    """A game whose loss comes to a level and stays."""
    return game([0.69] * 150 + flat_losses(150, level=level, noise=level / 50), **notes)


LIMITS = {
    "learning-rate-jump": [
        (rates((1e-3, 15), (1e-1, 100)), None),  # within the first twenty steps: part of the beginning
        (rates((1e-2, 50), (1e-4, 50), (1e-2, 50)), None),  # a warm restart
        (rates((0.0, 30), (1e-3, 50)), None),  # nothing to be a multiple of
        (rates((1e-5, 40), (5e-4, 40), (1e-3, 40), initial_lr=1e-3), None),  # a warm-up by the epoch
        (rates((1e-2, 100), (1e-4, 550), (1e-2, 50)), None),  # from a level that has left the window
    ],
    "scheduler-not-stepping": [
        (rates((1e-5, 49), has_scheduler=True, initial_lr=1e-3), None),
        (rates((1e-3, 1000), has_scheduler=True, initial_lr=1e-3), "info"),
    ],
    "no-warm-up": [
        (run([2.3, 2.4, 2.3, *[4.0] * 116]), "info"),  # may come down yet
        (run([2.3, 2.4, 0.9, *[2.5] * 117]), None),  # one easy batch, not the weights that a run begins with
        (run([2.3, 2.4, 2.3, *[4.0] * 20, *falling_losses(80)]), "info"),  # came down again
        (run([0.7, 0.8, 0.9, *[1.1 + 0.5 * (-1) ** s for s in range(80)]]), None),  # samples differ by as much
        (run([1.0, 1.0, 1.0, *[4.0] * 120], loss_ops=ACTOR_CRITIC), "info"),
        (ended(run([0.2, 0.8, 1.1, *[1.5] * 17])), "info"),
        (of_classes([0.01, 0.01, 0.01, *[0.05] * 120]), "info"),  # far below chance
    ],
    "growing-norm": [
        (run(falling_losses(300, noise=0.01), RISING_TWICE), None),
        (run([2 + s / 50 for s in range(300)], RISING_TWICE), "warning"),
    ],
    "norm-spike": [
        (run(flat_losses(300, noise=0.0), SPIKED), "info"),  # nothing gained, and nothing lost
        (run([None] * 300, SPIKED), "warning"),  # nothing says that it does no harm
        (run([loss - 1.0 for loss in LOST], SPIKED), "info"),  # a game
    ],
    "clip-rate-high": [
        (clipped(0.1, FLAT, "Adam"), "info"),  # which divides by the size of the gradient
        (clipped(0.1, FALLING, "SGD"), "info"),  # it learns all the same
        (clipped(0.9e-5, FLAT, "Adam"), "warning"),  # whose eps outweighs what is left
    ],
    "unscaled-accumulation": [
        (run(falling_losses(60), change=lambda step: {"clip_coef": 0.3}, backward_per_step=8), None),
        (run(falling_losses(60), change=lambda step: {"clip_coef": 0.1}, backward_per_step=2), None),
        (updates(0.04, backward_per_step=8), "warning"),
        (updates(0.03, backward_per_step=8), None),
    ],
    "loss-oscillation": [(run(falling_losses(400, noise=0.4)), None)],
    "loss-not-decreasing": [
        (run([*flat_losses(110), *[1.9] * 20]), None),  # it has just begun to fall
        (run(TURNS), None),  # two in turns
        (of_classes(flat_losses(250, level=0.4)), "info"),  # trained before
        (of_classes(flat_losses(250, level=2.6)), "warning"),  # worse than guessing
        (run(line(1e-4, 250)), "info"),  # it falls surely, if slowly
        (run(held(2.4, 2.39, 189)), "info"),  # it is given time
        (run(flat_losses(200), loss_ops=ACTOR_CRITIC), "info"),
        (run(flat_losses(200), loss_ops=VALUES), None),
    ],
    "underfitting": [
        (standing(2.3, 0.2), None),  # it has learnt
        (standing(2.3, 1.7), None),  # a seventh
        *((standing(2.3, 1.9, loss_kind=kind), "warning") for kind in ("cross-entropy", "negative log-likelihood")),
        (standing(2.3, 1.9, loss_ops=["NegBackward0", "MeanBackward0", LINEAR]), None),  # a density has no floor
        (run([*flat_losses(20), *flat_losses(180, level=3.5)]), None),  # it rose
        (run([3.4] * 10 + [3.2 - 0.001 * s + 0.05 * math.sin(7 * s) for s in range(300)]), None),  # it falls
        (run(held(2.4, 2.39, 139)), "info"),
    ],
    "loss-divergence": [
        (run(flat_losses(200, noise=0.2)), None),  # it had no progress to lose
        (run(LATE, LATE_NORMS, loss_ops=ACTOR_CRITIC), None),
    ],
    "divergence-ahead": [
        (run(LATE, LATE_NORMS), True),
        (run(LATE, LATE_NORMS, loss_ops=ACTOR_CRITIC), None),
    ],
    "loss-explosion": [
        (run([0.4, 0.3, 0.3, 0.1, 0.1, *[0.0] * 60]), None),  # gone within its first ten
        (run([*[2.3] * 12, *[40.0] * 10]), "critical"),
        (run([*flat_losses(60), *flat_losses(60, level=9.0)], loss_ops=ACTOR_CRITIC), "info"),
    ],
    "loss-spike": [
        *((run(bend(falling_losses(200), range(100, 100 + n), lambda v: 20.0)), "warning") for n in (1, 4)),
        *((run(bend(falling_losses(200), range(100, 100 + n), lambda v: 20.0)), None) for n in (5, 30)),
    ],
    "periodic-loss-spikes": [
        (spiky(40, 62, 95), None),
        (spiky(40, 62), None),
        (spiky(40, 90, steps_per_epoch=50), "warning"),
        (spiky(*range(60, 300, 44), losses=falling_losses(300, pace=15.0, start=8.0)), "info"),
    ],
    "overfitting": [
        (run(BY_HEART, val_losses=validated(400, level=0.9)), "warning"),
        (run(BY_HEART, val_losses=validated(400, level=0.5)), None),
    ],
    "training-above-validation": [
        (run(flat_losses(200), val_losses=validated(200, level=1.5), dropout={"drop": 0.7}), "warning"),
        (run(flat_losses(200), val_losses=validated(200, level=1.5), dropout={"drop": 0.69}), "info"),
    ],
    "negated-loss": [
        (negated(loss_ops=["NegBackward0", "NegBackward0", "MeanBackward0", "MulBackward0"]), "warning"),
        (negated(loss_ops=["NegBackward0", "MeanBackward0", "LogSigmoidBackward0"]), None),
        (negated(num_foreign_parameters=4), None),  # a game, as far as evidence goes
        (negated(optimizer_settings=[{"kind": "SGD", "lr": 0.1, "maximize": True}]), None),
        (run(falling_losses(60), loss_ops=MINUS), None),
    ],
    "loss-without-floor": [
        (runaway(tuple(3.0 - 0.1 * s for s in range(80))), None),  # no faster than before
        (runaway(tuple(900.0 - 0.02 * s**2 for s in range(80))), None),  # above zero
        (run([-0.1 * s for s in range(50)], [2.0**s for s in range(50)]), None),  # too few
        (run([-(1.0 * s**3) for s in range(200)], [1.0 + s**2 for s in range(200)]), "warning"),  # in any direction
    ],
    "loss-gone": [
        (run([2.3] * 35 + [1e-5] * 60), None),  # it took its time
        (run([2.3] * 7 + [1e-5] * 93, loss_ops=["MultiMarginLossBackward0", LINEAR]), "info"),
    ],
    "loss-still-falling": [
        (run(falling_losses(60, pace=40.0, floor=0.0, noise=0.0)), None),  # it may go on
        (ended(run(falling_losses(60, pace=15.0, floor=0.0, noise=0.0))), None),  # much of a little
        (ended(run(falling_losses(60, pace=40.0, floor=0.0, noise=0.0), window=50)), None),  # its begin is not kept
        (ended(run([2.3 - 0.06 * step for step in range(25)], loss_ops=(CROSS[0], LINEAR))), "info"),  # a smoke run
        (ended(run([2.3 - 0.01 * step for step in range(100)], loss_ops=(CROSS[0], LINEAR))), "warning"),
        *((ended(run([2.3 + s / 50 for s in range(num)])), None) for num in (16, 40, 60)),
    ],
    "one-side-wins": [
        (lasting(4.5), None),
        (lasting(0.01), "warning"),
        (lasting(6.0, loss_ops=("MeanBackward0", LINEAR)), None),  # of Wasserstein: without a bound
        (game(flat_losses(199, level=0.01, noise=1e-4)), None),
    ],
    "steps-too-large": [
        (sized(lr=0.031, num_steps=80), "warning"),
        (sized(lr=0.031, num_steps=79), None),
        (sized(lr=0.031, losses=falling_losses(80, pace=15.0)), None),
        (sized(lr=0.11, losses=held(2.3, 1.7)), "warning"),  # by more than the weights each step
    ],
    "steps-too-small": [
        (ended(sized(lr=4.9e-5, num_steps=39)), None),
        (ended(sized(lr=3e-5, losses=falling_losses(60, pace=150.0))), "warning"),  # moved by 0.018 in all
        (ended(sized(lr=4e-5, losses=falling_losses(60, pace=150.0))), None),  # by 0.024
        (ended(sized(lr=3e-5, losses=falling_losses(60, pace=25.0))), None),  # and learnt more than half
        (sized(lr=3e-5, num_steps=99), None),
        (sized(lr=8e-5, losses=line(2e-3)), "warning"),
        (sized(lr=8e-5, losses=line(7e-3)), None),  # half of it is gone
    ],
    "learning-rate-unusual": [
        (sized("AdamW", 9e-7, num_steps=80), "warning"),
        (sized("SGD", 3.1, num_steps=80), "warning"),
        (sized("Muon", 50.0, num_steps=80), None),  # its usual range is not known
        (sized("Adadelta", 1e-3, losses=line(2e-3)), "warning"),  # it falls steadily, slowly
        (sized(lr=0.1, losses=held(2.3, 1.6, 210)), "warning"),  # with steps of the size of the weights it is too high
        *((sized(lr=0.25, losses=falling_losses(80, pace=20.0), objective=o), "warning") for o in ("reward", "game")),
        (sized(lr=0.15, num_steps=100, objective="reward"), "info"),
        (sized(lr=0.25, losses=FALLING, initialization={}), "info"),  # weights that are not known
        (sized(lr=5.0, losses=FALLING, target_mean=100.0, target_std=10.0, loss_ops=HUBER), "info"),
        (run(flat_losses(100), lrs=[1e-9 * (s + 1) for s in range(100)], optimizer_settings=settings()), None),
    ],
    "learning-rate-gone": [
        (run(flat_losses(260), lrs=[1e-3] * 200 + [1e-6] * 60), None),  # a decay near the end
        (run(flat_losses(100), lrs=[1e-6] * 100), None),  # it never was higher
        (run(flat_losses(200), lrs=[5e-4 * (1 + math.cos(math.pi * s / 200)) for s in range(200)]), None),  # a cosine
        (run([2.3] * 50 + [1.25] * 100, lrs=[1e-3] * 50 + [1e-6] * 100), "warning"),
        (run([2.3] * 50 + [1.05] * 100, lrs=[1e-3] * 50 + [1e-6] * 100), None),  # half is learnt
    ],
    "learning-rate-still-rising": [
        (run(flat_losses(200), lrs=[1e-5 * min(s + 1, 180) for s in range(200)]), None),  # a warm-up that has ended
        (run(flat_losses(200), lrs=[1e-5 * (s + 1 - 2 * (s == 50)) for s in range(200)]), None),  # it fell once
        (run(flat_losses(200), lrs=[1e-5 * s for s in range(200)]), None),
        (rising(300, losses=falling_losses(300)), None),  # and all goes well
        (run([1.0] * 100 + [10.0 * 1.05**s for s in range(150)], lrs=[1e-3 * 1.03**s for s in range(250)]), "critical"),
    ],
    "loss-begins-high": [
        (batches_run([90.0, *flat_losses(50, 4.0)], batch(output_std=40.0), loss_kind="cross-entropy"), "info"),
        (batches_run([90.0, *flat_losses(120, 4.0)], batch(output_std=2.0), loss_kind="cross-entropy"), None),  # a sum
        (batches_run([2.0, *flat_losses(120, 4.0)], batch(output_std=40.0), loss_kind="cross-entropy"), None),
    ],
}
