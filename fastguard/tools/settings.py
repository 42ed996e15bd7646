"""All that keeps a training stable, read from one file: arguments for `wrap` and for what stands around a run."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import pstdev
from typing import Any

import torch
from torch.optim.lr_scheduler import ConstantLR, LinearLR, LRScheduler, SequentialLR

from .._text import shown
from ..diagnosis import RULES, Finding, diagnose, make_rule
from ..diagnosis.presets import PRESETS
from ..guard.recovery import Recovery
from ..guard.wrappers import innermost
from ..history import TrainingHistory
from ..stats.values import maybe
from .early_stopping import EarlyStopping
from .schedules import num_warmup_steps, warmup_cosine

_SCHEDULES = ("cosine", "linear", "constant")
_PRECISIONS: dict[str, torch.dtype | None] = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_OTHER_NAMES = {"none": "no", "fp32": "no", "float32": "no", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What a file of settings says, as attributes; `fastguard.settings` reads one. What it leaves out is as here.

    Attributes:
        max_grad_norm: largest gradient norm let through; None for no clipping. In `wrapping()`.
        gradient_accumulation_steps: backward passes for each step of the optimizer. In `accumulates(index)`.
        learning_rate: for your optimizer; within `lr_min` and `lr_max`.
        warmup_steps: steps of linear warm-up; below 1, the share of all steps. In `scheduler(optimizer, total)`.
        lr_scheduler: what follows: "cosine", "linear" (to zero) or "constant".
        mixed_precision: "no", "fp16" or "bf16"; true is "fp16". In `autocast(device)` and `scaler(device)`.
        early_stopping, patience: whether to stop after so many checks without a better value. In `stopping()`.
        auto_recovery, max_recovery_attempts: whether a guard recovers, and how often at most. In `wrapping()`.
        loss_window_size, divergence_threshold: so many of the newest losses must not have a standard deviation above
            the threshold. In `diagnose(history)`, as are the next two.
        explosion_threshold: a norm must not be above so many times `max_grad_norm`.
        lr_min, lr_max: where learning rates must lie.
        log_frequency, checkpoint_frequency: at which steps `logs(step)` and `saves(step)` are True.
    """

    max_grad_norm: float | None = 1.0
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    warmup_steps: float = 0
    lr_scheduler: str = "cosine"
    mixed_precision: str = "no"
    early_stopping: bool = False
    patience: int = 5
    auto_recovery: bool = False
    max_recovery_attempts: int = 3
    loss_window_size: int = 10
    divergence_threshold: float = 10.0
    explosion_threshold: float = 10.0
    lr_min: float = 1e-8
    lr_max: float = 1e-2
    log_frequency: int = 10
    checkpoint_frequency: int = 1000

    def wrapping(self) -> dict[str, Any]:
        """Keyword arguments for `fastguard.wrap`: `wrap(optimizer, model, **settings.wrapping())`."""
        arguments: dict[str, Any] = {"max_norm": self.max_grad_norm}
        if self.auto_recovery:
            arguments["recovery"] = Recovery(attempts=self.max_recovery_attempts)
        return arguments

    def accumulates(self, index: int) -> bool:
        """Whether batch `index` (from 0) only adds to the gradients: no step of the optimizer follows it."""
        return (index + 1) % self.gradient_accumulation_steps != 0

    def scheduler(self, optimizer: Any, total: int) -> LRScheduler:
        """Warm-up and what follows it, of torch's own schedulers, over `total` steps of the optimizer.

        Raises:
            ValueError: the warm-up is as long as `total`, or longer.
        """
        if self.lr_scheduler == "cosine":
            return warmup_cosine(optimizer, self.warmup_steps, total)
        inner, warmup = innermost(optimizer), num_warmup_steps(self.warmup_steps, total)
        rise = LinearLR(inner, 0.01, 1.0, warmup) if warmup else None
        # ConstantLR of factor 1 leaves the rate where it is
        is_linear = self.lr_scheduler == "linear"
        after = LinearLR(inner, 1.0, 0.0, total - warmup) if is_linear else ConstantLR(inner, 1.0, 1)
        return after if rise is None else SequentialLR(inner, [rise, after], [warmup])

    def autocast(self, device: str = "cuda") -> contextlib.AbstractContextManager[Any]:
        """The context for forward passes on `device`; one that does nothing without mixed precision."""
        dtype = _PRECISIONS[self.mixed_precision]
        return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)

    def scaler(self, device: str = "cuda") -> torch.amp.GradScaler:
        """A GradScaler, which does nothing unless `mixed_precision` is "fp16"."""
        return torch.amp.GradScaler(device, enabled=self.mixed_precision == "fp16")

    def stopping(self, **arguments: Any) -> EarlyStopping | None:
        """An `EarlyStopping` with this patience and other `arguments`; None without `early_stopping`."""
        return EarlyStopping(self.patience, **arguments) if self.early_stopping else None

    def logs(self, step: int) -> bool:
        """Whether `step` is one in `log_frequency`."""
        return step % self.log_frequency == 0

    def saves(self, step: int) -> bool:
        """Whether `step` is one in `checkpoint_frequency`, and not step 0."""
        return step > 0 and step % self.checkpoint_frequency == 0

    def diagnose(self, history: TrainingHistory) -> list[Finding]:
        """What fastguard's rules find in a run, and what is beyond the thresholds that are set here.

        Cost: about 1 ms, as `fastguard.diagnosis.diagnose`.
        """
        asked = [*RULES.values(), _UNSTABLE]
        thresholds: dict[str, dict[str, float]] = {
            "learning-rate-out-of-bounds": {"low": self.lr_min, "high": self.lr_max},
            _UNSTABLE.name: {"newest": self.loss_window_size, "std": self.divergence_threshold},
        }
        if self.max_grad_norm is not None:
            asked.append(_LARGE)
            thresholds[_LARGE.name] = {"norm": self.explosion_threshold * self.max_grad_norm}
        return diagnose(history, rules=asked, thresholds=thresholds)


