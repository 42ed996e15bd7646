"""What rules have in common: the fall of a loss, sizes of steps, progress, its graph, and when an alarm is a remark."""

import math

import pytest

from fastguard.diagnosis import Finding, diagnose, make_rule, needs
from fastguard.diagnosis.checkup import Reported
from fastguard.diagnosis.harm import is_harmed
from fastguard.diagnosis.needs import is_squared_error
from fastguard.diagnosis.rules.lr import estimated_update_ratio
from fastguard.diagnosis.rules.output import loss_and_activation
from fastguard.diagnosis.signals import fall_of, median, signals_of
from fastguard.records import TrainingHistory
from fastguard.records.running import quantiles

from faulty_runs import BAD
from made_runs import batch, batches_run, bend, falling_losses, flat_losses, lost_losses, run, settings
from records import make_bad_record, make_batch


def test_the_fall_of_too_few_values_is_not_sure():
    assert [fall_of(values) for values in ([], [1.0], [2.0, 1.0])] == [(0.0, math.inf)] * 3
    assert fall_of([3.0, 2.0, 1.0]) == pytest.approx((2.0, 0.0))


def sized(kind="Adam", lr=1e-3, std=0.1, losses=None, norms=None, num_steps=60, **values):
    """A run of one weight matrix `w` of four elements, with the settings of its optimizer."""
    losses = flat_losses(num_steps) if losses is None else losses
    notes = {"optimizer_settings": settings(kind, lr=lr, **values), "initialization": {"w": (std, 0.1)}}
    return run(losses, norms, lrs=[lr] * num_steps, **notes)


class TestSizeOfSteps:
    @pytest.mark.parametrize(
        ("history", "expected"),
        [
            (sized("Adam", 1e-3), 1e-2),
            (sized("Lion", 1e-4), 1e-3),
            (sized("Adagrad", 1e-2, num_steps=100), 1e-2),  # a tenth of the first step
            (sized("SGD", 0.1, norms=[2.0] * 60), 1.0),  # elements of 1
            (sized("SGD", 0.1, norms=[2.0] * 60, momentum=0.9), 10.0),
            (sized("Adadelta"), None),
            (sized("Adam", std=1e-4), None),  # begun so small that any step is large
            (TrainingHistory(), None),
        ],
    )
    def test_estimate(self, history, expected):
        assert estimated_update_ratio(history) == (expected and pytest.approx(expected, rel=1e-6))


LINEAR = "AddmmBackward0"
CROSS_ENTROPY = ("NllLossBackward0", "LogSoftmaxBackward0")


class TestOutput:
    @pytest.mark.parametrize(
        ("ops", "expected"),
        [
            ((*CROSS_ENTROPY, LINEAR), ("cross-entropy", "none")),
            ((*CROSS_ENTROPY, "ViewBackward0", "SoftmaxBackward0", LINEAR), ("cross-entropy", "softmax")),
            (("MeanBackward0", *CROSS_ENTROPY, "SigmoidBackward0"), ("cross-entropy", "sigmoid")),
            (CROSS_ENTROPY, ("cross-entropy", "")),
            (("NllLossBackward0", LINEAR), ("negative log-likelihood", "none")),
            (("NllLossBackward0", "SoftmaxBackward0"), ("negative log-likelihood", "softmax")),
            (("NllLossBackward0", "LogBackward0", "SoftmaxBackward0"), ("negative log-likelihood", "log")),
            (("BinaryCrossEntropyBackward0", "SigmoidBackward0", LINEAR), ("binary cross-entropy", "sigmoid")),
            (("BinaryCrossEntropyBackward0", "ClampBackward1", "SigmoidBackward0"), ("binary cross-entropy", "clamp")),
            (("BinaryCrossEntropyBackward0", "ClampBackward1", LINEAR), ("binary cross-entropy", "none")),
            (("MseLossBackward0", "TanhBackward0", LINEAR), ("squared error", "tanh")),
            (("NegBackward0", "MeanBackward0", LINEAR), ("", "")),
            (("AddBackward0", *CROSS_ENTROPY, LINEAR), ("cross-entropy", "none")),  # and a penalty, say
            ((), ("", "")),
        ],
    )
    def test_names_of_losses(self, ops, expected):
        assert loss_and_activation(ops) == expected


