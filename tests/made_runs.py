"""Builders of invented runs, made without torch."""

import math
import random

from fastguard.diagnosis import RULES, by_sign, diagnose
from fastguard.records import StepStats, TrainingHistory
from fastguard.records.columns import COLUMNS
from fastguard.records.samples import ActivationStats, ModuleActivity, WeightStats

from records import make_bad_record, make_batch, make_history, make_record, make_row, make_table

LAYERS = tuple(f"layers.{i}.weight" for i in range(8))


def ask(name, history, **thresholds):
    """What the sign of that name finds in the run."""
    found = RULES[name](history, **thresholds)
    return by_sign([found]).get(name) if found else None


def signs_in(history):
    """What is found of each sign, by its name."""
    return by_sign(diagnose(history))


def severity(name, history, **thresholds):
    finding = ask(name, history, **thresholds)
    return finding and finding.severity


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


def ending_in_zeros(num_zero, num_tensors=4):
    history = make_history(noisy_norms(20))
    rows = [make_row(0.0, 8, num_zeros=8)] * num_zero + [make_row(1.0, 8)] * (num_tensors - num_zero)
    history.add(StepStats(20, make_table(rows, [f"t{i}" for i in range(num_tensors)])))
    return history


def spiked(norms, step, times):
    return make_history([norm * (times if i == step else 1) for i, norm in enumerate(norms)])


def run(losses, norms=None, *, lrs=None, val_losses=None, change=lambda step: {}, window=512, **notes):
    """A run of these losses; `change` gives further fields of the record of a step, `notes` are for `note_model`."""
    history = TrainingHistory(window)
    history.note_model(**notes)
    norms = noisy_norms(len(losses)) if norms is None else norms
    for step, (loss, norm) in enumerate(zip(losses, norms)):
        lr = 1e-3 if lrs is None else lrs[step]
        fields = {"loss": loss, "lr": lr, "val_loss": (val_losses or {}).get(step), **change(step)}
        history.add(make_record(step, norm, **fields))
    return history


def layered(num_steps, norm_of, losses=None, names=LAYERS, numel=16):
    """A run of many tensors: `norm_of(step, place)` is each one's norm, 0 for only zeros."""
    history = TrainingHistory()
    for step in range(num_steps):
        rows = []
        for place in range(len(names)):
            norm = norm_of(step, place)
            rows.append(make_row(norm, numel, num_zeros=0 if norm else numel))
        history.add(StepStats(step, make_table(rows, names), loss=None if losses is None else losses[step], lr=1e-3))
    return history


def linear_layers(sizes, ops=("NllLoss", "LogSoftmax", "Addmm", "Addmm", "T")):
    """A run of layers with these numbers of weights and biases."""
    names = [f"{layer}.{part}" for layer in range(len(sizes)) for part in ("weight", "bias")]
    rows = [make_row(1.0, size) for pair in sizes for size in pair]
    history = TrainingHistory()
    history.note_model(loss_ops=[f"{op}Backward0" for op in ops], names=names)
    for step, loss in enumerate(falling_losses(100)):
        history.add(StepStats(step, make_table(rows, names), loss=loss, lr=1e-3))
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
        name, family, stats, fields.pop("order", 0), inputs_finite, units, int(dead * units), int(stuck * units),
        **fields,
    )  # fmt: skip


def with_activities(*modules, every=20, num_steps=100, since=0):
    """A run that samples these activations every 20 steps, from step `since` on."""
    return run(
        falling_losses(num_steps),
        change=lambda step: {"activations": modules} if step % every == 0 and step >= since else {},
    )


def weights_run(ratio, losses=None, norm=lambda step: 10.0, num_steps=140, every=20, **notes):
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


def lost_losses(count, since, rate=0.02):
    """As `falling_losses`, and `rate` more at each step from `since` on: soon most of what was gained is lost."""
    return [loss + rate * max(0, step - since) for step, loss in enumerate(falling_losses(count))]


def flat_losses(count, level=2.3, noise=0.01, seed=0):
    rng = random.Random(seed)
    return [level + rng.gauss(0.0, noise) for _ in range(count)]


def batches_run(losses, *made, every=10, **notes):
    """A run that looks at forward passes every 10 steps: `made` give them, one after the other, from the step."""
    return run(losses, change=lambda s: {} if s % every else {"batches": tuple(make(s) for make in made)}, **notes)


def batch(**fields):
    """A training batch that is another one at each step; `fields` are what else is not as usual."""
    return lambda step: make_batch(**{"input_digest": step + 1, **fields})


def passed(**fields):
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


def ended(history):
    """The same run, as a log of it is read."""
    history.has_ended = True
    return history


def bend(values, at, function):
    """`values` with those at the steps `at` replaced."""
    return [function(value) if step in at else value for step, value in enumerate(values)]


def lone_row(norm, largest, numel=1000):
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


def routed(idle, num_steps=200, names=EXPERTS, absent=False, losses=None):
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


def machine(**used):
    """The `resources` of an idle machine with enough memory, but for what is given."""
    idle = {"page_faults": 3.0, "system_share": 0.02, "core_wait_share": 0.01}
    return {**idle, "is_glibc": 1.0, **used}
