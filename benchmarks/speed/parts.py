"""What is measured, by name. Every part proves its results first, then times them: alone, and beside a busy core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fastguard

from . import adamw, clipping, frames, further, memory, scripts, steps
from .cases import CASES, STEP_CASES
from .rivals import RIVALS
from .steps import FIRST_STEPS, measure_steps
from .timing import NUM_SETS, Settings, Spread, compared, take_turns

Measuring = Callable[[Settings], dict[str, Any]]


class Part(NamedTuple):
    """One thing that is measured.

    Attributes:
        prepare: makes the tensors, checks the results, and returns what measures.
        beside: it is measured beside a busy core as well.
        memory_bytes: what it needs; where there is less it is left out.
    """

    prepare: Callable[[], Measuring]
    beside: bool = True
    memory_bytes: float = 0.0


def _steps(case: str, ours: str = steps.GUARDED) -> Measuring:
    return lambda settings: measure_steps(STEP_CASES[case], settings, ours)


def rivals_in_turn(case: clipping.Case, names: Sequence[str]) -> Measuring:
    """Measures rivals in turn, each proved right first; `left_out` says which cannot run here, and why."""
    left_out = {name: reason for name in names if (reason := RIVALS[name].missing()) is not None}
    subjects = [clipping.Subject(case, seed) for seed in range(NUM_SETS)]
    calls = {name: [RIVALS[name].prepare(s) for s in subjects] for name in names if name not in left_out}
    errors = {name: RIVALS[name].check(on_sets[0](), subjects[0]) for name, on_sets in calls.items()}

    def measure(settings: Settings) -> dict[str, Any]:
        rounds = take_turns(calls, settings)
        first, *others = rounds
        ratios = {name: compared(rounds[first], rounds[name]) for name in others}
        return {**ratios, "norm_errors": errors, "left_out": left_out, "rounds_us": rounds}

    return measure


def _count(count: Callable[[], dict[str, Any]]) -> Measuring:
    def measure(settings: Settings) -> dict[str, Any]:
        found = count()
        spreads = {key: Spread.of([found[key]])._asdict() for key in ("clean", "mean")}
        return {**spreads, "counts": found["counts"]}

    return measure


def package_lines() -> int:
    """Lines of the package's Python, as `wc -l` counts them."""
    return sum(path.read_bytes().count(b"\n") for path in Path(fastguard.__file__).parent.rglob("*.py"))


def _memory(case: str, num_processes: int = 1) -> Measuring:
    return lambda settings: memory.measure_memory(CASES[case], num_processes if settings.num_rounds > 5 else 1)


_GPT2 = CASES["gpt2-float32"]
_SETS_BYTES = (NUM_SETS + 1) * 4.0 * _GPT2.num_elements


def _clip_part(case: clipping.Case, *, clips: bool = False) -> Part:
    return Part(
        lambda: clipping.Clipping(case, clips=clips).measure,
        memory_bytes=(NUM_SETS + 1) * 4.0 * case.num_elements,
    )


PARTS: dict[str, Part] = {
    "package-lines": Part(lambda: lambda _: {"lines": Spread.of([package_lines()])._asdict()}, beside=False),
    "frames-cpu": Part(lambda: _count(lambda: frames.count_frames("auto")), beside=False),
    "frames-gpu": Part(lambda: _count(frames.count_frames_interpreted), beside=False),
    **{name: _clip_part(CASES[name]) for name in ("gpt2-float32", "gpt2-bfloat16", "resnet50", "300x1000", "3000x64")},
    **{f"{name}-clipping": _clip_part(CASES[name], clips=True) for name in ("gpt2-float32", "300x1000", "3000x64")},
    "adamw": Part(lambda: adamw.clipping_adamw(_GPT2), memory_bytes=14 * 4.0 * _GPT2.num_elements),
    "step-mlp": Part(lambda: _steps("step-mlp")),
    "step-mlp-jsonl": Part(lambda: _steps("step-mlp", steps.RECORDED)),
    "step-mlp-first": Part(
        lambda: partial(
            measure_steps, STEP_CASES["step-mlp"], ours=steps.OBSERVED, max_steps=FIRST_STEPS, from_start=True
        ),
        beside=False,
    ),
    **{name: Part(partial(scripts.measure_script, name), beside=False) for name in scripts.SCRIPTS},
    "step-transformer": Part(lambda: _steps("step-transformer")),
    "further-tensor": Part(lambda: further.further_tensor(CASES["10000x1"], CASES["1000x1"])),
    "300x1000-fresh": Part(lambda: further.after_backward(CASES["300x1000"])),
    "3000x64-fresh": Part(lambda: further.after_backward(CASES["3000x64"])),
    "one-pass": Part(
        lambda: rivals_in_turn(_GPT2, ("stats", "read", "read-prefetch", "memcpy")), memory_bytes=2 * _SETS_BYTES
    ),
    # In this order: after numpy its threads go on spinning for a while.
    "statistics": Part(
        lambda: rivals_in_turn(_GPT2, ("stats-rows", "toolkit", "separate-ops")),
        beside=False,
        memory_bytes=2 * _SETS_BYTES,
    ),
    "norm": Part(lambda: rivals_in_turn(_GPT2, ("norm", "torch-norm")), beside=False, memory_bytes=_SETS_BYTES),
    "memory-10000x1": Part(lambda: _memory("10000x1", 3), beside=False),
    "memory-gpt2": Part(lambda: _memory("gpt2-float32"), beside=False, memory_bytes=8.0 * _GPT2.num_elements),
}
