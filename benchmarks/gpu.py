"""The GPU path against its rivals, on one NVIDIA GPU: python benchmarks/gpu.py [--out results.json]

Runs from the source tree. Correct first, then timed: rivals alternate within one loop; device time by events, behind a
kernel that keeps the device busy until everything is queued; host time until the call returns; launches counted by the
profiler; allocations by the allocator's counters; and the guarded step runs once under
torch.cuda.set_sync_debug_mode("error"). Ratios are medians over the same rounds.

Passes over the gradients are timed kernel by kernel, steps as users take them: with `fastguard.wrap`. --dry-run goes
through everything once with tiny tensors on whatever device the kernels have (the CPU with TRITON_INTERPRET=1); its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fastguard
from fastguard.kernels import triton as kernels
from fastguard.kernels.slots import StepOptions, make_slots
from fastguard.kernels.triton import Workspace
from fastguard.records.slot import NORM

Run = Callable[[], object]
AHEAD_CYCLES = 60_000_000  # about 30 ms, in which the host queues what is timed
LIMITS = {  # issue: measure, case, what is divided by what, at most or at least
    "statistics / copy bandwidth": ("llama-1.5b", torch.bfloat16, 0.88, "at least"),
    "statistics / copy bandwidth, float32": ("llama-1.5b", torch.float32, 0.93, "at least"),
    "guard / clip_grad_norm_, device": ("llama-1.5b", torch.bfloat16, 0.40, "at most"),
    "guard / clip_grad_norm_, host": ("small-2000", torch.float32, 0.15, "at most"),
    "guarded fused AdamW / clip + fused AdamW, device": ("gpt2-124m", torch.float32, 0.88, "at most"),
}


def gpt2() -> list[tuple[int, ...]]:
    d = 768
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d), *block * 12, (d,), (d,)]


def llama(d: int, layers: int, ffn: int, vocabulary: int, kv: int) -> list[tuple[int, ...]]:
    block = [(d, d), (kv, d), (kv, d), (d, d), (ffn, d), (ffn, d), (d, ffn), (d,), (d,)]
    return [(vocabulary, d), *block * layers, (d,), (vocabulary, d)]


CASES: dict[str, list[tuple[int, ...]]] = {
    "gpt2-124m": gpt2(),
    "llama-1.5b": llama(2048, 28, 5632, 32000, 2048),
    "llama-8b": llama(4096, 32, 14336, 128256, 1024),
    "small-2000": [(1000,)] * 2000,
}
TINY: dict[str, list[tuple[int, ...]]] = {name: [(40, 50), (7,), (1000,)] for name in CASES}


class Clock:
    """Device and host microseconds of one call; on a machine without a GPU the host's alone."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        if self.is_gpu:
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, run: Run) -> tuple[float, float]:
        if self.is_gpu:
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD_CYCLES)
            self.start.record()
        began = time.perf_counter()
        run()
        host = 1e6 * (time.perf_counter() - began)
        if not self.is_gpu:
            return host, host
        self.end.record()
        self.end.synchronize()
        return 1e3 * self.start.elapsed_time(self.end), host


def alternate(rivals: dict[str, Run], device: torch.device, rounds: int) -> dict[str, dict[str, Any]]:
    """Median, least and most of each, and of its ratio to the first, taken round by round."""
    clock = Clock(device)
    for run in rivals.values():
        for _ in range(3 if clock.is_gpu else 1):
            run()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            times[name].append(clock(run))
    first = times[next(iter(rivals))]
    return {
        name: {
            side: _summary([t[k] for t in taken], [f[k] for f in first]) for k, side in enumerate(("device", "host"))
        }
        for name, taken in times.items()
    }


