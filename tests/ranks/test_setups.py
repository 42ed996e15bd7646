"""Set-ups as people write them, on two real ranks: FSDP2's policies, whose NaN it was, experts, pipelines, FSDP1."""

from pathlib import Path

import pytest
from several_processes import run, slow

from fastguard.sinks import read_jsonl

SCRIPT = Path(__file__).with_name("setups_script.py")
WATCHED = ("plain", "mixed precision", "offload", "not resharded", "accumulation")
pytestmark = slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("setups")
    return run(SCRIPT, 2, folder), folder


@pytest.fixture
def found(ran):
    return ran[0]


@pytest.mark.parametrize("case", [*WATCHED, "logs", "experts", "pipeline"])
def test_the_norm_is_that_of_the_whole_model_and_its_bits_those_of_all_ranks(found, case):
    for each in found:
        assert each[case]["norm"] < 1e-6
        assert each[case]["bits"] == found[0][case]["bits"]


@pytest.mark.parametrize("case", WATCHED)
def test_under_fully_shard_a_skip_names_the_rank_that_brought_nan_into_the_sum(found, case):
    bad = {"rank": 1, "num_ranks": 2, "step": 12, "num_nans": 5, "num_infs": 0, "num_steps": 1, "name": "4.bias"}
    for each in found:
        assert each[case]["skipped"] == [12] and each[case]["bad"] == [bad]
        assert each[case]["failures"] == [] and each[case]["num_ranks"] == 2
    (told,) = found[0][case]["told"]
    assert told.endswith("; rank 1, 4.bias: 5 NaN; the others were finite); the step was skipped")
    assert found[1][case]["told"] == []


@pytest.mark.parametrize("case", WATCHED)
def test_what_is_read_under_fully_shard_is_a_ranks_own(found, case):
    for each in found:
        own = each[case]
        assert own["own"] < (0.05 if case == "mixed precision" else 1e-6)  # of gradients in bfloat16
        assert own["hooks"] == 4  # those of fully_shard are left


def test_collectives_are_those_of_the_norm_and_one_in_ten_steps(found):
    assert found[0]["logs"]["costs"] == (42 + 2 * 14) / 42
    assert found[0]["plain"]["costs"] == (42 + 2 * 15 + 5) / 42  # five times who had what, at step 12 too


def test_nan_that_came_after_the_sum_is_told_of_whose_part_has_it(found):
    for each in found:
        ((bad),) = each["struck"]["bad"]
        assert (bad["rank"], bad["name"], bad["num_nans"]) == (1, "2.weight", 1) and each["struck"]["skipped"]


def test_beside_tensor_parallelism_no_norms_of_ranks_are_compared(found):
    for each in found:
        assert each["tensor parallel"] == {"bad": [0, 1], "odd": [], "failures": []}


def test_each_rank_writes_its_own_log_if_asked(ran):
    logs = [list(read_jsonl(ran[1] / f"{rank}.jsonl")) for rank in (0, 1)]
    for log, each in zip(logs, ran[0]):
        assert [float(line["grad/norm"]).hex() for line in log] == [norm for norm, _ in each["logs"]["bits"]]


def test_experts_beside_ddp_count_once_and_stages_step_as_the_whole_model(found):
    for each in found:
        assert each["pipeline"]["weights"] < 1e-6
        assert each["experts"]["skipped"] and each["experts"]["router"] == 0.0


def test_flat_parameters_are_refused_by_the_function_unless_each_rank_has_them_whole(found):
    for each in found:
        assert len(each["flat"]["said"]) == 2
        for said in each["flat"]["said"]:
            assert said.startswith("`parameters` must not be the flat ones") and "model.clip_grad_norm_" in said
        assert each["flat"]["norm"] < 1e-6 and each["flat"]["clipped"] <= 0.0501