def unstable_loss(history: TrainingHistory, *, newest: int = 10, std: float = 10.0) -> Finding | None:
    """The standard deviation of the `newest` losses is above `std`, or one of them is NaN or Inf."""
    known = [entry for entry in history.recent if entry.loss is not None][-newest:]
    losses = [entry.loss for entry in known if entry.loss is not None]
    if len(known) < newest:
        return None
    spread = pstdev(losses) if all(map(math.isfinite, losses)) else math.nan
    if spread <= std:
        return None
    return Finding(
        f"The standard deviation of the newest {newest} losses is {spread:.3g}.",
        known[0].step,
        known[-1].step,
        evidence={"std": spread, "threshold": std},
    )


_UNSTABLE = make_rule(unstable_loss, "settings/unstable-loss", source="the toolkit's stability check of the loss")
_LARGE = next(rule for rule in PRESETS["toolkit"] if rule.name == "toolkit/large-norm")


def settings(source: str | os.PathLike[str] | Mapping[str, Any]) -> TrainingSettings:
    """Settings of a training, from a YAML, JSON or TOML file, or a dict.

    Keys are the attributes of `TrainingSettings`; they may stand in sections (a key that holds keys), whose names are
    for the reader. docs/around-a-run.md says what each one does.

    Args:
        source: a path ending in .yaml, .yml, .json or .toml; or a dict. YAML needs PyYAML, TOML Python 3.11.

    Raises:
        ValueError: an unknown key (the nearest known one is named), one that is there twice, or a value that it cannot
            have; a file that cannot be read as what its name says.
        ImportError: PyYAML is not installed, or this Python reads no TOML.

    Cost: one read of the file.

    >>> import fastguard
    >>> found = fastguard.settings({"clipping": {"max_grad_norm": 0.5}, "warmup_steps": 100, "mixed_precision": "bf16"})
    >>> found.wrapping(), found.warmup_steps, found.patience
    ({'max_norm': 0.5}, 100, 5)
    >>> fastguard.settings({"max_gradnorm": 1.0})
    Traceback (most recent call last):
    ...
    ValueError: `max_gradnorm` is no setting - at a dict. Did you mean `max_grad_norm`?
    """
    where, plain = ("a dict", source) if isinstance(source, Mapping) else (str(source), _read(Path(source)))
    if not isinstance(plain, Mapping):
        raise ValueError(f"{where} must hold keys with values, got a {type(plain).__name__}")
    found: dict[str, Any] = {}
    for key, value in _flat(plain):
        if key not in _READERS:
            nearest = difflib.get_close_matches(str(key), _READERS, 1, 0.0)[0]
            raise ValueError(f"`{shown(key, 80)}` is no setting - at {where}. Did you mean `{nearest}`?")
        if key in found:
            raise ValueError(f"`{key}` must be there once, and is there twice - at {where}")
        try:
            found[key] = _READERS[key](value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"`{key}` must be {error}, got {value!r} - at {where}") from None
    result = TrainingSettings(**found)
    if result.lr_min > result.lr_max or not result.lr_min <= result.learning_rate <= result.lr_max:
        raise ValueError(
            f"`learning_rate` must lie from `lr_min` to `lr_max`, got {result.learning_rate:g} beside "
            f"{result.lr_min:g} and {result.lr_max:g} - at {where}. Set these too where they shall be others."
        )
    return result


