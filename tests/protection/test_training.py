"""The experiment's trainings: what stands between gradients and optimizer, and trouble that does what it says."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("benchmarks.protection", reason="the experiment is not beside these tests", exc_type=ImportError)

import fastguard
from benchmarks.lab.training import Setup
from benchmarks.protection import guide, suite, tasks, training
from benchmarks.protection.rivals import FixedNorm, SkipStep

NUM_STEPS = 40


def small(seed=0, **changes):
    torch.manual_seed(seed)
    held_out = torch.randn(64, 4), torch.randint(3, (64,))

    def batch_at(number):
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()

    def build():
        return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    given = {
        "seed": seed,
        "build": build,
        "model": build(),
        "loss_of": tasks.smoothed_loss,
        "batch_at": batch_at,
        "held_out": held_out,
        "num_batches": 100,
        "lr": 0.1,
        "make_optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        "num_steps": NUM_STEPS,
    }
    return Setup(**{**given, **changes})


def test_a_run_is_the_same_each_time_and_learns():
    a, b = (training.train(small(), training.Protection()) for _ in range(2))
    assert a["digest"] == b["digest"] and a["error"] is None
    assert a["losses"][-1] < a["losses"][0]
    assert training.train(small(1), training.Protection())["digest"] != a["digest"]


def test_one_bit_of_a_parameter_changes_the_digest():
    model = small().model
    before = training.digest(model, [1.0])
    weight = model[0].weight.detach().view(torch.int32)
    weight[0, 0] ^= 1
    assert training.digest(model, [1.0]) != before
    weight[0, 0] ^= 1
    assert training.digest(model, [1.0]) == before
    assert training.digest(model, [math.nextafter(1.0, 2.0)]) != before


def test_a_rule_scales_what_reaches_the_optimizer():
    setup = small(num_steps=1, lr=1.0)
    before = [p.detach().clone() for p in setup.model.parameters()]
    training.train(setup, training.Ruled(FixedNorm(1e-3)))
    moved = torch.stack([(p - b).norm() for p, b in zip(setup.model.parameters(), before)]).norm()
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)


class _Never(training.Ruled):
    """Skips every step."""

    def __init__(self):
        super().__init__(FixedNorm(0.0))


def test_a_skipped_step_leaves_everything():
    setup = small()
    before = [p.detach().clone() for p in setup.model.parameters()]
    found = training.train(setup, _Never())
    assert found["num_skipped"] == NUM_STEPS
    assert all(torch.equal(p, b) for p, b in zip(setup.model.parameters(), before))


def test_a_rule_that_skips_leaves_nan_out_and_one_that_clips_does_not():
    def ruin(model):
        with torch.no_grad():
            model[0].bias[0] = float("nan")

    for rule, is_skipped in ((SkipStep(), True), (FixedNorm(), False)):
        setup = small()
        setup.events.append((20, ruin))
        found = training.train(setup, training.Ruled(rule))
        assert found["num_skipped"] == (20 if is_skipped else 0)
        assert found["final"] == math.inf


def test_a_guarded_run_tells_what_was_raised_and_ends_there():
    def ruin(model):
        with torch.no_grad():
            model[0].bias[0] = float("nan")

    setup = small()
    setup.events.append((5, ruin))
    found = training.train(setup, training.Guarded(max_norm=1.0, max_consecutive_skips=3))
    assert found["error"] == "NonFiniteGradientsError"
    assert len(found["losses"]) < NUM_STEPS and found["num_skipped"] >= 3


def test_guarding_changes_no_bit():
    plain = training.train(small(), training.Protection())
    assert training.train(small(), training.Guarded())["digest"] == plain["digest"]


def rates(setup):
    return [setup.schedule(step) for step in range(setup.num_steps)]


def test_the_rate_is_high_for_a_while_only():
    plain = rates(tasks.prepared("char-lstm", 0))
    high = rates(tasks.troubled("char-lstm", "lr × 10 for 30 steps", 0))
    raised = [step for step, (a, b) in enumerate(zip(plain, high)) if a != b]
    assert len(raised) == 30 and raised[-1] - raised[0] == 29
    assert all(high[step] == pytest.approx(10 * plain[step]) for step in raised)


def test_a_bad_block_is_thirty_batches():
    plain, bad = tasks.prepared("char-lstm", 0), tasks.troubled("char-lstm", "bad block of 30 batches", 0)
    changed = [n for n in range(plain.num_steps) if not torch.equal(plain.batch_at(n)[1], bad.batch_at(n)[1])]
    assert len(changed) == 30 and changed[-1] - changed[0] == 29
    inputs, targets = bad.batch_at(changed[0])
    assert torch.equal(inputs, plain.batch_at(changed[0])[0]) and len(targets.unique()) == 1


@pytest.mark.parametrize("kind", ["noise", "× 100", "NaN"])
def test_one_matrix_is_ruined(kind):
    setup = tasks.troubled("char-lstm", f"weights: {kind}", 0)
    ((step, ruin),) = setup.events
    assert 0.3 * setup.num_steps < step < 0.6 * setup.num_steps
    before = {name: p.detach().clone() for name, p in setup.model.named_parameters()}
    ruin(setup.model)
    changed = [name for name, p in setup.model.named_parameters() if not torch.equal(p, before[name])]
    assert len(changed) == 1 and before[changed[0]].ndim > 1
    assert any(p.isnan().any() for p in setup.model.parameters()) is (kind == "NaN")


def test_the_same_seed_is_the_same_trouble_and_another_is_another():
    starts = [tasks.troubled("char-lstm", "weights: NaN", seed).events[0][0] for seed in (0, 0, 1, 2, 3)]
    assert starts[0] == starts[1] and len(set(starts)) > 2


def test_the_guides_summary_counts_explosions_and_spreads_the_rest():
    runs = [
        {"exploded": False, "final": 1.0, "error": None, "num_skipped": 0, "num_rollbacks": 0},
        {"exploded": False, "final": 3.0, "error": None, "num_skipped": 2, "num_rollbacks": 1},
        {"exploded": True, "final": math.inf, "error": "AnError", "num_skipped": 3, "num_rollbacks": 0},
    ]
    found = guide.summary(runs)
    assert (found["num_exploded"], found["num_raised"], found["num_skipped"], found["num_rollbacks"]) == (1, 1, 5, 1)
    assert found["final"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert guide.summary(runs[2:])["final"] is None


def test_precisions_run_as_they_say():
    found = guide.run_precision("char-transformer", "float16 with scaler", 0, num_steps=2)
    assert found["error"] is None and math.isfinite(found["final"])
    assert fastguard.__name__ == "fastguard"


@pytest.mark.slow
@pytest.mark.skipif("Recovery" not in fastguard.__all__, reason="this fastguard has no recovery")
def test_a_run_whose_weights_are_ruined_is_brought_through_by_recovery_alone(monkeypatch):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    trouble = "weights: NaN"
    monkeypatch.setattr(suite, "TROUBLES", {trouble: tasks.TROUBLES[trouble]})
    (found,) = suite.in_trouble("digits-cnn", 0, 0.5, tuple(training.PROTECTIONS))
    endings = {name: run["ending"] for name, run in found["runs"].items()}
    assert endings.pop(training.OURS) == "brought through"
    assert found["runs"][training.OURS]["num_rollbacks"] >= 1
    assert set(endings.values()) == {"silent"}


@pytest.mark.slow
@pytest.mark.skipif("Recovery" not in fastguard.__all__, reason="this fastguard has no recovery")
def test_a_healthy_run_is_the_same_bits_with_recovery():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    found = suite.with_recovery("digits-cnn", 0, 0.4)
    assert found["num_rollbacks"] == 0
    assert found["digest"] == found["digest_without"]
