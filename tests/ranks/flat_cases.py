"""FSDP1 on the ranks of `script.py`."""

import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fastguard

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])
LIMIT, NUM_STEPS, BAD = 0.05, 8, 6


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 48), nn.Tanh(), nn.Linear(48, 5))


def flat(**settings):
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), auto_wrap_policy=policy, **settings)


def train(bad=None, **settings):
    """Trains a sharded model beside a whole one; how far they are apart, and what the guard said."""
    model, whole = flat(**settings), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    beside = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    optimizer = fastguard.wrap(optimizer, model, max_norm=LIMIT)
    guard = optimizer.guard
    torch.manual_seed(1)
    found = {"norm": 0.0, "bits": [], "skipped": [], "elements": []}
    for step in range(NUM_STEPS):
        x, y = torch.randn(8, 16), torch.randn(8, 5)
        optimizer.zero_grad()
        beside.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        ((whole(x) - y) ** 2).mean().backward()
        exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in whole.parameters()))
        if step == bad and RANK == 1:
            next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = math.nan
        nn.utils.clip_grad_norm_(whole.parameters(), LIMIT)
        optimizer.step()
        last = guard.last
        found["bits"].append([last.norm.hex(), last.clip_coef.hex()])
        found["skipped"].append(last.skipped)
        found["elements"].append(last.gradients.total_elements)
        if step != bad:
            beside.step()
            found["norm"] = max(found["norm"], abs(last.norm / exact - 1.0))
        if step == 5:
            found["names"] = list(last.tensors.names)
            norms = {name: float(p.grad.double().norm()) for name, p in whole.named_parameters()}
            scale = last.clip_coef  # torch's clipping has scaled these
            rows = [one for one in zip(last.tensors.names, last.tensors) if one[0] in norms]  # none where all is flat
            found["rows"] = max((abs(row.norm * scale / norms[name] - 1.0) for name, row in rows), default=0.0)
    report = guard.report()
    found["outputs"] = float((model(x) - whole(x)).abs().max())
    found["findings"] = sorted(finding.rule for finding in report.findings)
    found["trouble"] = guard._run.ranks.trouble
    found["num_ranks"] = guard.history.model.num_ranks
    found["failures"] = [str(one) for one in guard._run.failures]
    return found


def refusals():
    model = flat(use_orig_params=True)
    whole = FullyShardedDataParallel(
        nn.Linear(5, 5), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    mixed = nn.Sequential(flat(use_orig_params=True), whole)
    said = {}
    cases = {
        "no model": (model, None, {}),
        "another model": (model, net(), {}),
        "two strategies": (mixed, mixed, {}),
        "recovery": (model, model, {"recovery": True}),
        "units": (model, model, {"clip": fastguard.AGC()}),
        "plain": (net(), model, {}),
    }
    for case, (own, given, settings) in cases.items():
        try:
            fastguard.wrap(torch.optim.SGD(own.parameters(), lr=0.1), given, **settings)
        except (TypeError, ValueError) as error:
            said[case] = str(error)
    return said


def flat_cases():
    """Of four ranks."""
    pairs = [dist.new_group([i, i + 1]) for i in range(0, WORLD, 2)]
    across = [dist.new_group(list(range(i, WORLD, 2))) for i in range(2)]
    hybrid = {"process_group": (pairs[RANK // 2], across[RANK % 2]), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    return {
        "flat, NaN": train(bad=BAD),
        "originals, NaN": train(use_orig_params=True, bad=BAD),
        "gradients only": train(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        "not sharded": train(sharding_strategy=ShardingStrategy.NO_SHARD),
        "hybrid": train(use_orig_params=True, **hybrid),
        "refusals": refusals(),
    }
