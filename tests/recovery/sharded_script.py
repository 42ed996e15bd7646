"""One rank of two of a sharded training that goes wrong on one: `sharded_script.py RANK WORLD FOLDER`. Prints JSON."""

import hashlib
import json
import sys

import torch
import torch.distributed as dist
from recovery_helpers import loss_of, make, ruin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fastguard

RANK, STORE = int(sys.argv[1]), f"{sys.argv[3]}/store"


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def digest(model, optimizer):
    """Of what is here of parameters and optimizer state."""
    found = hashlib.sha256()
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    for tensor in (*model.parameters(), *state):
        found.update(local(tensor).detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run(case):
    model = make(norm=False)
    own = 0 if case == "tp" else RANK  # of the data
    if case == "tp":
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        fully_shard(model[0])
        fully_shard(model[2])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = None if case == "without" else fastguard.Recovery(every=10, patience=3, quarantine=4)
    optimizer = fastguard.wrap(optimizer, model, recovery=settings, check_every=0, max_consecutive_skips=8)
    places, before = [local(p).data_ptr() for p in model.parameters()], []
    for step in range(90):
        if step == 60 and RANK == 1 and case in ("large", "tp", "nan", "lost snapshots"):
            with torch.no_grad():
                local(model[2].weight).mul_(1e4 if case in ("large", "tp") else float("nan"))
        if step == 60 and case == "lost state":  # what a snapshot has, and the optimizer no longer
            optimizer.state.clear()
            with torch.no_grad():
                local(model[2].weight).mul_(1e4)
        if step == 60 and RANK == 1 and case == "lost snapshots":
            guard = optimizer.guard
            guard._rescue._snapshots.choose(older=True)  # as if the newest could not have been taken here
        optimizer.zero_grad()
        loss = loss_of(model, 2 * step + own)
        loss.backward()
        before.append(digest(model, optimizer))
        try:
            optimizer.step()
        except fastguard.RecoveryFailedError as error:
            return {"told": str(error)}
        optimizer.guard.observe(loss=loss.detach())
    events = optimizer.guard.history.model.recoveries
    back = [one for one in events if one["kind"] == "rollback"]
    return {
        "told": [] if settings is None else optimizer.guard.recoveries,
        "is_as_it_was": all(before[one["step"] + 1] == before[one["to"]] for one in back),
        "kinds": sorted({type(v).__name__ for s in optimizer.state.values() for v in s.values()}),
        "is_in_place": places == [local(p).data_ptr() for p in model.parameters()],
        "loss": float(sum(loss_of(model, 1000 + i).detach() for i in range(8)) / 8),
        "bits": digest(model, optimizer),
    }


def pipeline():
    """Each rank has a stage of plain tensors, and only the last one knows losses; the first one is ruined."""
    torch.manual_seed(RANK)
    stage = torch.nn.Linear(4 + RANK, 3)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    settings = fastguard.Recovery(every=10, patience=3, quarantine=4)
    world = dist.group.WORLD
    optimizer = fastguard.wrap(optimizer, stage, recovery=settings, check_every=0, process_group=world)
    before, random = [], torch.Generator().manual_seed(3)
    for step in range(80):
        if step == 62 and RANK == 0:
            with torch.no_grad():
                stage.weight.mul_(float("nan"))
        optimizer.zero_grad()
        loss = (stage(torch.randn(32, 4 + RANK, generator=random)) - 1.0).square().mean()
        loss.backward()
        before.append(digest(stage, optimizer))
        optimizer.step()
        if RANK == 1:
            optimizer.guard.observe(loss=loss.detach())
    (back,) = [one for one in optimizer.guard.history.model.recoveries if one["kind"] == "rollback"]
    return {"to": back["to"], "is_as_it_was": before[back["step"] + 1] == before[back["to"]]}


def ddp(case):
    """Both ranks have the whole model, and what is wrong is seen by one or by both."""
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
        loss = loss_of(model, 2 * step + RANK)
        if case == "nan" and RANK == 1 and 60 <= step < 75:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        told = loss.detach()
        if case == "local" and RANK == 1 and 60 <= step < 65:
            told = told * 1e6  # what one of them alone sees
        optimizer.guard.observe(loss=told)
        skipped.append(optimizer.guard.last.skipped)
    weights = [float(p.double().sum()) for p in model.parameters()]
    return {"told": optimizer.guard.recoveries, "skipped": skipped, "weights": weights}


torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{STORE}", rank=RANK, world_size=2)
CASES = ("without", "healthy", "large", "tp", "nan", "lost state", "lost snapshots")
by_ddp = {case: ddp(case) for case in ("healthy", "ruined", "nan", "local")}
print(json.dumps({**{case: run(case) for case in CASES}, "pipeline": pipeline(), "ddp": by_ddp}))
dist.destroy_process_group()
