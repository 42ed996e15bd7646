"""Checkpoints of a guarded run: files are complete or absent, and a run resumes from them bit for bit."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import kernels
from .._text import listed, prose, shown
from ..observers.observer import unwrapped
from ..ranks.shards import has_other_ranks
from ..records import values
from ..recovery.snapshots import load_random_state, random_state
from ..report.whole_file import write_whole
from ..step import Guard
from ..step.scalars import scalar

_NAME = re.compile(r"step-(\d+)(?:_metric-(-?\d+(?:\.\d+)?(?:e[-+]\d+)?|-?inf|nan))?\.pt")
_SPOILT = "not-finite_"
_VERSION = 1
_SHAPE: dict[str, Any] = {"step": int, "model": (dict, type(None)), "optimizers": list}
_SHAPE |= dict.fromkeys(("guard", "state", "random"), dict)
_PLAIN = "Leave out other objects, or save their numbers."
_REMEDY = "Save sharded and multi-process runs with torch.distributed.checkpoint, guard.stateful among them."


class Checkpoint(NamedTuple):
    """A checkpoint on disk. `metric` is NaN if it has no finite metric."""

    step: int
    metric: float
    path: Path


class Checkpoints:
    """Saves a guarded run into a folder, keeps the newest and the best checkpoints, and resumes from them.

    A checkpoint is one file, such as `step-00000120_metric-0.25.pt`, and is always complete. `torch.load(path,
    weights_only=True)` reads it: `step`, `metric`, `model`, `optimizers`, `guard`, `state` and `random`.

    Args:
        folder: a folder for this run alone; created if it is missing.
        keep_last: number of newest steps to keep, >= 1.
        keep_best: number of best metrics to keep, >= 0.
        mode: "min" or "max": whether a smaller or a larger metric is better. NaN and Inf never are.
        state: other parts of the run by name: objects with `state_dict` and `load_state_dict` (scheduler, GradScaler,
            `EarlyStopping`), or a `torch.Generator`, such as a DataLoader's.

    Raises:
        ValueError: `keep_last`, `keep_best` or `mode` is out of range.
        TypeError: an entry of `state` has no `load_state_dict`.

    Cost: `save` reads parameters and optimizer state to check that they are finite, and writes them. Synchronises.

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
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max', got {mode!r}")
        self.folder = Path(folder)
        self.keep_last = values.at_least(1, "keep_last", keep_last)
        self.keep_best, self.mode = values.at_least(0, "keep_best", keep_best), mode
        for name, part in (state or {}).items():
            if not isinstance(part, torch.Generator) and not hasattr(part, "load_state_dict"):
                what = f"{type(part).__name__} - at {name!r}"
                raise TypeError(f"`state` must hold objects with state_dict and load_state_dict, got {what}")
        self.state = dict(state or {})

    def all(self) -> list[Checkpoint]:
        """All checkpoints in the folder, by step."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        named = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name)) and path.is_file()]
        found = [Checkpoint(int(match[1]), float(match[2] or math.nan), path) for match, path in named]
        return sorted(found, key=lambda one: (one.step, one.path.name))

    def latest(self) -> Path | None:
        """The file of the highest step, or None."""
        return next((found.path for found in reversed(self.all())), None)

    def best(self) -> Path | None:
        """The file with the best metric, the earliest of equal ones; None if no metric is finite."""
        return next((found.path for found in self._ranked(self.all())), None)

    def _ranked(self, found: list[Checkpoint]) -> list[Checkpoint]:
        sign = 1.0 if self.mode == "min" else -1.0
        return sorted((c for c in found if math.isfinite(c.metric)), key=lambda c: (sign * c.metric, c.step))

    def save(self, guard: Any, step: int, metric: Any = None) -> Path:
        """Saves model, optimizers, guard, `state` and random generators, and removes checkpoints that are not kept.

        If parameters contain NaN or Inf, or buffers or optimizer state contain NaN, it warns and names the file
        `not-finite_step-….pt`, which neither `latest` nor `best` returns. Only the first such file is kept.

        Args:
            guard: `optimizer.guard`, or a guarded optimizer.
            step: number of steps taken; not below a step in the folder. The same step replaces its file.
            metric: a number, or a tensor of one element. NaN and Inf count as no metric.

        Returns:
            The file.

        Raises:
            ValueError: `step` is below a step in the folder, the guard has no model, or or a state is not plain data.
            TypeError: the model is sharded.
            RuntimeError: this is one of several processes.
            OSError: the file could not be written. Existing files are unchanged.
        """
        values.at_least(0, "step", step)
        before = self.all()
        if before and before[-1].step > step:
            there = f"{before[-1].path} there. Use another folder, call load first, or move later ones away"
            raise ValueError(f"`step` must not be below a step in the folder, got {step} with {there}.")
        guard, model = self._whole(guard)
        number = math.nan if metric is None else scalar("metric", metric)
        state = _state_of(guard, model, self.state)
        contents = {"version": _VERSION, "step": step, "metric": number, **state}
        name = f"step-{step:08d}" + ("" if metric is None else f"_metric-{number!r}") + ".pt"
        spoilt = _not_finite(model, guard.optimizers)
        if spoilt:
            known = sorted(self.folder.glob(f"{_SPOILT}*.pt"))
            path = known[0] if known else self.folder / (_SPOILT + name)
            what = "was not saved: there is" if known else "was saved as"
            good = before[-1].path.name if before else "none"
            said = f"step {step} holds NaN or Inf in {len(spoilt)} tensors ({listed(spoilt)}), and {what} {path.name}, "
            said += f"from which nothing is resumed. The newest good one: {good}."
            warnings.warn(said, RuntimeWarning, stacklevel=2)
            if not known:
                _write(path, contents)
            return path
        path = self.folder / name
        _write(path, contents)
        every = self.all()
        found = [c for c in every if c.step < step or c.path == path]  # of this step, the one just written
        keep = {*found[-self.keep_last :], *self._ranked(found)[: self.keep_best]}
        for other in every:
            if other not in keep:
                other.path.unlink(missing_ok=True)
        return path

    def load(self, guard: Any, path: str | os.PathLike[str] | None = None) -> int:
        """Resumes from a checkpoint; returns its step, or 0 if there is none.

        The run continues bit for bit if model, optimizers and `state` are built as before. Float32 state of
        half-precision parameters is not rounded. Checkpoints do not include non-persistent buffers.

        Args:
            guard: `optimizer.guard`, or a guarded optimizer.
            path: the file; None for the latest.

        Raises:
            FileNotFoundError: there is no file at `path`.
            ValueError: the file's checksums are wrong, or it lacks an entry of `state`.
            RuntimeError, ValueError: the model, an optimizer or another part refuses its state. After any error
                everything is as it was.

        Cost: one more read than torch.load, for the checksums, and a copy of model, optimizers and `state`.
        """
        path = self.latest() if path is None else Path(path)
        if path is None:
            return 0
        contents = _read(path)
        guard, model = self._whole(guard)
        saved, num_optimizers = contents["state"], len(guard.optimizers)
        missing = sorted(self.state.keys() - saved.keys())
        if missing or num_optimizers != len(contents["optimizers"]) or (model is None) != (contents["model"] is None):
            what = f"{listed(missing)}" if missing else f"{num_optimizers} optimizers, or the model, under this guard"
            raise ValueError(f"{shown(path)} lacks {what}")
        if saved.keys() - self.state.keys():
            forgotten = listed(sorted(saved.keys() - self.state.keys()))
            warnings.warn(f"{shown(path.name)} also holds {forgotten}, which `state` does not name", stacklevel=2)
        before = copy.deepcopy(_state_of(guard, model, self.state))
        try:
            _load_parts(contents, guard, model, self.state)
            guard.load_state_dict(contents["guard"])  # which itself loads all or nothing
        except BaseException as error:
            _load_parts(before, guard, model, self.state)
            if isinstance(error, (RuntimeError, ValueError)) or not isinstance(error, Exception):
                raise
            raise ValueError(f"{shown(path)} does not suit this run: {prose(repr(error))}") from error
        return int(contents["step"])

    def _whole(self, guard: Any) -> tuple[Guard, torch.nn.Module | None]:
        """The guard, and its model without wrappers; None where `state` has one instead."""
        if has_other_ranks():
            raise RuntimeError(f"`Checkpoints` must be used by a single process, got one of several. {_REMEDY}")
        guard = guard if isinstance(guard, Guard) else Guard.of(guard)
        model = None if guard.model is None else unwrapped(guard.model)
        if model is None and not any(isinstance(part, torch.nn.Module) for part in self.state.values()):
            remedy = 'Give it to fastguard.wrap, or to state={"model": model}.'
            raise ValueError(f"`guard` must know the model, got one without, or whose model is gone. {remedy}")
        for name, p in () if model is None else model.named_parameters():
            if hasattr(p, "to_local"):
                raise TypeError(f"`guard` must have a model of whole tensors, got a DTensor - at {name!r}. {_REMEDY}")
        return guard, model


def _write(path: Path, contents: dict[str, Any]) -> None:
    asked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # `_read` compares the checksums
    try:
        write_whole(path, partial(torch.save, contents), _check)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch's writer complains of what it could not finish
        raise
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"a checkpoint must hold plain data, and could not be written: {error}. {_PLAIN}") from error
    finally:
        torch.serialization.set_crc32_options(asked)


def _check(path: Path) -> None:
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe:
        raise ValueError(f"a checkpoint must hold plain data, got {listed(sorted(unsafe))}. {_PLAIN}")


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is wrong")
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file raises any
        remedy = "Move it away to resume from the checkpoint before it."
        raise ValueError(f"{shown(path)} cannot be read: {prose(error)}. {remedy}") from error
    is_ours = isinstance(contents, dict) and contents.get("version") == _VERSION
    if not is_ours or not all(key in contents and isinstance(contents[key], kind) for key, kind in _SHAPE.items()):
        raise ValueError(f"{shown(path)} must be a file that Checkpoints.save wrote, in version {_VERSION}")
    return contents


def _state_of(guard: Guard, model: torch.nn.Module | None, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Of the model, the optimizers, the guard, further parts and the random generators."""
    return {
        "model": None if model is None else model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in guard.optimizers],
        "guard": guard.state_dict(),
        "state": {n: p.get_state() if isinstance(p, torch.Generator) else p.state_dict() for n, p in parts.items()},
        "random": random_state(),
    }


