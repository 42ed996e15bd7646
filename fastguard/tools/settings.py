"""Settings of a training from one file: arguments for `wrap`, schedule, precision, early stopping, thresholds."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import pstdev
from typing import Annotated, Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from .._text import did_you_mean, shown
from ..diagnosis import Finding, diagnose
from ..diagnosis.finding import count
from ..errors import missing_package
from ..records import TrainingHistory
from ..records.codec import readers_of
from ..records.values import MisfitError, maybe, refused, truth
from ..recovery import Recovery
from ..step.wrappers import innermost
from .early_stopping import EarlyStopping

_SCHEDULES = ("cosine", "linear", "constant")
_PRECISIONS: dict[str, torch.dtype | None] = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_OTHER_NAMES: dict[Any, str] = {True: "fp16", False: "no", None: "no"}


def _real(what: str, fits: Callable[[float], bool], kind: type[Any] = float) -> Callable[[Any], Any]:
    """A reader of finite numbers; YAML takes 1e-4 for text."""

    def read(value: Any) -> Any:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and fits(number)):
            raise refused(what, value)
        return kind(number)

    return read


def _count(least: int) -> Callable[[Any], int]:
    return _real(f"a whole number >= {least}", lambda number: number >= least and number == int(number), int)


def _one_of(names: Collection[str], what: str = "") -> Callable[[Any], str]:
    def read(value: Any) -> str:
        name = value.lower() if isinstance(value, str) else value if value in (True, False, None) else ""
        name = _OTHER_NAMES.get(name, name)
        if name not in names:
            raise refused(f"one of {', '.join(names)}{what}", value)
        return str(name)

    return read


_positive = _real("a finite number > 0", lambda number: number > 0.0)
_not_negative = _real("a finite number >= 0", lambda number: number >= 0.0)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of a training, as `fastguard.settings` reads them. Missing keys have the defaults shown here.

    Attributes:
        max_grad_norm: gradients are clipped to this norm; None for no clipping. In `wrapping()`.
        gradient_accumulation_steps: backward passes for each step of the optimizer. In `accumulates(index)`.
        learning_rate: for your optimizer; between `lr_min` and `lr_max`.
        warmup_steps: steps of linear warm-up; below 1, a share of all steps. In `scheduler(optimizer, total)`.
        lr_scheduler: the schedule after the warm-up: "cosine", "linear" (to zero) or "constant".
        mixed_precision: "no", "fp16" or "bf16"; true is "fp16". In `autocast(device)` and `scaler(device)`.
        early_stopping, patience: whether to stop after `patience` checks without an improvement. In `stopping()`.
        auto_recovery, max_recovery_attempts: whether the guard recovers, and how often at most. In `wrapping()`.
        loss_window_size, divergence_threshold: limit on the standard deviation of the newest `loss_window_size` losses.
            `diagnose(history)` checks it, and the next two.
        explosion_threshold: limit on the gradient norm, as a multiple of `max_grad_norm`.
        lr_min, lr_max: range of learning rates.
        log_frequency, checkpoint_frequency: `logs(step)` and `saves(step)` are True at multiples of these.
    """

    max_grad_norm: Annotated[float | None, maybe(_positive)] = 1.0
    gradient_accumulation_steps: Annotated[int, _count(1)] = 1
    learning_rate: Annotated[float, _positive] = 1e-3
    warmup_steps: Annotated[float, _not_negative] = 0.0
    lr_scheduler: Annotated[str, _one_of(_SCHEDULES)] = "cosine"
    mixed_precision: Annotated[str, _one_of(_PRECISIONS, ", true or false")] = "no"
    early_stopping: Annotated[bool, truth] = False
    patience: Annotated[int, _count(1)] = 5
    auto_recovery: Annotated[bool, truth] = False
    max_recovery_attempts: Annotated[int, _count(1)] = 3
    loss_window_size: Annotated[int, _count(2)] = 10
    divergence_threshold: Annotated[float, _positive] = 10.0
    explosion_threshold: Annotated[float, _positive] = 10.0
    lr_min: Annotated[float, _not_negative] = 1e-8
    lr_max: Annotated[float, _positive] = 1e-2
    log_frequency: Annotated[int, _count(1)] = 10
    checkpoint_frequency: Annotated[int, _count(1)] = 1000

    def wrapping(self) -> dict[str, Any]:
        """Keyword arguments for `fastguard.wrap`: `wrap(optimizer, model, **settings.wrapping())`."""
        arguments: dict[str, Any] = {"max_norm": self.max_grad_norm}
        if self.auto_recovery:
            arguments["recovery"] = Recovery(attempts=self.max_recovery_attempts)
        return arguments

    def accumulates(self, index: int) -> bool:
        """Whether batch `index` (from 0) only accumulates gradients, and no optimizer step follows it."""
        return (index + 1) % self.gradient_accumulation_steps != 0

    def scheduler(self, optimizer: Any, total: int) -> LRScheduler:
        """A torch scheduler with the warm-up and the schedule after it, for `total` steps of the optimizer.

        Raises:
            ValueError: the warm-up takes `total` steps or more.
        """
        inner, share = innermost(optimizer), self.warmup_steps
        num_first = round(share * total) if share < 1.0 else int(share)
        rest = total - num_first
        if rest < 1:
            raise ValueError(f"`total` must be above the {num_first} steps of the warm-up, got {total!r}")
        if self.lr_scheduler == "cosine":
            after: LRScheduler = CosineAnnealingLR(inner, rest)
        else:
            after = LinearLR(inner, 1.0, 0.0 if self.lr_scheduler == "linear" else 1.0, rest)
        return SequentialLR(inner, [LinearLR(inner, 0.01, 1.0, num_first), after], [num_first]) if num_first else after

    def autocast(self, device: str = "cuda") -> contextlib.AbstractContextManager[Any]:
        """The autocast context for forward passes on `device`; without mixed precision it does nothing."""
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
        """The findings of fastguard's rules, and of the thresholds that are set here.

        Cost: about 1 ms, as `fastguard.diagnosis.diagnose`.
        """
        found = diagnose(history, thresholds={"learning-rate-unusual": {"low": self.lr_min, "high": self.lr_max}})
        known = [(entry.step, entry.loss) for entry in history.recent if entry.loss is not None]
        steps, losses = zip(*known[-self.loss_window_size :]) if len(known) >= self.loss_window_size else ((), ())
        spread = pstdev(losses) if all(map(math.isfinite, losses)) and losses else math.nan
        if losses and not spread <= self.divergence_threshold:
            summary = f"The standard deviation of the newest {len(losses)} losses is {spread:.3g}."
            found.append(Finding(summary, steps[0], steps[-1], rule="settings/unstable-loss"))
        limit = math.inf if self.max_grad_norm is None else self.explosion_threshold * self.max_grad_norm
        if over := [entry.step for entry in history.recent if entry.norm > limit]:
            summary = f"The norm was above {limit:g} at {count(len(over), 'step')}."
            found.append(Finding(summary, over[0], over[-1], rule="settings/large-norm"))
        return found