class TestProgress:
    def test_a_cross_entropy_that_comes_down_to_chance_has_learnt_nothing(self):
        losses = [30.0 * 0.8**step + math.log(4) for step in range(150)]
        history = batches_run(losses, batch(output_width=4), loss_kind="cross-entropy")
        s = signals_of(history)
        assert s.fall > 0.8 and abs(s.progress) < 0.03

    def test_torchs_own_operation_outweighs_what_the_gradient_looks_like(self):
        notes = {"loss_kind": "binary cross-entropy with logits", "squared_losses": [1e6]}
        assert is_squared_error(run([1e6, *flat_losses(40)], loss_ops=["MseLossBackward0"], **notes))
        assert not is_squared_error(run([1e6, *flat_losses(40)], **notes))
        assert not is_squared_error(run([2.3, *flat_losses(40)], loss_ops=["MseLossBackward0"], **notes))


def chosen(*ops, num_samples=1, **facts):
    batch = make_batch(num_samples=num_samples)
    return run(
        falling_losses(9), change=lambda step: {"batches": (batch,)}, loss_ops=[f"{op}Backward0" for op in ops], **facts
    )


def episodes():
    """One batch a step, as long as an episode was."""
    ops = [f"{op}Backward0" for op in ("Sum", "Mul", "Neg", "Sum", "Mul", "Log")]
    lengths = lambda step: {"batches": (make_batch(num_samples=20 + 7 * step),)}  # noqa: E731
    return run(falling_losses(9), change=lengths, loss_ops=ops)


def density(losses=(3.0, 1.0, -1.0), num_samples=32, **notes):
    """A loss that falls below zero, alone in its process."""
    notes = {"num_foreign_parameters": 0, "loss_ops": ["MeanBackward0", "PowBackward0"], **notes}
    return batches_run(list(losses), batch(num_samples=num_samples), **notes)


@pytest.mark.parametrize(
    ("need", "history", "answer"),
    [
        (needs.descent, run(falling_losses(20)), None),
        (needs.descent, run([1.0, -0.1, 0.5]), False),
        (needs.descent, run([1.0, -0.1, 0.5], objective="minimise"), True),
        (needs.descent, density(), None),
        (needs.descent, density(num_foreign_parameters=6), False),
        (needs.descent, density(loss_ops_beside=["MeanBackward0"]), False),  # an actor's, beside a critic
        (needs.descent, density(loss_ops=["SubBackward0", "MeanBackward0"]), False),  # a term of it is to grow
        (needs.descent, density(num_samples=1), False),
        (needs.descent, density([-1.0, -2.0, -3.0]), False),  # it began below zero
        (needs.descent, run(falling_losses(20), objective="game"), False),
        (needs.descent, run(falling_losses(20), objective="reward"), False),
        (needs.reinforces, chosen("Mul", "Neg", "Log", "Select"), True),
        (needs.reinforces, chosen("Sum", "Cat", "Mul", "Neg", "Squeeze", "Gather", "Sub"), True),
        (needs.reinforces, chosen("Mul", "Neg", "Gather", num_samples=32), False),  # a mask, perhaps
        (needs.reinforces, chosen("Neg", "Mean", "Gather"), False),
        (needs.reinforces, chosen("Mul", "NllLoss", "Select"), False),
        (needs.reinforces, chosen("Mul", "Neg", "Addmm", "Select"), False),
        (needs.reinforces, chosen("Mul", "Neg", "Gather", objective="minimise"), False),
        (needs.rewarded, chosen("Add", "Neg", "Sum", "Mul", "Log"), True),
        (needs.rewarded, chosen("Add", "Neg", "Sum", "Mul", "LogSigmoid"), False),  # a likelihood
        (needs.is_of_numbers, chosen("NllLoss", "LogSoftmax", loss_kind="squared error"), False),
        (needs.reinforces, episodes(), True),
        (needs.reinforces, chosen("Sum", "Mul", "Neg", "Sum", "Mul", "Log", num_samples=32), False),
        (needs.reinforces, run(falling_losses(9), loss_ops=["NegBackward0", "MinimumBackward0", "ExpBackward0"]), True),
        (needs.descent, chosen("Mul", "Neg", "Gather"), False),
        (needs.descent, chosen("Mean", "Gather", loss_kind="squared error"), False),
        (needs.descent, chosen("Mean", "Gather", "LogSoftmax", loss_kind="squared error"), None),
    ],
)
def test_needs(need, history, answer):
    assert need(history) is answer


