"""Sharded trainings on real process groups: one norm, one decision and one history, the same bits on every rank."""

import math
from pathlib import Path

import pytest
from several_processes import run, slow

pytestmark = slow
SCRIPT = Path(__file__).with_name("script.py")
WORLD = 4
FLAT = ("flat, NaN", "originals, NaN", "gradients only", "not sharded", "hybrid")
TRAININGS = ("fsdp", "fsdp, NaN", "hsdp", "tp", "tp on a part", "tp and fsdp", "tp and fsdp, NaN")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(SCRIPT, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", TRAININGS)
def test_the_norm_is_that_of_the_whole_model_and_the_steps_are_those_of_one_process(found, case):
    first = found[0][case]
    assert first["norm"] < 1e-6
    assert first["rows"] < 1e-5
    assert first["weights"] < 1e-6


@pytest.mark.parametrize("case", [*TRAININGS, "fsdp, each tensor"])
def test_every_rank_decides_and_remembers_the_same_bits(found, case):
    keys = {"bits", "skipped", "nonfinite", "elements", "losses", "findings", "trouble", "tables", "collectives"}
    if case == "tp on a part":
        keys -= {"losses"}  # of the two ranks of a mesh each
    for other in found[1:]:
        assert {key: other[case][key] for key in keys} == {key: found[0][case][key] for key in keys}


@pytest.mark.parametrize("case", ["fsdp, NaN", "tp and fsdp, NaN"])
def test_a_nan_on_one_rank_skips_the_step_on_all_and_its_rank_is_named(found, case):
    first, bad = found[0][case], 3 if case.startswith("tp") else 12
    assert [step for step, skipped in enumerate(first["skipped"]) if skipped] == [bad]
    assert first["nonfinite"][bad] == ["0.weight"]
    assert first["trouble"] == [[1, "0.weight", 1, 0]]
    assert "non-finite-gradients" in first["findings"]
    told = [text for text in found[0]["told"] if text.startswith(f"step {bad}: ")]
    assert told and all("rank 1, 0.weight: 1 NaN; the others were finite" in text for text in told)
    assert not any(other["told"] for other in found[1:])  # rank 0 alone tells


@pytest.mark.parametrize("case", ["fsdp, NaN", "tp and fsdp, NaN"])
def test_the_report_names_the_rank_and_says_what_the_collectives_cost(found, case):
    first, bad = found[0][case], 12 if case.startswith("fsdp") else 3
    rank = {"rank": 1, "num_ranks": WORLD, "step": bad, "num_nans": 1, "num_infs": 0, "num_steps": 1}
    assert first["bad ranks"] == [WORLD, [{**rank, "name": "0.weight"}]]
    assert first["said"][0].endswith(f" Rank 1 alone of 4 held NaN, first at step {bad} in 0.weight.")
    assert "\nranks             4; 1 held NaN or Inf\n" in first["text"]
    count, sent = (first["costs"][f"{name}_per_step"] for name in ("num_collectives", "collective_bytes"))
    assert count == first["collectives"] / 14
    assert f"\ncost of ranks     {count:.4g} collectives a step, {sent:.0f} bytes from each rank" in first["text"]
    tables = 11 if bad == 3 else 12
    told = 14 * sent - (14 * 144 + tables * 6 * 96)  # of what the bad step had to tell
    assert 0 < told < 40
    for other in found[1:]:
        for key in ("bad ranks", "said", "costs"):
            assert other[case][key] == first[key]


def test_the_loss_names_the_rank_whose_batch_brought_nan_to_all(found):
    for each in found:
        spread = each["fsdp, NaN in a batch"]
        assert [step for step, skipped in enumerate(spread["skipped"]) if skipped] == [11]
        assert spread["said"][0].endswith(" Rank 1 alone of 4 held NaN, first at step 11 in 4.bias.")


def test_a_clean_training_has_no_findings(found):
    for case in ("fsdp", "hsdp", "tp", "tp on a part", "tp and fsdp"):
        assert found[0][case]["findings"] == [], case
        assert found[0][case]["bad ranks"][1] == []


def test_tables_come_at_some_steps_and_collectives_are_few(found):
    first = found[0]["fsdp"]
    assert first["tables"][0] == 0  # of step 13
    assert first["costs"]["collective_bytes_per_step"] == (14 * 144 + 11 * 6 * 96) / 14
    assert first["collectives"] == 14 + 2 * 11  # a gather each, and two reductions at steps 0 to 10
    assert found[0]["fsdp, each tensor"]["collectives"] == 14 * 3


def test_a_mesh_of_one_rank_asks_nobody_and_has_each_tensor_at_every_step(found):
    for each in found:
        alone = each["fsdp, alone"]
        assert alone["norm"] < 1e-6 and alone["rows"] < 1e-5 and alone["weights"] < 1e-6
        assert (alone["collectives"], alone["costs"], alone["findings"]) == (0, {}, [])
        assert alone["tables"][0] == 6 and alone["bad ranks"] == [None, []]


def test_the_loss_of_a_record_is_the_mean_over_the_ranks(found):
    losses = [each["fsdp"]["losses"] for each in found]
    assert losses[0] == losses[-1] and len(losses[0]) == 13
    assert all(math.isfinite(loss) and loss > (WORLD - 1) / 2 for loss in losses[0])  # each added its number


def test_what_needs_whole_tensors_is_refused(found):
    said = found[0]["refusals"]
    for text, argument in zip(said, ("weights", "clip", "clip"), strict=True):
        assert text.startswith(f"`{argument}` must be left out where parameters are sharded")


def test_the_norm_of_pipeline_stages_is_that_of_all(found):
    for case in ("pipeline",):
        for each in found:
            assert each[case]["norm"] == pytest.approx(each[case]["exact"], rel=1e-7)
            assert each[case]["names"] == ["weight", "bias"]
        assert len({each[case]["coef"] for each in found}) == 1


def test_a_scaler_finds_the_same_on_all_ranks(found):
    for each in found:
        assert len(each["scaled"]) == 4
        for case, seen in each["scaled"].items():
            assert seen == [True, 512.0, True, "inf"], case


def test_ranks_that_are_out_of_step_get_an_error_and_do_not_hang(found):
    for each in found:
        for case in ("out of step",):
            assert "must step together" in each[case] and "different steps: [0.0, " in each[case]


def test_steps_and_parameters_without_gradients_hang_nobody(found):
    for each in found:
        assert each["without gradients"] == {"empty": 0.0, "names": ["0.weight", "0.bias"]}
        apart, kind = each["function without gradients"]
        assert apart < 1e-6 and kind == "DTensor"


@pytest.mark.parametrize("case", ["functions, fsdp", "functions, hsdp", "functions, tp"])
def test_the_functions_agree_with_torchs_on_dtensors(found, case):
    for each in found:
        for limit in ("0.05", "1000000.0"):
            norm, gradients = each[case][limit]
            assert norm < 1e-6 and gradients < 1e-6
        assert each[case]["norm"] == "inf" and each[case]["error"] is True
        assert each[case]["groups"] == ([WORLD // 2] if "hsdp" in case else [WORLD])  # of replicas one is asked


@pytest.mark.parametrize("case", FLAT)
def test_flat_parameters_have_the_norm_of_the_whole_model_and_its_steps(found, case):
    for flat in (each["flat"][case] for each in found):
        assert flat["norm"] < 1e-6 and flat["rows"] < 1e-6 and flat["outputs"] < 1e-6
        assert flat["bits"] == found[0]["flat"][case]["bits"]
        assert (flat["failures"], flat["num_ranks"]) == ([], WORLD)
        assert flat["findings"] == (["non-finite-gradients"] if "NaN" in case else [])


@pytest.mark.parametrize(("case", "name"), [("flat, NaN", "0._flat_param"), ("originals, NaN", "0.weight")])
def test_a_nan_in_one_ranks_part_of_a_flat_parameter_skips_the_step_on_all(found, case, name):
    for flat in (each["flat"][case] for each in found):
        assert [step for step, skipped in enumerate(flat["skipped"]) if skipped] == [6]
        assert flat["trouble"] == [[1, name, 1, 0]]


def test_parameters_shown_by_fsdp1_have_their_names_and_sizes(found):
    for case in ("originals, NaN", "hybrid"):
        assert found[0]["flat"][case]["names"] == [f"{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]
        assert set(found[0]["flat"][case]["elements"]) == {16 * 33 + 33 + 33 * 48 + 48 + 48 * 5 + 5}


def test_flat_parameters_that_cannot_be_right_are_refused(found):
    said = found[0]["flat"]["refusals"]
    for case in ("no model", "another model"):
        assert said[case].startswith("`model` must be the FullyShardedDataParallel module whose flat parameters")
    assert "over the same process group, with one sharding strategy" in said["two strategies"]
    assert said["recovery"].startswith("`recovery` must be left out") and said["units"].startswith("`clip` must be")
    assert said["plain"].startswith("`model` must not be sharded")
