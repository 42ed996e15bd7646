"""One rank of two: `setups_script.py RANK WORLD FOLDER`. Set-ups as people write them, and what comes of them."""

import math

import torch
import torch.distributed as dist
from one_rank import FOLDER, RANK, WORLD, fsdp, join, leave, local, net, small, told
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import fastguard

LIMIT, BAD, NUM_STEPS = 0.05, 12, 42


def whole_norm(params):
    """Of gradients, by their whole tensors, in float64."""
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in params]
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))


def train(model, num_micro=1, *, bad=True, sinks=(), **settings):
    """Trains a model that shards its parameters, with a NaN in one batch of rank 1."""
    told.clear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = fastguard.wrap(optimizer, model, max_norm=LIMIT, sinks=sinks, **settings)
    guard = optimizer.guard
    torch.manual_seed(10 + RANK)
    found = {"norm": 0.0, "bits": [], "skipped": []}
    for step in range(NUM_STEPS):
        for micro in range(num_micro):
            x = torch.randn(8, 16)
            if bad and step == BAD and RANK == 1 and micro == 0:
                x[0] = math.nan
            if num_micro > 1:
                model.set_requires_gradient_sync(micro == num_micro - 1)
            (model(x).float() + 1.0).square().mean().backward()
        exact = whole_norm(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        last = guard.last
        found["bits"].append([last.norm.hex(), last.clip_coef.hex()])
        if last.skipped:
            found["skipped"].append(step)
        if math.isfinite(exact):
            found["norm"] = max(found["norm"], abs(last.norm / exact - 1.0))
    found["costs"] = guard.report().numbers.get("num_collectives_per_step")
    model_facts = guard.history.model
    found |= {"bad": list(model_facts.bad_ranks), "num_ranks": model_facts.num_ranks}
    found["failures"] = [str(one) for one in guard._run.failures]
    found["told"] = [text for text in told if text.startswith("step ")]
    guard.close()
    guard.detach()
    return found


def struck_shard():
    """A NaN that came to rank 1's part after the sum."""
    model = fsdp(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fastguard.wrap(optimizer, model)
    model(torch.ones(2, 16)).sum().backward()
    if RANK == 1:
        local(model[2].weight.grad).view(-1)[0] = math.nan
    optimizer.step()
    return {"bad": list(optimizer.guard.history.model.bad_ranks), "skipped": optimizer.guard.last.skipped}


class Experts(nn.Module):
    """A router that all ranks have, and an expert of this rank's own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(6, 4)
        torch.manual_seed(1 + RANK)
        self.expert = nn.Linear(4, 3 + RANK)

    def forward(self, x):
        return self.expert(self.router(x).tanh())


def experts():
    """Experts that DistributedDataParallel leaves alone: what it averages counts once, each rank's own too."""
    inner = Experts()
    ignored = [f"expert.{name}" for name, _ in inner.expert.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ignored)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fastguard.wrap(optimizer, model, max_norm=LIMIT, process_group=dist.group.WORLD)
    apart, bits = 0.0, []
    for step in range(12):
        optimizer.zero_grad()
        model(
            torch.randn(4, 6, generator=torch.Generator().manual_seed(step * WORLD + RANK))
        ).square().mean().backward()
        own = torch.tensor(whole_norm(inner.expert.parameters()) ** 2, dtype=torch.float64)
        dist.all_reduce(own)
        exact = math.sqrt(whole_norm(inner.router.parameters()) ** 2 + float(own))
        optimizer.step()
        last = optimizer.guard.last
        apart = max(apart, abs(last.norm / exact - 1.0))
        bits.append([last.norm.hex(), last.clip_coef.hex()])
    optimizer.zero_grad()
    model(torch.randn(4, 6) * (math.nan if RANK == 1 else 1.0)).square().mean().backward()
    for p in inner.router.parameters():
        p.grad.zero_()  # so that the NaN is in one rank's expert alone
    optimizer.step()
    rows = {name: optimizer.guard.last.tensors[name].norm for name in optimizer.guard.last.tensors.names}
    skipped = optimizer.guard.last.skipped
    return {"norm": apart, "bits": bits, "skipped": skipped, "router": rows["router.weight"]}


def pipeline():
    """torch's own pipeline: each rank has a stage, and all clip by the norm of the whole."""
    whole, twin = net(), net()
    stages = [nn.Sequential(*whole[:2]), nn.Sequential(*whole[2:])]
    stage = stages[RANK]
    run = ScheduleGPipe(
        PipelineStage(stage, RANK, WORLD, torch.device("cpu")), 4, loss_fn=lambda y, t: (y - t).square().mean()
    )
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    optimizer = fastguard.wrap(optimizer, stage, max_norm=LIMIT, process_group=dist.group.WORLD)
    beside = torch.optim.SGD(twin.parameters(), lr=0.1)
    apart, bits = 0.0, []
    torch.manual_seed(3)
    for _ in range(6):
        x, y = torch.randn(8, 16), torch.randn(8, 5)
        optimizer.zero_grad()
        beside.zero_grad()
        run.step(x) if RANK == 0 else run.step(target=y)
        (twin(x) - y).square().mean().backward()
        exact = float(nn.utils.clip_grad_norm_(twin.parameters(), LIMIT))
        optimizer.step()
        beside.step()
        last = optimizer.guard.last
        apart = max(apart, abs(last.norm / exact - 1.0))
        bits.append([last.norm.hex(), last.clip_coef.hex()])
    mine = [twin[:2], twin[2:]][RANK]
    weights = max(float((p - q).abs().max()) for p, q in zip(stage.parameters(), mine.parameters()))
    return {"norm": apart, "bits": bits, "weights": weights}


def flat():
    """`fastguard.clip_grad_norm_` on FSDP1's flat parameters, and in torch's place where nothing of it is sharded."""
    said = []
    for settings in ({}, {"use_orig_params": True}):
        model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), **settings)
        model(torch.ones(2, 16)).sum().backward()
        try:
            fastguard.clip_grad_norm_(model.parameters(), LIMIT)
        except TypeError as error:
            said.append(str(error))
    whole = ShardingStrategy.NO_SHARD
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), sharding_strategy=whole)
    model(torch.ones(2, 16)).sum().backward()
    exact = whole_norm(model.parameters())
    known, nn.utils.clip_grad_norm_ = nn.utils.clip_grad_norm_, fastguard.clip_grad_norm_
    try:
        norm = float(model.clip_grad_norm_(LIMIT))
    finally:
        nn.utils.clip_grad_norm_ = known
    return {"said": said, "norm": abs(norm / exact - 1.0), "clipped": whole_norm(model.parameters())}


