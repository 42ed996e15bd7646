"""One of two processes of a training: prints as JSON what came of each case. Run by test_processes.py."""

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from guard_helpers import loss_at, make_model, poison
from torch.nn.parallel import DistributedDataParallel

import fastguard

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[3])


class Heard(logging.Handler):
    """Keeps what is logged from warnings on."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.told = []

    def emit(self, record):
        self.told.append(record.getMessage())


def data_parallel(ranks):
    """Ten steps with a NaN in all processes' gradients at one of them."""
    heard = Heard()
    logging.getLogger("fastguard").addHandler(heard)
    model = DistributedDataParallel(make_model())
    path = FOLDER / (f"{ranks}.jsonl" if ranks == "first" else f"{ranks}-{RANK}.jsonl")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = fastguard.wrap(
        optimizer, model, max_norm=1.0, sinks=[fastguard.JsonlSink(path)], ranks=ranks, check_every=5
    )
    for step in range(10):
        optimizer.zero_grad()
        loss_at(model, 2 * step + RANK).backward()
        if step == 3:
            poison(model)
        optimizer.step()
    optimizer.guard.close()
    logging.getLogger("fastguard").removeHandler(heard)
    weights = [float(p.detach().double().sum()) for p in model.parameters()]
    findings = [finding.rule for finding in optimizer.guard.report().findings]
    return {"told": heard.told, "weights": weights, "steps": optimizer.guard.history.num_steps, "findings": findings}


def checkpointed():
    """Saved by torch.distributed.checkpoint after six steps, loaded into a fresh guard, gone on with."""

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            loss = loss_at(model, step)
            loss.backward()
            optimizer.step()
            optimizer.guard.observe(loss=loss)

    def make():
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, fastguard.wrap(optimizer, model, clip=fastguard.Spikes(), check_every=0)

    model, optimizer = make()
    train(model, optimizer, range(6))
    dcp.save({"guard": optimizer.guard.stateful, "model": model}, checkpoint_id=FOLDER / "dcp")
    train(model, optimizer, range(6, 40))
    fresh, again = make()
    dcp.load({"guard": again.guard.stateful, "model": fresh}, checkpoint_id=FOLDER / "dcp")
    start = again.guard._run.step
    train(fresh, again, range(6, 40))
    clips = [o.guard.state_dict()["clip"] for o in (optimizer, again)]
    histories = [[list(o.guard.history.loss), list(o.guard.history.grad_norm)] for o in (optimizer, again)]
    return {"start": start, "clips": clips, "histories": histories}


def sharded():
    """What `wrap` says of flat parameters, that come without their model, whichever parameters FSDP shows."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    told = []
    for shows_originals in (False, True):
        inner = make_model()
        model = FullyShardedDataParallel(inner, use_orig_params=shows_originals, device_id=torch.device("cpu"))
        for given in (None, inner):
            try:
                fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), given)
                told.append("not refused")
            except TypeError as error:
                told.append(str(error))
    return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("fastguard").propagate = False
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=2)
    found = {
        "first": data_parallel("first"),
        "all": data_parallel("all"),
        "checkpointed": checkpointed(),
        "sharded": sharded(),
    }
    print(json.dumps(found))
    dist.destroy_process_group()
