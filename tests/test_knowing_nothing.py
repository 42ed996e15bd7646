"""What counts as learnt is what goes beyond knowing nothing; and losses that have no floor to come down to."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis.needs import is_squared_error
from fastguard.diagnosis.signals import signals_of

from made_runs import batch, batches_run, falling_losses, flat_losses, noisy_norms, run, severity

MINUS = ["NegBackward0", "NllLossBackward0", "LogSoftmaxBackward0"]


def regression(losses, *, first, mean, std, **notes):
    """A squared error of targets that are known."""
    known = {"target_mean": mean, "target_std": std, "target_range": [mean - 3 * std, mean + 3 * std]}
    return batches_run(
        [first, *losses], batch(output_width=1), loss_kind="squared error", squared_losses=[first], **known, **notes
    )


class TestProgress:
    def test_a_cross_entropy_that_comes_down_to_chance_has_learnt_nothing(self):
        losses = [30.0 * 0.8**step + math.log(4) for step in range(150)]
        history = batches_run(losses, batch(output_width=4), loss_kind="cross-entropy")
        s = signals_of(history)
        assert s.fall > 0.8 and abs(s.progress) < 0.03

    def test_nor_has_a_squared_error_that_comes_down_to_the_spread_of_its_targets(self):
        history = regression([25.0 * 0.8**s + 1.0 for s in range(150)], first=26.0, mean=5.0, std=1.0)
        s = signals_of(history)
        assert s.chance == pytest.approx(1.0) and s.fall > 0.8 and abs(s.progress) < 0.03

    def test_weights_that_began_alike_are_told_where_only_the_mean_was_learnt(self):
        flat = {"initialization": {"a": (0.0, 0.2), "b": (0.0, 0.2)}}
        history = regression([25.0 * 0.8**s + 1.0 for s in range(150)], first=26.0, mean=5.0, std=1.0, **flat)
        assert severity("poor-initialisation", history) == "warning"
        learns = regression([25.0 * 0.8**s + 0.1 for s in range(150)], first=26.0, mean=5.0, std=1.0, **flat)
        assert severity("poor-initialisation", learns) is None

    @pytest.mark.parametrize(("mean", "fires"), [(0.0, True), (5.0, True), (1e4, True)])
    def test_a_loss_that_stands_at_the_spread_is_at_chance_wherever_the_mean(self, mean, fires):
        history = regression(flat_losses(250, level=1.02), first=1.0 + mean**2, mean=mean, std=1.0)
        assert (severity("loss-at-chance", history) is not None) == fires

    def test_one_that_passes_by_is_not(self):
        losses = [1.15 - 0.0008 * step for step in range(250)]
        assert severity("loss-at-chance", regression(losses, first=26.0, mean=5.0, std=1.0)) is None

    def test_torchs_own_operation_outweighs_what_the_gradient_looks_like(self):
        notes = {"loss_kind": "binary cross-entropy with logits", "squared_losses": [1e6]}
        assert is_squared_error(run([1e6, *flat_losses(40)], loss_ops=["MseLossBackward0"], **notes))
        assert not is_squared_error(run([1e6, *flat_losses(40)], **notes))
        assert not is_squared_error(run([2.3, *flat_losses(40)], loss_ops=["MseLossBackward0"], **notes))


class TestFloors:
    @pytest.mark.parametrize(
        ("notes", "fires"),
        [
            ({}, True),
            ({"loss_ops": ["NegBackward0", "MeanBackward0", "MseLossBackward0"]}, True),
            ({"loss_ops": ["NegBackward0", "NegBackward0", "MeanBackward0", "MulBackward0"]}, True),
            ({"loss_ops": ["NegBackward0", "MeanBackward0", "LogSigmoidBackward0"]}, False),
            ({"loss_ops": ["MeanBackward0", "MulBackward0", "NllLossBackward0", "LogSoftmaxBackward0"]}, False),
            ({"loss_ops": ["MeanBackward0", "NllLossBackward0"]}, False),
            ({"objective": "game"}, False),
            ({"objective": "reward"}, False),
            ({"num_foreign_parameters": 4}, False),  # a game, as far as evidence goes
            ({"optimizer_settings": [{"kind": "SGD", "lr": 0.1, "maximize": True}]}, False),
        ],
    )
    def test_negated(self, notes, fires):
        history = run([-2.3 - 0.1 * s for s in range(60)], **{"loss_ops": MINUS, **notes})
        assert (severity("negated-loss", history) == "warning") == fires

    def test_negated_needs_a_loss_below_zero(self):
        assert severity("negated-loss", run(falling_losses(60), loss_ops=MINUS)) is None

    @pytest.mark.parametrize(
        ("losses", "norms", "fires"),
        [
            ([-0.01 * 1.1**s for s in range(200)], [1.05**s for s in range(200)], True),
            ([-0.1 * s for s in range(50)], [2.0**s for s in range(50)], False),  # too few
            ([-0.01 * 1.1**s for s in range(200)], noisy_norms(200), False),
            ([-(1.0 * s**3) for s in range(200)], [1.0 + s**2 for s in range(200)], True),  # in any direction
            ([-(1.0 * s**3) for s in range(200)], [1.0 + s / 4.0 for s in range(200)], False),
            ([-(200.0 - s) for s in range(200)], [1.0 + s**2 for s in range(200)], False),
            ([3.0 - 6.0 * (1.0 - math.exp(-s / 50)) for s in range(200)], [1.05**s for s in range(200)], False),
        ],
    )
    def test_without_floor(self, losses, norms, fires):
        assert (severity("loss-without-floor", run(losses, norms)) == "warning") == fires

    def test_nothing_is_ahead_of_an_explosion_that_has_come(self):
        rising = [*falling_losses(200, noise=0.02), *[0.3 * 1.06**s for s in range(80)]]
        norms = [n * 1.05 ** max(0, s - 200) for s, n in enumerate(noisy_norms(280))]
        assert severity("divergence-ahead", run(rising[:230], norms[:230])) == "warning"
        assert severity("loss-explosion", run(rising, norms)) == "critical"
        assert severity("divergence-ahead", run(rising, norms)) is None
