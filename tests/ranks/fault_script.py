"""One rank of two: `fault_script.py RANK WORLD FOLDER`. Rank 1 stalls, straggles, and dies; rank 0 says how it went."""

import datetime
import json
import os
import time

import torch
import torch.distributed as dist
from one_rank import FOLDER, RANK, join
from torch import nn
from torch.distributed.fsdp import fully_shard

import fastguard

SHORT, DIES_AT = datetime.timedelta(seconds=2), 4


def made(model, **settings):
    return fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **settings)


def stage():
    torch.manual_seed(RANK)
    return nn.Linear(4, 3)


def stalled():
    """Rank 1 never comes to the step."""
    group = dist.new_group([0, 1], SHORT, "gloo")
    model = stage()
    optimizer = made(model, process_group=group)
    model(torch.ones(2, 4)).sum().backward()
    before, started, error = [p.clone() for p in model.parameters()], time.monotonic(), ""
    if RANK == 0:
        try:
            optimizer.step()
        except RuntimeError as raised:
            error = str(raised)
    waited = time.monotonic() - started
    dist.barrier()
    stayed = all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    last = optimizer.guard.last
    return {"error": error, "waited": waited, "stayed": stayed, "recorded": last is not None}


def straggling():
    """Rank 1 comes late, and the step is as ever."""
    model = stage()
    optimizer = made(model, process_group=dist.group.WORLD, max_norm=0.5)
    bits = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).sum().backward()
        if RANK == 1 and step == 1:
            time.sleep(1.0)
        optimizer.step()
        last = optimizer.guard.last
        bits.append([last.norm.hex(), last.clip_coef.hex()])
    return {"bits": bits, "total_s": optimizer.guard.report().numbers["overhead_total_s"]}


def killed():
    """Rank 1 dies between a backward pass and its step."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = made(model, sinks=[fastguard.JsonlSink(FOLDER / "log.jsonl")])
    started, error = time.monotonic(), ""
    try:
        for step in range(8):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            if step == DIES_AT and RANK == 1:
                os._exit(3)
            optimizer.step()
            optimizer.guard.observe(loss=float(step))
    except RuntimeError as raised:
        error = str(raised)
    waited = time.monotonic() - started
    optimizer.guard.close()
    return {"error": error, "waited": waited, "report": str(optimizer.guard.report())}


def main():
    join(60.0)
    found = {"stalled": stalled(), "straggling": straggling()}
    print(json.dumps(found), flush=True)
    found["killed"] = killed()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
