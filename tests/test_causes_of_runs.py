"""Which cause is named first: a table of runs, with the facts that speak against the usual suspect."""

import json
import math

import pytest

from fastguard.diagnosis import RULES, diagnose, find_causes
from fastguard.records import StepStats, TrainingHistory

from made_runs import (
    batch,
    batches_run,
    bend,
    chance_losses,
    ended,
    falling_losses,
    flat_losses,
    layered,
    noisy_norms,
    run,
    settings,
    severity,
    with_bad_steps,
)
from records import make_bad_record, make_record, make_row, make_table

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
LINEAR = ("NllLossBackward0", "LogSoftmaxBackward0", "AddmmBackward0", "TBackward0")
LEFT = {"num_left_gradients": 20, "num_watched_backwards": 20}
CLIMBING = [2.3 * 1.05**step for step in range(150)]


def zeros_at(*names, **notes):
    """A run in which these parameters get nothing but zeros from the first step on."""
    losses = flat_losses(150)
    history = layered(150, lambda step, place: 0.0 if NAMES[place] in names else 1.0, losses, names=NAMES)
    history.note_model(**notes)
    return history


def skipping(num_clean, **notes):
    """A run whose gradients are NaN at every step from the `num_clean`th on."""
    history = with_bad_steps(num_clean + 30, {step: ["a"] for step in range(num_clean, num_clean + 30)})
    history.note_model(**notes)
    return history


def never_finite(loss, *ops, is_smooth=False, **seen):
    """A run all of whose steps were skipped, with this loss."""
    facts = {"loss_ops": [f"{op}Backward0" for op in ops], "is_smooth": is_smooth}
    return run([loss] * 25, [math.nan] * 25, change=lambda step: {"skipped": True, **seen}, **facts)


def climbs(lr, begin):
    losses = [*begin, *CLIMBING]
    notes = {"initialization": {"w": (0.1, 0.1)}, "optimizer_settings": settings(lr=lr)}
    return run(losses, lrs=[lr] * len(losses), **notes)


def at_chance(lr=1e-3, std=0.1, **notes):
    facts = {"initialization": {"a": (std, std)}, "optimizer_settings": settings(lr=lr), "loss_kind": "cross-entropy"}
    return batches_run(chance_losses(150), batch(), lrs=[lr] * 150, **facts, **notes)


def fading(std):
    history = layered(220, lambda step, place: 1e-5 * 10.0 ** (place / 2), flat_losses(220))
    history.note_model(optimizer_settings=settings(), initialization={"layers.0.weight": (std, std)})
    return history


def nan_after_a_rise(is_smooth):
    losses = [2.0, 2.0, 2.0, *(2.0 * 1.05**step for step in range(60)), *[math.nan] * 30]
    return run(losses, [*noisy_norms(63), *[math.nan] * 30], is_smooth=is_smooth)


def ran_away(rate=1.05, num=100, **notes):
    """A loss and a norm that are ten times what they were at once, and grow."""
    grown = [10.0 * rate**step for step in range(num)]
    return run([1.0] * 100 + grown, [1.0] * 100 + [10.0 * loss for loss in grown], **notes)


def penalised(*sizes, ops=("AddBackward0", "NllLossBackward0"), num_steps=120):
    """A run whose weights have gradients of these sizes, and whose output ends without any spread."""
    names = tuple(f"{place}.weight" for place in range(len(sizes)))
    history = TrainingHistory()
    history.note_model(loss_ops=ops, initialization=dict(zip(names, ((0.1, 0.1), (0.2, 0.1), (0.3, 0.1)))))
    for step, loss in enumerate(falling_losses(num_steps, start=40.0)):
        table = make_table([make_row(4.0 * size, 16, num_zeros=0) for size in sizes], names)
        passes = () if step % 10 else (batch(output_spread=0.5 if step < 50 else 0.0)(step),)
        history.add(StepStats(step, table, loss=loss, lr=1e-3, batches=passes))
    return history


