"""Rules on games, experts, batch statistics and single elements: where they speak, and where not."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import RULES, diagnose, find_causes
from fastguard.diagnosis.rules.units_experts import siblings
from fastguard.records import TrainingHistory

from made_runs import EXPERTS, falling_losses, flat_losses, flipped, game, routed, run, severity, validated
from records import make_bad_record, make_record


def first_cause(history):
    return next((one.rule for one in find_causes(diagnose(history), history)), None)


class TestIdleExperts:
    @pytest.mark.parametrize(
        ("idle", "expected"),
        [
            ([], None),
            (["experts.1."], "info"),
            (["experts.0.", "experts.1."], "info"),
            (["experts.0.", "experts.1.", "experts.3."], "critical"),
            ([f"experts.{i}." for i in range(4)], None),  # all of them: something else
            (["experts.1.0"], None),  # one layer within an expert
        ],
    )
    @pytest.mark.parametrize("absent", [False, True], ids=["zeros", "none"])
    def test_severity_follows_what_is_lost(self, idle, expected, absent):
        assert severity("idle-experts", routed(idle, absent=absent)) == expected

    def test_one_of_eight_is_a_remark(self):
        names = [f"experts.{i}.weight" for i in range(8)]
        assert severity("idle-experts", routed(["experts.3."], names=names)) == "info"

    def test_half_of_them_matter_where_the_loss_has_not_kept_what_it_had_gained(self):
        losses = [*falling_losses(100), *flat_losses(100, level=2.0)]
        assert severity("idle-experts", routed(["experts.1.", "experts.2."], losses=losses)) == "warning"

    def test_not_before_there_was_time(self):
        assert severity("idle-experts", routed(["experts.1."], num_steps=39)) is None

    @pytest.mark.parametrize(("idle", "fires"), [("blocks.2.", True), ("blocks.0.", False), ("blocks.3.", False)])
    def test_of_layers_in_a_row_only_one_between_others_that_learn(self, idle, fires):
        names = [f"blocks.{i}.weight" for i in range(4)]
        assert (RULES["idle-experts"](routed([idle], names=names)) is not None) == fires

    def test_what_is_frozen_is_no_expert(self):
        history = routed(["experts.1.", "experts.2."])
        history.note_model(
            names_without_gradient=[name for name in EXPERTS if name.startswith(("experts.1.", "experts.2."))]
        )
        assert severity("idle-experts", history) is None

    def test_the_cause_wins_over_parameters_that_are_cut_off(self):
        history = routed(["experts.1.", "experts.2.", "experts.3."], absent=True)
        assert "idle-experts" in {one.rule for one in diagnose(history)}
        assert first_cause(history) == "dead-experts"

    def test_siblings_have_the_same_parameters(self):
        assert siblings(["a.0.w", "a.1.w", "a.1.b"]) == [] == siblings(["a.0.w", "b.w"])
        [layers, experts] = siblings(["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w", "l.1.e.1.w"])[:2]
        assert list(layers) == ["l.0", "l.1"] and list(experts) == ["l.0.e.0", "l.0.e.1"]


class TestGames:
    @pytest.mark.parametrize(("level", "fires"), [(4.5, False), (4.9, True), (0.7, False), (0.05, False), (0.01, True)])
    def test_level(self, level, fires):
        history = game([0.69] * 150 + flat_losses(150, level=level, noise=level / 50))
        assert (RULES["one-side-wins"](history) is not None) == fires

    def test_who_wins(self):
        lost, won = (
            RULES["one-side-wins"](game([0.69] * 150 + flat_losses(150, level=level, noise=1e-4)))
            for level in (6, 0.01)
        )
        assert (lost.evidence["is_the_winner"], won.evidence["is_the_winner"]) == (False, True)

    @pytest.mark.parametrize(
        "notes",
        [
            {"objective": "minimise"},
            {"objective": "", "num_foreign_parameters": 0},
            {"loss_ops": ("MeanBackward0", "AddmmBackward0")},  # of Wasserstein: without a bound
            {"loss_ops": ()},
        ],
    )
    def test_only_of_games_with_a_logistic_loss(self, notes):
        assert severity("one-side-wins", game([0.69] * 150 + flat_losses(150, level=6.0), **notes)) is None

    def test_a_game_is_known_by_the_other_sides_parameters(self):
        history = game([0.69] * 150 + flat_losses(150, level=6.0), objective="", num_foreign_parameters=6)
        assert severity("one-side-wins", history) == "warning"
        assert first_cause(history) == "adversary-wins"

    def test_not_before_there_was_time(self):
        assert severity("one-side-wins", game(flat_losses(199, level=0.01, noise=1e-4))) is None


class TestLoneElement:
    @pytest.mark.parametrize(
        ("fields", "fires"),
        [
            ({}, True),
            ({"largest": 50.0}, False),  # not far enough out
            ({"at": (100, 105, 110)}, True),
            ({"at": (90, 95, 100, 105)}, False),  # too often for chance
            ({"at": (19,)}, False),  # nothing to compare with
            ({"at": (20,)}, True),
            ({"numel": 40}, False),  # a few numbers can be one-sided
            ({"loss": lambda step, loss: 10 * loss if step == 100 else loss}, False),  # the batch, or weights before it
        ],
    )
    def test_finite(self, fields, fires):
        assert (RULES["lone-element"](flipped(**fields)) is not None) == fires

    def test_a_large_gradient_of_all_elements_is_none(self):
        history = flipped(at=())
        history.add(make_record(130, 1e9, loss=0.4, lr=1e-3))
        assert not history.lone_elements and severity("lone-element", history) is None

    def test_what_follows_is_explained_by_it(self):
        history = flipped(at=(100,), num_steps=101)
        for step in range(101, 110):
            history.add(
                make_bad_record(step, ["a.weight", "b.weight"], ["a.weight", "b.weight", "c.weight"], loss=math.nan)
            )
        assert first_cause(history) == "hardware-fault"
        history.note_model(dtypes=["float16"])
        assert first_cause(history) != "hardware-fault"

    @pytest.mark.parametrize(("num_bad", "fires"), [(1, True), (2, False)])
    def test_not_finite(self, num_bad, fires):
        names = ["a.weight", "b.weight", "c.weight"]
        history = flipped(at=())
        history.add(make_bad_record(130, names[:num_bad], names, loss=0.4))
        assert (RULES["lone-element"](history) is not None) == fires

    def test_is_kept_by_a_state(self):
        history = TrainingHistory()
        history.load_state_dict(flipped().state_dict())
        [one] = history.lone_elements
        assert (one.step, one.name, one.value) == (100, "b.weight", 1e9) and one.usual == pytest.approx(1.0, rel=0.5)


class TestRunningStatistics:
    @pytest.mark.parametrize(
        ("pair", "level", "expected"),
        [
            ((2.5, 1.0), 4.0, "warning"),
            ((0.2, 0.1), 4.0, "warning"),
            ((0.45, 1.9), 4.0, None),
            ((2.5, 1.0), 0.4, "info"),  # validation does not suffer
        ],
    )
    def test_limits(self, pair, level, expected):
        history = run(
            falling_losses(100), val_losses=validated(100, level=level), norm_statistics={"n": pair, "m": (0, 1)}
        )
        assert severity("running-statistics-apart", history) == expected

    def test_without_validation_it_is_a_remark(self):
        assert (
            severity("running-statistics-apart", run(falling_losses(100), norm_statistics={"n": (3.0, 1.0)})) == "info"
        )
        assert severity("running-statistics-apart", run(falling_losses(29), norm_statistics={"n": (3.0, 1.0)})) is None


class TestSquaredError:
    """A squared error that is written by hand ends at zero as torch's own does."""

    OPS = ("MeanBackward0", "PowBackward0", "SubBackward0", "AddmmBackward0")

    @pytest.mark.parametrize(
        ("squared", "dtypes", "expected"),
        [
            ((2.3,), ["float32"], "warning"),
            ((2.31,), ["float32"], None),  # another loss, by the gradient of the output
            ((2.31,), ["bfloat16"], "warning"),  # within its rounding
            ((), ["float32"], None),
        ],
    )
    def test_underfitting(self, squared, dtypes, expected):
        losses = [2.3, *falling_losses(40, pace=8.0, floor=1.9)[1:], *flat_losses(160, level=1.9)]
        notes = {"loss_ops": self.OPS, "loss_kind": "squared error", "squared_losses": squared, "dtypes": dtypes}
        assert severity("underfitting", run(losses, **notes)) == expected


class TestStoppedTooEarly:
    @pytest.mark.parametrize(
        ("pace", "num_steps", "expected"),
        [
            (40.0, 60, "warning"),  # from 0.5 of the first loss to 0.25 in the second half
            (40.0, 240, None),
            (15.0, 60, None),  # much of a little
            (200.0, 60, None),  # hardly at all
        ],
    )
    def test_by_how_much(self, pace, num_steps, expected):
        history = run(falling_losses(num_steps, pace=pace, floor=0.0, noise=0.0))
        assert severity("loss-still-falling", history) is None  # it may go on
        history.has_ended = True
        assert severity("loss-still-falling", history) == expected
        assert (first_cause(history) == "stopped-too-early") == (expected == "warning")

    def test_a_loss_that_comes_down_from_an_explosion_is_not_meant(self):
        history = run([1.0] * 20 + [9.0 - 0.2 * s for s in range(40)])
        history.has_ended = True
        assert severity("loss-still-falling", history) != "warning"
