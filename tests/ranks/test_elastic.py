"""examples/elastic.py under torchrun: a rank dies, both are started anew, and log and report say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from several_processes import slow, torchrun

from fastguard.sinks import read_jsonl

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
pytestmark = [
    *slow,
    pytest.mark.skipif(not EXAMPLE.is_file(), reason="examples/ is not beside the tests: they run from a copy"),
]


def test_a_run_that_torchrun_starts_anew_goes_on_and_says_so(tmp_path: Path) -> None:
    often = "--max-restarts", "1", "--monitor-interval", "0.1"
    said = torchrun(2, *often, str(EXAMPLE), str(tmp_path), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # see the example
    assert "attempt 2, from step 10\n" in said and "torchrun has started this run anew: attempt 2" in said
    assert "\nrestarts          1 by torchrun\n" in said and "\nsteps             20, the last is step 19\n" in said
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    restarts = [line["model"]["num_restarts"] for line in lines if line.get("model", {}).get("num_restarts")]
    assert restarts == [1]
    written = [line["step"] for line in lines if "step" in line]
    # Those after the checkpoint were taken twice: by the attempt that died, and by the one that counts.
    assert written[:12] == [*range(12)] and written[-10:] == [*range(10, 20)]
    log = read_jsonl(tmp_path / "log.jsonl")
    assert {line["step"] for line in log} == {*range(20)}
