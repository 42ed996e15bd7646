"""Two processes that train one model: one log, one warning; checkpoints; shards that look like whole parameters."""

from pathlib import Path

import pytest
from several_processes import run, slow

from fastguard.sinks import read_jsonl

pytestmark = slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def found(folder):
    return run(Path(__file__).with_name("processes_script.py"), 2, folder)


def test_rank_0_alone_writes_and_warns_and_all_know_the_same(found, folder):
    first, second = (each["first"] for each in found)
    assert [line["step"] for line in read_jsonl(folder / "first.jsonl")] == list(range(10))
    assert any("step 3: gradients are not finite" in text for text in first["told"])
    assert second["told"] == []
    assert first["weights"] == second["weights"]
    assert (first["steps"], first["findings"]) == (second["steps"], second["findings"])
    assert "non-finite-gradients" in first["findings"]


def test_where_all_are_asked_each_writes_its_own(found, folder):
    for rank, each in enumerate(found):
        assert [line["step"] for line in read_jsonl(folder / f"all-{rank}.jsonl")] == list(range(10))
        assert any("step 3: gradients are not finite" in text for text in each["all"]["told"])


def test_torchs_distributed_checkpoint_carries_the_guard(found):
    for each in found:
        got = each["checkpointed"]
        assert got["start"] == 6
        assert got["clips"][0] == got["clips"][1]
        assert got["histories"][0] == got["histories"][1] and len(got["histories"][0][0]) == 39  # the last step is held


def test_flat_parameters_without_their_model_are_refused(found):
    for each in found:
        assert len(each["sharded"]) == 4
        for message in each["sharded"]:
            assert "FullyShardedDataParallel" in message and "model.clip_grad_norm_" in message
