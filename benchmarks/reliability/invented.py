"""Invented histories, logs and saved states: what a hostile, unlucky or careless user might hand in."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from fastguard.records import StepStats, TensorStats, TrainingHistory
from fastguard.records.columns import COLUMNS, fold_rows
from fastguard.records.samples import ActivationStats, ModuleActivity, WeightStats

NAMES = ("w", "", "NaN", "Infinity", "a.b.weight", "a.b.bias", "weight_hh", "\x1b[2J", "\u202e", "\ud800", "x" * 300)
FAMILIES = ("relu", "gelu", "silu", "tanh", "sigmoid", "hardtanh", "softmax", "attention", "norm", "block", "other")
_EXTREMES = (0.0, 1.0, -1.0, 5e-324, 1e-300, 1e-162, 1e-30, 1e30, 1e154, 1e200, 1.7e308)


def number(random: Random) -> float:
    """A float of any size and sign, NaN and Inf among them."""
    kind = random.randrange(8)
    if kind == 0:
        return random.choice((math.nan, math.inf, -math.inf))
    if kind == 1:
        return random.choice(_EXTREMES) * random.choice((1, -1))
    if kind == 2:
        return math.ldexp(random.uniform(-1, 1), random.randrange(-1070, 1023))
    return random.gauss(1.0, 1.0)


def size(random: Random) -> float:
    """A finite float that is not below 0."""
    value = abs(number(random))
    return value if value < math.inf else 1.0


def course(random: Random) -> Callable[[int], float]:
    """A series: a level, a slope, noise, spikes, alternation, or anything at all."""
    kind, level, spread = random.randrange(6), number(random), size(random)
    if kind == 0:
        return lambda step: number(random)
    if kind == 1:
        return lambda step: level
    if kind == 2:
        return lambda step: level if step % 2 else -level
    if kind == 3:
        return lambda step: spread if random.random() < 0.03 else 1.0 + random.random()
    if kind == 4:
        return lambda step: random.choice(_EXTREMES)
    return lambda step: 2.0 * math.exp(-step / 60) + 0.1 * random.random()


def row(random: Random, norm: float) -> list[float]:
    """A row of a table as a kernel may make it."""
    numel = random.choice((0, 1, 3, 100, 10**9))
    squared = min(norm, 1e154) ** 2
    values = {
        "numel": numel,
        "sum_sq": squared if numel else 0.0,
        "sum": random.choice((0.0, norm, -norm)) if numel else 0.0,
        "abs_max": norm,
        "abs_min_nonzero": random.choice((0.0, 2.0**-24, norm)),
        "num_zeros": random.choice((0, numel, numel // 2)),
        "num_nans": int(random.random() < 0.02),
        "num_infs": int(random.random() < 0.02),
    }
    return [float(values.get(name, 0.0)) for name in COLUMNS]


def table(random: Random, names: list[str], norm: float) -> TensorStats:
    """A table of these tensors; at times one that knows their total only."""
    rows = [row(random, norm * random.choice((0.0, 0.1, 1.0))) for _ in names]
    if random.random() < 0.1:
        return TensorStats(b"", (), fold_rows(rows))
    flat = [value for one in rows for value in one]
    return TensorStats(struct.pack(f"{len(flat)}d", *flat), names)


def activity(random: Random, name: str) -> ModuleActivity:
    numel = random.choice((0, 1, 1000))
    counts = [random.choice((0, numel, numel // 2)) for _ in range(5)]
    zeros, saturated, nans, infs, near = counts
    figures = [number(random) for _ in range(4)]
    stats = ActivationStats(*figures, zeros, saturated, nans, infs, numel, abs(number(random)), near)
    units = random.choice((0, 1, 64))
    dead = random.choice((0, units))
    known = random.choice((None, True, False))
    return ModuleActivity(name, random.choice(FAMILIES), stats, random.randrange(9), known, units, dead, units - dead)


def weight(random: Random, name: str) -> WeightStats:
    grad, update = (random.choice((None, abs(number(random)))) for _ in range(2))
    norm, std, largest = (abs(number(random)) for _ in range(3))
    return WeightStats(name, random.choice((0, 15, 100)), norm, std, largest, grad, update, random.choice((0, 0, 3)))


def facts(random: Random, names: list[str]) -> dict[str, Any]:
    """What a guard might know of the model."""
    known: dict[str, Any] = {
        "names": names,
        "not_in_optimizer": random.sample(names, min(len(names), random.randrange(3))),
        "without_gradient": random.sample(names, min(len(names), random.randrange(3))),
        "initialization": {name: (number(random), number(random)) for name in names},
        "dropout": {name: number(random) for name in names[:2]},
        "decay_per_step": number(random),
        "backward_per_step": random.randrange(9),
        "has_scheduler": random.random() < 0.5,
        "initial_lr": number(random),
        "steps_per_epoch": random.choice((1, 44, 10**6)),
    }
    return {name: value for name, value in known.items() if random.random() < 0.5}


_LENGTHS = (0, 1, 3, 3, 12, 12, 12, 25, 25, 60, 130, 300)


def history(random: Random, lengths: Sequence[int] = _LENGTHS) -> TrainingHistory:
    """A run of any length, with any numbers, fed in any of the ways."""
    made = TrainingHistory(random.choice((1, 2, 7, 64, 512)))
    names = random.sample(NAMES, random.choice((1, 2, 3, 9)))
    made.note_model(**facts(random, names))
    loss, norm, lr, val = (course(random) for _ in range(4))
    has = [random.random() < 0.8 for _ in range(4)]
    step, rare = random.choice((0, 10**6, 10**15)), random.choice((3, 7, 20))
    for _ in range(random.choice(lengths)):
        size_now = abs(norm(step))
        if random.random() < 0.03:
            made.record(step, loss(step), size_now, lr(step), val(step))
        else:
            is_bad = not size_now < math.inf
            rows = table(random, names, 1.0 if is_bad else size_now)
            made.add(
                StepStats(
                    step=step,
                    tensors=rows,
                    clip_coef=random.choice((1.0, 1.0, 0.1, 1e-300)),
                    skipped=is_bad and random.random() < 0.9,
                    loss=loss(step) if has[0] else None,
                    val_loss=val(step) if has[1] and step % 10 == 0 else None,
                    lr=lr(step) if has[2] else None,
                    loss_scale=abs(number(random)) if not has[3] else None,
                    activations=tuple(activity(random, n) for n in names) if step % rare == 0 else (),
                    weights=tuple(weight(random, n) for n in names) if step % rare == 0 else (),
                ),
                random.choice((None, 1e-4, size(random))),
            )
        step += random.choice((1, 1, 1, 1, 1, 50, 0))
    return made


def junk(random: Random, depth: int = 0) -> Any:
    """Any JSON value, and a few that no JSON has."""
    kind = random.randrange(10 if depth < 3 else 7)
    if kind < 2:
        return number(random)
    if kind == 2:
        return random.choice((None, True, False, 0, -1, 10**400, -(10**30), 2**53))
    if kind < 5:
        return random.choice(("", "NaN", "Infinity", "text", "1.5", *NAMES))
    if kind < 7:
        return random.choice(([], {}, 1, -7, 0.5))
    if kind < 9:
        return [junk(random, depth + 1) for _ in range(random.randrange(4))]
    return {random.choice(NAMES): junk(random, depth + 1) for _ in range(random.randrange(4))}


def places(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Every (container, key) within nested dicts and lists."""
    found = [] if found is None else found
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            places(value[key], found)
    return found