def doubtful(history):
    """Warns always."""
    return Finding("Something is odd.")


def severities(history, *others, needs_harm=True):
    rule = make_rule(doubtful, "doubtful", needs_harm=needs_harm)
    return {finding.rule: finding.severity for finding in diagnose(history, rules=[rule, *others])}


class TestIsHarmed:
    @pytest.mark.parametrize(
        ("losses", "expected"),
        [
            (falling_losses(200), False),
            (flat_losses(200), True),
            (lost_losses(200, 100), True),
            (lost_losses(200, 190, 0.1), False),  # not for two blocks yet
            (flat_losses(39), False),  # too early to tell
            (bend(falling_losses(200), (150,), lambda loss: 30.0), True),
            (bend(falling_losses(200), (150,), lambda loss: 12.0), False),
            ([None] * 200, None),
        ],
    )
    def test_by_losses(self, losses, expected):
        assert is_harmed(run(losses)) is expected

    def test_what_is_not_finite_does_harm(self):
        history = run(falling_losses(100))
        history.add(make_bad_record(100, ["a"]))
        assert is_harmed(history) is True
        assert is_harmed(run([*falling_losses(100), math.nan])) is True

    @pytest.mark.parametrize(("last", "expected"), [((1.4, 1.5), True), ((1.0, 1.5), False), ((1.2, 1.2), False)])
    def test_by_the_newest_two_validation_losses(self, last, expected):
        values = dict(zip(range(19, 200, 20), (*(2.0, 1.5, 1.2, 1.1, 1.0, 1.0, 1.0, 1.0), *last)))
        assert is_harmed(run(falling_losses(200), val_losses=values)) is expected


class TestDiagnose:
    def test_a_warning_is_a_remark_where_nothing_is_the_worse_for_it(self):
        assert severities(run(falling_losses(200))) == {"doubtful": "info"}

    @pytest.mark.parametrize("losses", [flat_losses(200), lost_losses(200, 100), [None] * 200])
    def test_it_warns_where_something_is_or_may_be(self, losses):
        assert severities(run(losses)) == {"doubtful": "warning"}


class TestReported:
    def test_tells_each_finding_once_and_again_when_it_gets_worse(self):
        history, told = TrainingHistory(), []
        reported = Reported(told.append)
        for step in range(60):
            bad = step == 12 or step >= 38
            history.record(step, loss=math.nan if bad else 1.0 - step / 100, grad_norm=1.0 + step % 5, lr=0.1)
            if step % 10 == 9:
                reported.add(diagnose(history))
        assert [(f.rule, f.severity) for f in told] == [("non-finite-loss", "warning"), ("non-finite-loss", "critical")]
        assert reported.findings["non-finite-loss"].last_step == 59

    def test_a_resumed_run_does_not_repeat_itself(self):
        before, told = Reported(lambda finding: None), []
        before.add(diagnose(BAD["loss-explosion"]))
        resumed = Reported(told.append)
        resumed.load_state_dict(before.state_dict())
        resumed.add(diagnose(BAD["loss-explosion"]))
        assert told == []


@pytest.mark.parametrize("values", [[], [2.0], [3.0, 1.0], [5.0, 1.0, 2.0], [-1e308, 1e308], [math.inf] * 2, [0.1] * 4])
def test_the_median_is_the_quantile_to_the_bit(values):
    assert str(median(values)) == str(quantiles(values, (0.5,))[0])
