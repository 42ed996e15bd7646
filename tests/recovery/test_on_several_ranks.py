"""Several processes decide alike, whoever of them sees what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    here = Path(__file__).parent
    path = [str(here), str(here.parents[1]), *sys.path]
    code = f"import sys\nsys.path[:0] = {path!r}\n{CODE}"
    command, store = [sys.executable, "-c", code], str(tmp_path / "store")
    started = [subprocess.Popen([*command, str(rank), store], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    found: list[dict[str, Any]] = []
    for process in started:
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        found.append(json.loads(out))
    assert found[0] == found[1]
    assert {case: len(one["told"]) for case, one in found[0].items()} == {
        "healthy": 0,
        "ruined": 1,
        "nan": 1,
        "local": 1,
    }
