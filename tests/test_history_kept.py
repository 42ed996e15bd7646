"""What a history keeps beside its steps: across a resume, of the model, of bad ranks, and for a diagnosis."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fastguard.diagnosis import RULES
from fastguard.diagnosis.rules.nonfinite import describe_bad_ranks
from fastguard.ranks import with_bad_step
from fastguard.records import ModelNotes, TrainingHistory, strict_json
from fastguard.records.samples import WeightStats

from made_runs import activity, with_bad_steps
from records import make_record


def through_json(state):
    return strict_json.decode(json.loads(json.dumps(strict_json.encode(state), allow_nan=False)))


class TestResume:
    def test_everything_goes_on_as_if_never_saved(self):
        def steps(low, high):
            for step in range(low, high):
                sampled = step % 10 == 0
                yield make_record(
                    step,
                    1.0 + step % 7,
                    loss=9.0 if step == 150 else 2.0 - step / 300,
                    val_loss=1.0 if step % 50 == 49 else None,
                    lr=0.1,
                    activations=(activity("act"),) if sampled else (),
                    weights=(WeightStats("w", 4, 2.0, 0.5, 1.0, 0.2, 0.1),) if sampled else (),
                )

        whole, first, second = TrainingHistory(64), TrainingHistory(64), TrainingHistory(64)
        for history in (whole, first):
            history.note_model(names=["w"], initialization={"w": (0.1, 0.2)}, dropout={"d": 0.5}, steps_per_epoch=50)
        for record in steps(0, 120):
            first.add(record)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        for record in steps(120, 240):
            second.add(record)
        for record in steps(0, 240):
            whole.add(record)
        assert second.state_dict() == whole.state_dict()

    def test_a_state_that_was_saved_before_is_read_to_the_letter(self):
        # Names that look like numbers stay names.
        saved = json.loads(Path(__file__).with_name("history_state_v2.json").read_text(encoding="utf-8"))
        history = TrainingHistory(2)
        history.load_state_dict(saved)
        state = history.state_dict()
        saved["tensors"] = saved["tensors"][1:]  # which counted steps
        assert {key: state[key] for key in saved if key != "model"} | {"model": saved["model"]} == saved
        assert {name: state["model"][name] for name in saved["model"]} == saved["model"]
        assert len(history.batches) == len(history.grad_cosines) == 0  # there was no such thing then
        assert list(history.tensors) == ["NaN"] and history.copy().state_dict() == state

    def test_copy_is_apart(self):
        history = TrainingHistory()
        history.add(make_record(0, loss=1.0))
        twin = history.copy()
        history.add(make_record(1, loss=2.0))
        assert (twin.num_steps, twin.last.step, history.num_steps) == (1, 0, 2)

    def test_copy_has_everything_and_shares_nothing_that_changes(self):
        def steps(low, high):
            for step in range(low, high):
                activations, weights = (activity("act"),), (WeightStats("w", 40, 2.0, 0.5, 1.0, 0.2, 0.1, step == 70),)
                fields = {"activations": activations, "weights": weights} if step % 10 == 0 else {}
                loss = 9.0 if step in (60, 130) else 2.0 - step / 300
                norm = math.nan if step == 75 else 1.0 + step % 7
                yield make_record(step, norm, loss=loss, val_loss=loss, lr=0.1, skipped=step == 75, **fields)

        history = TrainingHistory(64)
        history.note_model(names=["w"], dropout={"d": 0.5})
        for record in steps(0, 100):
            history.add(record)
        before = json.dumps(history.state_dict())
        twin = history.copy()
        assert json.dumps(twin.state_dict()) == before
        for record in steps(100, 200):
            twin.add(record)
        twin.note_model(names=["v"])
        assert json.dumps(history.state_dict()) == before
        assert twin.num_steps == 200 and twin.updates.count == 20


class TestModelNotes:
    def test_what_is_not_given_stays(self):
        history = TrainingHistory()
        history.note_model(names=["a"], has_scheduler=True, initial_lr=0.1)
        history.note_model(has_scheduler=False)
        assert (history.model.names, history.model.has_scheduler, history.model.initial_lr) == (("a",), False, 0.1)

    def test_facts_survive_json(self):
        settings = [{"kind": "AdamW", "lr": 1e-3, "betas": [0.9, 0.999], "maximize": False}, {"lr": math.inf}]
        facts = {
            **{"module_kinds": {"Linear": 2}, "last_modules": ["Softmax", "Linear"], "dtypes": ["float32"]},
            **{"autocast": "bfloat16", "has_scaler": True, "clip_limit": 1.0, "optimizer_settings": settings},
            **{"num_left_gradients": 3, "num_watched_backwards": 20, "overwritten": ["w"], "num_overwritten": 1},
            **{"num_compared": 4, "objective": "game", "last_operations": ["Softmax"], "num_ranks": 4},
            "bad_ranks": list(with_bad_step([], 12, 4, [(3, "w", 5, 0)])),
        }
        history = TrainingHistory()
        history.note_model(**facts)
        notes = ModelNotes.of(json.loads(json.dumps(history.model.state(), allow_nan=False)))
        assert notes == history.model and notes.optimizer_settings == tuple(settings)
        assert {name: getattr(notes, name) for name in facts if not isinstance(facts[name], list)} == {
            name: fact for name, fact in facts.items() if not isinstance(fact, list)
        }
        before = history.model.num_changes
        history.note_model(**facts)
        assert history.model.num_changes == before  # no news

    @pytest.mark.parametrize(
        ("facts", "message"),
        [
            ({"objective": "maximise"}, r"must be one of \['minimise', 'game', 'reward'\], got 'maximise'"),
            ({"optimizer_settings": {"lr": 1}}, "must be a list, got"),
            ({"optimizer_settings": [{"lr": None}]}, "must be a number, got None"),
            ({"module_kinds": {"Linear": -1}}, "must be a whole number >= 0, got -1"),
            ({"last_modules": "Softmax"}, "must be names, got a single text 'Softmax'"),
            ({"num_ranks": 0}, "must be at least 1, got 0"),
            ({"bad_ranks": [{"rank": 1}]}, "must be there, and is missing"),
            ({"has_scaler": "yes"}, "must be true or false, got 'yes'"),
        ],
    )
    def test_facts_that_cannot_be_are_refused(self, facts, message):
        with pytest.raises(ValueError, match=message):
            TrainingHistory().note_model(**facts)

    def test_a_spread_that_says_nothing_is_left_out(self):
        history = TrainingHistory()
        history.note_model(initialization={"a": (math.nan, 1.0), "b": (1.0, 0.0), "c": (1.0, 2.0)})
        assert history.model.initialization == {"c": (1.0, 2.0)}

    def test_steps_per_epoch_must_be_positive(self):
        with pytest.raises(ValueError, match="`steps_per_epoch` must be at least 1, got 0"):
            TrainingHistory().note_model(steps_per_epoch=0)

    def test_an_unknown_fact_is_refused_with_the_known_ones(self):
        with pytest.raises(TypeError, match=r"`drop_out` must be a fact of the model .* names, .*, dropout, .*_epoch"):
            TrainingHistory().note_model(drop_out={"d": 0.5})

    def test_facts_may_be_spelt_as_before(self):
        short, long = TrainingHistory(), TrainingHistory()
        short.note_model(not_in_optimizer=["a"], without_gradient=["b"], zero_lr=["c"])
        long.note_model(names_not_in_optimizer=["a"], names_without_gradient=["b"], names_with_zero_lr=["c"])
        assert short.model == long.model and short.model.zero_lr == ("c",)

    def test_a_state_of_another_version_is_read_as_far_as_it_goes(self):
        notes = ModelNotes.of({"names": ["a"], "from_the_future": 1})
        assert notes == ModelNotes(names=("a",)) and notes.num_changes == 0


class TestBadRanks:
    def test_the_first_of_each_rank_is_kept_and_its_steps_are_counted(self):
        bad = with_bad_step([], 5, 4, [(1, "b", 2, 0), (1, "a", 1, 1)])
        bad = with_bad_step(bad, 9, 4, [(0, "a", 0, 3), (1, "a", 1, 0)])
        assert [(one["rank"], one["step"], one["name"], one["num_steps"]) for one in bad] == [
            (1, 5, "b", 2),
            (0, 9, "a", 1),
        ]
        assert describe_bad_ranks(bad) == "2 of 4 ranks held NaN and Inf, rank 1 first at step 5 in b"
        every = with_bad_step([], 5, 2, [(1, "b", 2, 0), (0, "a", 1, 0)])
        assert describe_bad_ranks(every) == "all 2 ranks held NaN, rank 0 first at step 5 in a"
        assert describe_bad_ranks(bad[1:]) == "rank 0 alone of 4 held Inf, first at step 9 in a"

    def test_sixteen_are_kept(self):
        bad = with_bad_step([], 1, 64, [(rank, "w", 1, 0) for rank in range(20)])
        assert [one["rank"] for one in bad] == list(range(16)) and with_bad_step(bad, 2, 64, [(19, "w", 1, 0)]) == bad
        assert describe_bad_ranks(bad) == "16 or more of 64 ranks held NaN, rank 0 first at step 1 in w"

    def test_the_finding_names_them(self):
        history = with_bad_steps(100, {40: ["a", "b"]})
        said = RULES["non-finite-gradients"](history)
        history.note_model(num_ranks=4, bad_ranks=with_bad_step([], 40, 4, [(3, "a", 1, 0)]))
        found = RULES["non-finite-gradients"](history)
        assert found.summary == f"{said.summary} Rank 3 alone of 4 held NaN, first at step 40 in a."
        assert found.evidence == {**said.evidence, "bad_ranks": [3]}


class TestToolkitDiagnose:
    def history(self, losses, val_losses=None):
        history = TrainingHistory()
        for step, loss in enumerate(losses):
            history.record(step, loss, 1.0, 1e-3, None if val_losses is None else val_losses[step])
        return history

    def test_healthy(self):
        assert self.history([1.0 / (s + 1) for s in range(200)]).diagnose() == {
            "status": "healthy",
            "issues": [],
            "recommendations": [],
        }

    @pytest.mark.parametrize(("place", "fires"), [(-1, True), (-5, True), (-6, False)])
    def test_explosion(self, place, fires):
        losses = [1.0 / (s + 1) for s in range(30)]
        losses[place] = math.inf
        found = self.history(losses).diagnose()
        assert (found["status"] == "critical") == fires
        assert [issue.partition(":")[0] for issue in found["issues"]] == ["LOSS_EXPLOSION"] * fires

    @pytest.mark.parametrize(
        ("count", "spread", "fires"), [(100, 0.0009, True), (99, 0.0009, False), (100, 0.0011, False)]
    )
    def test_plateau(self, count, spread, fires):
        found = self.history([1.0 + spread * (s % 2) for s in range(count)]).diagnose()
        assert (found["status"] == "warning") == fires
        assert [issue.partition(":")[0] for issue in found["issues"]] == ["LOSS_PLATEAU"] * fires

    @pytest.mark.parametrize(("count", "slope", "fires"), [(20, 1, True), (19, 1, False), (40, -1, False)])
    def test_overfitting(self, count, slope, fires):
        losses = [2.0 - s / 50 for s in range(count)]
        found = self.history(losses, [2.0 + slope * s / 50 for s in range(count)]).diagnose()
        assert [issue.partition(":")[0] for issue in found["issues"]] == ["OVERFITTING"] * fires