def _load_parts(state: dict[str, Any], guard: Guard, model: torch.nn.Module | None, parts: Mapping[str, Any]) -> None:
    """Loads what `_state_of` returned, the guard's own state apart. Float32 state stays float32."""
    if model is not None:
        model.load_state_dict(state["model"])
    for optimizer, saved in zip(guard.optimizers, state["optimizers"], strict=True):
        _load_optimizer(optimizer, saved)
    for name, part in parts.items():
        load = part.set_state if isinstance(part, torch.Generator) else part.load_state_dict
        load(state["state"][name])
    load_random_state(state["random"])


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loads an optimizer's state, and undoes torch's casts to the dtype of the parameter."""
    optimizer.load_state_dict(saved)
    numbers = [i for group in saved.get("param_groups", ()) for i in group.get("params", ())]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, parameters):
        state = optimizer.state.get(p, {})
        for key, value in saved.get("state", {}).get(number, {}).items():
            now = state.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and value.dtype != now.dtype:
                state[key] = value.to(now.device)


def _not_finite(model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
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
    tensors = {n: t.detach() for n, t in (others | parameters).items() if t.is_floating_point() or t.is_complex()}
    rows = kernels.tensor_stats(list(tensors.values()), names=list(tensors))
    return [name for name, row in zip(tensors, rows) if row.num_nans or (row.num_infs and name in parameters)]
