"""The command: runs the parts, prints their tables, writes the results."""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastguard.records import strict_json

from .. import machine
from ..faults.runs import ROOT
from . import costs, criteria, guide, replay, table
from .rivals import OURS as RULE
from .rivals import RULES
from .sources import CACHE, Source, digest_of, keep, load, name_of, sources
from .tasks import TASKS, TROUBLES, prepared, troubled
from .training import NOTHING, OURS, PROTECTIONS, Guarded, recovery, train

RESULTS = ROOT / "benchmarks" / "results" / "protection.json"
PARTS = ("policies", "guide", "diverging", "healthy", "costs")
Work = tuple[Any, ...]


# -- what a worker does ------------------------------------------------------------------------------------------------


def replayed(source: Source) -> list[dict[str, Any]]:
    """What each rule did on the traces of a source: kept, so that a run that was interrupted goes on where it was."""
    here = Path(__file__).parent
    asked = [here / name for name in ("criteria.py", "norms.py", "replay.py", "rivals.py")]
    rules = digest_of((*asked, *(ROOT / "fastguard" / "guard" / "policies").glob("*.py")))
    path = CACHE / "replayed" / f"{name_of(source)}.{rules}.json"
    if path.exists():
        return list(strict_json.decode(json.loads(path.read_text(encoding="utf-8"))))
    found = [
        {
            "trace": trace.name,
            "calm": replay.is_calm(trace),
            "rules": {n: replay.ask(make, trace) for n, make in RULES.items()},
        }
        for trace in load(source)
    ]
    keep(path, json.dumps(strict_json.encode(found)).encode())
    return found


def in_trouble(task: str, seed: int, length: float, names: Sequence[str]) -> list[dict[str, Any]]:
    """The clean run's loss, and how the run went under each protection of `names` in each trouble. Where it would have
    come out as good as the clean one by itself, nobody else is asked."""
    clean = train(prepared(task, seed, length), PROTECTIONS[NOTHING]())["final"]
    told = []
    for trouble in TROUBLES:
        found = {}
        for name in names:
            run = train(troubled(task, trouble, seed, length), PROTECTIONS[name]())
            del run["losses"]
            found[name] = {**run, "ending": criteria.ending(run, clean)}
            if name == NOTHING and not criteria.diverges(run, clean):
                break
        told.append({"task": task, "trouble": trouble, "seed": seed, "clean": clean, "runs": found})
    return told


def with_recovery(task: str, seed: int, length: float) -> dict[str, Any]:
    """A healthy run with recovery and without: rollbacks, and digests of all bits."""
    found = train(prepared(task, seed, length), Guarded(max_norm=1.0, recovery=recovery()))
    without = train(prepared(task, seed, length), Guarded(max_norm=1.0))
    return {
        "task": task,
        "seed": seed,
        "num_rollbacks": found["num_rollbacks"],
        "digest": found["digest"],
        "digest_without": without["digest"],
    }


WORKERS: dict[str, Callable[..., Any]] = {
    "replayed": replayed,
    "measure": guide.run_measure,
    "precision": guide.run_precision,
    "trouble": in_trouble,
    "healthy": with_recovery,
}


def carry_out(work: Work) -> Any:
    """One piece of work, in a process of its own with one thread; without the guard's word on what is planted."""
    torch.set_num_threads(1)
    logging.getLogger("fastguard").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of float16 on the CPU
        return WORKERS[work[0]](*work[1:])