def settings(source: str | os.PathLike[str] | Mapping[str, Any]) -> TrainingSettings:
    """Settings of a training, from a YAML, JSON or TOML file, or a dict.

    Keys are the attributes of `TrainingSettings`. You may group them in sections, whose names have no meaning.
    docs/around-a-run.md describes each key.

    Args:
        source: a path ending in .yaml, .yml, .json or .toml; or a dict. YAML needs PyYAML, TOML Python 3.11.

    Raises:
        ValueError: an unknown key (names the nearest known one), a key that two sections give, or an invalid value; a
            file that is not valid YAML, JSON or TOML.
        ImportError: PyYAML is not installed, or this Python reads no TOML.

    Cost: one read of the file.

    >>> import fastguard
    >>> found = fastguard.settings({"clipping": {"max_grad_norm": 0.5}, "warmup_steps": 100, "mixed_precision": "bf16"})
    >>> found.wrapping(), found.warmup_steps, found.patience
    ({'max_norm': 0.5}, 100.0, 5)
    >>> fastguard.settings({"max_gradnorm": 1.0})
    Traceback (most recent call last):
    ...
    ValueError: Unknown setting `max_gradnorm` - at a dict. Did you mean `max_grad_norm`?
    """
    where, plain = ("a dict", source) if isinstance(source, Mapping) else (str(source), _read(Path(source)))
    if not isinstance(plain, Mapping):
        raise ValueError(f"{where} must hold keys with values, got a {type(plain).__name__}")
    found: dict[str, Any] = {}
    readers = readers_of(TrainingSettings)
    sections = [value for key, value in plain.items() if isinstance(value, Mapping) and key not in readers]
    single = {key: value for key, value in plain.items() if not isinstance(value, Mapping) or key in readers}
    for key, value in (item for section in (single, *sections) for item in section.items()):
        if key not in readers:
            raise ValueError(f"Unknown setting `{shown(key, 80)}` - at {where}. {did_you_mean(key, readers)}")
        if key in found:
            raise ValueError(f"`{key}` must be given once, got it twice - at {where}")
        try:
            found[key] = readers[key](value)
        except MisfitError as error:
            raise ValueError(f"`{key}` {error.problem} - at {where}") from None
    result = TrainingSettings(**found)
    if not result.lr_min <= result.learning_rate <= result.lr_max:
        got = f"{result.learning_rate:g} with {result.lr_min:g} and {result.lr_max:g} - at {where}"
        raise ValueError(f"`learning_rate` must lie from `lr_min` to `lr_max`, got {got}. Set those too.")
    return result


def _read(path: Path) -> Any:
    kind = path.suffix.lower()
    names = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "tomllib"}
    if kind not in names:
        raise ValueError(f"`source` must be a path that ends in {', '.join(names)}, got {str(path)!r}")
    is_yaml, text = names[kind] == "yaml", path.read_text(encoding="utf-8")
    try:
        reader: Any = importlib.import_module(names[kind])
    except ImportError as error:
        if is_yaml:
            raise missing_package(shown(path), "PyYAML", error, "settings") from error
        raise ImportError(f"{shown(path)} needs Python 3.11. Use YAML or JSON with an older one.") from error
    broken = reader.YAMLError if is_yaml else ValueError
    try:
        found = reader.safe_load(text) if is_yaml else reader.loads(text)
    except (broken, RecursionError) as error:
        raise ValueError(f"{shown(path)} must be {kind[1:].upper()}, and cannot be read: {error}") from error
    return {} if found is None else found
