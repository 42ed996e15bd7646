"""Where the rules on the size of steps, and on how fast the loss falls, stop."""

from __future__ import annotations

import pytest

from fastguard.diagnosis import RULES
from fastguard.diagnosis.rules.lr import estimated_update_ratio
from fastguard.records import TrainingHistory

from made_runs import ask, ended, falling_losses, flat_losses, run, settings, severity


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

    @pytest.mark.parametrize(
        ("fall", "lr", "num_steps", "fires"),
        [
            (2e-3, 8e-5, 200, True),
            (2e-3, 8e-5, 199, False),
            (2e-3, 1.1e-4, 200, False),
            (7e-3, 8e-5, 200, False),  # half of it is gone
            (0.0, 8e-5, 200, False),
        ],
    )
    def test_small_steps_of_a_loss_that_falls_in_a_line(self, fall, lr, num_steps, fires):
        losses = [level - fall * step for step, level in enumerate(flat_losses(num_steps))]
        history = sized(lr=lr, losses=losses, num_steps=num_steps)
        assert (severity("steps-too-small", history) is not None) == fires

    @pytest.mark.parametrize(("fall", "expected"), [(2e-3, "info"), (7e-3, "info"), (0.0, "warning")])
    def test_a_low_rate_of_a_loss_that_falls_in_a_line(self, fall, expected):
        losses = [level - fall * step for step, level in enumerate(flat_losses(200))]
        assert severity("learning-rate-unusual", sized("Adadelta", 0.01, losses=losses, num_steps=200)) == expected

    def test_two_optimizers_are_not_judged(self):
        history = run(flat_losses(60), initialization={"w": (0.1, 0.1)})
        history.note_model(optimizer_settings=[*settings("Adam"), *settings("SGD")])
        assert estimated_update_ratio(history) is None

    @pytest.mark.parametrize(
        ("history", "fires"),
        [
            (sized(lr=0.031, num_steps=80), True),
            (sized(lr=0.029, num_steps=80), False),
            (sized(lr=0.031, num_steps=79), False),
            (sized(lr=0.031, num_steps=80, losses=falling_losses(80, pace=15.0)), False),
            (sized(lr=0.031, num_steps=100, losses=[2.3] * 10 + [2.1] * 90), True),
            (sized(lr=0.031, num_steps=100, losses=[2.3] * 10 + [2.0] * 90), False),
            (sized(lr=0.11, num_steps=100, losses=[2.3] * 10 + [1.7] * 90), True),  # by more than the weights each step
            (sized(lr=0.11, num_steps=100, losses=[2.3] * 10 + [1.5] * 90), False),
        ],
    )
    def test_too_large(self, history, fires):
        assert (RULES["steps-too-large"](history) is not None) == fires

    @pytest.mark.parametrize(
        ("history", "fires"),
        [
            (sized(lr=4.9e-5), True),
            (sized(lr=5.1e-5), False),
            (sized(lr=4.9e-5, num_steps=40), True),
            (sized(lr=4.9e-5, num_steps=39), False),
            (sized(lr=4.9e-5, losses=falling_losses(60, pace=15.0)), False),
            (sized(lr=3e-5, losses=falling_losses(60, pace=150.0)), True),  # moved by 0.018 in all, and learnt a third
            (sized(lr=4e-5, losses=falling_losses(60, pace=150.0)), False),  # by 0.024
            (sized(lr=3e-5, losses=falling_losses(60, pace=25.0)), False),  # and learnt more than half
        ],
    )
    def test_too_small(self, history, fires):
        assert (RULES["steps-too-small"](ended(history)) is not None) == fires

    def test_too_small_is_not_said_before_there_was_time_to_learn(self):
        assert RULES["steps-too-small"](sized(lr=3e-5, num_steps=99)) is None
        assert RULES["steps-too-small"](sized(lr=3e-5, num_steps=100)) is not None

    @pytest.mark.parametrize(
        ("kind", "lr", "is_high"),
        [
            ("Adam", 0.04, None),
            ("Adam", 0.06, True),
            ("AdamW", 9e-7, False),
            ("SGD", 2.9, None),
            ("SGD", 3.1, True),
            ("Adadelta", 1.0, None),
            ("Adadelta", 1e-3, False),
            ("Muon", 50.0, None),  # nobody knows what is usual
        ],
    )
    def test_usual_learning_rates(self, kind, lr, is_high):
        finding = ask("learning-rate-unusual", sized(kind, lr, num_steps=80))
        assert (finding and finding.evidence["is_high"]) == is_high

    def test_an_unusual_learning_rate_with_which_all_goes_well_is_a_remark(self):
        for losses, expected in (
            (falling_losses(100, pace=15.0), "info"),
            ([2.3] * 10 + [2.0] * 90, "info"),
            ([2.3] * 10 + [2.1] * 90, "warning"),
        ):
            assert severity("learning-rate-unusual", sized(lr=0.1, num_steps=100, losses=losses)) == expected
        for std, expected in ((0.1, "warning"), (1.0, "info")):  # with steps of the size of the weights it is too high
            stuck = sized(lr=0.1, std=std, num_steps=220, losses=[2.3] * 10 + [1.6] * 210)
            assert severity("learning-rate-unusual", stuck) == expected

    def test_a_run_that_ends_while_the_rate_still_rises(self):
        lrs = [1e-9 * (s + 1) for s in range(100)]
        history = run(flat_losses(100), lrs=lrs, optimizer_settings=settings(), initialization={"w": (0.1, 0.1)})
        history.has_ended = True
        assert severity("steps-too-small", history) == severity("learning-rate-still-rising", history) == "warning"

    @pytest.mark.parametrize("objective", ["reward", "game", "minimise"])
    @pytest.mark.parametrize(
        ("lr", "num_steps", "expected"),
        [
            (1e-7, 199, "info"),
            (9.9e-7, 300, "info"),  # 3e-3
            (0.25, 80, "warning"),
            (0.15, 80, "info"),
            (1e-5, 200, None),
        ],
    )
    def test_what_is_certain_of_a_rate_whatever_the_loss_does(self, objective, lr, num_steps, expected):
        losses = falling_losses(num_steps, pace=20.0)
        history = sized(lr=lr, losses=losses, num_steps=num_steps)
        history.note_model(objective=objective)
        finding = RULES["learning-rate-unusual"](history)
        assert (finding and finding.severity) == expected
        assert finding is None or finding.evidence["is_certain"] == (expected == "warning")

    @pytest.mark.parametrize("objective", ["reward", "minimise"])
    def test_a_reward_that_stands_is_no_sign_of_an_unusual_rate(self, objective):
        history = sized(lr=0.15, num_steps=100)
        history.note_model(objective=objective)
        assert severity("learning-rate-unusual", history) == ("info" if objective == "reward" else "warning")

    def test_an_unusual_learning_rate_is_told_after_eighty_steps(self):
        assert severity("learning-rate-unusual", sized(lr=0.1, num_steps=79)) is None
        assert severity("learning-rate-unusual", sized(lr=0.1, num_steps=80)) == "warning"

    def test_a_warm_up_is_waited_for(self):
        lrs = [1e-9 * (s + 1) for s in range(100)]
        history = run(flat_losses(100), lrs=lrs, optimizer_settings=settings(), initialization={"w": (0.1, 0.1)})
        assert severity("learning-rate-unusual", history) is None
        assert severity("steps-too-small", history) is None


