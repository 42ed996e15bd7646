"""One rank of several: `script.py RANK WORLD FOLDER`. The last line that it prints is what it found, as JSON."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from flat_cases import flat_cases
from one_rank import RANK, WORLD, fsdp, join, leave, local, net, told
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fastguard
from fastguard.ranks.shards import groups_across, layouts_of

LIMIT = 0.05
Make = Callable[[nn.Module], nn.Module]


def tp(model, mesh):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def train(make, width, bad=None, in_batch=False, **settings):
    """Trains a sharded model beside a whole one; how far they are apart, and what the guard said."""
    model, whole = make(net(width)), net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    beside = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    optimizer = fastguard.wrap(optimizer, model, **{"max_norm": LIMIT, **settings})
    guard = fastguard.Guard.of(optimizer)
    torch.manual_seed(1)
    found = {"norm": 0.0, "rows": 0.0, "elements": [], "bits": [], "skipped": [], "nonfinite": []}
    for step in range(14):
        x, y = torch.randn(8, 16), torch.randn(8, 5)
        mine = x * math.nan if step == bad and RANK == 1 and in_batch else x
        loss = ((model(mine) - y) ** 2).mean()
        loss.backward()
        ((whole(x) - y) ** 2).mean().backward()
        exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in whole.parameters()))
        if step == bad and RANK == 1 and not in_batch:
            local(next(iter(model.parameters())).grad).view(-1)[0] = math.nan
        rows = {name: (p.grad.double(), p.grad.numel()) for name, p in whole.named_parameters()}
        rows = {
            name: (float(g.norm()), float(g.abs().max()), float(g.std(correction=0)), n)
            for name, (g, n) in rows.items()
        }
        nn.utils.clip_grad_norm_(whole.parameters(), LIMIT)
        optimizer.step()
        guard.observe(loss=loss + RANK)
        if step != bad:
            beside.step()
        last = guard.last
        found["elements"].append(last.gradients.total_elements)
        found["skipped"].append(last.skipped)
        found["bits"].append([last.norm.hex(), last.clip_coef.hex()])
        found["nonfinite"].append(last.nonfinite)
        if step != bad:
            found["norm"] = max(found["norm"], abs(last.norm / exact - 1.0))
            for name, row in zip(last.tensors.names, last.tensors):
                norm, largest, std, count = rows[name]
                apart = abs(row.norm / norm - 1.0), abs(row.abs_max / largest - 1.0), abs(row.std / std - 1.0)
                found["rows"] = max(found["rows"], *apart, float(row.numel != count))
        optimizer.zero_grad()
        beside.zero_grad()
    found["tables"] = [len(guard.last.tensors), guard.history.tensors.num_samples]
    with torch.no_grad():
        pairs = zip(model.parameters(), whole.parameters())
        full = [(p.full_tensor() if hasattr(p, "full_tensor") else p, q) for p, q in pairs]
        found["weights"] = max(float((p - q).abs().max()) for p, q in full)
    report = guard.report()
    found["losses"] = [entry.loss for entry in guard.history.recent]
    found["findings"] = sorted(finding.rule for finding in report.findings)
    found["collectives"] = guard._run.ranks.wire.num_collectives if guard._run.ranks else 0
    found["trouble"] = guard._run.ranks.trouble if guard._run.ranks else []
    found["bad ranks"] = [guard.history.model.num_ranks, list(guard.history.model.bad_ranks)]
    found["said"] = [finding.summary for finding in report.findings if finding.rule == "non-finite-gradients"]
    found["costs"] = {name: number for name, number in report.numbers.items() if "collective" in name}
    found["text"] = str(report)
    return found


def refusals(mesh):
    """What is said to settings that need whole tensors."""
    said = []
    for settings in (
        {"weights": True},
        {"clip": fastguard.AGC()},
        {"clip": fastguard.Value(1.0)},
    ):
        model = fsdp(net(33), mesh)
        try:
            fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **settings)
        except TypeError as error:
            said.append(str(error))
    return said


def pipeline():
    """Each rank has a stage of its own, of plain tensors: the norm is that of all."""
    stages = [nn.Linear(4 + rank, 3) for rank in range(WORLD)]
    stage = stages[RANK]
    optimizer = fastguard.wrap(
        torch.optim.SGD(stage.parameters(), lr=0.1), stage, max_norm=1.0, process_group=dist.group.WORLD
    )
    for rank, one in enumerate(stages):
        for p in one.parameters():
            p.grad = torch.full_like(p, rank + 1.0)
    exact = math.sqrt(sum(float(p.grad.square().sum()) for one in stages for p in one.parameters()))
    optimizer.step()
    last = optimizer.guard.last
    return {"norm": last.norm, "exact": exact, "names": list(last.tensors.names), "coef": last.clip_coef.hex()}


def functions(make, *, bad=(0,)):
    """`clip_grad_norm_` and `get_total_norm` beside torch's own; `bad` ranks then have an Inf."""
    found = {}
    for limit in (0.05, 1e6):
        ours, theirs = make(net(32)), make(net(32))
        torch.manual_seed(2)
        x = torch.randn(8, 16)
        for model in (ours, theirs):
            model(x).square().mean().backward()
        norms = [
            fastguard.get_total_norm([p.grad for p in ours.parameters()]),
            fastguard.clip_grad_norm_(ours.parameters(), limit),
            nn.utils.clip_grad_norm_(list(theirs.parameters()), limit),
        ]
        values = [float(norm.full_tensor()) for norm in norms]
        pairs = zip(ours.parameters(), theirs.parameters())
        apart = [float((local(p.grad) - local(q.grad)).abs().sum()) for p, q in pairs]
        found[str(limit)] = [max(abs(value / values[-1] - 1.0) for value in values), max(apart)]
    found["groups"] = [group.size() for group in groups_across(layouts_of(ours.parameters()))]
    local(ours[0].weight.grad).fill_(math.inf if RANK in bad else 1.0)
    found["norm"] = str(float(fastguard.get_total_norm([p.grad for p in ours.parameters()]).full_tensor()))
    try:
        fastguard.clip_grad_norm_(ours.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        found["error"] = "non-finite" in str(error)
    return found


def function_without_gradients(mesh):
    """`clip_grad_norm_` where rank 1 has no gradients, as of an expert that nothing was sent to: it takes part."""
    model = fsdp(net(33), mesh)
    model(torch.ones(2, 16)).sum().backward()
    if RANK == 1:
        for p in model.parameters():
            p.grad = None
    square = sum(float(local(p.grad).double().square().sum()) for p in model.parameters() if p.grad is not None)
    exact = torch.tensor(float(square), dtype=torch.float64)
    dist.all_reduce(exact)
    norm = fastguard.clip_grad_norm_(model.parameters(), 1e6)
    return [abs(float(norm.full_tensor()) / float(exact.sqrt()) - 1.0), type(norm).__name__]


def scaled(mesh):
    """An Inf on one rank under a GradScaler, torch's own and that of FSDP: whether weights moved, and the scale."""
    found = {}
    for kind, made in (("plain", torch.amp.GradScaler), ("sharded", ShardedGradScaler)):
        for unscales in (False, True):
            model = fsdp(net(33), mesh)
            optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
            scaler = made(device="cpu", init_scale=1024.0)
            before = [local(p).clone() for p in model.parameters()]
            scaler.scale(model(torch.ones(2, 16)).square().mean()).backward()
            if RANK == 1:
                local(next(iter(model.parameters())).grad).view(-1)[0] = math.inf
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            stayed = all(torch.equal(old, local(p)) for old, p in zip(before, model.parameters()))
            last = optimizer.guard.last
            found[f"{kind}, {unscales}"] = [stayed, scaler.get_scale(), last.skipped, str(last.norm)]
    return found


def out_of_step(mesh):
    """One rank's guard has been through more steps than the others': that is an error on all, and no hanging."""
    model = fsdp(net(33), mesh)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    if RANK == 1:
        optimizer.guard._run.step = 5
    model(torch.ones(2, 16)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def without_gradients(mesh):
    """Parameters that no loss reaches, and a step at which no rank has any gradient."""
    model = fsdp(net(33), mesh)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
    optimizer.step()
    empty = optimizer.guard.last.norm
    model[0](torch.ones(2, 16)).sum().backward()
    optimizer.step()
    return {"empty": empty, "names": list(optimizer.guard.last.tensors.names)}


def main():
    join()
    line = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("all",))
    square = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("outer", "inner"))
    alone = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("outer", "inner"))["inner"]
    pair = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("outer", "inner"))
    found = {
        "fsdp": train(lambda m: fsdp(m, line), 33),
        "fsdp, NaN": train(lambda m: fsdp(m, line), 33, bad=12),
        "fsdp, NaN in a batch": train(lambda m: fsdp(m, line), 33, bad=11, in_batch=True),
        "fsdp, each tensor": train(lambda m: fsdp(m, line), 33, max_norm=None, clip=fastguard.AdaGC()),
        "fsdp, alone": train(lambda m: fsdp(m, alone), 33),
        "hsdp": train(lambda m: fsdp(m, square), 33),
        "tp": train(lambda m: tp(m, line), 32),
        "tp on a part": train(lambda m: tp(m, pair["inner"]), 32) if WORLD > 2 else None,
        "tp and fsdp": train(lambda m: fsdp(tp(m, square["inner"]), square["outer"]), 32),
        "tp and fsdp, NaN": train(lambda m: fsdp(tp(m, square["inner"]), square["outer"]), 32, bad=3),
        "functions, fsdp": functions(lambda m: fsdp(m, line)),
        "functions, hsdp": functions(lambda m: fsdp(m, square), bad=(0, 2)),
        "function without gradients": function_without_gradients(line),
        "functions, tp": functions(lambda m: tp(nn.Sequential(*m[:3]), line)),
        "refusals": refusals(line),
        "pipeline": pipeline(),
        "scaled": scaled(line),
        "out of step": out_of_step(line),
        "without gradients": without_gradients(line),
        "flat": flat_cases(),
        "told": told,
    }
    leave(found)


if __name__ == "__main__":
    main()
