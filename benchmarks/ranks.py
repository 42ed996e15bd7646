"""`python -m benchmarks.ranks`: clipping sharded gradients, ours and torch's in turn, on gloo ranks of this machine.

Each case starts its own processes. A call is timed between two barriers on every rank, and counts as long as the
slowest; ours and torch's `clip_grad_norm_` take turns on gradients of the same shapes. torch's result is waited for
(`full_tensor().item()`), as whoever wants to know it does. The ranks share the machine's cores. "local" is what of ours
needs no other rank: finding the parts and reading them. "bare" is the gather alone, of tensors that are there: with
"local" the least that such a clip can take.

Under DistributedDataParallel every rank has whole gradients, and the guard asks nobody: "replicas" is what guarding
adds to a step there, over what `clip_grad_norm_` adds, on two ranks and on one.

The constants of docs/scale.md come from a gather of a header and from tables of 100 and of 3000 tensors, on 2, 4 and 8
ranks: what each would take without a tensor, and what a tensor adds. A table of 1000 tensors, which nothing was fitted
to, says how good that is. On more ranks than cores, latencies are those of taking turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "ranks.json"
CASES = {
    "FSDP2, 300 tensors, 2 ranks": ("fsdp", 2, 300, 96),
    "FSDP2, 3000 small tensors, 2 ranks": ("fsdp", 2, 3000, 8),
    "HSDP 2 x 2, 300 tensors": ("hsdp", 4, 300, 96),
    "TP x FSDP 2 x 2, 300 tensors": ("2d", 4, 300, 96),
}
WORLDS, SIZES, UNSEEN = (2, 4, 8), (100, 3000), 1000  # ranks; tensors of a table, fitted and predicted
LIMITS = dict(zip(CASES, (0.25, 0.10, 0.40, 0.40)))


def timed(call: Any) -> float:
    """Microseconds that `call` takes on the slowest rank, all of which begin together."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    call()
    took = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return 1e6 * float(took)


def wire_main(world: int, rounds: int, rank: int, folder: str) -> None:
    """One rank of those that time collectives alone."""
    import torch
    import torch.distributed as dist

    from fastguard.ranks.exchange import NUM_COLUMNS, Wire

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    group: Any = dist.group.WORLD
    wire, words = Wire([group]), ([1.0] * NUM_COLUMNS, [1.0] * 4, [1.0] * 4)
    row = torch.ones(1, NUM_COLUMNS, dtype=torch.float64)
    tables = {size: torch.ones(size, NUM_COLUMNS, dtype=torch.float64) for size in (*SIZES, UNSEEN)}
    found: dict[str, list[float]] = {"gather": [], "reduce": [], **{str(size): [] for size in tables}}
    for turn in range(rounds + 3):
        took = {"gather": timed(lambda: wire.join(*words))}
        took["reduce"] = timed(lambda: wire.reduced(row))
        took |= {str(size): timed(lambda rows=rows: wire.reduced(rows)) for size, rows in tables.items()}
        if turn >= 3:
            for name, one in took.items():
                found[name].append(one)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({name: statistics.median(values) for name, values in found.items()}))