def _summary(taken: list[float], first: list[float]) -> dict[str, float]:
    ratios = [t / f for t, f in zip(taken, first, strict=True)]
    return {
        "median_us": statistics.median(taken),
        "min_us": min(taken),
        "max_us": max(taken),
        "ratio_to_first": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


class Guarded:
    """What the guard launches for a list of gradients: statistics, decision, scaling if needed."""

    def __init__(self, gradients: list[torch.Tensor], workspace: Workspace) -> None:
        self.gradients, self.workspace = gradients, workspace
        self.slots = make_slots(workspace.device, len(gradients), count=2)

    def measure(self) -> None:
        self.workspace.measure(self.workspace.plan(self.gradients), self.slots[0])

    def __call__(self, max_norm: float = math.inf, scale: torch.Tensor | None = None) -> None:
        plan = self.workspace.plan(self.gradients)
        self.workspace.measure(plan, self.slots[0], StepOptions(max_norm=max_norm, scale=scale))
        self.workspace.scale(plan, self.slots[0])


def check(guarded: Guarded) -> float:
    """The norm, which is right; raises if it is not, or if a row is not that of its tensor."""
    guarded.measure()
    slot = guarded.slots[0]
    norm = float(slot.words[NORM])
    true = math.sqrt(sum(float((c.double() ** 2).sum()) for g in guarded.gradients for c in g.flatten().split(1 << 26)))
    if not math.isclose(norm, true, rel_tol=1e-6):
        raise AssertionError(f"norm {norm} is not {true}")
    if slot.rows[:, 0].tolist() != [g.numel() for g in guarded.gradients]:
        raise AssertionError("the rows are not those of the tensors")
    return norm


def package_rivals(gradients: list[torch.Tensor]) -> dict[str, Run]:
    """Norm kernels of packages that happen to be installed."""
    try:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier
    except ImportError:
        return {}
    overflow = torch.zeros(1, dtype=torch.int32, device=gradients[0].device)
    return {"apex l2norm": lambda: multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [gradients], False)}


def launches(run: Run, device: torch.device) -> int | None:
    """Kernels that one call launches; copies and fills not counted."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiled:
        run()
        torch.cuda.synchronize()
    on_device = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not e.name.startswith(("Memcpy", "Memset")) for e in on_device)


def allocations(run: Run, device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    run()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(20):
        run()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def never_syncs(run: Run, device: torch.device) -> bool | None:
    if device.type != "cuda":
        return None
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes a second of a copy, read and written bytes together."""
    num_bytes = 1 << 32 if device.type == "cuda" else 1 << 20
    a = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    found = alternate({"copy": lambda: b.copy_(a)}, device, rounds)
    return 2 * num_bytes / (1e-6 * found["copy"]["device"]["median_us"])


def measure_pass(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, workspace: Workspace, rounds: int
) -> dict[str, Any]:
    """Everything about the gradients alone."""
    device = workspace.device
    parameters = [torch.nn.Parameter(torch.empty(s, dtype=dtype, device=device)) for s in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape, device=device, dtype=dtype).mul_(1e-3)
        p.data = torch.empty(0, dtype=dtype, device=device)  # make room: only the gradients are read here
    gradients = [p.grad for p in parameters if p.grad is not None]
    guarded = Guarded(gradients, workspace)
    norm = check(guarded)
    clip = torch.nn.utils.clip_grad_norm_
    almost_1 = torch.full(
        (), 1.0 + 2.0**-23, device=device
    )  # a loss scale that leaves gradients as they are, call by call
    rivals: dict[str, Run] = {
        "clip_grad_norm_, foreach": lambda: clip(parameters, 2 * norm, foreach=True),
        "get_total_norm": lambda: torch.nn.utils.get_total_norm(gradients, foreach=True),
        "guard: statistics and decision": guarded.measure,
        "guard, no clip needed": lambda: guarded(max_norm=2 * norm),
        "guard, gradients scaled": lambda: guarded(max_norm=2 * norm, scale=almost_1),
        **package_rivals(gradients),
    }
    num_bytes = sum(g.numel() * g.element_size() for g in gradients)
    found = {
        "norm": norm,
        "num_bytes": num_bytes,
        "launches, statistics and decision": launches(guarded.measure, device),
        "launches, clip_grad_norm_": launches(rivals["clip_grad_norm_, foreach"], device),
        "allocations of 20 steps": allocations(lambda: guarded(max_norm=2 * norm), device),
        "never syncs": never_syncs(lambda: guarded(max_norm=2 * norm), device),
        "times": alternate(rivals, device, rounds),
    }
    found["statistics, bytes a second"] = num_bytes / (
        1e-6 * found["times"]["guard: statistics and decision"]["device"]["median_us"]
    )
    return found


