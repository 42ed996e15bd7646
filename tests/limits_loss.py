"""Where the rules on the loss and on steps begin and end: runs, and what each sign says of them."""

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


def rates(*parts, **notes):
    """A run with these learning rates, each for so many steps."""
    return run(falling_losses(sum(n for _, n in parts)), lrs=[lr for lr, n in parts for _ in range(n)], **notes)


def spiky(*steps, losses=FALLING_LONG, **notes):
    return run(bend(losses, steps, lambda value: value + 3.0), **notes)


def standing(first, level, num=160, **notes):
    """A loss that comes down to a level soon, and stands there."""
    return run([*falling_losses(40, pace=8.0, start=first, floor=level), *flat_losses(num, level=level)], **notes)


def of_classes(losses, **notes):
    """A cross-entropy over ten classes."""
    known = {"loss_kind": "cross-entropy", "loss_ops": CROSS}
    return batches_run(losses, batch(output_width=10), **{**known, **notes})


ENDED = [1.0, *[math.nan] * 9]


def sized(kind="Adam", lr=1e-3, std=0.1, losses=None, num_steps=60, num_layers=1, **notes):
    """A run of one weight matrix, or some, with the settings of its optimizer."""
    losses = flat_losses(num_steps) if losses is None else losses
    weights = {f"w{i}": (std, 0.1) for i in range(num_layers)}
    known = {"optimizer_settings": settings(kind, lr=lr), "initialization": weights}
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


VALIDATED = range(19, 400, 20)

TURNS = [(1.38 if s % 2 else 0.68) + random.Random(s).gauss(0.0, 0.01) for s in range(200)]
LATE = [*falling_losses(100, noise=0.01, pace=15.0), *(0.3 + 0.02 * step for step in range(90))]
LATE_NORMS = [1.0] * 100 + [1.0 + 0.1 * step for step in range(90)]
NOISE = random.Random(2)
RESTLESS = [0.8 * NOISE.lognormvariate(0.0, 0.5) for _ in range(80)]
GROWING = [norm * (1.0 if step < 200 else 2.0) for step, norm in enumerate(noisy_norms(280))]
RUNAWAY = tuple(0.7 - 0.02 * s**2 for s in range(80))


def policy(*ops, losses=tuple(-3.0 + 0.01 * s for s in range(60)), num_samples=1, **notes):
    """Losses of a policy gradient, by the operations down to the last layer."""
    known = {"loss_ops": [*(f"{op}Backward0" for op in ops), LINEAR], **notes}
    return batches_run(losses, batch(num_samples=num_samples), **known)


