"""A training on a bench: batches of any nesting, a loss and steps of them, and how everything is restored."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..observers.tensors import leaves
from ..observers.tensors import mapped as mapped
from ..ranks.shards import refuse_sharding_model
from ..recovery.snapshots import load_random_state, random_state
from ..step import Guard
from ..step.backup import Backup
from ..step.guard import GUARD
from ..step.wrappers import innermost
from .clipping import clip_grad_norm_

_WHOLE_NAMES = ("model", "net", "network", "module", "self_model")


def take(batch: Any, most: int) -> list[Any]:
    """The first batches of `batch`, which is one batch or gives them, each with tensors of its own.

    One batch is a tensor, a dict, a tuple, or a list that holds a tensor; anything else that can be iterated over
    gives batches: a DataLoader, a list of pairs.
    """
    refuse_iterator("batch", batch)
    is_list = isinstance(batch, list)
    if any(isinstance(part, Tensor) for part in batch) if is_list else isinstance(batch, (Tensor, Mapping, tuple)):
        return [mapped(_own, batch)]
    if not isinstance(batch, Iterable) or isinstance(batch, (str, bytes)):
        remedy = "Of a data set, pass a DataLoader."
        raise TypeError(f"`batch` must be a batch or give batches, got {type(batch).__name__}. {remedy}")
    taken = [mapped(_own, one) for one in itertools.islice(batch, most)]
    if not taken:
        raise ValueError("`batch` must give at least one batch, got none")
    return taken


def refuse_iterator(name: str, batches: Any) -> None:
    if isinstance(batches, Iterator):
        what = f"{type(batches).__name__}, an iterator, which would be used up"
        raise ValueError(f"`{name}` must be iterable again and again, got {what}. Pass a loader or a list of batches.")


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def tensors_in(nested: Any) -> list[Tensor]:
    """All tensors of `nested`, in order; a dataclass or the like of outputs is looked into as well."""
    return [tensor for _, tensor in leaves(nested)]


def first_tensor(nested: Any, *, floating: bool = False) -> Tensor | None:
    """The first tensor in `nested`; with `floating`, the first of a floating dtype."""
    found = (t for t in tensors_in(nested) if t.numel() and (not floating or t.is_floating_point()))
    return next(found, None)


def is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


@contextlib.contextmanager
def randomness_restored(loader: Any) -> Iterator[None]:
    """Restores the random generators of torch, Python and NumPy, and those of a DataLoader, afterwards."""
    holders = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    own = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
    state = random_state()
    try:
        yield
    finally:
        load_random_state(state)
        for generator, before in own:
            generator.set_state(before)


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Sets the learning rate of a group; a tensor is written in place, because compiled steps hold it."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


@contextlib.contextmanager
def without_guard(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """Pauses the guard. Yields a function that clips the gradients to its fixed limit, if it has one."""
    guard = getattr(optimizer, "__dict__", {}).get(GUARD)
    if not isinstance(guard, Guard):
        yield lambda: None
        return
    limit = getattr(guard._run.clip, "limit", None)

    def clip() -> None:
        if isinstance(limit, (int, float)):
            clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], limit)

    with guard.paused():
        yield clip


class Bench:
    """A model, its optimizer and its loss, to run and to train within `put_back`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, form: str) -> None:
        self.model, self.optimizer = model, optimizer  # the user's own
        self.form = form  # "pair" for `loss_fn(model(inputs), targets)`, "whole" for `loss_fn(model, batch)`
        self._loss_fn = loss_fn

    def run(self, batch: Any) -> tuple[Any, Tensor]:
        """Output (None where only the loss function knows it) and loss of `batch`."""
        if self.form == "whole":
            return None, self.judge(self.model, mapped(torch.clone, batch))
        inputs, targets = self.parts(batch)
        output = output_of(self.model, mapped(torch.clone, inputs))  # a first layer may write to its input
        return output, self.judge(output, targets)

    def judge(self, *given: Any) -> Tensor:
        """The loss of an output and targets, or of the model and a batch."""
        loss = self._loss_fn(*given)
        if not isinstance(loss, Tensor):
            raise TypeError(f"`loss_fn` must return a tensor of one element, got {type(loss).__name__}")
        return loss

    def parts(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch that is a pair, on the model's device."""
        device = next((p.device for p in self.model.parameters()), None)
        inputs, targets = mapped(lambda t: t if device is None else t.to(device), batch)
        return inputs, targets

    def step(self, batch: Any, clip: Callable[[], None] | None = None) -> float:
        """Takes one training step, with `clip` after the backward pass, and returns the loss before it."""
        seen: list[float] = []

        @torch.enable_grad()
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            _, loss = self.run(batch)
            loss.backward()
            if clip is not None:
                clip()
            seen.append(float(loss.detach()))
            return loss

        wanted = inspect.signature(self.optimizer.step).parameters.get("closure")
        is_needed = wanted is not None and wanted.default is wanted.empty
        if is_needed or isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            self.optimizer.step()
        return seen[0]

    @contextlib.contextmanager
    def put_back(self, loader: Any = None) -> Iterator[None]:
        """Restores model, optimizer, loss and random generators afterwards, whatever happened.

        Of modules that is: parameters, buffers, gradients, modes, and Python attributes that are plain data. Autograd
        does not notice, so a graph that was made before can still be differentiated.
        """
        roots = [one for one in (self.model, self._loss_fn) if isinstance(one, nn.Module)]
        modules = [module for root in roots for module in root.modules()]
        own = [p for module in modules for p in module.parameters(recurse=False)]
        buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        backup = Backup(self.optimizer, more=(*own, *buffers, *map(vars, modules)))
        parameters = dict.fromkeys([*own, *(p for group in self.optimizer.param_groups for p in group["params"])])
        before = [(p, p.grad, p.requires_grad) for p in parameters]
        counted = tuple(t for t in (*parameters, *buffers) if not t.is_inference())
        for p in own:
            p.grad = None  # an accumulation under way is left alone
        try:
            with _unsafe_preserve_version_counter(counted), randomness_restored(loader):
                yield
        finally:
            backup.restore()
            for p, gradient, requires_grad in before:
                p.grad = gradient
                p.requires_grad_(requires_grad)


def output_of(model: nn.Module, inputs: Any) -> Any:
    """The model's output for `inputs`: a dict is given as keywords, a tuple or list as arguments."""
    if hasattr(inputs, "keys"):
        return model(**inputs)
    return model(*inputs) if type(inputs) in (list, tuple) else model(inputs)


def require_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}. Pass the model itself.")


