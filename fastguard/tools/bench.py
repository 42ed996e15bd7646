"""The training on a bench: how a batch becomes a loss and a step, and how everything is restored."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..step.wrappers import innermost, refuse_sharding_model
from .batches import is_pair, mapped
from .restoring import everything_restored, without_guard

_WHOLE_NAMES = ("model", "net", "network", "module", "self_model")


class Bench:
    """A model, its optimizer and its loss, to run and to train within `put_back`.

    Attributes:
        model, optimizer: the user's own.
        form: "pair" for `loss_fn(model(inputs), targets)`, "whole" for `loss_fn(model, batch)`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, form: str) -> None:
        self.model = model
        self.optimizer = optimizer
        self.form = form
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
        return Bench(self.model, optimizer, self._loss_fn, self.form)

    def judge(self, output: Any, targets: Any) -> Tensor:
        """The loss of any output; of the form "pair" only."""
        return self._checked(self._loss_fn(output, targets))

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

        if _wants_closure(self.optimizer):
            self.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            self.optimizer.step()
        return seen[0]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Restores model, optimizer, loss and random generators afterwards."""
        with everything_restored(self.model, self.optimizer, None, more=self._loss_fn):
            yield

    @staticmethod
    def _checked(loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise TypeError(f"`loss_fn` must return a tensor of one element, got {type(loss).__name__}")
        return loss


def require_module(model: Any) -> None:
    """Raises TypeError if `model` is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}. Pass the model itself.")


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
    """By the signature, or else by trial: as a pair first, and as a whole if that raises and this does not."""
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
            except Exception:  # the trial pass reports it, in the form that is chosen
                continue
            return form
    return "pair"


@contextlib.contextmanager
def set_up(model: nn.Module, optimizer: Any, loss_fn: Any, batches: list[Any]) -> Iterator[Bench]:
    """A bench; everything is restored afterwards, whatever happens, and a guard sees nothing.

    Raises:
        TypeError: `model` is not a module or is sharded, `optimizer` is not an optimizer, `loss_fn` cannot be called.
        ValueError: a parameter is lazy or on the meta device.
    """
    require_module(model)
    if not callable(loss_fn):
        raise TypeError(f"`loss_fn` must be a function or a module, got {type(loss_fn).__name__}")
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise TypeError(f"`loss_fn` must be a function or a module, got the class {name}. Write {name}().")
    if str(getattr(type(loss_fn), "__module__", "")).startswith("torch.nn") and not is_pair(batches[0]):
        raise ValueError(
            f"`batch` must be a pair (inputs, targets) for {type(loss_fn).__name__}, got {type(batches[0]).__name__}. "
            "Pass a pair, or a function loss_fn(model, batch)."
        )
    refuse_sharding_model(model)
    inner = innermost(optimizer)
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter) or p.is_meta:
            raise ValueError(f"`model` must have values in all parameters, got none - at {name!r}. Run a batch first.")
    while hasattr(model, "_orig_mod"):  # compiled: the same parameters in plain Python, which can be watched
        model = model._orig_mod  # type: ignore[assignment]

    def make(form: str) -> Bench:
        return Bench(model, inner, loss_fn, form)

    with make("pair").put_back(), without_guard(inner):
        yield make(_find_form(make, loss_fn, batches[0]))
