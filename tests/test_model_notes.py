"""What a history knows of the model and its ranks, and the toolkit's own diagnosis."""

import json
import math

import pytest

from fastguard.diagnosis import RULES
from fastguard.diagnosis.rules.nonfinite import describe_bad_ranks
from fastguard.ranks.ranks import with_bad_step
from fastguard.records import ModelNotes, TrainingHistory

from made_runs import with_bad_steps


class TestModelNotes:
    def test_facts_survive_json(self):
        settings = [{"kind": "AdamW", "lr": 1e-3, "betas": [0.9, 0.999], "maximize": False}, {"lr": math.inf}]
        facts = {
            **{"module_kinds": {"Linear": 2}, "last_modules": ["Softmax", "Linear"], "dtypes": ["float32"]},
            **{"autocast": "bfloat16", "has_scaler": True, "clip_limit": 1.0, "optimizer_settings": settings},
            **{"overwritten": ["w"], "objective": "game", "num_ranks": 4},
            "bad_ranks": list(with_bad_step([], 12, 4, [(3, "w", 5, 0)])),
        }
        history = TrainingHistory()
        history.note_model(**facts)
        saved = json.loads(json.dumps(history.model.state(), allow_nan=False))
        notes = ModelNotes.of({**saved, "from_the_future": 1})
        assert notes == history.model and notes.optimizer_settings == tuple(settings)
        assert all(
            getattr(notes, name) in (fact, tuple(fact) if isinstance(fact, list) else fact)
            for name, fact in facts.items()
        )
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
            ({"num_ranks": 0}, "must be a whole number >= 1, got 0"),
            ({"bad_ranks": [{"rank": 1}]}, "must be there, and is missing"),
            ({"has_scaler": "yes"}, "must be true or false, got 'yes'"),
            ({"steps_per_epoch": 0}, "`steps_per_epoch` must be a whole number >= 1, got 0"),
        ],
    )
    def test_facts_that_do_not_fit_are_refused(self, facts, message):
        with pytest.raises(ValueError, match=message):
            TrainingHistory().note_model(**facts)

    def test_an_unknown_fact_is_refused_with_the_known_ones(self):
        with pytest.raises(TypeError, match=r"`drop_out` must be a fact of the model .* names, .*, dropout, .*_epoch"):
            TrainingHistory().note_model(drop_out={"d": 0.5})


class TestBadRanks:
    def test_the_first_step_of_each_rank_is_kept_and_its_steps_are_counted(self):
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

    def test_the_finding_names_them(self):
        history = with_bad_steps(100, {40: ["a", "b"]})
        said = RULES["non-finite-gradients"](history)
        history.note_model(num_ranks=4, bad_ranks=with_bad_step([], 40, 4, [(3, "a", 1, 0)]))
        found = RULES["non-finite-gradients"](history)
        assert found.summary == f"{said.summary} Rank 3 alone of 4 held NaN, first at step 40 in a."
        assert found.evidence == {**said.evidence, "bad_ranks": [3]}


FALLING = [1.0 / (s + 1) for s in range(30)]


@pytest.mark.parametrize(
    ("losses", "val_losses", "issues"),
    [
        ([1.0 / (s + 1) for s in range(200)], None, []),
        ([*FALLING[:-1], math.inf], None, ["LOSS_EXPLOSION"]),
        ([*FALLING[:-5], math.inf, *FALLING[-4:]], None, ["LOSS_EXPLOSION"]),
        ([*FALLING[:-6], math.inf, *FALLING[-5:]], None, []),
        ([1.0 + 0.0009 * (s % 2) for s in range(100)], None, ["LOSS_PLATEAU"]),
        ([1.0 + 0.0009 * (s % 2) for s in range(99)], None, []),
        ([1.0 + 0.0011 * (s % 2) for s in range(100)], None, []),
        ([2.0 - s / 50 for s in range(20)], [2.0 + s / 50 for s in range(20)], ["OVERFITTING"]),
        ([2.0 - s / 50 for s in range(19)], [2.0 + s / 50 for s in range(19)], []),
        ([2.0 - s / 50 for s in range(40)], [2.0 - s / 50 for s in range(40)], []),
    ],
)
def test_the_toolkits_diagnosis(losses, val_losses, issues):
    history = TrainingHistory()
    for step, loss in enumerate(losses):
        history.record(step, loss, 1.0, 1e-3, None if val_losses is None else val_losses[step])
    found = history.diagnose()
    status = "critical" if "LOSS_EXPLOSION" in issues else "warning" if issues else "healthy"
    assert [issue.partition(":")[0] for issue in found["issues"]] == issues
    assert (found["status"], len(found["recommendations"])) == (status, len(issues))
