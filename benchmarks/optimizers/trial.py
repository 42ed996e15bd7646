"""What is asked of one optimizer class, and what came of it."""

from __future__ import annotations

import dataclasses
import functools
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import fastguard

from . import state
from .training import Outcome, RefusedError, Way, train

# Settings under which the guard must leave training to the bit as it is.
IDLE: dict[str, dict[str, Any]] = {
    "wrap": {},
    "max_norm=1e9": {"max_norm": 1e9},
    "skip_nonfinite=False": {"skip_nonfinite": False},
}
BAD = 6  # the batch with a NaN in a gradient
MAX_NORM = 0.05  # clips every step
CLOSE = 1e-5  # to torch's clip, relative to the largest weight

_T = TypeVar("_T")


@dataclasses.dataclass
class Verdict:
    """What came of a class. Each list names what differed, or holds the error that was raised; empty lists are good.

    Args:
        name, module: of the class.
        unusable: why it does not train here without a guard; the rest is then empty.
        refused: what `wrap` said that would not have it; the rest is then empty.
        stepped: how, if it trains: "step()", "step(closure)", ...
        idle: by name of the settings.
        skip: what the skipped step changed.
        skip_after: what differs at the end from a run that never saw the batch.
        skip_first, skip_first_after: the same where the first batch is the bad one. What that step creates is not
            among them: the later steps tell whether it is what a first step creates.
        creates: what it does create, beyond what was there before a skipped first step.
        gradients_kept: a skipped step leaves the gradients as they were.
        clip: what differs from `fastguard.clip_grad_norm_` and a step.
        clip_unknown: why clipping by hand, which the guard is held to, does not work for it.
        clip_torch: largest distance to torch's clip, relative to the largest weight.
        clip_torch_ulp: how far torch's own clip goes when `max_norm` is up to two float32 ulps another, where asked.
        seconds: it took.
        note: what else there is to say about it.
    """

    name: str
    module: str
    unusable: str | None = None
    refused: str | None = None
    stepped: str = ""
    idle: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    skip: list[str] = dataclasses.field(default_factory=list)
    skip_after: list[str] = dataclasses.field(default_factory=list)
    skip_first: list[str] = dataclasses.field(default_factory=list)
    skip_first_after: list[str] = dataclasses.field(default_factory=list)
    creates: list[str] = dataclasses.field(default_factory=list)
    gradients_kept: bool = True
    clip: list[str] = dataclasses.field(default_factory=list)
    clip_unknown: str | None = None
    clip_torch: float | None = None
    clip_torch_ulp: float | None = None
    seconds: float = 0.0
    note: str = ""


def one_line(error: BaseException) -> str:
    """The error, and the file that raised it, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({'/'.join(frames[-1].filename.split('/')[-2:])}:{frames[-1].lineno})" if frames else ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return (text if len(text) <= 240 else text[:239] + "…") + where


def _or_error(run: Callable[[], _T]) -> _T | str:
    try:
        return run()
    except RefusedError:
        raise
    except Exception as error:
        return f"raised {one_line(error)}"


def _against(outcome: Outcome | str, truth: Outcome) -> list[str]:
    """Everything by which the end of a training differs from another's."""
    if isinstance(outcome, str):
        return [outcome]
    found = state.differences(truth.parts, outcome.parts)
    return found + ([] if outcome.losses == truth.losses else ["losses"])


def _distance(a: Outcome, b: Outcome) -> float:
    largest = max(float(p.abs().max()) for p in b.parameters)
    apart = max(float((p.double() - q.double()).abs().max()) for p, q in zip(a.parameters, b.parameters))
    return apart / largest


def judge(
    cls: Any, way: Way, *, note: str = "", bad: int = BAD, ready: Callable[[Verdict], None] = lambda verdict: None
) -> Verdict:
    """Trains with `cls` some ten times.

    Args:
        bad: the batch of the skipped step that is not the first.
        ready: called when it has trained without a guard: what goes wrong after that is the guard's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the authors', at what they call
        return _judge(cls, way, note, bad, ready)


def _judge(cls: Any, way: Way, note: str, bad: int, ready: Callable[[Verdict], None]) -> Verdict:
    started = time.perf_counter()
    verdict = Verdict(cls.__qualname__, cls.__module__, note=note)
    alone = _or_error(functools.partial(train, way))
    if isinstance(alone, str):
        verdict.unusable = alone.removeprefix("raised ")
    elif not alone.is_finite:
        verdict.unusable = "diverges"
    elif not alone.moved:
        verdict.unusable = "does not move the parameters"
    elif _against(again := train(way), alone):
        verdict.unusable = f"does not repeat itself: {_against(again, alone)[0]}"
    else:
        stepped = {None: "step()", "step": "step(closure)", "after": "backward(), step(closure)"}[way.closure]
        verdict.stepped = stepped + (", create_graph=True" if way.graph else "")
        ready(verdict)
        try:
            _judge_guarded(verdict, way, alone, bad)
        except RefusedError as error:
            verdict.refused = str(error)
    verdict.seconds = round(time.perf_counter() - started, 2)
    return verdict


def _judge_guarded(verdict: Verdict, way: Way, alone: Outcome, bad: int) -> None:
    for name, settings in IDLE.items():
        outcome = _or_error(functools.partial(train, way, settings=settings))
        verdict.idle[name] = _against(outcome, alone)
        if not isinstance(outcome, str) and outcome.skipped + outcome.clipped:
            verdict.idle[name].append(f"skipped {outcome.skipped}, clipped {outcome.clipped}")

    verdict.skip, verdict.skip_after, verdict.gradients_kept = _skipped(way, bad)
    first, verdict.skip_first_after, _ = _skipped(way, 0)
    verdict.creates = [path for path in first if path.endswith(state.NEW)]
    verdict.skip_first = [path for path in first if not path.endswith(state.NEW)]

    clipped = _or_error(functools.partial(train, way, settings={"max_norm": MAX_NORM}))
    ours = _or_error(functools.partial(train, way, clip=fastguard.clip_grad_norm_, max_norm=MAX_NORM))
    clip = functools.partial(train, way, clip=torch.nn.utils.clip_grad_norm_)
    theirs = _or_error(functools.partial(clip, max_norm=MAX_NORM))
    if isinstance(theirs, str):
        verdict.clip_unknown = f"torch's clip_grad_norm_ {theirs}"
        return
    if isinstance(ours, str):
        verdict.clip = [f"fastguard.clip_grad_norm_ {ours}"]
        return
    verdict.clip = _against(clipped, ours)
    if isinstance(clipped, str):
        return
    if not clipped.clipped:
        verdict.clip.append("nothing was clipped")
    verdict.clip_torch = _distance(clipped, theirs)
    if verdict.clip_torch > CLOSE:
        near = [MAX_NORM * (1 + ulps * torch.finfo(torch.float32).eps) for ulps in (-2, -1, 1, 2)]
        verdict.clip_torch_ulp = max(_distance(clip(max_norm=max_norm), theirs) for max_norm in near)


def _skipped(way: Way, bad: int) -> tuple[list[str], list[str], bool]:
    """What a skipped step changed, what differs at the end, and whether gradients were kept."""
    outcome = _or_error(functools.partial(train, way, settings={}, bad=bad))
    if isinstance(outcome, str):
        return [outcome], [outcome], False
    changed = outcome.changed
    if outcome.skipped != [bad]:
        changed = [f"the records say that {outcome.skipped or 'nothing'} was skipped", *changed]
    return changed, _against(outcome, train(way, left_out=bad)), outcome.gradients_kept
