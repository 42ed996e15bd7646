"""One rank of two under DistributedDataParallel: `ddp_script.py RANK WORLD FOLDER`. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from recovery_helpers import loss_of, make, ruin

import fastguard

rank, store = int(sys.argv[1]), f"{sys.argv[3]}/store"
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def run(case: str) -> dict[str, Any]:
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
