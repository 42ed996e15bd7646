"""Each rank's own gradients, read before they are averaged: who brought NaN, and who is odd."""

import math
from pathlib import Path

import pytest
import torch
from several_processes import run, slow

import fastguard
from fastguard.ranks.local import OddRanks

SCRIPT = Path(__file__).with_name("local_script.py")
WORLD = 3


def norms(num_ranks, num_steps, scatter, seed=0):
    generator = torch.Generator().manual_seed(seed)
    trend = torch.randn(1, num_steps, generator=generator, dtype=torch.float64)
    return (trend + scatter * torch.randn(num_ranks, num_steps, generator=generator, dtype=torch.float64)).exp()


def entered(found, all_norms):
    known = []
    for first in range(0, all_norms.shape[1], 10):
        known = found.add(first, all_norms[:, first : first + 10]) or known
    return known


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_an_odd_rank_is_found_on_either_side_and_named_by_its_number(num_ranks, factor):
    given = norms(num_ranks, 60, 0.2)
    given[1, 20:] *= factor
    (odd,) = entered(OddRanks(range(10, 10 + num_ranks)), given)
    assert (odd["rank"], odd["num_ranks"]) == (11, num_ranks) and odd["step"] in (10, 20)
    assert odd["ratio"] == pytest.approx(factor, rel=0.4)


@pytest.mark.parametrize("num_ranks", [2, 3, 16])
def test_ranks_of_one_kind_are_left_in_peace_in_a_long_run(num_ranks):
    for seed, scatter in enumerate((0.02, 0.3, 1.0)):
        assert entered(OddRanks(range(num_ranks)), norms(num_ranks, 500, scatter, seed)) == []


def test_single_spikes_bad_steps_and_two_ranks_make_nobody_odd():
    given = norms(4, 60, 0.2)
    given[2, ::3] *= 1000.0
    assert entered(OddRanks(range(4)), given) == []
    given = norms(4, 60, 0.2)
    given[2] *= 5.0
    given[0, ::2] = math.nan
    assert [odd["rank"] for odd in entered(OddRanks(range(4)), given)] == [2]
    assert entered(OddRanks(range(4)), torch.zeros(4, 60, dtype=torch.float64)) == []
    two = norms(2, 60, 0.1)
    two[1] *= 10.0
    assert entered(OddRanks(range(2)), two) == []


@pytest.mark.parametrize("argument", ["watch_ranks", "parity"])
@pytest.mark.parametrize("every", [0, -1, 1.5, "often"])
def test_no_number_of_steps_is_refused(argument, every):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=f"`{argument}` must be True, False or an integer >= 1"):
        fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **{argument: every})
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, watch_ranks=True)
    assert optimizer.guard._local is None


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(SCRIPT, WORLD, tmp_path_factory.mktemp("local"))


ONE = ("NaN", "NaN, bucket views", "NaN, static graph", "NaN, a hook", "NaN, accumulation")
BAD = dict.fromkeys(ONE, (13, "2.bias"))
BAD |= {"NaN at an exchange": (10, "2.bias"), "NaN, checkpointing": (13, "last.bias")}


@pytest.mark.parametrize("case", [pytest.param(case, marks=slow) for case in ("sound", "odd", *BAD)])
def test_what_is_read_is_this_ranks_own_and_no_bit_changes(found, case):
    for each in found:
        assert each[case]["same"] and each[case]["apart"] < 1e-6 and each[case]["failures"] == []


@pytest.mark.parametrize(("case", "step", "name"), [pytest.param(case, *bad, marks=slow) for case, bad in BAD.items()])
def test_a_skip_names_the_rank_that_brought_nan_into_the_average(found, case, step, name):
    rank = {"rank": 1, "num_ranks": WORLD, "step": step, "num_nans": 3, "num_infs": 0, "num_steps": 1, "name": name}
    for each in found:
        assert each[case]["bad"] == [rank] and each[case]["skipped"] == 1
        assert any(
            f"Rank 1 alone of 3 held NaN, first at step {step} in {name}." in said for said in each[case]["said"]
        )
    told = [text for text in found[0][case]["told"] if text.startswith(f"step {step}: ")]
    assert told and f"; rank 1, {name}: 3 NaN; the others were finite); the step was skipped" in told[0]


class TestOnRealRanks:
    pytestmark = slow

    def test_without_being_asked_for_nobody_is_named_and_nothing_is_sent(self, found):
        for each in found:
            assert each["not asked"]["bad"] == [] and each["not asked"]["costs"] == {}
            assert each["not asked"]["skipped"] == 1
            assert any("Averaging over 3 ranks hides which of them" in said for said in each["not asked"]["said"])

    def test_a_sound_run_has_no_findings_and_one_gather_in_ten_steps(self, found):
        for each in found:
            sound = each["sound"]
            assert (sound["findings"], sound["bad"], sound["odd"], sound["num_ranks"]) == ([], [], [], WORLD)
            assert sound["costs"]["num_collectives_per_step"] == 3 / 32
            assert sound["costs"]["collective_bytes_per_step"] == 3 * 8 * 28 / 32
            assert "\nranks             3\n" in sound["text"]

    def test_a_rank_of_another_scale_is_a_finding_on_all(self, found):
        for each in found:
            (odd,) = each["odd"]["odd"]
            assert odd["rank"] == 2 and 2.5 < odd["ratio"] < 6.0
            assert each["odd"]["findings"] == ["ranks-differ"]
            assert f"norm of rank 2's own gradients was {odd['ratio']:.3g} times the median" in each["odd"]["said"][0]

    def test_what_all_know_is_the_same_on_all(self, found):
        for case in ("sound", "odd", *BAD):
            for each in found[1:]:
                keys = ("bad", "odd", "findings", "costs")
                assert [each[case][key] for key in keys] == [found[0][case][key] for key in keys]

    def test_ranks_that_do_not_fit_are_told_once_and_training_goes_on(self, found):
        for each in found:
            assert each["of another mind"]["steps"] == 19
            ((times, error),) = each["of another mind"]["failures"]
            assert times == 1 and "the ranks are at different steps" in error

    def test_another_model_than_the_wrapper_is_refused(self, found):
        none, plain = found[0]["refused"]
        assert "got none. Pass the wrapped model" in none and "got Sequential. Pass the wrapped model" in plain

    def test_zero_redundancy_optimizer_clips_skips_and_keeps_its_state_as_adamw(self, found):
        for each in found:
            zero = each["zero"]
            assert zero["norm"] < 1e-6 and zero["weights"] < 1e-6 and zero["stayed"]
            assert [step for step, one in enumerate(zero["seen"]) if one[2]] == [5]
            assert zero["seen"] == found[0]["zero"]["seen"]
            assert [(one["rank"], one["name"]) for one in zero["bad"]] == [(1, "2.bias")]
        assert found[0]["zero"]["state"] == 4
