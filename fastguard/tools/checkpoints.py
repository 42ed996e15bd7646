"""Checkpoints of a guarded run: a file is whole or not there, and the run goes on from it bit for bit."""

from __future__ import annotations

import math
import os
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import kernels
from .._text import listed, prose, shown
from ..guard import Guard
from ..guard.ledger import scalar
from ..guard.wrappers import unwrapped
from .randomness import load_random_state, random_state

_NAME = re.compile(r"step-(\d+)(?:_metric-(-?\d+(?:\.\d+)?(?:e[-+]\d+)?|-?inf|nan))?\.pt")
_UNFINISHED = ".unfinished"
_SPOILT = "not-finite_"
_VERSION = 1
_PLAIN = "Leave out what is none, or save its numbers."
_REMEDY = "Save sharded and multi-process runs with torch.distributed.checkpoint, with guard.state_dict() beside them."


class Checkpoint(NamedTuple):
    """A checkpoint on disk. `metric` is NaN where it has none that could be compared."""

    step: int
    metric: float
    path: Path


class Checkpoints:
    """Saves a guarded run into a folder, keeps the newest and the best, and resumes from them.

    One file a checkpoint, `step-00000120_metric-0.25.pt`, written beside its place, flushed to the disk and renamed: at
    any moment each of them is whole. `torch.load(path, weights_only=True)` reads it: `step`, `metric`, `model` (without
    the prefixes of torch.compile and DDP), `optimizers`, `guard`, `state`, `random` (Python, NumPy, torch) and `extra`.

    Args:
        folder: made where it is missing. One run a folder, which nobody else writes to.
        keep_last: so many of the newest steps are kept, >= 1.
        keep_best: so many of the best metrics are kept, >= 0. One that is also among the newest is one file.
        mode: "min" or "max": which metric is better. NaN and Inf never are.
        state: what else belongs to the run, by name: objects with `state_dict` and `load_state_dict` (scheduler,
            GradScaler, `EarlyStopping`, an average of the weights), or a `torch.Generator`, as of a DataLoader.

    Attributes:
        extra: what else `save` was given, from the file that was loaded last.

    Cost: `save` reads parameters and optimizer state once, to see whether they are finite, and writes them; training
    waits for the disk. On a GPU it synchronises. Until `save` returns the disk holds one checkpoint more than is kept.

    >>> import tempfile, torch, fastguard
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters()), model)
    >>> checkpoints = fastguard.Checkpoints(tempfile.mkdtemp(), keep_last=2, keep_best=1)
    >>> for step in range(checkpoints.load(optimizer.guard), 4):
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    ...     path = checkpoints.save(optimizer.guard, step + 1, metric=abs(step - 1.5))
    >>> sorted(path.name for path in checkpoints.folder.iterdir())
    ['step-00000002_metric-0.5.pt', 'step-00000003_metric-0.5.pt', 'step-00000004_metric-1.5.pt']
    >>> checkpoints.best().name, checkpoints.load(optimizer.guard)
    ('step-00000002_metric-0.5.pt', 4)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep_last: int = 2,
        keep_best: int = 1,
        *,
        mode: str = "min",
        state: Mapping[str, Any] | None = None,
    ) -> None:
        for name, number, least in (("keep_last", keep_last, 1), ("keep_best", keep_best, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"`{name}` must be an integer >= {least}, got {number!r}")
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max', got {mode!r}")
        self.folder = Path(folder)
        self.keep_last, self.keep_best, self.mode = keep_last, keep_best, mode
        for name, part in (state or {}).items():
            if not isinstance(part, torch.Generator) and not hasattr(part, "load_state_dict"):
                what = type(part).__name__
                raise TypeError(
                    f"`state` must hold objects with state_dict and load_state_dict, got {what} - at {name!r}"
                )
        self.state = dict(state or {})
        self.extra: dict[str, Any] = {}

    def all(self) -> list[Checkpoint]:
        """All checkpoints in the folder, by step."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        named = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name)) and path.is_file()]
        found = [Checkpoint(int(match[1]), float(match[2] or math.nan), path) for match, path in named]
        return sorted(found, key=lambda one: (one.step, one.path.name))

    def latest(self) -> Path | None:
        """The file of the highest step; None where there is none."""
        found = self.all()
        return found[-1].path if found else None

    def best(self) -> Path | None:
        """The file with the best metric, of equal ones the earliest; None where none has a finite metric."""
        ranked = self._ranked(self.all())
        return ranked[0].path if ranked else None

    def _ranked(self, found: list[Checkpoint]) -> list[Checkpoint]:
        sign = 1.0 if self.mode == "min" else -1.0
        return sorted((c for c in found if math.isfinite(c.metric)), key=lambda c: (sign * c.metric, c.step))

    def save(self, guard: Any, step: int, metric: Any = None, **extra: Any) -> Path:
        """Saves model, optimizers, guard, `state` and random generators, and removes what need not be kept.

        Where parameters hold NaN or Inf, or buffers or optimizer state NaN, it warns, and the file gets another name,
        `not-finite_step-….pt`, which neither `latest` nor `best` gives. Of these the first is kept, for you to look at.

        Args:
            guard: `optimizer.guard`, or a guarded optimizer.
            step: how many steps have been taken; not below one that is in the folder. Saved again, it is replaced.
            metric: a number, or a tensor of one element. NaN and Inf count as none.
            extra: plain data (numbers, text, tensors, lists and dicts of these), found in `extra` after `load`.

        Returns:
            The file.

        Raises:
            ValueError: `step` is below one in the folder; the guard has no model; something would not load again.
            TypeError: the model is sharded.
            RuntimeError: this is one of several processes.
            OSError: it could not be written. What was there before is there still.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"`step` must be an integer >= 0, got {step!r}")
        before = self.all()
        if before and before[-1].step > step:
            raise ValueError(
                f"`step` must not be below a step that is in the folder, got {step} beside {before[-1].path}. Use "
                "another folder, or call load first; to go on from an earlier one, move the later ones away."
            )
        guard = guard if isinstance(guard, Guard) else Guard.of(guard)
        model = self._whole_model(guard)
        number = math.nan if metric is None else scalar("metric", metric)
        contents = {
            "version": _VERSION,
            "step": step,
            "metric": number,
            "model": None if model is None else model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in guard.optimizers],
            "guard": guard.state_dict(),
            "state": {name: _state_of(part) for name, part in self.state.items()},
            "random": random_state(),
            "extra": extra,
        }
        name = f"step-{step:08d}" + ("" if metric is None else f"_metric-{number!r}") + ".pt"
        spoilt = _spoilt(model, guard.optimizers)
        if spoilt:
            known = sorted(self.folder.glob(f"{_SPOILT}*.pt"))
            path = known[0] if known else self.folder / (_SPOILT + name)
            what = "was not saved: there is" if known else "was saved as"
            warnings.warn(
                f"step {step} holds NaN or Inf in {len(spoilt)} tensors ({listed(spoilt)}), and {what} {path.name}, "
                f"from which nothing is resumed. The newest good one: {before[-1].path.name if before else 'none'}.",
                RuntimeWarning,
                stacklevel=2,
            )
            return path if known else self._write(path, contents)
        path = self._write(self.folder / name, contents)
        found = self.all()
        keep = {path, *(c.path for c in found if c.step < step)}  # of this step, the one just written
        found = [c for c in found if c.path in keep]
        keep = {c.path for c in (*found[-self.keep_last :], *self._ranked(found)[: self.keep_best])}
        for other in self.all():
            if other.path not in keep:
                other.path.unlink(missing_ok=True)
        return path

    def load(self, guard: Any, path: str | os.PathLike[str] | None = None) -> int:
        """Has the run go on from a checkpoint; returns its step, or 0 where there is none.

        Bit for bit, if model, optimizers and `state` are made as they were. Float32 state of half-precision parameters
        stays float32, which `Optimizer.load_state_dict` alone would round. Buffers that are not persistent are not in a
        checkpoint: by their definition they are made anew.

        Args:
            guard: `optimizer.guard`, or a guarded optimizer.
            path: None for the latest.

        Raises:
            ValueError: the file cannot be read, or lacks what `state` names. Nothing is changed then.
            RuntimeError, ValueError: the model, an optimizer or another part refuses what was saved; parts before it
                are loaded already.
        """
        path = self.latest() if path is None else Path(path)
        if path is None:
            return 0
        contents = _read(path)
        guard = guard if isinstance(guard, Guard) else Guard.of(guard)
        model = self._whole_model(guard)
        saved, optimizers = contents["state"], guard.optimizers
        missing = sorted(self.state.keys() - saved.keys())
        if missing or len(optimizers) != len(contents["optimizers"]) or (model is None) != (contents["model"] is None):
            what = f"{listed(missing)}" if missing else f"{len(optimizers)} optimizers, or the model, under this guard"
            raise ValueError(f"{shown(path)} must hold what is to be loaded, and lacks {what}")
        if saved.keys() - self.state.keys():
            forgotten = listed(sorted(saved.keys() - self.state.keys()))
            warnings.warn(f"{shown(path.name)} also holds {forgotten}, which `state` does not name", stacklevel=2)
        if model is not None:
            model.load_state_dict(contents["model"])
        for optimizer, state in zip(optimizers, contents["optimizers"], strict=True):
            _load_optimizer(optimizer, state)
        guard.load_state_dict(contents["guard"])
        for name, part in self.state.items():
            part.set_state(saved[name]) if isinstance(part, torch.Generator) else part.load_state_dict(saved[name])
        load_random_state(contents["random"])
        self.extra = contents["extra"]
        return int(contents["step"])

    def _whole_model(self, guard: Guard) -> torch.nn.Module | None:
        """The guard's model, without wrappers; None where `state` has one instead."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise RuntimeError(f"`Checkpoints` must be used by a single process, got one of several. {_REMEDY}")
        model = None if guard.model is None else unwrapped(guard.model)
        if model is None and not any(isinstance(part, torch.nn.Module) for part in self.state.values()):
            raise ValueError(
                "`guard` must know the model, got one that was given none, or whose model no longer exists. Give it to "
                'fastguard.wrap, or to state={"model": model}.'
            )
        for name, p in () if model is None else model.named_parameters():
            if hasattr(p, "to_local"):
                raise TypeError(
                    f"`guard` must have a model with whole parameters, got a DTensor - at {name!r}. {_REMEDY}"
                )
        return model

    def _write(self, path: Path, contents: dict[str, Any]) -> Path:
        """Writes a file that is there as a whole, or not at all."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            _sync(self.folder.parent)
        for left in self.folder.glob(f".*{_UNFINISHED}"):  # by a process that was killed
            left.unlink(missing_ok=True)
        unfinished = self.folder / f".{path.name}{_UNFINISHED}"
        try:
            with open(unfinished, "xb") as file:  # the mode is that of any new file
                torch.save(contents, file)
                file.flush()
                os.fsync(file.fileno())
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(unfinished)
            if unsafe:
                raise ValueError(f"a checkpoint must hold plain data, got {listed(sorted(unsafe))}. {_PLAIN}")
            os.replace(unfinished, path)
        except BaseException as error:
            unfinished.unlink(missing_ok=True)
            if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
                raise error.__context__ from None  # torch's writer complains of what it could not finish
            if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
                raise ValueError(
                    f"a checkpoint must hold plain data, and could not be written: {error}. {_PLAIN}"
                ) from error
            raise
        _sync(self.folder)
        return path


def _sync(folder: Path) -> None:
    """Has the names in a folder outlive a loss of power, where a folder can be opened."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(path: Path) -> dict[str, Any]:
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, KeyError, ValueError) as error:
        raise ValueError(
            f"{shown(path)} cannot be read: {prose(error)}. Move it away to go on from the one before."
        ) from error
    if not isinstance(contents, dict) or contents.get("version") != _VERSION:
        raise ValueError(f"{shown(path)} must be a file that Checkpoints.save wrote, in version {_VERSION}")
    return contents


