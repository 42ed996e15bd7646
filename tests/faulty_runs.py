"""Invented runs, made without torch: one for each rule that it must find, and healthy ones that none may."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from fastguard.history import TrainingHistory
from fastguard.stats import BatchSample, StepStats
from fastguard.stats.columns import COLUMNS
from fastguard.stats.samples import ActivationStats, ModuleActivity, WeightStats

from records import (
    make_bad_record,
    make_batch,
    make_history,
    make_record,
    make_row,
    make_table,
    make_turning_history,
)

LAYERS = tuple(f"layers.{i}.weight" for i in range(8))


def noisy_norms(count, seed=0, level=1.0):
    rng = random.Random(seed)
    return [level * rng.lognormvariate(0.0, 0.3) for _ in range(count)]


def falling_norms(count):
    """As training begins: from 300 down to 0.3 in the first hundred steps."""
    return [n * (0.3 + 300 * math.exp(-step / 15)) for step, n in enumerate(noisy_norms(count, 1))]


def falling_losses(count, seed=0, noise=0.05, floor=0.3, start=2.3, pace=60.0):
    """As training goes: down from `start` to `floor`, with noise for its level."""
    rng = random.Random(seed)
    levels = [floor + (start - floor) * math.exp(-step / pace) for step in range(count)]
    return [level * (1 + rng.gauss(0.0, noise)) for level in levels]


def scaler_run(num_steps, skipped):
    history = TrainingHistory()
    for step, norm in enumerate(noisy_norms(num_steps)):
        bad = step in skipped
        history.add(make_record(step, math.inf if bad else norm, skipped=bad, loss_scale=1024.0))
    return history


def with_bad_steps(num_steps, bad, **fields):
    history = TrainingHistory()
    for step, norm in enumerate(noisy_norms(num_steps)):
        history.add(make_bad_record(step, bad[step], **fields) if step in bad else make_record(step, norm))
    return history


def clipped_run(num_steps, num_clipped, coef=0.5):
    history = TrainingHistory()
    for step, norm in enumerate(noisy_norms(num_steps)):
        history.add(make_record(step, norm, clip_coef=coef if step < num_clipped else 1.0))
    return history


def _clipped_below_eps():
    history = clipped_run(60, 60, coef=1e-9)
    history.note_model(optimizer_settings=settings(lr=1e-3, eps=1e-8), clip_policy="GlobalNorm(1e-09)")
    return history


def ending_in_zeros(num_zero, num_tensors=4):
    history = make_history(noisy_norms(20))
    rows = [make_row(0.0, 8, num_zeros=8)] * num_zero + [make_row(1.0, 8)] * (num_tensors - num_zero)
    history.add(StepStats(20, make_table(rows, [f"t{i}" for i in range(num_tensors)])))
    return history


def spiked(norms, step, times):
    return make_history([norm * (times if i == step else 1) for i, norm in enumerate(norms)])


def run(
    losses: Sequence[float | None],
    norms: Sequence[float] | None = None,
    *,
    lrs: Sequence[float] | None = None,
    val_losses: dict[int, float] | None = None,
    change: Callable[[int], dict] = lambda step: {},
    window: int = 512,
    **notes,
) -> TrainingHistory:
    """A run of these losses; `change` gives further fields of the record of a step, `notes` are for `note_model`."""
    history = TrainingHistory(window)
    history.note_model(**notes)
    norms = noisy_norms(len(losses)) if norms is None else norms
    for step, (loss, norm) in enumerate(zip(losses, norms)):
        lr = 1e-3 if lrs is None else lrs[step]
        fields = {"loss": loss, "lr": lr, "val_loss": (val_losses or {}).get(step), **change(step)}
        history.add(make_record(step, norm, **fields))
    return history


def layered(num_steps, norm_of: Callable[[int, int], float], losses=None, names=LAYERS, numel=16) -> TrainingHistory:
    """A run of many tensors: `norm_of(step, place)` is each one's norm, 0 for only zeros."""
    history = TrainingHistory()
    for step in range(num_steps):
        rows = []
        for place in range(len(names)):
            norm = norm_of(step, place)
            rows.append(make_row(norm, numel, num_zeros=0 if norm else numel))
        history.add(StepStats(step, make_table(rows, names), loss=None if losses is None else losses[step], lr=1e-3))
    return history


def activity(name="act", family="relu", *, zero=0.3, saturated=0.0, units=64, dead=0.0, stuck=0.0, **fields):
    """One module's output: 1000 elements, `zero` and `saturated` shares of them; shares `dead`, `stuck` of the
    units."""
    numel = 1000
    stats = ActivationStats(
        0.1, 0.5, -1.0, 1.0, int(zero * numel), int(saturated * numel), fields.pop("nans", 0), fields.pop("infs", 0),
        numel, abs_max=1.0, num_near_zero=int(zero * numel),
    )  # fmt: skip
    inputs_finite = fields.pop("inputs_finite", True)
    return ModuleActivity(
        name, family, stats, fields.pop("order", 0), inputs_finite, units, int(dead * units), int(stuck * units)
    )


