"""Where the rules on gradients begin and end: runs, and what each sign says of them."""

import random

from fastguard.records import StepStats, TrainingHistory

from made_runs import (
    bend,
    clipped_run,
    ending_in_zeros,
    falling_losses,
    flat_losses,
    noisy_norms,
    run,
    scaler_run,
    settings,
    with_bad_steps,
)
from records import make_history, make_record, make_row, make_table, make_turning_history

FLAT, FALLING = flat_losses(100), falling_losses(100)
SPIKED = [norm * (50.0 if step == 200 else 1.0) for step, norm in enumerate(noisy_norms(300))]
LOST = [*falling_losses(240, pace=20.0), *flat_losses(60, level=2.0)]
RISING_TWICE = [n * 1.02**step for step, n in enumerate(noisy_norms(300))]
WILD = [random.Random(seed).lognormvariate(0.0, 1.5) for seed in range(300)]


def then(history, norms):
    """The same run, gone on with these norms."""
    for step, norm in enumerate(norms, history.newest_step + 1):
        history.add(make_record(step, norm))
    return history


def ends(rows, names):
    """Twenty usual steps, and one with these rows."""
    history = make_history(noisy_norms(20))
    history.add(StepStats(20, make_table(rows, names)))
    return history


def zero_at(*zero, names=("0.weight", "0.bias", "1.weight", "bias")):
    return ends([make_row(0.0, 8, num_zeros=8) if name in zero else make_row(1.0, 8) for name in names], names)


def all_zero_for(num_steps):
    history = make_history([*noisy_norms(20), *[0.0] * num_steps])
    history.add(StepStats(20 + num_steps, make_table([make_row(0.0, 8, num_zeros=8)] * 2, ["a", "b"])))
    return history


def only_norms(noise, norm=1.0, num_steps=20):
    history = TrainingHistory()
    for step in range(num_steps):
        history.record(step, loss=1.0, grad_norm=norm * (1.0 + noise * (step % 3)), lr=0.1)
    return history


def limited(limit, count=200):
    """Norms as clip_grad_norm_ leaves them."""
    norms = noisy_norms(count, level=min(limit, 1.0) if limit < 0.1 else 1.0)
    return make_turning_history([min(n, limit * n / (n + 1e-6)) for n in norms])


def clipped(coef, losses, kind=None):
    notes = {} if kind is None else {"optimizer_settings": settings(kind)}
    return run(losses, change=lambda step: {"clip_coef": coef}, **notes)


LIMITS = {
    "growing-norm": [
        (run(falling_losses(300, noise=0.01), RISING_TWICE), None),
        (run([2 + s / 50 for s in range(300)], RISING_TWICE), "warning"),
    ],
    "non-finite-gradients": [
        (with_bad_steps(100, {40: ["a"]}), "warning"),
        (with_bad_steps(100, {99: ["a"]}), "critical"),  # the last step
        (with_bad_steps(100, {step: ["a"] for step in (40, 41, 42)}), "critical"),  # three in a row
        (with_bad_steps(100, {step: ["a"] for step in range(0, 90, 15)}), "critical"),  # six of a hundred
        (then(with_bad_steps(100, {step: ["a"] for step in (40, 41, 42)}), noisy_norms(600)), "warning"),  # long past
        (with_bad_steps(100, {40: ["a"]}, skipped=False), "critical"),
        (scaler_run(20, range(6)), "info"),  # the scale is being found
        (scaler_run(2000, [1900]), "info"),
        (scaler_run(600, range(100, 600, 10)), "warning"),
        (scaler_run(100, range(80, 91)), "critical"),
    ],
    "skip-run": [
        (with_bad_steps(100, {10: ["a"], 11: ["a"], 13: ["a"]}), None),
        (with_bad_steps(54, {step: ["a"] for step in range(50, 54)}), "critical"),
        (scaler_run(100, range(10)), None),
        (scaler_run(100, range(11)), "warning"),
    ],
    "clip-rate-high": [
        (clipped_run(49, 49), None),
        (clipped_run(50, 50), "info"),
        (clipped_run(100, 90), None),
        (clipped_run(500, 290), None),  # not of the newest
        (clipped_run(100, 100, coef=0.9999995), None),
        (clipped(0.5, FLAT, "SGD"), "info"),
        (clipped(0.1, FLAT, "SGD"), "warning"),
        (clipped(0.1, FLAT), "warning"),
        (clipped(0.1, FLAT, "Adam"), "info"),  # which divides by the size of the gradient
        (clipped(0.1, FALLING, "SGD"), "info"),  # it learns all the same
        (clipped(1.1e-5, FLAT, "Adam"), "info"),
        (clipped(0.9e-5, FLAT, "Adam"), "warning"),  # whose eps outweighs what is left
        (clipped(0.9e-5, FALLING, "Adam"), "info"),
    ],
    "norm-spike": [
        (make_history(WILD), None),
        (make_history([1.0] * 100 + [11.0]), True),
        (run(falling_losses(300, pace=20.0), SPIKED), "info"),
        (run(flat_losses(300, noise=0.0), SPIKED), "info"),  # nothing gained, and nothing lost
        (run(LOST, SPIKED), "warning"),
        (run([None] * 300, SPIKED), "warning"),  # nothing says that it does no harm
        (run([loss - 1.0 for loss in LOST], SPIKED), "info"),  # a game
        (run(bend(falling_losses(300), [200], lambda v: 9.0), SPIKED), "warning"),
    ],
    "zero-gradients": [
        *((ending_in_zeros(num), said) for num, said in ((1, "info"), (2, "warning"), (3, "warning"), (4, "info"))),
        (all_zero_for(18), "info"),  # a loss that is met now and then
        (all_zero_for(19), "warning"),
        (zero_at("0.bias"), None),  # what pulls one way and the other adds up to nothing
        (zero_at("0.weight"), "info"),
        (zero_at("bias"), "info"),  # of no weight
    ],
    "already-clipped": [
        *((make_turning_history([norm] * 10), "info") for norm in (1.0, 0.25, 5.0005)),
        *((make_turning_history([norm] * 10), None) for norm in (1.234, 0.0)),
        (make_turning_history([*noisy_norms(9), *[1.0] * 9]), None),
        (make_history([3.0] * 40), None),  # the gradient does not change
        (make_turning_history([3.0] * 40), "info"),
        (make_history([3.0 + 1e-5 * step for step in range(40)]), None),
        (only_norms(0.0), None),
        (only_norms(1e-7, 9e-6, 60), "warning"),
        (only_norms(1e-7, 1e-4, 60), "info"),
        (make_turning_history([1e-3] * 100, losses=flat_losses(100)), "warning"),  # and nothing is learnt
        (make_turning_history([1e-2] * 100, losses=flat_losses(100)), "info"),
        *((limited(limit), "info") for limit in (1.0, 0.05, 1.6)),
        *((limited(limit), None) for limit in (1.2345, 3.0)),
        (limited(1.0, 20), "info"),
        (make_history([1.0 - 0.5**step for step in range(200)]), None),  # they come to rest at the largest
        (make_history([1.0 - 1e-6 * step for step in range(200)]), None),
        (make_history([1.0 if step % 2 else 0.5 for step in range(200)]), None),  # the same two batches
        (make_history([1.0, *[0.5 + 0.001 * step for step in range(100)]]), None),
    ],
}
