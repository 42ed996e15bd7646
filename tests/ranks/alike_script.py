"""One rank of two: `alike_script.py RANK WORLD FOLDER`. Settings that differ between ranks."""

import datetime

import torch
import torch.distributed as dist
from one_rank import RANK, fsdp, join, leave, small, told
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastguard
from fastguard.ranks import alike


def train(make, *, is_guarded=True, later=None, **settings):
    """What the guard said while a model was trained; `later` changes it after two steps."""
    told.clear()
    model = make(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if is_guarded:
        fastguard.wrap(optimizer, model, **settings)
    for step in range(alike._NUM_LOOKS + 3):
        if step == 2 and later is not None:
            later(fastguard.Guard.of(optimizer))
        model(torch.ones(4, 6)).square().mean().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return {"error": str(error), "step": step}
        optimizer.zero_grad()
    run = optimizer.guard._run if is_guarded else None
    is_over = is_guarded and run.is_alike and (run.is_short or run.ranks is not None)
    return {"error": "", "told": told.copy(), "is over": is_over}


def alone(model):
    return model


def clips(limit):
    """Assigns a limit; None changes nothing."""
    return None if limit is None else lambda guard: setattr(guard, "clip", fastguard.GlobalNorm(limit))


def stops_skipping(guard):
    guard.skip_nonfinite = False


def unguarded():
    """Rank 1 has no guard: rank 0 waits until the store's timeout, and no longer."""
    store = dist.distributed_c10d._get_default_store()
    known = store.timeout
    store.set_timeout(datetime.timedelta(seconds=1))
    try:
        return train(alone, is_guarded=RANK == 0, recovery=True)
    finally:
        store.set_timeout(known)


def main():
    join(60.0)
    first, ddp = RANK == 0, DistributedDataParallel
    found = {
        "ddp, max_norm": train(ddp, max_norm=1.0 + RANK),
        "ddp, recovery": train(ddp, recovery=True if first else None),
        "fsdp, max_norm": train(fsdp, max_norm=0.01 if first else 1e9),
        "fsdp, skip": train(fsdp, skip_nonfinite=first),
        "fsdp, recovery": train(fsdp, recovery=True if first else None),
        "ddp, alike": train(ddp, clip=fastguard.ZClip(), recovery=fastguard.Recovery(keep=2, state=[nn.Linear(1, 1)])),
        "fsdp, alike": train(fsdp, clip=fastguard.Percentile(90.0)),
        "apart": train(alone, max_norm=1.0 + RANK),
        "fsdp, clip assigned": train(fsdp, later=clips(1.0)),
        "fsdp, clips assigned": train(fsdp, later=clips(1.0 + RANK)),
        "fsdp, clip on one": train(fsdp, later=clips(1.0 if first else None)),
        "fsdp, skip on one": train(fsdp, later=stops_skipping if first else None),
        "ddp, one guard": train(ddp, is_guarded=first),
        "unguarded": unguarded(),
    }
    leave(found)


if __name__ == "__main__":
    main()