def with_activities(*modules: ModuleActivity, every=20, num_steps=100, since=0) -> TrainingHistory:
    """A run that samples these activations every 20 steps, from step `since` on."""
    return run(
        falling_losses(num_steps),
        change=lambda step: {"activations": modules} if step % every == 0 and step >= since else {},
    )


def weights_run(
    ratio: Callable[[int, str], float], losses=None, norm=lambda step: 10.0, num_steps=140, every=20, **notes
):
    """A run whose two weights change by `ratio(step, name)` of their norm at each sample, `every` so many steps."""

    def sampled(step):
        if step % every:
            return {}
        size = norm(step)
        update = {name: ratio(step, name) for name in ("a.weight", "b.weight")}
        return {
            "weights": tuple(
                WeightStats(name, 100, size + (step * u if u else 0.0), size / 10, size / 5, 1.0, u * size)
                for name, u in update.items()
            )
        }

    return run(falling_losses(num_steps) if losses is None else losses, change=sampled, **notes)


def moments_run(rms: Callable[[int], float], largest=lambda step: 0.1, losses=None, **notes):
    """A run of two weights, sampled each ten steps, of `rms(step)` as Adam's second moment has it; gradients of 1."""

    def sampled(step):
        fields = (100, 10.0, 1.0, 2.0, 1.0, 0.1, 0, rms(step), 0.0, largest(step), 1e-2)
        return {} if step % 10 else {"weights": tuple(WeightStats(name, *fields) for name in ("a.weight", "b.weight"))}

    return run(flat_losses(140) if losses is None else losses, change=sampled, **notes)


def flat_losses(count, level=2.3, noise=0.01, seed=0):
    rng = random.Random(seed)
    return [level + rng.gauss(0.0, noise) for _ in range(count)]


def batches_run(
    losses: Sequence[float], *made: Callable[[int], BatchSample], every: int = 10, **notes
) -> TrainingHistory:
    """A run that looks at forward passes every 10 steps: `made` give them, one after the other, from the step."""
    return run(losses, change=lambda s: {} if s % every else {"batches": tuple(make(s) for make in made)}, **notes)


def batch(**fields) -> Callable[[int], BatchSample]:
    """A training batch that is another one at each step; `fields` are what else is not as usual."""
    return lambda step: make_batch(**{"input_digest": step + 1, **fields})


def passed(**fields) -> Callable[[int], BatchSample]:
    """As `batch`, a pass without gradients in eval mode: validation."""
    return batch(**{"training": False, "with_grad": False, **fields})


def settings(kind="Adam", **values):
    """What a guard tells of an optimizer of one group."""
    return [{"kind": kind, "num_parameters": 64, **values}]


def wild_losses(count, seed=0):
    """As of batches of one: from almost 0 to 4, and never better."""
    rng = random.Random(seed)
    return [rng.uniform(0.1, 4.0) for _ in range(count)]


def chance_losses(count, classes=4):
    return flat_losses(count, level=math.log(classes), noise=0.005)


def validated(count, every=20, level=1.0):
    return dict.fromkeys(range(every - 1, count, every), level)


def ended(history: TrainingHistory) -> TrainingHistory:
    """The same run, as a log of it is read."""
    history.has_ended = True
    return history


def bend(values, at, function):
    """`values` with those at the steps `at` replaced."""
    return [function(value) if step in at else value for step, value in enumerate(values)]


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


def lone_row(norm: float, largest: float, numel: int = 1000) -> list[float]:
    """A row whose squares are those of `numel` elements of that norm, and one more of `largest`."""
    row = make_row(norm, numel)
    row[COLUMNS.index("sum_sq")] += largest * largest
    row[COLUMNS.index("abs_max")] = largest
    row[COLUMNS.index("finite_norm")] = math.hypot(norm, largest)
    return row


def flipped(at=(100,), largest=1e9, num_steps=130, numel=1000, loss=lambda step, loss: loss, **fields):
    """A run in which one element of the second of three tensors is `largest` at the steps `at`."""
    history = TrainingHistory()
    names = ["a.weight", "b.weight", "c.weight"]
    for step, (norm, value) in enumerate(zip(noisy_norms(num_steps), falling_losses(num_steps))):
        rows = [make_row(norm, numel) for _ in names]
        if step in at:
            rows[1] = lone_row(norm, largest, numel)
        history.add(StepStats(step, make_table(rows, names), loss=loss(step, value), lr=1e-3, **fields))
    return history


EXPERTS = ("router.weight", *(f"experts.{i}.{j}.weight" for i in range(4) for j in (0, 2)), "head.weight")


