"""Set-ups as people write them, on two real ranks: FSDP2's policies, experts, pipelines, FSDP1, ZeRO-1."""

from pathlib import Path

import pytest
from several_processes import run, slow

from fastguard.sinks import read_jsonl

SCRIPT = Path(__file__).with_name("setups_script.py")
POLICIES = ("plain", "mixed precision", "offload", "not resharded", "accumulation")
pytestmark = slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("setups")
    return run(SCRIPT, 2, folder), folder


@pytest.fixture
def found(ran):
    return ran[0]


@pytest.mark.parametrize("case", [*POLICIES, "logs", "experts", "pipeline"])
def test_the_norm_is_that_of_the_whole_model_and_its_bits_those_of_all_ranks(found, case):
    for each in found:
        assert each[case]["norm"] < 1e-6
        assert each[case]["bits"] == found[0][case]["bits"]


@pytest.mark.parametrize("case", POLICIES)
def test_under_fully_shard_nan_of_one_rank_skips_the_step_on_all(found, case):
    for each in found:
        assert each[case]["skipped"] == [12] and [one["rank"] for one in each[case]["bad"]] == [0, 1]
        assert each[case]["failures"] == [] and each[case]["num_ranks"] == 2
    (told,) = found[0][case]["told"]
    assert told.endswith("; the step was skipped") and found[1][case]["told"] == []


def test_nan_that_came_after_the_sum_is_told_of_whose_part_has_it(found):
    for each in found:
        ((bad),) = each["struck"]["bad"]
        assert (bad["rank"], bad["name"], bad["num_nans"]) == (1, "2.weight", 1) and each["struck"]["skipped"]


def test_each_rank_writes_its_own_log_if_asked(ran):
    logs = [list(read_jsonl(ran[1] / f"{rank}.jsonl")) for rank in (0, 1)]
    for log, each in zip(logs, ran[0]):
        assert [float(line["grad/norm"]).hex() for line in log] == [norm for norm, _ in each["logs"]["bits"]]


def test_experts_beside_ddp_count_once_and_stages_step_as_the_whole_model(found):
    for each in found:
        assert each["pipeline"]["weights"] < 1e-6
        assert each["experts"]["skipped"] and each["experts"]["router"] == 0.0


def test_zero_redundancy_optimizer_clips_skips_and_keeps_its_state_as_adamw(found):
    for each in found:
        zero = each["zero"]
        assert zero["norm"] < 1e-6 and zero["weights"] < 1e-6 and zero["stayed"]
        assert [step for step, one in enumerate(zero["seen"]) if one[2]] == [5]
        assert zero["seen"] == found[0]["zero"]["seen"]
    assert found[0]["zero"]["state"] == 4


def test_flat_parameters_are_refused_by_the_function_unless_each_rank_has_them_whole(found):
    for each in found:
        assert len(each["flat"]["said"]) == 2
        for said in each["flat"]["said"]:
            assert said.startswith("`parameters` must not be the flat ones") and "model.clip_grad_norm_" in said
        assert each["flat"]["norm"] < 1e-6 and each["flat"]["clipped"] <= 0.0501
