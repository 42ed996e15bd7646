"""One rank of several: `parity_script.py RANK WORLD FOLDER`. The last line that it prints is what it found, as JSON."""

import torch
from one_rank import RANK, WORLD, join, leave, small
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fastguard

NUM_STEPS, BAD = 24, 13


def train(model, *, ahead=None, same_data=False, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fastguard.wrap(optimizer, model, **{"parity": 4, **settings})
    torch.manual_seed(100 if same_data else 100 + RANK)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        if ahead is not None:
            ahead(step, model)
        optimizer.step()
    report = fastguard.Guard.of(optimizer).report()
    found = [finding for finding in report.findings if finding.rule == "ranks-differ"]
    history = fastguard.Guard.of(optimizer).history
    return [dict(one) for one in history.model.replica_differences] if found else []


def flipped(step, model):
    if step == BAD and RANK == WORLD - 1:
        weight = next(iter(model.parameters())).data
        weight.view(torch.int32).view(-1)[5] ^= 1


def clipped_alone(step, model):
    if step >= BAD and RANK == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def main():
    join()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    found = {
        "sound": train(DistributedDataParallel(small())),
        "sound, clipped": train(DistributedDataParallel(small()), max_norm=1e-3),
        "sound, tensor parallel": train(parallelize_module(small(), mesh, plan), same_data=True),
        "clipped on one rank": train(DistributedDataParallel(small()), ahead=clipped_alone),
        "flipped bit": train(DistributedDataParallel(small()), ahead=flipped),
        "other seeds": train(small(RANK)),
        "copies of a tensor-parallel bias drift": train(
            parallelize_module(small(), mesh, plan), ahead=_drift, same_data=True
        ),
    }
    leave(found)


def _drift(step, model):
    if step == BAD and RANK == 1:
        model[2].bias.data.to_local().add_(1e-3)


if __name__ == "__main__":
    main()
