"""What guarding costs, measured on the demo's own model: unguarded, with torch's clipping, guarded; interleaved."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

import fastguard

from .model import CharTransformer, loss_of
from .text import Corpus
from .training import MAX_NORM, make_optimizer

MIN_ROUNDS = 5
MAX_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one contender, one entry a round: of the whole step, and of all that follows backward in it."""

    name: str
    whole_s: list[float]
    update_s: list[float]


@dataclass(frozen=True, slots=True)
class _Contender:
    name: str
    model: CharTransformer
    optimizer: torch.optim.Optimizer
    update: Callable[[torch.Tensor], object]


def _contenders(model: CharTransformer, log: Path) -> list[_Contender]:
    made = []
    for name in ("unguarded", "with clip_grad_norm_", "with fastguard"):
        own = copy.deepcopy(model)
        made.append(_Contender(name, own, optimizer := make_optimizer(own), _update(name, own, optimizer, log)))
    return made


def _update(
    name: str, model: CharTransformer, optimizer: torch.optim.Optimizer, log: Path
) -> Callable[[torch.Tensor], object]:
    if name == "unguarded":
        return lambda loss: optimizer.step()
    if name == "with clip_grad_norm_":

        def clip_and_step(loss: torch.Tensor) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()

        return clip_and_step

    sinks = [fastguard.JsonlSink(log, append=False)]
    # No diagnosis: a trained model under a new optimizer is no run to judge, and a median would not show its cost.
    fastguard.wrap(optimizer, model, max_norm=MAX_NORM, sinks=sinks, check_every=0)
    guard = fastguard.Guard.of(optimizer)

    def guarded_step(loss: torch.Tensor) -> None:
        optimizer.step()
        guard.observe(loss=loss)

    return guarded_step


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(model: CharTransformer, corpus: Corpus, seconds: float, log: Path) -> list[Measured]:
    """Times whole steps of the three in turn, each on its own copy of `model` and the same batches.

    The order changes from round to round. Takes about `seconds`, but no fewer than five rounds.
    """
    contenders = _contenders(model, log)
    measured = [Measured(c.name, [], []) for c in contenders]
    deadline = time.perf_counter() + seconds
    for round_ in range(-1, MAX_ROUNDS):  # round -1 warms up: it makes the optimizers' state
        if round_ >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        inputs, targets = corpus.batch()
        for turn in range(len(contenders)):
            i = (turn + round_) % len(contenders)
            contender = contenders[i]
            started = _now(corpus.device)
            loss = loss_of(contender.model, inputs, targets)
            loss.backward()
            after_backward = _now(corpus.device)
            contender.update(loss)
            after_update = _now(corpus.device)
            contender.optimizer.zero_grad()
            ended = _now(corpus.device)
            if round_ >= 0:
                measured[i].whole_s.append(ended - started)
                measured[i].update_s.append(after_update - after_backward)
    fastguard.Guard.of(contenders[-1].optimizer).close()
    log.unlink(missing_ok=True)  # of three copies' steps: nobody's run
    return measured


def table(measured: list[Measured], model: CharTransformer) -> str:
    """`measured` as text. What is added is the median over rounds of the difference from unguarded after backward."""
    base = measured[0]
    step_s = median(base.whole_s)
    tensors = list(model.parameters())
    lines = [
        f"what guarding costs a step: medians (min-max) of {len(base.whole_s)} rounds, in turn; "
        f"{sum(p.numel() for p in tensors) / 1e6:.1f} M float32",
        f"parameters in {len(tensors)} tensors, fused AdamW, threads: {torch.get_num_threads()}",
        f"{'':22}{'whole step, ms':>22}{'after backward, us':>24}{'added, us':>11}{'of a step':>11}",
    ]
    for one in measured:
        added = median(ours - theirs for ours, theirs in zip(one.update_s, base.update_s))
        extra = f"{1e6 * added:>+11.0f}{added / step_s:>+11.2%}" if one is not base else f"{'-':>11}{'-':>11}"
        lines.append(f"{one.name:22}{_spread(one.whole_s, 1e3, 1):>22}{_spread(one.update_s, 1e6, 0):>24}{extra}")
    lines.append("clip_grad_norm_ clips. fastguard clips, skips, keeps statistics of every tensor, and writes the log.")
    return "\n".join(lines)


def _spread(values: list[float], unit: float, digits: int) -> str:
    low, mid, high = (f"{unit * v:.{digits}f}" for v in (min(values), median(values), max(values)))
    return f"{mid} ({low}-{high})"