def _flat(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values, those in sections too."""
    for key, value in plain.items():
        if isinstance(value, Mapping) and key not in _READERS:
            yield from _flat(value)
        else:
            yield key, value


def _read(path: Path) -> Any:
    kind = path.suffix.lower()
    names = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "tomllib"}
    if kind not in names:
        raise ValueError(f"`source` must be a path that ends in {', '.join(names)}, got {str(path)!r}")
    text = path.read_text(encoding="utf-8")
    try:
        reader: Any = importlib.import_module(names[kind])
    except ImportError as error:
        remedy = "pip install pyyaml" if names[kind] == "yaml" else "Python 3.11 brings it; YAML and JSON need no more"
        raise ImportError(f"{shown(path)} needs {names[kind]} to be read: {remedy}") from error
    broken = reader.YAMLError if names[kind] == "yaml" else ValueError
    try:
        found = reader.safe_load(text) if names[kind] == "yaml" else reader.loads(text)
    except broken as error:
        raise ValueError(f"{shown(path)} must be {kind[1:].upper()}, and cannot be read: {error}") from error
    return {} if found is None else found


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[Any], float]:
    """Reads a finite number from `low` on, or above it; YAML takes 1e-4 for text."""

    def read(value: Any) -> float:
        what = f"a finite number {'>' if above else '>='} {low:g}" + (f" and <= {high:g}" if high < math.inf else "")
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (low < number if above else low <= number) or not number <= high or number == math.inf:
            raise ValueError(what)
        return number

    return read


def _count(low: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        number = _number(-math.inf)(value) if isinstance(value, (int, float, str)) else math.nan
        if not number >= low or number != int(number):
            raise ValueError(f"a whole number >= {low}")
        return int(number)

    return read


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _warmup(value: Any) -> float:
    number = _number(0.0)(value)
    if number >= 1.0 and number != int(number):
        raise ValueError("a whole number of steps, or a share below 1")
    return int(number) if number >= 1.0 or not number else number


def _schedule(value: Any) -> str:
    if value not in _SCHEDULES:
        raise ValueError(f"one of {', '.join(_SCHEDULES)}")
    return str(value)


def _precision(value: Any) -> str:
    name = "fp16" if value is True else "no" if value is False else str(value).lower()
    name = _OTHER_NAMES.get(name, name)
    if name not in _PRECISIONS:
        raise ValueError(f"one of {', '.join(_PRECISIONS)}, true or false")
    return name


_READERS: dict[str, Callable[[Any], Any]] = {
    "max_grad_norm": maybe(_number(0.0, above=True)),
    "gradient_accumulation_steps": _count(1),
    "learning_rate": _number(0.0, above=True),
    "warmup_steps": _warmup,
    "lr_scheduler": _schedule,
    "mixed_precision": _precision,
    "early_stopping": _truth,
    "patience": _count(1),
    "auto_recovery": _truth,
    "max_recovery_attempts": _count(1),
    "loss_window_size": _count(2),
    "divergence_threshold": _number(0.0, above=True),
    "explosion_threshold": _number(0.0, above=True),
    "lr_min": _number(0.0),
    "lr_max": _number(0.0, above=True),
    "log_frequency": _count(1),
    "checkpoint_frequency": _count(1),
}
