"""The training on a bench: copies of model and optimizer that may be trained a little, and how they give a loss."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...step.wrappers import innermost, refuse_sharding_model
from ..batches import is_pair, mapped
from ..restoring import everything_restored, without_guard

_WHOLE_NAMES = ("model", "net", "network", "module", "self_model")


class Bench:
    """A model, its optimizer and its loss, to be run and trained as one likes.

    Attributes:
        model, optimizer: copies; or the user's own, where they cannot be copied, to be put back afterwards.
        form: "pair" of `loss_fn(model(inputs), targets)`, "whole" of `loss_fn(model, batch)`.
        is_copy: whether they are copies.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, form: str, is_copy: bool
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.form = form
        self.is_copy = is_copy
        self._loss_fn = loss_fn

    def output(self, inputs: Any) -> Any:
        """The model's output for `inputs`: a dict is given as keywords, a tuple or list as arguments."""
        if isinstance(inputs, dict) or hasattr(inputs, "keys"):
            return self.model(**inputs)
        if type(inputs) in (list, tuple):
            return self.model(*inputs)
        return self.model(inputs)

    def run(self, batch: Any) -> tuple[Any, Tensor]:
        """Output (None where only the loss function knows it) and loss of `batch`."""
        if self.form == "whole":
            return None, self._checked(self._loss_fn(self.model, mapped(torch.clone, batch)))
        inputs, targets = self.parts(batch)
        output = self.output(mapped(torch.clone, inputs))  # a first layer may write to its input
        return output, self._checked(self._loss_fn(output, targets))

    def with_optimizer(self, optimizer: torch.optim.Optimizer) -> Bench:
        """The same model and loss under another optimizer."""
        return Bench(self.model, optimizer, self._loss_fn, self.form, self.is_copy)

    def judge(self, output: Any, targets: Any) -> Tensor:
        """The loss of any output; of the form "pair" only."""
        return self._checked(self._loss_fn(output, targets))

    def parts(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch that is a pair, on the model's device."""
        device = next((p.device for p in self.model.parameters()), None)
        inputs, targets = mapped(lambda t: t if device is None else t.to(device), batch)
        return inputs, targets

    def step(self, batch: Any) -> float:
        """Takes one training step and returns the loss before it."""
        seen: list[float] = []

        @torch.enable_grad()
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            _, loss = self.run(batch)
            loss.backward()
            seen.append(float(loss.detach()))
            return loss

        if _wants_closure(self.optimizer):
            self.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            self.optimizer.step()
        return seen[0]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Model, optimizer and random generators are afterwards as they were before."""
        with everything_restored(self.model, self.optimizer, None):
            yield

    @staticmethod
    def _checked(loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise TypeError(f"`loss_fn` must return a tensor of one element, got {type(loss).__name__}")
        return loss


def _wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _form_by_name(loss_fn: Any) -> str | None:
    """What the signature says of the form; None if nothing."""
    if isinstance(loss_fn, nn.Module):
        return "pair"
    try:
        first = next(iter(inspect.signature(loss_fn).parameters.values()), None)
    except (TypeError, ValueError):  # a built-in function: torch's losses
        return "pair"
    if first is None:
        return None
    is_module = isinstance(first.annotation, type) and issubclass(first.annotation, nn.Module)
    return "whole" if is_module or first.name in _WHOLE_NAMES or str(first.annotation).endswith("Module") else None


def _find_form(make: Callable[[str], Bench], loss_fn: Any, batch: Any) -> str:
    """By the signature; else by trial: as a pair first, and as a whole where that raises and this does not."""
    if not is_pair(batch):
        return "whole"
    by_name = _form_by_name(loss_fn)
    if by_name is not None:
        return by_name
    for form in ("pair", "whole"):
        bench = make(form)
        with bench.put_back():
            try:
                bench.run(batch)
            except Exception:  # what it says is told by the trial pass, of the form that is chosen
                continue
            return form
    return "pair"


def _is_apart(bench: Bench, model: nn.Module, batch: Any) -> bool:
    """Whether the loss depends on the copy's parameters, and on none of the original's: a function may hold these."""
    own = [p for p in bench.model.parameters() if p.requires_grad]
    originals = [p for p in model.parameters() if p.requires_grad]
    with bench.put_back(), torch.enable_grad():
        try:
            _, loss = bench.run(batch)
        except Exception:  # as above
            return True
        if not loss.requires_grad or not own or loss.numel() != 1:
            return True
        found = torch.autograd.grad(loss, [*own, *originals], allow_unused=True)
    reached = [g is not None for g in found]
    return any(reached[: len(own)]) and not any(reached[len(own) :])


def _can_step(bench: Bench, batch: Any) -> bool:
    """Whether the copied optimizer still works: one that keeps things outside its groups loses them in a copy."""
    with bench.put_back(), torch.enable_grad():
        try:
            _, loss = bench.run(batch)
            loss.backward()
        except Exception:  # the training itself is broken, not the copy
            return True
        try:
            bench.step(batch)
        except Exception:  # the copy alone fails: the originals are put back instead
            return False
        return True


@contextlib.contextmanager
def set_up(model: nn.Module, optimizer: Any, loss_fn: Any, batches: list[Any]) -> Iterator[Bench]:
    """A bench of copies, or of the originals where those cannot be copied; all is put back, whatever happens.

    Raises:
        TypeError: `model` is no module or sharded, `optimizer` is no optimizer, `loss_fn` cannot be called.
        ValueError: a parameter is lazy or on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    if not callable(loss_fn):
        raise TypeError(f"`loss_fn` must be a function or a module, got {type(loss_fn).__name__}")
    refuse_sharding_model(model)
    inner = innermost(optimizer)
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter) or p.is_meta:
            raise ValueError(f"`model` must have values in all parameters, got none - at {name!r}. Run a batch first.")
    while hasattr(model, "_orig_mod"):  # compiled: the same parameters in plain Python, which can be watched
        model = model._orig_mod  # type: ignore[assignment]
    bench = None if _holds_modules(loss_fn) else _copied(model, inner, loss_fn, batches[0])
    if bench is not None:
        with bench.put_back():  # the random generators
            yield bench
        return
    with everything_restored(model, inner, None), without_guard(inner):

        def make(form: str) -> Bench:
            return Bench(model, inner, loss_fn, form, False)

        yield make(_find_form(make, loss_fn, batches[0]))