def _find_form(bench: Bench, loss_fn: Any, batch: Any) -> str:
    """By the signature, or else by trial: as a pair first, and as a whole if that raises and this does not."""
    if not is_pair(batch):
        return "whole"
    if isinstance(loss_fn, nn.Module):
        return "pair"
    try:
        first = next(iter(inspect.signature(loss_fn).parameters.values()), None)
    except (TypeError, ValueError):  # a built-in function: torch's losses
        return "pair"
    name, kind = getattr(first, "name", ""), getattr(first, "annotation", None)
    is_module = isinstance(kind, type) and issubclass(kind, nn.Module)
    if is_module or name in _WHOLE_NAMES or str(kind).endswith("Module"):
        return "whole"
    for form in ("pair", "whole"):
        bench.form = form
        with bench.put_back():
            try:
                bench.run(batch)
            except Exception:  # the trial pass reports it, in the form that is chosen
                continue
            return form
    return "pair"


@contextlib.contextmanager
def set_up(
    model: nn.Module, optimizer: Any, loss_fn: Any, batch: Any, num_batches: int
) -> Iterator[tuple[Bench, list[Any]]]:
    """A bench and the first batches; everything is restored afterwards, whatever happens, and a guard sees nothing."""
    require_module(model)
    kind = type(loss_fn)
    if not callable(loss_fn) or isinstance(loss_fn, type):
        is_class = isinstance(loss_fn, type)
        what = f"the class {loss_fn.__name__}. Write {loss_fn.__name__}()." if is_class else kind.__name__
        raise TypeError(f"`loss_fn` must be a function or a module, got {what}")
    refuse_sharding_model(model)
    inner = innermost(optimizer)
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter) or p.is_meta:
            raise ValueError(f"`model` must have values in all parameters, got none - at {name!r}. Run a batch first.")
    while hasattr(model, "_orig_mod"):  # compiled: the same parameters in plain Python, which can be watched
        model = model._orig_mod  # type: ignore[assignment]

    bench = Bench(model, inner, loss_fn, "pair")
    with bench.put_back(batch), without_guard(inner), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes and schedulers, from trial steps
        batches = take(batch, num_batches)
        if kind.__module__.startswith("torch.nn") and not is_pair(batches[0]):
            what = f"{type(batches[0]).__name__}. Pass a function loss_fn(model, batch)."
            raise ValueError(f"`batch` must be a pair (inputs, targets) for {kind.__name__}, got {what}")
        bench.form = _find_form(bench, loss_fn, batches[0])
        yield bench, batches
