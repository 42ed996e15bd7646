"""A transformer sharded with `fully_shard`: a NaN on one rank, a step that all ranks skip, a resume on other ranks.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py FOLDER
torchrun --standalone --nproc-per-node 4 examples/fsdp2.py FOLDER --resume

The first trains 20 steps, of which step 12 has a NaN in the gradients of rank 1 alone, and saves model, optimizer and
guard. The second goes on from there to step 30; on as many ranks as you like, as long as 16 can be divided by them.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fastguard

SAVED, TOTAL, BAD = 20, 30, 12
SYMBOLS, LENGTH, BATCH = 16, 24, 16


class Transformer(nn.Module):
    """Logits of each next symbol, [batch * length, symbols], for symbols [batch, length]."""

    def __init__(self, width: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.symbols(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x.flatten(0, 1))


def batch_of(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the batch of `step`: rows that count up, each at a pace of its own."""
    generator = torch.Generator().manual_seed(step)
    first, pace = torch.randint(SYMBOLS, (2, BATCH, 1), generator=generator)
    rows = (first + (pace % 3 + 1) * torch.arange(LENGTH + 1)) % SYMBOLS
    mine = rows[rank::world]
    return mine[:, :-1], mine[:, 1:]


def say(text: str) -> None:
    """Prints in one write, so that the lines of several ranks do not mix."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(folder: Path, *, resume: bool) -> None:
    """Trains from step 0 and saves, or goes on from what was saved."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    log = fastguard.JsonlSink(folder / "log.jsonl")  # to which rank 0 alone writes
    optimizer = fastguard.wrap(optimizer, model, max_norm=1.0, sinks=[log])
    guard = optimizer.guard

    start = 0
    if resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state, "guard": guard.stateful}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        start = SAVED
    for step in range(start, TOTAL if resume else SAVED):
        inputs, targets = batch_of(step, rank, world)
        loss = nn.functional.cross_entropy(model(inputs), targets.flatten())
        loss.backward()
        if step == BAD and rank == 1:
            model.layers[1].linear1.weight.grad.to_local()[0, :3] = math.nan
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss=loss)
        if guard.last.skipped:
            say(f"rank {rank} of {world}: step {step} was skipped, for {guard.last.nonfinite}")
    if not resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state, "guard": guard.stateful}, checkpoint_id=folder)
    guard.close()
    if rank == 0:
        say(str(guard.report()))
    say(f"rank {rank} of {world}: {guard.history.num_steps} steps, the last norm {guard.last.norm:.9g}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), resume="--resume" in sys.argv[2:])
    dist.destroy_process_group()