def without_floor(loss, num, **notes):
    """A loss without a floor, and what it ends in."""
    losses, rates = [0.7 - 0.02 * s**2 for s in range(80)], [1.05**s for s in range(80)]
    history = run(losses, rates, change=lambda s: {"grad_cosine": 0.98 if s else None}, **notes)
    for step in range(80, 80 + num):
        history.add(make_bad_record(step, ["a"], loss=loss))
    return history


def standing(lr, norm=1.0, **group):
    weights = {"w": (0.1, 0.1)}
    known = {"initialization": weights, "optimizer_settings": [{"kind": "SGD", "lr": lr, **group}]}
    return run(flat_losses(200), [norm * (1.0 + 1e-8 * (step % 2)) for step in range(200)], lrs=[lr] * 200, **known)


def spoilt_batches(bad_step, bad_batch):
    """A step with NaN that was taken, and batches that have NaN from `bad_batch` on."""
    history = TrainingHistory()
    for step in range(60):
        one = batch(input_num_nonfinite=int(step >= bad_batch))(step)
        make = make_bad_record if step == bad_step else make_record
        given = {"skipped": False, "loss": 1.0} if step == bad_step else {}
        history.add(make(step, ["a"] if step == bad_step else 1.0, batches=(one,), **given))
    return history


def test_batches_that_are_spoilt_by_nan_weights_are_not_the_cause():
    assert severity("batch-not-finite", spoilt_batches(20, 30)) == "info"
    assert severity("batch-not-finite", spoilt_batches(20, 20)) == "critical"


BITS = bend(falling_losses(100), [20, 21, 22, 50, 70], lambda loss: math.nan)
ENDED = [1.0, *[math.nan] * 40]
FIRST = {
    "dead-units": [zeros_at("0.weight", "0.bias", "2.weight"), zeros_at("0.weight", "0.bias")],
    "singular-operation": [
        run(BITS, is_smooth=False),
        never_finite(math.nan, "Mean", "Log", "Addmm"),
        never_finite(math.nan, "MseLoss", "Addmm", is_smooth=True, batches=(batch()(0),)),
    ],
    "unknown": [run(BITS), skipping(40, is_smooth=False)],
    "corrupted-weights": [skipping(40), skipping(40, autocast="bfloat16")],
    "half-precision-overflow": [
        skipping(40, autocast="float16"),
        skipping(40, dtypes=["float16"]),
        skipping(1, dtypes=["float16"]),
    ],
    "exploding-gradients": [
        skipping(1),
        never_finite(math.inf, "Mean", "Log", "Addmm"),
        never_finite(math.nan, "NllLoss", "LogSoftmax", "Addmm"),
        never_finite(math.nan, "MseLoss", is_smooth=True, batches=(batch(output_num_nonfinite=8)(0),)),
    ],
    "no-gradient-arrives": [zeros_at(*NAMES, loss_kind="zero"), zeros_at(*NAMES, loss_kind="zero", autocast="float16")],
    "half-precision-underflow": [zeros_at(*NAMES, loss_kind="cross-entropy", autocast="float16")],
    "wrong-targets": [
        at_chance(),
        batches_run(chance_losses(150), batch(), loss_kind="cross-entropy", loss_ops=LINEAR),
        run(falling_losses(400), val_losses={step: 4.0 + step / 100 for step in range(20, 400, 20)}),
    ],
    "learning-rate-too-low": [at_chance(lr=1e-7), at_chance(std=100.0, loss_ops=LINEAR, target_dependence=9.0)],
    "wrong-loss": [climbs(1e-3, [2.3] * 3), without_floor(-50.0, 10, is_smooth=False), without_floor(-math.inf, 1)],
    "learning-rate-too-high": [
        standing(5.0),
        standing(5.0, weight_decay=0.1),
        run(ENDED, ENDED, lrs=[0.1] * 41, optimizer_settings=settings(lr=0.1), is_smooth=False),
        climbs(0.1, [2.3] * 3),  # steps as large as the weights
        climbs(1e-3, [2.3 - 0.02 * step for step in range(50)]),  # it had come down
        fading(2e-3),
        nan_after_a_rise(True),
    ],
    "vanishing-gradients": [fading(0.1)],
    "missing-zero-grad": [ran_away(**LEFT)],
    "wrong-schedule": [ran_away(num=150, lrs=[1e-3 * 1.03**step for step in range(250)])],
    "weight-decay-too-high": [
        penalised(0.5, 0.5, 0.51),
        penalised(0.2, 0.4, 0.6),
        penalised(0.2, 0.4, 1.6),
        standing(5.0, weight_decay=1.0),
    ],
}
NEVER = {
    "dead-units": [zeros_at(*NAMES[:2], module_kinds={"Linear": 2}, loss_ops=[*LINEAR, "TanhBackward0"])],
    "weight-decay-too-high": [penalised(0.5, 0.5, 0.5, ops=("NllLossBackward0", "AddBackward0"))],
}