def _state_of(part: Any) -> Any:
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def _spoilt(model: torch.nn.Module | None, optimizers: list[torch.optim.Optimizer]) -> list[str]:
    """Names of parameters with NaN or Inf, and of buffers and optimizer state with NaN: a mask may hold Inf."""
    parameters = dict(model.named_parameters()) if model is not None else {}
    others = dict(model.named_buffers()) if model is not None else {}
    names = {id(p): name for name, p in parameters.items()}
    for k, optimizer in enumerate(optimizers):
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = names.setdefault(id(p), f"optimizer{k}.param{i}")
            parameters[name] = p
            state = optimizer.state[p].items() if p in optimizer.state else ()
            others |= {f"{name}.{key}": v for key, v in state if isinstance(v, torch.Tensor)}
    tensors = {
        n: t.detach() for n, t in (*others.items(), *parameters.items()) if t.is_floating_point() or t.is_complex()
    }
    rows = kernels.tensor_stats(list(tensors.values()), names=list(tensors))
    return [name for name, row in zip(tensors, rows) if row.num_nans or (row.num_infs and name in parameters)]


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loads it, and puts back what torch has cast to the dtype of its parameter."""
    optimizer.load_state_dict(saved)
    numbers = [i for group in saved.get("param_groups", ()) for i in group.get("params", ())]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, parameters):
        state = optimizer.state.get(p, {})
        for key, value in saved.get("state", {}).get(number, {}).items():
            now = state.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and value.dtype != now.dtype:
                state[key] = value.to(now.device)