def damage(random: Random, plain: Any) -> None:
    """Changes `plain`, nested dicts and lists, in one to three places: another value, one missing, one too many.

    Half of the time only numbers become other numbers, which may well be taken.
    """
    is_gentle = random.random() < 0.5
    for _ in range(random.randrange(1, 4)):
        every = places(plain)
        if not every:
            return
        # The upper levels, which are few, as often as the numbers, which are many.
        at, key = random.choice(every[: random.choice((10, 100, len(every)))])
        kind = random.randrange(4)
        if is_gentle:
            numbers = [(at, key) for at, key in every if type(at[key]) in (int, float)]
            if not numbers:
                return
            at, key = random.choice(numbers[: random.choice((10, 100, len(numbers)))])
            is_whole = type(at[key]) is int
            at[key] = random.choice((0, 1, at[key] + 1, at[key] - 1)) if is_whole else abs(number(random))
        elif kind == 0:
            del at[key]
        elif kind == 1 and isinstance(at, list):
            at.insert(key, junk(random))
        elif kind == 2 and isinstance(at[key], (dict, list)) and at[key]:
            at[key] = type(at[key])()
        else:
            at[key] = junk(random)


def log_line(random: Random, step: int) -> Any:
    """A line of a log, in order or not."""
    line: dict[str, Any] = {
        "step": step,
        "time": 1.0 + step,
        "loss": number(random),
        "lr": 1e-3,
        "grad/norm": abs(number(random)),
        "grad/mean": number(random),
        "grad/std": size(random),
        "grad/max": size(random),
        "grad/num_elements": random.choice((0, 12, 10**9)),
        "clip/coef": 1.0,
        "skipped": random.random() < 0.1,
    }
    if step % 7 == 0:
        line["tensors"] = {name: row(random, size(random)) for name in random.sample(NAMES, 3)}
        line["activations"] = {n: activity(random, n).to_dict() for n in random.sample(NAMES, 2)}
        line["weights"] = {n: weight(random, n).to_dict() for n in random.sample(NAMES, 2)}
        line["nonfinite"] = random.sample(NAMES, 2)
    return line


def log(random: Random) -> bytes:
    """The bytes of a log: sound, damaged, of another kind, cut off, or noise."""
    lines: list[bytes] = []
    how = random.random()
    for step in range(random.choice((0, 1, 5, 5, 20, 20, 110))):
        line: Any = log_line(random, step)
        if step == 0 and random.random() < 0.5:
            line = {"model": facts(random, list(NAMES))}
        if random.random() < (0.0 if how < 0.3 else 0.05):
            damage(random, line)
        if how > 0.9 and random.random() < 0.05:
            line = junk(random)
        lines.append(json.dumps(line).encode())
    text = b"\n".join(lines) + b"\n"
    if how > 0.8 and text:
        changed = bytearray(text)
        for _ in range(random.randrange(20)):
            changed[random.randrange(len(changed))] = random.randrange(256)
        text = bytes(changed[: random.randrange(len(changed) + 1)] if random.random() < 0.3 else changed)
    if random.random() < 0.02:
        text = bytes(random.randrange(256) for _ in range(random.randrange(500)))
    if random.random() < 0.02:
        text += b'{"step":1,"loss":' + b"[" * 5000
    return text
