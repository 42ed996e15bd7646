"""Several processes decide alike, whoever of them sees what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
]
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
CODE = """
import json, sys
import torch, torch.distributed as dist
import fastguard
from recovery_helpers import loss_of, make, ruin

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def run(case):
    model = torch.nn.parallel.DistributedDataParallel(make(norm=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = fastguard.Recovery(every=10, patience=3, quarantine=4)
    optimizer = fastguard.wrap(optimizer, model, recovery=settings, check_every=0, max_consecutive_skips=8)
    skipped = []
    for step in range(90):
        if case == "ruined" and step == 60:
            torch.manual_seed(3)
            ruin(model)
        optimizer.zero_grad()
        loss = loss_of(model, 2 * step + rank)
        if case == "nan" and rank == 1 and 60 <= step < 75:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        told = loss.detach()
        if case == "local" and rank == 1 and 60 <= step < 65:
            told = told * 1e6  # what one of them alone sees
        optimizer.guard.observe(loss=told)
        skipped.append(optimizer.guard.last.skipped)
    weights = [float(p.double().sum()) for p in model.parameters()]
    return {"told": optimizer.guard.recoveries, "skipped": skipped, "weights": weights}

print(json.dumps({case: run(case) for case in ("healthy", "ruined", "nan", "local")}))
dist.destroy_process_group()
"""


def run(command: list[str], store: Path) -> list[dict[str, Any]]:
    """What each of two processes printed."""
    here = Path(__file__).parent
    path = [str(here), str(here.parents[1]), *sys.path]
    code = f"import sys\nsys.path[:0] = {path!r}\n"
    started = [
        subprocess.Popen([sys.executable, "-c", code + command[0], *command[1:], str(rank), str(store)], **PIPES)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0, 0], said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_two_processes(tmp_path: Path) -> None:
    found = run([CODE], tmp_path / "store")
    assert found[0] == found[1]
    assert {case: len(one["told"]) for case, one in found[0].items()} == {
        "healthy": 0,
        "ruined": 1,
        "nan": 1,
        "local": 1,
    }


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("sharded_script.py")
    code = "import runpy; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return run([code, str(script)], tmp_path_factory.mktemp("sharded") / "store")


def test_a_healthy_sharded_run_is_the_same_to_the_bit(sharded: list[dict[str, Any]]) -> None:
    for found in sharded:
        assert found["healthy"]["told"] == [] and found["healthy"]["bits"] == found["without"]["bits"]


@pytest.mark.parametrize("case", ["large", "tp", "nan", "lost state"])
def test_ruin_on_one_rank_puts_the_parts_on_both_back(sharded: list[dict[str, Any]], case: str) -> None:
    for found in sharded:
        (told,) = found[case]["told"]
        assert told.startswith("rolled back from 63 to 50 because ")
        assert found[case]["is_as_it_was"] and found[case]["is_in_place"]
        assert found[case]["kinds"] == ["DTensor", "Tensor"]
    first, other = (found[case]["loss"] for found in sharded)
    assert first == other < 1.0


def test_copies_of_different_steps_are_put_back_nowhere(sharded: list[dict[str, Any]]) -> None:
    for found in sharded:
        told = found["lost snapshots"]["told"]
        assert "a process has no snapshot of the step that others go back to" in told and "Nothing could be" in told


def test_stages_go_back_together_though_one_alone_knows_losses(sharded: list[dict[str, Any]]) -> None:
    for found in sharded:
        assert found["pipeline"] == {"to": 50, "is_as_it_was": True}