def _holds_modules(loss_fn: Any) -> bool:
    """Whether the loss function may reach a model by itself: then copies would not be what it uses."""
    if isinstance(loss_fn, nn.Module):
        return False
    if isinstance(loss_fn, functools.partial):
        held = [*loss_fn.args, *loss_fn.keywords.values()]
        return _holds_modules(loss_fn.func) or any(map(_has_values, held))
    if not inspect.isfunction(loss_fn):
        return not inspect.isbuiltin(loss_fn)  # a bound method, or an object with `__call__`
    try:
        known = inspect.getclosurevars(loss_fn)
    except ValueError:  # a name that has no value yet
        return True
    return any(_has_values(value) for value in (*known.nonlocals.values(), *known.globals.values()))


def _has_values(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(True for _ in value.parameters()) or any(True for _ in value.buffers())
    return isinstance(value, (torch.optim.Optimizer, nn.Parameter))


def _copied(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, batch: Any) -> Bench | None:
    """A bench of copies, or None: they cannot be made, or the loss function holds the model itself."""
    memo: dict[int, Any] = {}
    versions = [t._version for t in _tensors(model)]
    try:
        own_model = copy.deepcopy(model, memo)
        own_optimizer = copy.deepcopy(optimizer, memo)
        own_loss = copy.deepcopy(loss_fn, memo) if isinstance(loss_fn, nn.Module) else loss_fn
    except Exception:  # hooks, locks, process groups: whatever cannot be copied is put back instead
        return None

    def make(form: str) -> Bench:
        return Bench(own_model, own_optimizer, own_loss, form, True)

    try:
        bench = make(_find_form(make, loss_fn, batch))
        is_apart = _is_apart(bench, model, batch)
    finally:  # a loss function that holds the model, unseen, has run it: the copy still is as it was
        for original, kept, version in zip(_tensors(model), _tensors(own_model), versions):
            # batch_norm writes to its running statistics without a new version
            if original._version != version or not torch.equal(original, kept):
                original.data.copy_(kept.data)
    return bench if is_apart and _can_step(bench, batch) else None


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
