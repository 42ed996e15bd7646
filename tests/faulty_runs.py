"""Invented runs, made without torch: one for each rule that it must find, and healthy ones that none may."""

import math

from fastguard.records import StepStats, TrainingHistory
from fastguard.records.samples import WeightStats

from made_runs import (
    activity,
    batch,
    batches_run,
    bend,
    chance_losses,
    clipped_run,
    ended,
    ending_in_zeros,
    falling_losses,
    falling_norms,
    flat_losses,
    flipped,
    game,
    layered,
    linear_layers,
    machine,
    noisy_norms,
    passed,
    run,
    scaler_run,
    settings,
    spiked,
    validated,
    weights_run,
    wild_losses,
    with_activities,
    with_bad_steps,
)
from records import make_history, make_record, make_table, make_turning_history


def _overfit():
    losses = falling_losses(400, floor=0.01)
    val = {step: (2.3 * math.exp(-step / 60) + 0.4 if step < 120 else 0.7 + step / 400) for step in range(19, 400, 20)}
    return losses, val


def _underflowing():
    history = TrainingHistory()
    for step in range(60):
        row = [16, 1e-12, 0.0, 1e-6, 2.0**-24, 12, 0, 0]
        history.add(StepStats(step, make_table([row, row], ["a", "b"])))
    return history


def _collapsing_scale():
    history = TrainingHistory()
    for step in range(60):
        bad = step >= 30
        scale = 65536.0 / 2 ** max(0, step - 30)
        history.add(make_record(step, math.inf if bad else 1.0 + step % 3, skipped=bad, loss_scale=scale))
    return history


def _spoilt_weights():
    good, bad = WeightStats("w", 10, 1.0, 0.1, 0.2), WeightStats("w", 10, 1.0, 0.1, 0.2, num_nonfinite=1)
    return run(falling_losses(100), change=lambda s: {} if s % 20 else {"weights": (bad if s >= 60 else good,)})


HEALTHY = {
    "empty": TrainingHistory(),
    "one step": make_history([1.0]),
    "noisy": make_history(noisy_norms(2000)),
    "falling norms": make_history(falling_norms(600)),
    "warm restarts": make_history([n * (3 if step % 100 < 10 else 1) for step, n in enumerate(noisy_norms(600))]),
    "clipped now and then": clipped_run(300, 60),
    "half-precision scale, no overflow": scaler_run(300, ()),
    "a gradient that is always the same": make_history([3.0] * 200),
    "tiny norms": make_history(noisy_norms(300, level=1e-12)),
    "falling loss": run(falling_losses(600)),
    "falling loss of a small batch": run(falling_losses(600, noise=0.3)),
    "loss that goes below zero": run([1.0 - step / 100 + 0.05 * (step % 3) for step in range(400)]),
    "an early jump of the loss": run(bend(falling_losses(400), range(3, 12), lambda v: 1.25 * v)),
    "a warm-up": run(
        [*flat_losses(150), *falling_losses(300)], lrs=[1e-3 * min(1.0, (s + 1) / 200) for s in range(450)]
    ),
    "warm restarts of the learning rate": run(
        falling_losses(400), lrs=[1e-3 * (0.55 + 0.45 * math.cos(math.pi * (s % 80) / 80)) for s in range(400)]
    ),
    "a learning rate that ends at zero": run(falling_losses(400), lrs=[1e-3 * (1 - s / 400) for s in range(400)]),
    "validation that dances around its best": run(
        falling_losses(400), val_losses={s: 0.4 + 2 * math.exp(-s / 60) + 0.02 * (s % 3) for s in range(19, 400, 20)}
    ),
    "a naturally sparse ReLU": with_activities(activity(zero=0.9, dead=0.2)),
    "a lively tanh": with_activities(activity(family="tanh", zero=0.0, saturated=0.25)),
    "a causal softmax": with_activities(activity(family="softmax", zero=0.5)),
    "usual updates": weights_run(lambda step, name: 0.05 / (1 + step / 20)),
    "momentum that gathers speed": weights_run(lambda step, name: {0: 0.005, 10: 0.035}.get(step, 0.02), every=10),
    "layers that differ by 30": layered(100, lambda step, place: (1 + step % 7 / 9) / (1 + 4 * place)),
    "ten percent of dropout": run(falling_losses(100), dropout={"drop": 0.1}, decay_per_step=1e-5),
    "a scheduler that works": run(
        falling_losses(100), lrs=[1e-3 * (1 - s / 100) for s in range(100)], has_scheduler=True, initial_lr=1e-3
    ),
    "a classifier that is looked at": batches_run(
        falling_losses(200, start=1.386), batch(), passed(), val_losses=validated(200, level=1.5),
        loss_ops=("NllLossBackward0", "LogSoftmaxBackward0", "AddmmBackward0"),
        last_modules=("Linear", "ReLU", "Linear"), module_kinds={"Linear": 3, "ReLU": 2, "Dropout": 1},
        dropout={"drop": 0.1}, optimizer_settings=settings(lr=1e-3, betas=(0.9, 0.999), eps=1e-8),
        initialization={"a": (0.1, 0.1)}, num_left_gradients=0, num_watched_backwards=20, num_foreign_parameters=0,
    ),
    "tokens": batches_run(
        falling_losses(200), batch(input_is_integer=True, input_abs_max=5e4, input_mean=9e3, input_std=1e4)
    ),
    "gradients that are cleared": run(falling_losses(60), num_left_gradients=0, num_watched_backwards=20),
    "accumulation in a loop that clears at every other step": run(
        falling_losses(60), num_left_gradients=10, num_watched_backwards=20
    ),
    "a cosine schedule to zero": run(
        falling_losses(400, pace=40.0), lrs=[5e-4 * (1 + math.cos(math.pi * s / 400)) for s in range(400)]
    ),
    "a hinge loss that has come to zero": run(
        [max(0.0, 1.0 - s / 150) for s in range(200)], [1.0 if s < 150 else 0.0 for s in range(200)]
    ),
    "a loss that was zero from the start": run([0.0] * 60, [0.0] * 60),
    "a game": batches_run(
        wild_losses(300), batch(num_samples=2), objective="game", last_modules=("Tanh", "Linear"),
        optimizer_settings=settings(lr=2e-4, betas=(0.5, 0.999), eps=1e-8),
    ),
    "a log-likelihood below zero": ended(run([1.0 - s / 50 for s in range(200)])),
    "a regression that ends in a sigmoid and learns": batches_run(
        falling_losses(200), batch(output_is_unit=True, output_min=0.0, output_max=1.0), last_modules=("Sigmoid",),
        loss_ops=("MseLossBackward0", "SigmoidBackward0", "AddmmBackward0"),
    ),
    "a large SGD step of small gradients": run(
        falling_losses(100), optimizer_settings=settings("SGD", lr=0.5, momentum=0.9), lrs=[0.5] * 100
    ),
}  # fmt: skip