class TestPace:
    @pytest.mark.parametrize(
        ("losses", "fires"),
        [
            ([2.3] * 7 + [2.2e-3] * 60, True),
            ([2.3] * 7 + [2.4e-3] * 60, False),
            ([2.3] * 35 + [1e-5] * 60, False),  # it took its time
            ([1e-7] * 7 + [1e-12] * 60, False),
            ([2.3] * 7 + [1e-5] * 12, False),
        ],
    )
    def test_gone(self, losses, fires):
        assert (RULES["loss-gone"](run(losses)) is not None) == fires

    @pytest.mark.parametrize(
        ("pace", "num_steps", "window", "fires"),
        [
            (40.0, 60, 512, True),
            (80.0, 60, 512, False),
            (10.0, 60, 512, False),
            (6.0, 9, 512, False),
            (40.0, 60, 50, False),  # the window no longer holds where it began
        ],
    )
    def test_still_falling(self, pace, num_steps, window, fires):
        losses = falling_losses(num_steps, pace=pace, floor=0.0, noise=0.0)
        assert (RULES["loss-still-falling"](ended(run(losses, window=window))) is not None) == fires

    def test_a_run_that_goes_on_may_fall(self):
        assert severity("loss-still-falling", run(falling_losses(60, pace=40.0, floor=0.0))) is None