def zero(bad=5):
    """ZeroRedundancyOptimizer beside AdamW without a guard: it has all gradients, and steps on some parameters."""
    model, twin = DistributedDataParallel(small()), DistributedDataParallel(small())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    beside = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    fastguard.wrap(optimizer, model, max_norm=LIMIT)
    torch.manual_seed(100 + RANK)
    apart, seen = 0.0, []
    for step in range(12):
        x = torch.randn(5, 6) * (math.nan if step == bad and RANK == 1 else 1.0)
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
    state = len(optimizer.state_dict()["state"]) if RANK == 0 else None
    return {"norm": apart, "weights": weights, "stayed": stayed, "seen": seen, "state": state}


def main():
    join()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {
        "plain": train(fsdp(net())),
        "mixed precision": train(fsdp(net(), mp_policy=mixed)),
        "offload": train(fsdp(net(), offload_policy=CPUOffloadPolicy(pin_memory=False))),
        "not resharded": train(fsdp(net(), reshard_after_forward=False)),
        "accumulation": train(fsdp(net()), 3),
        "logs": train(fsdp(net()), bad=False, sinks=[fastguard.JsonlSink(FOLDER / f"{RANK}.jsonl")], ranks="all"),
        "struck": struck_shard(),
        "zero": zero(),
        "experts": experts(),
        "pipeline": pipeline(),
        "flat": flat(),
    }
    leave(found)


if __name__ == "__main__":
    main()
