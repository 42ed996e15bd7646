"""A run that torchrun starts anew when a rank has died: it goes on from its checkpoint, and log and report say so.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/elastic.py FOLDER

The variable gives each attempt a store of its own: in one that attempts share, a rank may find the addresses of ranks
that are gone, and fail or wait for them (pytorch/pytorch#135712).

Rank 1 dies at step 12 of the first attempt. The second goes on from the checkpoint of step 10 to step 20.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastguard

TOTAL, EVERY, DIES_AT = 20, 5, 12


def main(folder: Path) -> None:
    """Trains to the end, or until rank 1 dies."""
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    log = fastguard.JsonlSink(folder / "log.jsonl")  # to which rank 0 alone writes, in all attempts
    guard = fastguard.wrap(optimizer, model, max_norm=1.0, sinks=[log]).guard
    saved, start = folder / "newest.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        guard.load_state_dict(state["guard"])
        start = state["step"]
    for step in range(start, TOTAL):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        if (rank, attempt, step) == (1, 0, DIES_AT):
            os._exit(13)  # as of a machine that is gone
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss=loss)
        if (step + 1) % EVERY == 0:
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "guard": guard.state_dict(), "step": step + 1}, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
            dist.barrier()
    guard.close()
    if rank == 0:
        print(f"attempt {attempt + 1}, from step {start}\n{guard.report()}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