def replicas_main(world: int, count: int, size: int, rounds: int, rank: int, folder: str) -> None:
    """One rank of a DistributedDataParallel run; each step follows a backward pass, and is timed without it."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import fastguard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    models = [nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count))) for _ in range(3)]
    sharing = [nn.parallel.DistributedDataParallel(model) for model in models]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.0, fused=True) for model in models]
    guard = fastguard.wrap(optimizers[0], sharing[0], max_norm=1e9, check_every=0).guard
    params = list(models[1].parameters())

    def clipped() -> None:
        nn.utils.clip_grad_norm_(params, 1e9)
        optimizers[1].step()

    calls: dict[str, Any] = {"guarded": optimizers[0].step, "clipped": clipped, "plain": optimizers[2].step}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for i, name in list(enumerate(calls))[:: 1 if turn % 2 else -1]:
            optimizers[i].zero_grad()
            sharing[i](torch.randn(4, size)).square().mean().backward()
            took = timed(calls[name])
            if turn >= 3:
                found[name].append(took)
    num_collectives = 0 if guard._run.ranks is None else guard._run.ranks.wire.num_collectives
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"us": found, "num_collectives": num_collectives}))


def replicas(world: int, rounds: int) -> dict[str, Any]:
    """What guarding adds to a step under DistributedDataParallel over what clipping adds: of medians."""
    found = started_on(world, ["replicas", str(world), "300", "96", str(rounds)])
    us = {name: statistics.median(values) for name, values in found["us"].items()}
    added = {name: us[name] - us["plain"] for name in ("guarded", "clipped")}
    ratio = added["guarded"] / added["clipped"]
    return {**{f"{k}_us": v for k, v in us.items()}, "ratio": ratio, "num_collectives": found["num_collectives"]}


def constants(world: int, rounds: int) -> dict[str, float]:
    """Of the cost model, on `world` ranks: microseconds of a gather, of a table without tensors, and of each tensor."""
    us = started_on(world, ["wire", str(world), "0", "0", str(rounds)])
    small, large = SIZES
    each = (us[str(large)] - us[str(small)]) / (large - small)
    table = us[str(small)] - small * each
    predicted = table + UNSEEN * each
    return {
        "gather_us": us["gather"],
        "reduce_us": us["reduce"],
        "table_us": table,
        "table_us_per_tensor": each,
        f"predicted_{UNSEEN}_us": predicted,
        f"measured_{UNSEEN}_us": us[str(UNSEEN)],
    }


def started_on(world: int, arguments: list[str]) -> dict[str, Any]:
    """What rank 0 of `world` processes of this file printed last."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.ranks", "--rank-of", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*command, str(rank), folder], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(world)
        ]
        said = [process.communicate(timeout=900)[0] for process in started]
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def rank_main(kind: str, world: int, count: int, size: int, rounds: int, rank: int, folder: str) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    import fastguard
    from fastguard.ranks.exchange import NUM_COLUMNS, _gather, gradients_over_ranks
    from fastguard.ranks.shards import groups_across, layouts_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,) if kind == "fsdp" else (2, world // 2))
    places = {"fsdp": [Shard(0)], "hsdp": [Replicate(), Shard(0)], "2d": [Shard(0), Shard(1)]}[kind]
    cut = {"fsdp": (world, 1), "hsdp": (world // 2, 1), "2d": (2, world // 2)}[kind]

    def parameters() -> list[Any]:
        shape = (size // cut[0], size // cut[1])
        made = []
        for i in range(count):
            p = torch.nn.Parameter(DTensor.from_local(torch.zeros(shape), mesh, places, run_check=False))
            torch.manual_seed(i if kind == "hsdp" else i * world + rank)
            p.grad = DTensor.from_local(torch.randn(shape), mesh, places, run_check=False)
            made.append(p)
        return made

    ours, theirs, guarded = parameters(), parameters(), parameters()
    optimizer = torch.optim.SGD(guarded, lr=0.0)
    fastguard.wrap(optimizer, max_norm=1e9, check_every=0)
    plain = torch.optim.SGD(parameters(), lr=0.0)
    (group,) = groups_across(layouts_of(ours))
    row = torch.zeros(NUM_COLUMNS, dtype=torch.float64)
    everyone = torch.empty(group.size() * NUM_COLUMNS, dtype=torch.float64)
    found: dict[str, list[float]] = {"ours": [], "theirs": [], "local": [], "bare": [], "guarded": [], "plain": []}
    clip = torch.nn.utils.clip_grad_norm_
    for turn in range(rounds + 3):
        both = {
            "ours": lambda: fastguard.clip_grad_norm_(ours, 1e9),
            "theirs": lambda: clip(theirs, 1e9).full_tensor().item(),
            "local": lambda: gradients_over_ranks(ours, "cpu"),
            "bare": lambda: _gather(everyone, row, group=group),
            "guarded": optimizer.step,
            "plain": plain.step,
        }
        for name in list(both) if turn % 2 else list(both)[::-1]:
            took = timed(both[name])
            if turn >= 3:
                found[name].append(took)
    norms = float(fastguard.clip_grad_norm_(ours, 1e9).full_tensor()), float(clip(theirs, 1e9).full_tensor())
    wire = fastguard.Guard.of(optimizer)._run.ranks.wire
    dist.destroy_process_group()
    if rank == 0:
        apart = abs(norms[0] / norms[1] - 1.0)
        steps = rounds + 3
        sent = {"collectives_a_step": wire.num_collectives / steps, "bytes_a_step": wire.num_bytes / steps}
        print(json.dumps({"us": found, "norms_apart": apart, **sent}))


def measure(case: str, rounds: int) -> dict[str, Any]:
    """One case: medians, and ratios of calls that stood next to each other."""
    kind, world, count, size = CASES[case]
    found = started_on(world, [kind, str(world), str(count), str(size), str(rounds)])
    us = found.pop("us")
    ratios = [a / b for a, b in zip(us["ours"], us["theirs"])]
    added = [(a - b) / c for a, b, c in zip(us["guarded"], us["plain"], us["theirs"])]
    spread = {
        name: [statistics.median(values), min(values), max(values)]
        for name, values in {**{f"{k}_us": v for k, v in us.items()}, "ratio": ratios, "guarding_ratio": added}.items()
    }
    return {**spread, **found, "at_most": LIMITS[case]}


def main() -> int:
    """Measures all cases, prints them, and saves them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--dry", action="store_true", help="save nothing")
    parser.add_argument("--rank-of", nargs=7, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        kind, *numbers, folder = arguments.rank_of
        if kind == "wire":
            world, _, _, rounds, rank = map(int, numbers)
            wire_main(world, rounds, rank, folder)
        elif kind == "replicas":
            replicas_main(*map(int, numbers), folder)  # type: ignore[call-arg]
        else:
            rank_main(kind, *map(int, numbers), folder)  # type: ignore[call-arg]
        return 0
    import torch

    results = {}
    for case in CASES:
        results[case] = one = measure(case, arguments.rounds)
        ratio, guarding = one["ratio"], one["guarding_ratio"]
        print(
            f"{case:36} ours {one['ours_us'][0]:7.0f} us, torch's {one['theirs_us'][0]:7.0f} us, ratio {ratio[0]:.3f} "
            f"({ratio[1]:.3f} - {ratio[2]:.3f}), at most {one['at_most']}, {one['local_us'][0]:.0f} us of it local, "
            f"a bare gather {one['bare_us'][0]:.0f}; "
            f"guarding adds {guarding[0]:.3f} of it; "
            f"{one['collectives_a_step']:.2f} collectives and {one['bytes_a_step']:.0f} bytes a guarded step",
            flush=True,
        )
    replicated = {str(world): replicas(world, arguments.rounds) for world in (1, 2)}
    for on, one in replicated.items():
        print(
            f"DDP on {on}: guarding adds {one['guarded_us'] - one['plain_us']:.0f} us to a step, {one['ratio']:.2f} of "
            f"what clipping adds; {one['num_collectives']} collectives",
            flush=True,
        )
    fitted = {}
    for world in WORLDS:
        fitted[str(world)] = one = constants(world, arguments.rounds)
        print(
            f"{world} ranks: a gather {one['gather_us']:.0f} us, reduced {one['reduce_us']:.0f} us; "
            f"a table {one['table_us']:.0f} us and "
            f"{one['table_us_per_tensor']:.3f} us a tensor; of {UNSEEN} tensors {one[f'measured_{UNSEEN}_us']:.0f} us, "
            f"predicted {one[f'predicted_{UNSEEN}_us']:.0f} us",
            flush=True,
        )
    if not arguments.dry:
        about = {"torch": torch.__version__, "cores": os.cpu_count(), "rounds": arguments.rounds}
        RESULTS.write_text(
            json.dumps({**about, "cases": results, "constants": fitted, "replicas": replicated}, indent=1) + "\n",
            encoding="utf-8",
        )
        print(f"wrote {RESULTS}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
