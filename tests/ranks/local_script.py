"""One rank of several: `local_script.py RANK WORLD FOLDER`. The last line that it prints is what it found, as JSON."""

import contextlib
import logging
import math
from typing import Any

import torch
from one_rank import RANK, WORLD, join, leave, small, told
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastguard

NUM_STEPS, BAD = 22, 13
BATCH, LIMIT = 5, 0.05
Settings = dict[str, Any]


class Checkpointed(nn.Module):
    """A net with a part that runs its own backward pass within that of the whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.part, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, x):
        x = checkpoint(self.part, self.first(x).tanh(), use_reentrant=True)
        return self.last(x.tanh())


def train(made=small, *, bad=None, num_micro=1, factor=1.0, hook=None, num_steps=NUM_STEPS, ddp=None, **settings):
    """Trains beside a twin without a guard; what is known of the ranks, whether both have the same bits, and how far
    what was read is from this rank's own gradients, which a third one has."""
    guarded, twin = (DistributedDataParallel(made(), **(ddp or {})) for _ in range(2))
    alone = made()
    if hook is not None:
        for model in (guarded, twin):
            model.register_comm_hook(None, hook)
    optimizer, beside = (torch.optim.SGD(model.parameters(), lr=0.02) for model in (guarded, twin))
    optimizer = fastguard.wrap(optimizer, guarded, **{"watch_ranks": True, **settings})
    local = fastguard.Guard.of(optimizer)._local
    told.clear()
    torch.manual_seed(100 + RANK)
    apart, is_same = 0.0, True
    for step in range(num_steps):
        optimizer.zero_grad()
        beside.zero_grad()
        alone.zero_grad()
        alone.load_state_dict(guarded.module.state_dict())
        for micro in range(num_micro):
            x = torch.randn(BATCH, 6)
            if step == bad and RANK == 1 and micro == 0:
                x[0] = math.nan
            both = guarded, twin
            with contextlib.ExitStack() as stack:
                if micro < num_micro - 1:
                    for model in both:
                        stack.enter_context(model.no_sync())
                for model in (*both, alone):
                    (model(x).square().mean() * (factor if RANK == WORLD - 1 else 1.0)).backward()
        if step != bad:
            is_same &= all(torch.equal(p.grad, q.grad) for p, q in zip(guarded.parameters(), twin.parameters()))
            if local is not None:
                exact = sum(float(p.grad.double().square().sum()) for p in alone.parameters())
                apart = max(apart, abs(local._read[step][0] / exact - 1.0))
        optimizer.step()
        if step != bad:
            beside.step()
    is_same &= all(torch.equal(p, q) for p, q in zip(guarded.parameters(), twin.parameters()))
    guard = optimizer.guard
    report = guard.report()
    history = guard.history
    failures = [str(one) for one in guard._run.failures]
    return {
        "same": is_same,
        "bad": list(history.model.bad_ranks),
        "odd": list(history.model.odd_ranks),
        "num_ranks": history.model.num_ranks,
        "skipped": history.num_skipped,
        "findings": sorted(finding.rule for finding in report.findings),
        "said": [finding.summary for finding in report.findings],
        "text": str(report),
        "told": list(told),
        "failures": failures,
        "costs": {name: number for name, number in report.numbers.items() if "collective" in name},
        "apart": apart,
    }


def zero(bad=5):
    """ZeroRedundancyOptimizer beside AdamW without a guard: it has all gradients, and steps on some parameters."""
    model, twin = DistributedDataParallel(small()), DistributedDataParallel(small())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    beside = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    fastguard.wrap(optimizer, model, max_norm=LIMIT, watch_ranks=True)
    torch.manual_seed(100 + RANK)
    apart, seen = 0.0, []
    for step in range(12):
        x = torch.randn(BATCH, 6) * (math.nan if step == bad and RANK == 1 else 1.0)
        for one in (model, twin):
            one.zero_grad()
            one(x).square().mean().backward()
        exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in twin.parameters()))
        nn.utils.clip_grad_norm_(twin.parameters(), LIMIT)
        before = [p.clone() for p in model.parameters()]
        optimizer.step()
        last = optimizer.guard.last
        seen.append([last.norm.hex(), last.clip_coef.hex(), last.skipped])
        if step != bad:
            beside.step()
            apart = max(apart, abs(last.norm / exact - 1.0))
        else:
            stayed = all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    optimizer.consolidate_state_dict(to=0)
    weights = max(float((p - q).abs().max()) for p, q in zip(model.parameters(), twin.parameters()))
    return {
        "norm": apart,
        "weights": weights,
        "stayed": stayed,
        "seen": seen,
        "bad": list(optimizer.guard.history.model.bad_ranks),
        "state": len(optimizer.state_dict()["state"]) if RANK == 0 else None,
    }


def of_another_mind():
    """One rank's guard is at another step: that is told once, and the training goes on."""
    model = DistributedDataParallel(small())
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.02), model, watch_ranks=5)
    if RANK == 1:
        optimizer.guard._run.step = 7
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    guard = optimizer.guard
    return {"steps": guard.history.num_steps, "failures": [[one.times, one.error] for one in guard._run.failures]}


def refused():
    said = []
    for model in (None, small()):
        own = small() if model is None else model
        try:
            fastguard.wrap(torch.optim.SGD(own.parameters(), lr=0.1), model, watch_ranks=True)
        except TypeError as error:
            said.append(str(error))
    return said


def main():
    join()
    logging.getLogger("fastguard").setLevel(logging.DEBUG)
    views = {"gradient_as_bucket_view": True}
    found = {
        "sound": train(num_steps=32),
        "NaN": train(bad=BAD),
        "NaN at an exchange": train(bad=10),
        "NaN, bucket views": train(bad=BAD, ddp=views),
        "NaN, static graph": train(bad=BAD, ddp={"static_graph": True}),
        "NaN, a hook": train(bad=BAD, hook=fp16_compress_hook),
        "NaN, accumulation": train(bad=BAD, num_micro=3),
        "NaN, checkpointing": train(Checkpointed, bad=BAD),
        "odd": train(factor=4.0, num_steps=42),
        "not asked": train(bad=BAD, watch_ranks=None),
        "zero": zero(),
        "of another mind": of_another_mind(),
        "refused": refused(),
    }
    leave(found)


if __name__ == "__main__":
    main()