def first_cause(history):
    told = find_causes(diagnose(ended(history)), history)
    return told[0].rule if told else None


@pytest.mark.parametrize(("name", "place"), [(name, i) for name, runs in FIRST.items() for i in range(len(runs))])
def test_it_is_named_first(name, place):
    assert first_cause(FIRST[name][place]) == name


@pytest.mark.parametrize("name", NEVER)
def test_it_is_not(name):
    assert name not in map(first_cause, NEVER[name])


def test_minus_inf_is_no_loss():
    history = without_floor(-math.inf, 1)
    assert severity("loss-without-floor", history) == "critical"
    assert json.dumps(RULES["loss-without-floor"](history).to_dict(), allow_nan=False)


class TestJumps:
    """A loss that jumps to other data, and is learnt again, has not diverged."""

    AGAIN = (*falling_losses(100, noise=0.01), *falling_losses(60, start=4.6, pace=15.0, noise=0.01))
    BEFORE = tuple(2.3 * math.exp(-step / 8) + 0.01 for step in range(50))
    TASKS = (*BEFORE, *3 * [8.0 * math.exp(-step / 12) + 0.3 for step in range(45)])

    @pytest.mark.parametrize("seen", [115, 120, 125, 130])
    def test_it_is_no_divergence(self, seen):
        norms = [norm * (1.0 if step < 100 else 5.0) for step, norm in enumerate(noisy_norms(160))]
        history = run(self.AGAIN[:seen], norms[:seen])
        said = {severity(name, history) for name in ("loss-divergence", "divergence-ahead", "loss-spike")}
        assert said == {None}

    @pytest.mark.parametrize("seen", [53, 60, 90, 98, 140, 150, 185])
    def test_tasks_one_after_another_alarm_nobody(self, seen):
        found = diagnose(run(self.TASKS[:seen], [2.0 * loss for loss in self.TASKS[:seen]], lrs=[0.01] * seen))
        assert [finding.rule for finding in found if finding.severity != "info"] == []

    @pytest.mark.parametrize(
        "change",
        [
            {"lrs": [0.01] * 48 + [0.1] * 137},  # the learning rate rose just before
            {"losses": (*BEFORE[:47], 0.05, 0.5, 1.5, *TASKS[50:])},  # the loss rose before it
            {"losses": (*BEFORE, *flat_losses(135, level=8.0))},  # nothing is learnt
        ],
    )
    def test_a_jump_that_is_of_the_steps_is_told(self, change):
        losses, lrs = change.get("losses", self.TASKS), change.get("lrs", [0.01] * 185)
        for seen in (62, 90):
            assert severity("loss-explosion", run(losses[:seen], lrs=lrs[:seen])) == "critical"