def routed(idle, num_steps=200, names=EXPERTS, absent=False, losses=None) -> TrainingHistory:
    """A run of a model with modules side by side, those whose name begins with one of `idle` without a gradient."""
    history = TrainingHistory()
    history.note_model(names=names)
    for step, loss in enumerate(losses or falling_losses(num_steps)):
        given = {name: 0.0 if name.startswith(tuple(idle)) else 1.0 for name in names}
        kept = [name for name in names if given[name] or not absent]
        rows = [make_row(given[name], 16, num_zeros=0 if given[name] else 16) for name in kept]
        history.add(StepStats(step, make_table(rows, kept), loss=loss, lr=1e-3))
    return history


_BCE = ("BinaryCrossEntropyWithLogitsBackward0", "AddmmBackward0")


def game(losses, **notes):
    """One side of a game with these losses."""
    return run(losses, **{"objective": "game", "loss_ops": _BCE, **notes})


def _imbalanced(step, place):
    return 1e-3 * 1.05**step if place == 3 else 1.0


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
    "clipped-below-eps": _clipped_below_eps(),
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
    "norm-jump": make_history([*noisy_norms(150), *noisy_norms(60, level=8.0)]),
    "layer-norm-imbalance": layered(240, _imbalanced),
    "unscaled-accumulation": run(
        falling_losses(60), noisy_norms(60, level=8.0), change=lambda s: {"clip_coef": 0.125}, backward_per_step=8
    ),
    "zero-gradient-tensors": layered(120, lambda step, place: 0.0 if place < 2 and step > 30 else 1.0),
    "vanishing-norm": run(flat_losses(150), [n * 0.9**step for step, n in enumerate(noisy_norms(150))]),
    "vanishing-layers": layered(100, lambda step, place: 10.0 ** (place - 8), flat_losses(100)),
    "half-precision-underflow": _underflowing(),
    "dead-relu-units": with_activities(activity(zero=0.9, dead=0.8)),
    "dead-smooth-units": with_activities(activity(family="gelu", zero=0.9, dead=0.8)),
    "saturated-units": with_activities(activity(family="tanh", zero=0.0, saturated=0.97)),
    "attention-collapse": with_activities(activity(family="softmax", zero=0.97, units=0)),
    "dropout-high": run(falling_losses(50), dropout={"drop": 0.95}),
    "update-ratio-high": weights_run(lambda step, name: 0.6),
    "update-ratio-low": weights_run(lambda step, name: 3e-5, flat_losses(140)),
    "second-moment-collapse": moments_run(
        lambda s: 0.1 if s < 60 else 1e-3, losses=[*falling_losses(100), *flat_losses(40)]
    ),
    "moment-out-of-bounds": moments_run(lambda s: 0.1, lambda s: 1e9 if s == 80 else 0.1),
    "unchanged-weights": weights_run(lambda step, name: 0.0 if name == "a.weight" else 0.01),
    "parameters-not-in-optimizer": run(
        falling_losses(50), names=["a", "b", "c"], names_not_in_optimizer=["b"]
    ),
    "frozen-parameters": run(falling_losses(50), names=["a", "b", "c"], names_without_gradient=["b"]),
    "missing-gradients": run(falling_losses(50), names=["v", "w", "x"]),
    "poor-initialisation": run(falling_losses(50), initialization={"a": (1.0, 0.1), "b": (0.1, 0.1)}),
    "shrinking-weights": weights_run(
        lambda step, name: 0.05, flat_losses(140), norm=lambda step: 10.0 * 0.97**step, decay_per_step=0.03
    ),
    "loss-explosion": run(bend(falling_losses(100), range(50, 60), lambda v: 50.0)),
    "loss-divergence": run([*falling_losses(150), *flat_losses(50)]),
    "loss-spike": run(bend(falling_losses(200), [150], lambda v: 20.0)),
    "spiky-loss": run(bend(falling_losses(600), [100, 131, 170, 230, 310, 333, 420, 471, 550], lambda v: v + 1.0)),
    "loss-oscillation": run(
        [*falling_losses(160, noise=0.01), *[0.9 + 0.4 * (-1) ** s for s in range(120)]]
    ),
    "loss-not-decreasing": run(flat_losses(150)),
    "underfitting": run([*falling_losses(40, pace=8.0, floor=1.9), *flat_losses(160, level=1.9)]),
    "loss-plateau": run([*falling_losses(200, noise=0.0), *[0.3 + 1e-6 * (s % 5) for s in range(80)]]),
    "overfitting": run(_overfit_losses, val_losses=_overfit_val),
    "overtraining": run(falling_losses(400), val_losses={s: abs(s - 99) / 100 + 0.5 for s in range(19, 400, 20)}),
    "training-above-validation": run(
        flat_losses(200), val_losses=dict.fromkeys(range(19, 200, 20), 1.5)
    ),
    "learning-rate-jump": run(falling_losses(200), lrs=[1e-3 if s < 120 else 1e-2 for s in range(200)]),
    "learning-rate-out-of-bounds": run(falling_losses(100), lrs=[50.0] * 100),
    "no-warm-up": run([2.3, 2.4, 2.3, *[4.0] * 20, *falling_losses(80)]),
    "scheduler-not-stepping": run(falling_losses(100), lrs=[1e-5] * 100, has_scheduler=True, initial_lr=1e-3),
    "periodic-loss-spikes": run(bend(falling_losses(300), range(27, 300, 44), lambda v: v + 2.0)),
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
    "no-signal": run(falling_losses(50), [0.0 if s % 10 == 4 else n for s, n in enumerate(noisy_norms(50))]),
    "odd-optimizer-settings": run(
        flat_losses(160), optimizer_settings=settings(lr=1e-3, betas=(0.9, 0.999), eps=0.1)
    ),
    "learning-rate-gone": run(flat_losses(150), lrs=[1e-3 if s < 50 else 1e-6 for s in range(150)]),
    "weights-overwritten": run(flat_losses(120), overwritten=["a", "b"], num_overwritten=5, num_compared=6),
    "validation-in-training-mode": batches_run(
        falling_losses(100), batch(), passed(training=True), val_losses=validated(100), dropout={"drop": 0.3}
    ),
    "tiny-batches": batches_run(wild_losses(200), batch(num_samples=2)),
    "output-against-loss": run(
        falling_losses(50), loss_ops=["NllLossBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0", "AddmmBackward0"]
    ),
    "bounded-output": batches_run(
        flat_losses(100), batch(output_abs_max=0.0, output_min=0.0, output_max=0.0), last_modules=["ReLU", "Linear"]
    ),
    "softmax-floor": batches_run(
        falling_losses(200, start=math.log(4), floor=0.8, noise=0.005), batch(output_rows_sum_to_one=True)
    ),
    "replicas-differ": run(
        falling_losses(50),
        replica_differences=[
            {"step": 20, "what": "weights", "name": "a", "num_tensors": 2, "num_ranks": 4, "ranks": [3]}
        ],
    ),
    "same-output-for-all": batches_run(
        flat_losses(220), lambda s: batch(output_spread=0.5 if s < 30 else 0.0)(s)
    ),
    "loss-at-chance": batches_run(chance_losses(150), batch()),
    "input-scale": batches_run(flat_losses(100), batch(input_abs_max=255.0, input_mean=120.0, input_std=70.0)),
    "batch-not-finite": batches_run(falling_losses(100), lambda s: batch(input_num_nonfinite=int(s == 40))(s)),
    "same-inputs": batches_run(falling_losses(100), batch(input_digest=7), steps_per_epoch=50),
    "input-outliers": batches_run(
        bend(falling_losses(100), [40], lambda v: 20.0), lambda s: batch(input_abs_max=9999.0 if s == 40 else 2.5)(s)
    ),
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
    "loss-gone": run([2.3 if s < 7 else 1e-5 for s in range(100)]),
    "negated-loss": run(
        [-2.3 - 0.1 * s for s in range(60)], loss_ops=["NegBackward0", "NllLossBackward0", "LogSoftmaxBackward0"]
    ),
    "loss-without-floor": run([-0.01 * 1.1**s for s in range(200)], [1.05**s for s in range(200)]),
    "one-target": run(falling_losses(60), num_targets=200, num_target_classes=1, target_top_share=1.0),
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
    "loss-still-falling": ended(run(falling_losses(60, pace=40.0, floor=0.0, noise=0.0))),
    "sorted-targets": batches_run(
        flat_losses(60), batch(), num_targets=200, num_target_classes=4, target_top_share=0.3,
        target_batch_top_share=1.0,
    ),
    "layers-without-activation": run(
        flat_losses(100), loss_ops=["NllLossBackward0", "LogSoftmaxBackward0", "AddmmBackward0", "AddmmBackward0"]
    ),
    "learning-rate-still-rising": run(flat_losses(250), lrs=[1e-5 * (s + 1) for s in range(250)]),
    "few-steps-an-epoch": ended(
        batches_run(
            falling_losses(60, pace=40.0, floor=0.0, noise=0.0), batch(num_samples=512),
            val_losses=validated(60, every=2),
        )
    ),
    "idle-experts": routed(["experts.1.", "experts.2.", "experts.3."]),
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
    "hardware-fault": run(
        falling_losses(60), recoveries=[{"kind": "recomputed", "step": 50, "reason": "", "num_tensors": 2}]
    ),
    "large-weight-decay": run(flat_losses(100), optimizer_settings=settings(lr=1e-3, weight_decay=0.5)),
}  # fmt: skip