_overfit_losses, _overfit_val = _overfit()
# A run for each rule, by the rule's name, on which it must fire.
BAD = {
    "non-finite-gradients": with_bad_steps(100, {40: ["a", "b"]}),
    "skip-run": with_bad_steps(100, {step: ["a"] for step in range(50, 54)}),
    "clip-rate-high": clipped_run(100, 100),
    "norm-spike": spiked(noisy_norms(300), 200, 50.0),
    "zero-gradients": ending_in_zeros(1),
    "already-clipped": make_turning_history([*noisy_norms(50), *[0.99999 + 1e-6 * (s % 2) for s in range(10)]]),
    "non-finite-loss": run(bend(falling_losses(100), [40], lambda v: math.nan)),
    "non-finite-activations": with_activities(
        activity("second", infs=3, inputs_finite=False, order=1), activity("first", infs=1), since=60
    ),
    "non-finite-weights": _spoilt_weights(),
    "loss-scale-collapse": _collapsing_scale(),
    "growing-norm": run(
        [*falling_losses(150), *[0.5 + step / 100 for step in range(150)]],
        [n * 1.03 ** max(0, step - 150) for step, n in enumerate(noisy_norms(300))],
    ),
    "unscaled-accumulation": run(
        falling_losses(60), noisy_norms(60, level=8.0), change=lambda s: {"clip_coef": 0.125}, backward_per_step=8
    ),
    "zero-gradient-tensors": layered(120, lambda step, place: 0.0 if place < 2 and step > 30 else 1.0),
    "vanishing-layers": layered(100, lambda step, place: 10.0 ** (place - 8), flat_losses(100)),
    "half-precision-underflow": _underflowing(),
    "dead-units": with_activities(activity(zero=0.9, dead=0.8)),
    "saturated-units": with_activities(activity(family="tanh", zero=0.0, saturated=0.97)),
    "page-faults": run(falling_losses(50), resources=machine(page_faults=69_000.0, system_share=0.3)),
    "starved-of-cores": run(falling_losses(50), resources=machine(core_wait_share=0.5)),
    "dropout-high": run(falling_losses(50), dropout={"drop": 0.95}),
    "update-ratio-high": weights_run(lambda step, name: 0.6),
    "update-ratio-low": weights_run(lambda step, name: 3e-5, flat_losses(140)),
    "parameters-not-in-optimizer": run(
        falling_losses(50), names=["a", "b", "c"], not_in_optimizer=["b"]
    ),
    "frozen-parameters": run(
        falling_losses(120), names=["a", "b", "c"], without_gradient=["b"], initialization={"b": (0.1, 0.1)}
    ),
    "missing-gradients": run(falling_losses(50), names=["v.weight", "w"], learning_modules=["v"]),
    "poor-initialisation": run(falling_losses(50), initialization={"a": (1.0, 0.1), "b": (0.1, 0.1)}),
    "shrinking-weights": run(flat_losses(140), weight_growth=0.01, decay_per_step=0.03),
    "loss-explosion": run(bend(falling_losses(100), range(50, 60), lambda v: 50.0)),
    "loss-divergence": run([*falling_losses(150), *flat_losses(50)]),
    "loss-spike": run(bend(falling_losses(200), [150], lambda v: 20.0)),
    "loss-not-decreasing": run(flat_losses(210)),
    "underfitting": run([*falling_losses(40, pace=8.0, floor=1.9), *flat_losses(160, level=1.9)]),
    "overfitting": run(_overfit_losses, val_losses=_overfit_val),
    "learning-rate-jump": run(falling_losses(200), lrs=[1e-3 if s < 120 else 1e-2 for s in range(200)]),
    "no-warm-up": run([2.3, 2.4, 2.3, *[4.0] * 120]),
    "scheduler-not-stepping": run(falling_losses(100), lrs=[1e-5] * 100, has_scheduler=True, initial_lr=1e-3),
    "label-noise": run(falling_losses(400), val_losses={s: 2.3 + s / 200 for s in range(19, 400, 20)}),
    "gradients-not-cleared": run(falling_losses(50), num_left_gradients=19, num_watched_backwards=20),
    "no-gradient": run(flat_losses(50), [0.0] * 50),
    "unseen-updates": run(
        falling_losses(50),
        names=["a", "w"],
        num_seen=1,
        never_seen=["a"],
        moved_between=["a"],
        num_reached_unseen=19,
    ),
    "odd-optimizer-settings": run(
        flat_losses(160), optimizer_settings=settings(lr=1e-3, betas=(0.9, 0.999), eps=0.1)
    ),
    "learning-rate-gone": run(flat_losses(150), lrs=[1e-3 if s < 50 else 1e-6 for s in range(150)]),
    "weights-overwritten": run(flat_losses(120), overwritten=["a", "b"]),
    "validation-in-training-mode": batches_run(
        falling_losses(100), batch(), passed(training=True), val_losses=validated(100), dropout={"drop": 0.3}
    ),
    "training-in-eval-mode": batches_run(falling_losses(100), batch(training=False), dropout={"drop": 0.3}),
    "output-against-loss": run(
        falling_losses(50), loss_ops=["NllLossBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0", "AddmmBackward0"]
    ),
    "bounded-output": batches_run(
        flat_losses(100), batch(output_abs_max=0.0, output_min=0.0, output_max=0.0), last_modules=["ReLU", "Linear"]
    ),
    "same-output-for-all": batches_run(
        flat_losses(220), lambda s: batch(output_spread=0.5 if s < 30 else 0.0)(s)
    ),
    "loss-at-chance": batches_run(chance_losses(150), batch()),
    "input-scale": batches_run(flat_losses(100), batch(input_abs_max=255.0, input_mean=120.0, input_std=70.0)),
    "batch-not-finite": batches_run(falling_losses(100), lambda s: batch(input_num_nonfinite=int(s == 40))(s)),
    "same-inputs": batches_run(falling_losses(100), batch(input_digest=7), steps_per_epoch=50),
    "validation-inputs-differ": batches_run(
        falling_losses(100), batch(), passed(input_mean=3.0), val_losses=validated(100, level=9.0)
    ),
    "steps-too-large": run(
        flat_losses(100), lrs=[0.1] * 100, optimizer_settings=settings(lr=0.1), initialization={"a": (0.1, 0.1)}
    ),
    "steps-too-small": run(
        flat_losses(100), lrs=[1e-6] * 100, optimizer_settings=settings(lr=1e-6), initialization={"a": (0.1, 0.1)}
    ),
    "learning-rate-unusual": run(flat_losses(100), lrs=[10.0] * 100, optimizer_settings=settings(lr=10.0)),
    "negated-loss": run(
        [-2.3 - 0.1 * s for s in range(60)], loss_ops=["NegBackward0", "NllLossBackward0", "LogSoftmaxBackward0"]
    ),
    "falls-in-a-line": ended(run([2.3 - 5e-4 * s + 1e-3 * (s % 3) for s in range(400)])),
    "negated-policy-loss": batches_run(
        flat_losses(60, level=-9.0), batch(num_samples=1), loss_ops=["MulBackward0", "GatherBackward0"]
    ),
    "loss-without-floor": run([-0.01 * 1.1**s for s in range(200)], [1.05**s for s in range(200)]),
    "loss-begins-high": batches_run(
        [90.0, *flat_losses(120, level=4.0)], batch(output_std=40.0), loss_kind="cross-entropy"
    ),
    "one-target": run(falling_losses(60), num_targets=200, num_target_classes=1, target_top_share=1.0),
    "answer-in-inputs": run(
        falling_losses(60), loss_kind="binary cross-entropy with logits", target_in_inputs=1.0
    ),
    "answer-seen": run(falling_losses(60), loss_kind="cross-entropy", target_shift=[1, 6, 15]),
    "unrelated-targets": run(falling_losses(120), loss_kind="cross-entropy", target_dependence=0.3),
    "inputs-without-effect": run([*[2.9] * 20, *flat_losses(180)], experiments=[{
        "step": 120, "arm": "inputs permuted", "causes": ["wrong-targets"], "verdict": "no difference",
        "effect": -0.001, "t": 0.4, "num_steps": 40, "ratio": 2.0, "text": "Tried: no clear difference.",
    }]),
    "uneven-targets": run(flat_losses(60), num_targets=200, num_target_classes=3, target_top_share=0.95),
    "target-scale": run(
        [1e4, *flat_losses(100, level=1e4, noise=10.0)], loss_kind="squared error", squared_losses=[1e4],
        target_mean=99.0, target_std=14.0, target_range=[60.0, 140.0], target_binary_share=0.0,
    ),
    "targets-beyond-output": run(
        [4.0, *flat_losses(60)], loss_kind="squared error", squared_losses=[4.0], last_modules=["Sigmoid", "Linear"],
        target_mean=2.0, target_std=1.0, target_range=[0.0, 4.0], target_binary_share=0.0,
    ),
    "output-not-as-the-loss-asks": batches_run(
        falling_losses(60), batch(output_rows_sum_to_one=True), loss_kind="cross-entropy"
    ),
    "loss-against-targets": run(
        [0.25, *flat_losses(100, level=0.25)], loss_kind="squared error", squared_losses=[0.25],
        target_mean=0.5, target_std=0.5, target_range=[0.0, 1.0], target_binary_share=1.0,
    ),
    "broadcast-targets": run(
        flat_losses(60), loss_ops=["MeanBackward0", "PowBackward0", "SubBackward0", "ExpandBackward0", "AddmmBackward0"]
    ),
    "loss-still-falling": ended(
        run(falling_losses(60, pace=40.0, floor=0.0, noise=0.0), val_losses={19: 1.5, 39: 0.9, 59: 0.6})
    ),
    "sorted-targets": batches_run(
        [*flat_losses(20), *flat_losses(80, level=3.0)], batch(), num_targets=200, num_target_classes=4,
        target_top_share=0.3, target_batch_top_share=1.0,
    ),
    "layers-without-activation": linear_layers([(200, 20), (100, 5)]),
    "learning-rate-still-rising": run(flat_losses(250), lrs=[1e-5 * (s + 1) for s in range(250)]),
    "one-side-wins": game([0.7 + 0.03 * s for s in range(200)] + flat_losses(120, level=6.5)),
    "lone-element": flipped(),
    "running-statistics-apart": run(
        falling_losses(100), val_losses=validated(100, level=4.0), norm_statistics={"norm": (2.5, 0.1)},
        module_kinds={"Linear": 2, "BatchNorm1d": 1},
    ),
    "divergence-ahead": run(
        [*falling_losses(200, noise=0.02), *[0.3 + 0.01 * s for s in range(80)]],
        [n * 1.02 ** max(0, s - 200) for s, n in enumerate(noisy_norms(280))],
    ),
    "rolled-back": run(
        falling_losses(60), recoveries=[{"kind": "rollback", "step": 50, "to": 20, "reason": "x", "num_batches": 31}]
    ),
    "large-weight-decay": run(flat_losses(100), optimizer_settings=settings(lr=1e-3, weight_decay=0.5)),
}  # fmt: skip
