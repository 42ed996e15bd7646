"""Two processes that train one model: one log, one warning; checkpoints; shards that look like whole parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fastguard.sinks import read_jsonl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("processes_script.py")
    path = [str(script.parent), str(script.parents[2])]
    code = f"import sys, runpy; sys.path[:0] = {path!r}; runpy.run_path({str(script)!r}, run_name='__main__')"
    command = [sys.executable, "-c", code]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, str(rank), str(folder)], **pipes) for rank in range(2)]
    try:
        said = [process.communicate(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0, 0], said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_rank_0_alone_writes_and_warns_and_all_know_the_same(found: list[dict[str, Any]], folder: Path) -> None:
    first, second = (each["first"] for each in found)
    assert [line["step"] for line in read_jsonl(folder / "first.jsonl")] == list(range(10))
    assert any("step 3: gradients are not finite" in text for text in first["told"])
    assert second["told"] == []
    assert first["weights"] == second["weights"]
    assert (first["steps"], first["findings"]) == (second["steps"], second["findings"])
    assert "non-finite-gradients" in first["findings"]


def test_where_all_are_asked_each_writes_its_own(found: list[dict[str, Any]], folder: Path) -> None:
    for rank, each in enumerate(found):
        assert [line["step"] for line in read_jsonl(folder / f"all-{rank}.jsonl")] == list(range(10))
        assert any("step 3: gradients are not finite" in text for text in each["all"]["told"])


def test_torchs_distributed_checkpoint_carries_the_guard(found: list[dict[str, Any]]) -> None:
    for each in found:
        got = each["checkpointed"]
        assert got["start"] == 6
        assert got["clips"][0] == got["clips"][1]
        assert got["histories"][0] == got["histories"][1] and len(got["histories"][0][0]) == 39  # the last step is held


def test_flat_parameters_without_their_model_are_refused(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert len(each["sharded"]) == 4
        for message in each["sharded"]:
            assert "FullyShardedDataParallel" in message and "model.clip_grad_norm_" in message