def short(num_steps=60, pace=40.0, **options):
    return ended(run(falling_losses(num_steps, pace=pace, floor=0.0, noise=0.0), **options))


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
        (rates((1e-3, 100), (4.9e-3, 20)), None),
        (rates((1e-3, 100), (5.1e-3, 20)), "warning"),
        (rates((1e-3, 15), (1e-1, 100)), None),  # within the first twenty steps: part of the beginning
        (rates((1e-2, 50), (1e-4, 50), (1e-2, 50)), None),  # a warm restart
        (rates((0.0, 30), (1e-3, 50)), None),  # nothing to be a multiple of
        (rates((1e-5, 40), (5e-4, 40), (1e-3, 40), initial_lr=1e-3), None),  # a warm-up by the epoch
        (rates((1e-5, 40), (5e-4, 40), (1e-3, 40), initial_lr=1e-4), "warning"),
        (rates((1e-2, 100), (1e-4, 550), (1e-2, 50)), None),  # from a level that has left the window
    ],
    "scheduler-not-stepping": [
        (rates((1e-5, 49), has_scheduler=True, initial_lr=1e-3), None),
        (rates((1e-5, 50), has_scheduler=True, initial_lr=1e-3), "warning"),
        (rates((1e-3, 500), has_scheduler=True, initial_lr=1e-3), None),
        (rates((1e-3, 1000), has_scheduler=True, initial_lr=1e-3), "info"),
        (rates((1e-5, 2000), has_scheduler=False), None),
    ],
    "no-warm-up": [
        (run([2.3, 2.4, 2.3, *[4.0] * 116]), "info"),  # may come down yet
        (run([2.3, 2.4, 2.3, *[4.0] * 117]), "warning"),
        (run([2.3, 2.4, 0.9, *[2.5] * 117]), None),  # one easy batch, not the weights that a run begins with
        (run([2.3, 2.4, 2.3, *[4.0] * 20, *falling_losses(80)]), "info"),  # came down again
        (run([0.7, 0.8, 0.9, *[1.1 + 0.5 * (-1) ** s for s in range(80)]]), None),  # samples differ by as much
        (run([2.3, 2.4, 2.3, *[4.0] * 100], lrs=[1e-3 * min(1, (s + 1) / 50) for s in range(103)]), None),
        (run([1.0, 1.0, 1.0, *[4.0] * 120], loss_ops=ACTOR_CRITIC), "info"),
        (ended(run([0.2, 0.8, 1.1, *[1.5] * 17])), "info"),
        (ended(run([0.2, 0.8, 1.1, *[1.5] * 57])), "warning"),
        (of_classes([0.01, 0.01, 0.01, *[0.05] * 120]), "info"),  # far below chance
        *((run([abs(random.Random(seed).gauss(0.0, 1.0)) for _ in range(80)]), None) for seed in range(5)),
    ],
    "unscaled-accumulation": [
        (run(falling_losses(60), change=lambda step: {"clip_coef": 0.2}, backward_per_step=8), "warning"),
        (run(falling_losses(60), change=lambda step: {"clip_coef": 0.3}, backward_per_step=8), None),
        (run(falling_losses(60), change=lambda step: {"clip_coef": 0.1}, backward_per_step=2), None),
        (updates(0.04, backward_per_step=8), "warning"),
        (updates(0.03, backward_per_step=8), None),
        (run(falling_losses(10), num_summed=8, optimizer_settings=settings("SGD")), "warning"),
        (run(falling_losses(9), num_summed=8, optimizer_settings=settings("SGD")), None),
        (run(falling_losses(10), num_summed=7, optimizer_settings=settings("SGD")), None),
        (run(falling_losses(60), num_summed=8, optimizer_settings=settings("Adam")), None),  # whose steps are as large
    ],
    "falls-in-a-line": [
        (ended(run(line(5e-4, 300))), "warning"),
        (ended(run(line(5e-4, 299))), None),
        (run(line(1e-4, 999)), None),
        (run(line(1e-4, 1000)), "warning"),
        (ended(run(line(9e-4, 300))), None),  # a tenth
        (ended(run(line(0.0, 300))), None),
        (ended(run([2.1 + 0.1 * math.exp(-step / 60) for step in range(400)])), None),  # ever slower
        (ended(run(line(5e-4, 300), objective="reward")), None),
    ],
    "loss-not-decreasing": [
        (run([*flat_losses(110), *[1.9] * 20]), None),  # it has just begun to fall
        (run(TURNS), None),  # two in turns
        (of_classes(flat_losses(250, level=2.3)), "warning"),
        (of_classes(flat_losses(250, level=2.22)), "warning"),
        (of_classes(flat_losses(250, level=0.4)), "info"),  # trained before
        (of_classes(flat_losses(250, level=2.6)), "warning"),  # worse than guessing
        (run(line(1e-4, 250)), "info"),  # it falls surely, if slowly
        (run(line(0.0, 250)), "warning"),
        (run(held(2.4, 2.39, 189)), "info"),  # it is given time
        (run(held(2.4, 2.39, 190)), "warning"),
        (ended(run(held(2.4, 2.39, 189))), "warning"),
        (run(flat_losses(200), loss_ops=ACTOR_CRITIC), "info"),
        (run(flat_losses(200), loss_ops=VALUES), None),
    ],
    "underfitting": [
        (standing(2.3, 0.2), None),  # it has learnt
        (standing(2.3, 1.9), "warning"),
        (standing(2.3, 1.7), None),  # a seventh
        *((standing(2.3, 1.9, loss_kind=kind), "warning") for kind in ("cross-entropy", "negative log-likelihood")),
        (standing(2.3, 1.9, loss_ops=["MseLossBackward0", LINEAR]), "warning"),
        (standing(2.3, 1.9, loss_ops=["NegBackward0", "MeanBackward0", LINEAR]), None),  # a density has no floor
        (standing(2.3, 1.9, loss_ops=["MeanBackward0", "ClampMinBackward0", "AddBackward1"]), "warning"),  # a hinge
        (run([*flat_losses(20), *flat_losses(180, level=3.0)]), "warning"),
        (run([*flat_losses(20), *flat_losses(180, level=3.5)]), None),  # it rose
        (run([3.4] * 10 + [3.2 - 0.001 * s + 0.05 * math.sin(7 * s) for s in range(300)]), None),  # it falls
        (run(line(0.0025, 300, first=5.0)), None),
        (of_classes([*falling_losses(40, start=0.45, pace=8.0, floor=0.4), *flat_losses(200, level=0.4)]), "info"),
        (of_classes([*falling_losses(40, start=2.5, pace=8.0, floor=2.2), *flat_losses(200, level=2.2)]), "warning"),
        (run(held(2.4, 2.39, 139)), "info"),
        (run(held(2.4, 2.39, 140)), "warning"),
        (run(flat_losses(200), loss_ops=ACTOR_CRITIC), None),
    ],
    "loss-divergence": [
        (run(flat_losses(200, noise=0.2)), None),  # it had no progress to lose
        (run(LATE, LATE_NORMS), True),
        (run(LATE, LATE_NORMS, loss_ops=ACTOR_CRITIC), None),
        (run(LATE, LATE_NORMS, loss_ops=VALUES), None),
    ],
    "divergence-ahead": [
        (run(LATE, LATE_NORMS), True),
        (run([*falling_losses(200, noise=0.01, pace=30.0), *RESTLESS], GROWING), None),  # its noise is as large
        (run(LATE, LATE_NORMS, loss_ops=ACTOR_CRITIC), None),
        (run(LATE, LATE_NORMS, loss_ops=VALUES), None),
    ],
    "loss-explosion": [
        (run([0.4, 0.3, 0.3, 0.1, 0.1, *[0.0] * 60]), None),  # gone within its first ten
        (run([*[2.3] * 12, *[40.0] * 10]), "critical"),
        (run([*flat_losses(60), *flat_losses(60, level=9.0)]), "critical"),
        (run([*flat_losses(60), *flat_losses(60, level=9.0)], loss_ops=VALUES), None),
        (run([*flat_losses(60), *flat_losses(60, level=9.0)], loss_ops=ACTOR_CRITIC), "info"),
    ],
    "loss-spike": [
        (run(bend(falling_losses(200), [100], lambda v: 20.0)), "warning"),
        (run(bend(falling_losses(200), range(100, 104), lambda v: 20.0)), "info"),
        (run(bend(falling_losses(200, noise=0.01), [90], lambda v: 4.45)), "info"),  # less than twice the first
        (run(bend(falling_losses(300, noise=0.01), [90, 150, 220], lambda v: 4.45)), "warning"),
        *((run(bend(falling_losses(200), range(100, 100 + n), lambda v: 20.0)), None) for n in (5, 30)),
        (run(bend(falling_losses(200, noise=0.01), [150], lambda v: v + 0.5)), None),
    ],
    "overfitting": [
        (run(falling_losses(400), val_losses={s: 1.0 if s < 200 else 1.1 for s in VALIDATED}), None),
        (run(falling_losses(400), val_losses={s: 1.0 if s < 200 else 1.5 for s in VALIDATED}), "warning"),
        (run(falling_losses(400, floor=0.05, pace=15.0), val_losses=validated(400, level=0.9)), None),
    ],
    "negated-loss": [
        (negated(), "warning"),
        (negated(loss_ops=["NegBackward0", "MeanBackward0", "MseLossBackward0"]), "warning"),
        (negated(loss_ops=["NegBackward0", "NegBackward0", "MeanBackward0", "MulBackward0"]), "warning"),
        (negated(loss_ops=["NegBackward0", "MeanBackward0", "LogSigmoidBackward0"]), None),
        (negated(loss_ops=["MeanBackward0", "NllLossBackward0"]), None),
        *((negated(objective=objective), None) for objective in ("game", "reward")),
        (negated(num_foreign_parameters=4), None),  # a game, as far as evidence goes
        (negated(optimizer_settings=[{"kind": "SGD", "lr": 0.1, "maximize": True}]), None),
        (run(falling_losses(60), loss_ops=MINUS), None),
    ],
    "negated-policy-loss": [
        (policy("Mean", "Mul", "Gather", "LogSoftmax"), "warning"),
        (policy("Sum", "Mul", "Sum", "Mul", "Log", "Softmax", num_samples=40), None),  # may be of data
        (policy("Neg", "Mean", "Mul", "Gather", "LogSoftmax"), None),
        (policy("Mean", "Mul", "Gather", "LogSoftmax", losses=(*falling_losses(59), -1.0)), None),
        (policy("Mean", "Mul", "Gather", "LogSoftmax", losses=(-1.0,) * 9), None),
        (policy("Add", "Sum", "Mul", "Gather", "Log", losses=FALLING), "warning"),  # beside the values' loss
        (policy("Add", "Sum", "Mul", "Mul", "Gather", "Log", losses=FALLING), None),  # times -1, perhaps
        (policy("Add", "Sum", "Neg", "Mul", "Gather", "Log", losses=FALLING), None),
        (policy("Sub", "Add", "Mean", "Mul", "Gather", "Log", losses=FALLING, num_samples=40), "warning"),
        (policy("Mean", "Addmm", losses=FALLING, foreign_loss_ops=["MseLossBackward0"]), "warning"),  # of its critic
        (policy("Mean", "Addmm", losses=FALLING, foreign_loss_ops=["AddBackward0"]), None),
        (policy("Mean", "Mul", "Gather", optimizer_settings=[{"kind": "SGD", "lr": 0.1, "maximize": True}]), None),
        (policy("Mean", "Mul", "Gather", objective="reward"), None),
        (policy("Mean", "Sub", "Add", "Minimum", "Mul", "Exp", losses=FALLING, num_samples=40), "warning"),
        (policy("Mean", "Sub", "Add", "Neg", "Minimum", "Mul", "Exp", losses=FALLING), None),
        (policy("Mean", "Sub", "Add", "Mul", "Minimum", "Mul", "Exp", losses=FALLING), None),  # times -1, perhaps
    ],
    "loss-without-floor": [
        (runaway(), "warning"),
        (runaway(rate=1.0), None),
        *((run([5.0] * 10 + [low], noisy_norms(11)), said) for low, said in ((-6e5, "warning"), (-4e5, None))),
        (runaway(cosine=0.5), None),
        (runaway(tuple(3.0 - 0.1 * s for s in range(80))), None),  # no faster than before
        (runaway(tuple(900.0 - 0.02 * s**2 for s in range(80))), None),  # above zero
        (runaway(objective="reward"), None),
        (runaway(num_foreign_parameters=4), None),
        (run([-0.1 * s for s in range(50)], [2.0**s for s in range(50)]), None),  # too few
        (run([-0.01 * 1.1**s for s in range(200)], noisy_norms(200)), "warning"),  # below -1e5
        (run([-(1.0 * s**3) for s in range(200)], [1.0 + s**2 for s in range(200)]), "warning"),  # in any direction
        (run([-(1.0 * s**3) for s in range(200)], [1.0 + s / 4.0 for s in range(200)]), None),
        (run([9.0, 5.0, 2.0, -1.0, -9.0, -30.0, math.nan], [1.0] * 6 + [math.nan]), "critical"),  # into NaN
        (run([9.0, 5.0, 2.0, 1.0, 0.5, 0.1, math.nan], [1.0] * 6 + [math.nan]), None),
    ],
    "loss-still-falling": [
        (run(falling_losses(60, pace=40.0, floor=0.0, noise=0.0)), None),  # it may go on
        (short(), "info"),
        (short(240), None),
        (short(pace=15.0), None),  # much of a little
        (short(window=50), None),  # its begin is not kept
        *((ended(run([2.3 + s / 50 for s in range(num)])), None) for num in (16, 40, 60)),
    ],
    "one-side-wins": [
        (lasting(4.5), None),
        (lasting(4.9), "warning"),
        (lasting(0.7), None),
        (lasting(0.05), None),
        (lasting(0.01), "warning"),
        (lasting(6.0, objective="minimise"), None),
        (lasting(6.0, objective="", num_foreign_parameters=0), None),
        (lasting(6.0, objective="", num_foreign_parameters=6), "warning"),
        (lasting(6.0, loss_ops=("MeanBackward0", LINEAR)), None),  # of Wasserstein: without a bound
        (lasting(6.0, loss_ops=()), None),
        (game(flat_losses(199, level=0.01, noise=1e-4)), None),
    ],
    "steps-too-large": [
        (sized(lr=0.031, num_steps=80), "warning"),
        (sized(lr=0.029, num_steps=80), None),
        (sized(lr=0.031, num_steps=79), None),
        (sized(lr=0.031, losses=falling_losses(80, pace=15.0)), None),
        (sized(lr=0.031, losses=held(2.3, 2.1)), "warning"),
        (sized(lr=0.031, losses=held(2.3, 2.0)), None),
        (sized(lr=0.071, num_layers=2, losses=falling_losses(80, pace=15.0)), "warning"),  # by most of the weights
        (sized(lr=0.069, num_layers=2, losses=falling_losses(80, pace=15.0)), None),
        (sized(lr=0.071, losses=falling_losses(80, pace=15.0)), None),
    ],
    "steps-too-small": [
        (ended(sized(lr=4.9e-5)), "warning"),
        (ended(sized(lr=5.1e-5)), None),
        (ended(sized(lr=4.9e-5, num_steps=40)), "warning"),
        (ended(sized(lr=4.9e-5, num_steps=39)), None),
        (ended(sized(lr=4.9e-5, losses=falling_losses(60, pace=15.0))), None),
        (ended(sized(lr=3e-5, losses=falling_losses(60, pace=150.0))), "warning"),  # moved by 0.018 in all
        (ended(sized(lr=4.9e-5, losses=falling_losses(99, pace=250.0))), "warning"),  # by 0.049
        (ended(sized(lr=4.9e-5, losses=falling_losses(120, pace=300.0))), None),  # by 0.059
        (ended(sized(lr=3e-5, losses=falling_losses(60, pace=25.0))), None),  # and learnt more than half
        (sized(lr=3e-5, num_steps=99), None),
        (sized(lr=3e-5, num_steps=100), "warning"),
        (ended(sized(lr=8e-5, losses=line(2e-3))), "warning"),
        (sized(lr=8e-5, losses=line(2e-3)), None),  # it may go on for long
        (sized(lr=8e-5, losses=line(4e-4, 1000)), "warning"),
        (ended(sized(lr=8e-5, losses=line(2e-3, 199))), None),
        (ended(sized(lr=1.1e-4, losses=line(2e-3))), None),
        (ended(sized(lr=8e-5, losses=line(7e-3))), None),  # half of it is gone
        (ended(sized(lr=8e-5, losses=line(0.0))), None),
    ],
    "learning-rate-unusual": [
        (sized("Adam", 0.04, num_steps=80), None),
        (sized("Adam", 0.06, num_steps=80), "warning"),
        (sized("Adam", 0.06, num_steps=79), None),
        (run(ENDED, ENDED, lrs=[0.06] * 10, optimizer_settings=settings()), "warning"),
        (sized("AdamW", 9e-7, num_steps=80), "warning"),
        (sized("SGD", 2.9, num_steps=80), None),
        (sized("SGD", 3.1, num_steps=80), "warning"),
        (sized("Adadelta", 1.0, num_steps=80), None),
        (sized("Adadelta", 1e-3, num_steps=80), "warning"),
        (sized("Muon", 50.0, num_steps=80), None),  # its usual range is not known
        (sized("Adadelta", 1e-3, losses=line(2e-3)), "warning"),  # it falls steadily, slowly
        (sized("Adadelta", 1e-3, losses=line(2e-3, 199)), "info"),
        (sized(lr=0.1, losses=falling_losses(100, pace=15.0)), "info"),
        (sized(lr=0.1, losses=held(2.3, 2.0)), "info"),
        (sized(lr=0.1, losses=held(2.3, 2.1)), "warning"),
        (sized(lr=0.1, losses=held(2.3, 1.6, 210)), "warning"),  # with steps of the size of the weights it is too high
        (sized(lr=0.1, std=1.0, losses=held(2.3, 1.6, 210)), "info"),
        *((sized(lr=0.25, losses=falling_losses(80, pace=20.0), objective=o), "warning") for o in ("reward", "game")),
        (sized(lr=0.15, losses=falling_losses(80, pace=20.0)), "info"),
        (sized(lr=0.25, std=1.0, losses=[*falling_losses(80, pace=20.0), *[2.0] * 40]), "warning"),  # and is lost again
        (sized(lr=0.15, std=1.0, losses=[*falling_losses(80, pace=20.0), *[2.0] * 40]), "info"),
        (sized(lr=0.15, num_steps=100, objective="reward"), "info"),
        (sized(lr=0.25, losses=FALLING, initialization={}), "info"),  # weights that are not known
        (sized(lr=0.25, losses=held(2.3, 1.6, 210), initialization={}), "warning"),
        (sized(lr=0.15, losses=held(2.3, 1.6, 210), initialization={}), "info"),
        (sized(lr=5.0, losses=FALLING, target_mean=100.0, target_std=10.0, loss_ops=HUBER), "info"),
        (
            sized(lr=25.0, losses=FALLING, target_mean=100.0, target_std=1.0, loss_ops=HUBER),
            "warning",
        ),
        (run(flat_losses(100), lrs=[1e-9 * (s + 1) for s in range(100)], optimizer_settings=settings()), None),
    ],
    "shrinking-weights": [
        (run(flat_losses(40), weight_growth=0.29), "warning"),
        (run(flat_losses(40), weight_growth=0.31), None),
        (run(falling_losses(200, pace=20.0), weight_growth=0.29), None),  # and much is learnt
        (run(falling_losses(200, pace=20.0), weight_growth=0.29, decay_per_step=0.011), "warning"),
        (run([4.0] * 10 + [math.log(2.0)] * 90, weight_growth=0.29, loss_ops=["SoftplusBackward0"]), "warning"),
    ],
    "learning-rate-gone": [
        *((run(flat_losses(150), lrs=[1e-3] * 50 + [lr] * 100), said) for lr, said in ((9e-6, True), (1.1e-5, None))),
        (run(flat_losses(89), lrs=[1e-3] * 50 + [1e-6] * 39), None),
        (run(flat_losses(260), lrs=[1e-3] * 200 + [1e-6] * 60), None),  # a decay near the end
        (run(flat_losses(100), lrs=[1e-6] * 100), None),  # it never was higher
        (run(flat_losses(200), lrs=[5e-4 * (1 + math.cos(math.pi * s / 200)) for s in range(200)]), None),  # a cosine
        (run([2.3] * 50 + [1.25] * 100, lrs=[1e-3] * 50 + [1e-6] * 100), "warning"),
        (run([2.3] * 50 + [0.2] * 100, lrs=[1e-3] * 50 + [1e-6] * 100), "warning"),  # whatever was learnt before
    ],
    "learning-rate-still-rising": [
        (rising(200), "warning"),
        (rising(199), None),
        (ended(rising(100, begin=1e-9)), "warning"),
        (run(flat_losses(200), lrs=[1e-5 * min(s + 1, 190) for s in range(200)]), "warning"),
        (run(flat_losses(200), lrs=[1e-5 * min(s + 1, 180) for s in range(200)]), None),  # a warm-up that has ended
        (run(flat_losses(200), lrs=[1e-5 * (s + 1 - 2 * (s == 50)) for s in range(200)]), None),  # it fell once
        (run(flat_losses(200), lrs=[1e-5 * s for s in range(200)]), None),
        (rising(300, losses=falling_losses(300)), None),  # and all goes well
        (run([1.0] * 100 + [10.0 * 1.05**s for s in range(150)], lrs=[1e-3 * 1.03**s for s in range(250)]), "critical"),
    ],
    "loss-begins-high": [
        (batches_run([90.0, *flat_losses(120, 4.0)], batch(output_std=40.0), loss_kind="cross-entropy"), "warning"),
        (batches_run([90.0, *flat_losses(50, 4.0)], batch(output_std=40.0), loss_kind="cross-entropy"), "info"),
        (batches_run([90.0, *falling_losses(120)], batch(output_std=40.0), loss_kind="cross-entropy"), "info"),
        (batches_run([90.0, *flat_losses(120, 4.0)], batch(output_std=2.0), loss_kind="cross-entropy"), None),  # a sum
        (batches_run([2.0, *flat_losses(120, 4.0)], batch(output_std=40.0), loss_kind="cross-entropy"), None),
        (batches_run([90.0, *flat_losses(120, 4.0)], batch(output_std=40.0), loss_kind=""), None),
    ],
}