def all_of(what: str, work: Sequence[Work], processes: int) -> list[Any]:
    """The results of all pieces, in their order."""
    found = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for number, one in enumerate(pool.imap(carry_out, work), 1):
            found.append(one)
            if sys.stderr.isatty():
                print(f"\r{what}: {number} of {len(work)}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return found


# -- the parts ---------------------------------------------------------------------------------------------------------


def policies(seeds: range, options: argparse.Namespace) -> dict[str, Any]:
    """Every rule on all recorded norms; on the fault suite's alone; and on those that keep below twice their median."""
    work = [("replayed", source) for source in sources(seeds, quick=options.quick)]
    traces = [one for some in all_of("policies", work, options.processes) for one in some]
    chosen = {
        "all": traces,
        "faults": [one for one in traces if one["trace"].startswith("faults/")],
        "calm": [one for one in traces if one["calm"]],
    }
    return {
        which: {rule: criteria.policy_measures([one["rules"][rule] for one in some]) for rule in RULES}
        for which, some in chosen.items()
        if some
    }


def the_guide(seeds: range, options: argparse.Namespace) -> dict[str, Any]:
    """Explosions and final losses by task and measure, and by task and precision."""
    found: dict[str, Any] = {}
    for what, names in (("measure", guide.MEASURES), ("precision", guide.PRECISIONS)):
        work = [(what, task, name, seed) for task in guide.MODELS for name in names for seed in seeds]
        by_name: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for (_, task, name, _), run in zip(work, all_of(what, work, options.processes)):
            by_name[task][name].append(run)
        found[what] = {t: {n: guide.summary(runs) for n, runs in some.items()} for t, some in by_name.items()}
    return found


def diverging(seeds: range, options: argparse.Namespace) -> dict[str, Any]:
    """How runs in trouble end, by protection, with half of the seeds; those that come out well by themselves are
    counted, and left out. With `--ours` the figures of the rivals stay as they are in the results."""
    names = (NOTHING, OURS) if options.ours else tuple(PROTECTIONS)
    work = [("trouble", task, seed, options.length, names) for task in TASKS for seed in seeds[: (len(seeds) + 1) // 2]]
    found = [one for some in all_of("diverging", work, options.processes) for one in some]
    proven = [one for one in found if len(one["runs"]) > 1]
    by_trouble = {trouble: [one for one in proven if one["trouble"] == trouble] for trouble in TROUBLES}
    kept = options.before.get("diverging", {}) if options.ours else {}
    return {
        "num_planted": len(found),
        "protections": {**kept.get("protections", {}), **{name: _ended(name, proven) for name in names}},
        "troubles": {
            trouble: {**kept.get("troubles", {}).get(trouble, {}), **{name: _ended(name, some) for name in names}}
            for trouble, some in by_trouble.items()
        },
        "not_brought_through": [
            {**{k: one[k] for k in ("task", "trouble", "seed", "clean")}, **one["runs"][OURS]}
            for one in proven
            if one["runs"][OURS]["ending"] != "brought through"
        ],
    }


def _ended(name: str, found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return criteria.diverging_measures([one["runs"][name]["ending"] for one in found])


def healthy(seeds: range, options: argparse.Namespace) -> dict[str, Any]:
    """Healthy runs with recovery: rollbacks, and how many differ in a bit from the same run without."""
    work = [("healthy", task, seed, options.length) for task in TASKS for seed in seeds]
    found = all_of("healthy", work, options.processes)
    return {
        "num_runs": len(found),
        "rollbacks": criteria.num_rollbacks(found),
        "different": criteria.num_different(found),
    }


RUN: dict[str, Callable[[range, argparse.Namespace], dict[str, Any]]] = {
    "policies": policies,
    "guide": the_guide,
    "diverging": diverging,
    "healthy": healthy,
    "costs": lambda seeds, options: costs.measure(quick=options.quick),
}


def measures(parts: dict[str, Any]) -> dict[str, float]:
    """The figure of each of `criteria.MEASURES` that was measured; those of nothing are left out."""
    found: dict[str, float] = {}
    if "policies" in parts:
        ours = parts["policies"]["all"][RULE]
        found |= {key: ours[key] for key in ("acted", "held", "damped")}
    if "diverging" in parts:
        ours = parts["diverging"]["protections"][OURS]
        found |= {key: ours[key] for key in ("through", "silent")}
    if "healthy" in parts:
        found |= {key: parts["healthy"][key] for key in ("rollbacks", "different")}
    costly = {key: value for key, value in parts.get("costs", {}).items() if isinstance(value, dict)}
    found |= {key: value["figure"] for key, value in costly.items() if "figure" in value}
    return {key: value for key, value in found.items() if not math.isnan(value)}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.protection",
        description="Replays clip rules on recorded norms, brings trouble over small real trainings, and measures what "
        "recovery costs. Data: digits from scikit-learn; text of Python's standard library.",
    )
    parser.add_argument("--quick", action="store_true", help="one seed, short runs, few traces: whether all works")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; several times")
    parser.add_argument("--ours", action="store_true", help="of the runs in trouble only those with recovery anew")
    parser.add_argument("--seeds", type=int, default=10, help="trainings of each kind (default: 10)")
    parser.add_argument("--processes", type=int, default=2, help="trainings at the same time (default: 2)")
    parser.add_argument(
        "--json",
        type=Path,
        help=f"where results go (default: {RESULTS.relative_to(ROOT)}; with --quick nowhere); the "
        "parts that were not run stay in it as they were",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; 0: missed measures are results, not errors."""
    options = make_parser().parse_args(argv)
    options.length = 1.0
    if options.quick:
        options.seeds, options.length = 1, 0.3
    path = options.json or (None if options.quick else RESULTS)
    results: dict[str, Any] = {"parts": {}}
    if path is not None and path.exists():
        results = strict_json.decode(json.loads(path.read_text(encoding="utf-8")))
    options.before = results["parts"]
    described = machine.Machine().to_dict()
    conditions = {key: described[key] for key in ("cpu", "num_cores", "python", "fastguard", "date")}
    for part in options.only or PARTS:
        started = time.perf_counter()
        found = RUN[part](range(options.seeds), options)
        results["parts"][part] = {
            **found,
            "conditions": {**conditions, "torch": torch.__version__, "seeds": options.seeds},
            "seconds": round(time.perf_counter() - started, 1),
        }
    results["measures"] = measures(results["parts"])
    print(table.text(results))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(strict_json.encode(results), indent=1, ensure_ascii=False, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
        print(f"results: {path}")
    return 0