def measure_step(shapes: list[tuple[int, ...]], workspace: Workspace, rounds: int) -> dict[str, Any]:
    """Whole optimizer steps, float32, gradients in place, no clip needed."""
    device = workspace.device

    def make() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        parameters = [torch.nn.Parameter(torch.randn(s, device=device)) for s in shapes]
        for p in parameters:
            p.grad = torch.randn_like(p).mul_(1e-3)
        return parameters, torch.optim.AdamW(parameters, lr=1e-6, fused=True)

    theirs, their_optimizer = make()
    ours, our_optimizer = make()
    max_norm = 2 * check(Guarded([p.grad for p in ours if p.grad is not None], workspace))
    fastguard.wrap(our_optimizer, max_norm=max_norm, backend="triton")
    one = torch.ones((), device=device)
    found_inf = torch.zeros((), device=device)

    def torch_clip() -> None:
        torch.nn.utils.clip_grad_norm_(theirs, max_norm, foreach=True)
        their_optimizer.step()

    def torch_scaled() -> None:  # what GradScaler.unscale_ launches, without its sync
        gradients = [p.grad for p in theirs if p.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, one)
        torch_clip()

    rivals: dict[str, Run] = {
        "clip_grad_norm_ + fused AdamW": torch_clip,
        "guarded fused AdamW": our_optimizer.step,
        "fused AdamW alone": their_optimizer.step,
        "unscale_ + clip_grad_norm_ + fused AdamW": torch_scaled,
    }
    return {
        "never syncs": never_syncs(our_optimizer.step, device),
        "launches, guarded": launches(our_optimizer.step, device),
        "launches, unguarded": launches(their_optimizer.step, device),
        "allocations of 20 steps, guarded": allocations(our_optimizer.step, device),
        "allocations of 20 steps, unguarded": allocations(their_optimizer.step, device),
        "times": alternate(rivals, device, rounds),
    }


def verdicts(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The table of limits, each with its value, or None where it was not measured."""

    def value(measure: str, case: str, dtype: torch.dtype) -> float | None:
        if measure.startswith("guarded"):
            step = results["steps"].get(case)
            return step and step["times"]["guarded fused AdamW"]["device"]["ratio_to_first"]
        one = results["passes"].get(f"{case} {str(dtype).removeprefix('torch.')}")
        if one is None:
            return None
        if measure.startswith("statistics"):
            return float(one["statistics, bytes a second"] / results["copy_bandwidth"])
        return float(one["times"]["guard, no clip needed"][measure.split(", ")[1]]["ratio_to_first"])

    return {
        measure: {"case": case, "value": value(measure, case, dtype), side: limit}
        for measure, (case, dtype, limit, side) in LIMITS.items()
    }


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} (no GPU)"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": kernels.TritonBackend().detail(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dry-run", action="store_true", help="once through everything, with tiny tensors")
    args = parser.parse_args()

    reason = kernels.unavailable()
    if reason is None and not args.dry_run and not torch.cuda.is_available():
        reason = "these figures need a CUDA device"
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    workspace = Workspace(device)
    cases, rounds = (TINY, 1) if args.dry_run else (CASES, args.rounds)
    results: dict[str, Any] = {
        "is_dry_run": args.dry_run,
        "machine": machine(device),
        "copy_bandwidth": copy_bandwidth(device, rounds),
        "passes": {},
        "steps": {},
        "left_out": [],
    }
    for name in args.cases:
        for dtype in (torch.float32, torch.bfloat16):
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            needed = 2.5 * dtype.itemsize * sum(math.prod(s) for s in cases[name])
            if device.type == "cuda" and needed > torch.cuda.mem_get_info()[0]:
                results["left_out"].append(f"{key}: {needed / 2**30:.0f} GiB are not free")
                continue
            print(key, file=sys.stderr)
            results["passes"][key] = measure_pass(cases[name], dtype, workspace, rounds)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if "gpt2-124m" in args.cases:
        results["steps"]["gpt2-124m"] = measure_step(cases["gpt2-124m"], workspace, rounds)
    results["verdicts"] = verdicts(results)
    text = json.dumps(results, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(results["verdicts"], indent=1) if args.out else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
