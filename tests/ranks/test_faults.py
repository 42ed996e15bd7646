"""Ranks that stall, come late, die or are started anew: an error after a timeout or the same numbers; a sound log."""

import json
import logging
from pathlib import Path

import pytest
import torch
from several_processes import slow, start

import fastguard
from fastguard.sinks import read_jsonl

SCRIPT = Path(__file__).with_name("fault_script.py")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What both ranks said last, and the folder; rank 1 has died."""
    folder = tmp_path_factory.mktemp("faults")
    started = start(SCRIPT, 2, folder)
    try:
        said = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0, 3], said
    return [json.loads(out.splitlines()[-1]) for out, _ in said], folder


class TestOnTwoRanks:
    pytestmark = slow

    def test_a_rank_that_does_not_come_is_an_error_after_the_timeout_and_no_step(self, ran):
        stalled = ran[0][0]["stalled"]
        assert "imed out" in stalled["error"] and 1.5 < stalled["waited"] < 30.0
        assert stalled["stayed"] and not stalled["recorded"]

    def test_a_rank_that_comes_late_is_waited_for(self, ran):
        first, second = (each["straggling"] for each in ran[0])
        assert first["bits"] == second["bits"] and len(first["bits"]) == 3
        assert first["total_s"] > 0.9  # what it waits is in the cost of guarding

    def test_a_rank_that_dies_is_an_error_and_the_log_of_rank_0_can_be_read(self, ran):
        killed = ran[0][0]["killed"]
        assert killed["error"] and killed["waited"] < 60.0
        assert [line["step"] for line in read_jsonl(ran[1] / "log.jsonl")] == [0, 1, 2, 3]
        assert "steps             4, the last is step 3" in killed["report"]


def trained(folder):
    model = torch.nn.Linear(2, 1)
    sink = fastguard.JsonlSink(folder / "log.jsonl")
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, sinks=[sink])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.guard.close()
    return optimizer.guard


@pytest.mark.parametrize("count", ["", "0", "1", "2", "odd"])
def test_a_run_that_torchrun_started_anew_says_so(count, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    with caplog.at_level(logging.WARNING, "fastguard"):
        guard = trained(tmp_path)
    times = int(count) if count in ("1", "2") else 0
    told = [record.getMessage() for record in caplog.records if "restarted this run" in record.getMessage()]
    assert told == ([f"torchrun restarted this run: attempt {times + 1}"] if times else [])
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    noted = [line["model"]["num_restarts"] for line in lines if line.get("model", {}).get("num_restarts")]
    assert noted == ([times] if times else [])
    assert (f"\nrestarts          {times} by torchrun\n" in str(guard.report())) == bool(times)
