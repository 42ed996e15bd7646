"""Records which functions of torch a training pass calls: losses, activations, and the first that returns NaN."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LOSSES = {"cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"}
LOSSES |= {name for name in dir(nn.functional) if name.endswith("_loss")}
REGRESSION = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
ACTIVATIONS = {
    *("relu", "relu6", "sigmoid", "tanh", "softmax", "log_softmax", "softplus", "softsign", "hardtanh", "hardsigmoid"),
    *("leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish", "logsigmoid", "softmin", "exp"),
}
# Functions with points where their value or derivative is infinite.
BREAKERS = {
    *("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "div", "__truediv__", "__rtruediv__", "true_divide", "rdiv"),
    *("reciprocal", "pow", "__pow__", "__rpow__", "norm", "vector_norm", "std", "var", "acos", "asin", "atanh", "sub"),
    *("softmax", "log_softmax", "xlogy", "cdist", "normalize", "cosine_similarity", "__rdiv__"),
}
# These keep the values, or nearly so: the function that made them still counts.
_CARRIERS = {
    *("view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t", "contiguous", "clone"),
    *("float", "double", "to", "type", "clamp", "clamp_min", "clamp_max", "clip", "__getitem__", "select", "swapaxes"),
    *("view_as", "reshape_as", "type_as", "movedim", "unflatten", "expand", "dropout"),
}


@dataclass(slots=True)
class LossCall:
    """One call of a loss of torch.nn.functional."""

    kind: str  # its name, like "cross_entropy"
    input: Tensor  # input, target: its arguments
    target: Any
    options: dict[str, Any]  # its keyword arguments
    made_by: tuple[str, int | None] | None  # the activation that made its input, and its dimension; None if none did
    result: Tensor | None = None  # what it returned; None if it raised


class Activity(NamedTuple):
    kind: str
    module: str
    output: Tensor


class Layer(NamedTuple):
    """A module with weights, and the input of its first call."""

    name: str
    module: nn.Module
    input: Tensor | None


class Watcher(TorchFunctionMode):
    """Records calls while it is entered; with `find_origin` also the first result that is not finite."""

    def __init__(self, *, find_origin: bool = False) -> None:
        super().__init__()
        self.losses: list[LossCall] = []
        self.activities: list[Activity] = []
        self.layers: dict[str, Layer] = {}
        self.dtypes: set[torch.dtype] = set()  # of results
        self.origin: tuple[str, str] | None = None
        self.zero_roots: list[tuple[str, str]] = []
        self._find_origin = find_origin
        self._made: dict[int, tuple[weakref.ref[Tensor], tuple[str, int | None]]] = {}
        self._inside: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", ""))
        name = name if name.startswith("__") else name.rstrip("_")
        call = None
        given = (*args, kwargs.get("input"), kwargs.get("target")) if name in LOSSES else ()
        tensors = [a for a in given if isinstance(a, Tensor)]
        if len(tensors) >= 2:
            call = LossCall(name, tensors[0], tensors[1], dict(kwargs), self.made_by(tensors[0]))
            self.losses.append(call)
        were_finite = not self._find_origin or all(is_finite(a) for a in args)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        self.dtypes.add(result.dtype)
        if call is not None:
            call.result = result
        elif name in ACTIVATIONS:
            dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else None)
            is_over_dim = name in ("softmax", "log_softmax", "softmin") and bool(result.dim())
            self._remember(result, (name, None if dim is None or not is_over_dim else dim % result.dim()))
            self.activities.append(Activity(name, self._where(), result.detach()))
        elif name in _CARRIERS and args and isinstance(args[0], Tensor):
            made_by = self.made_by(args[0])
            if made_by is not None:
                self._remember(result, made_by)
        elif name == "log" and args and (self.made_by(args[0]) or ("", None))[0] == "softmax":
            self._remember(result, ("log_softmax", self.made_by(args[0])[1]))  # type: ignore[index]
        if self._find_origin and self.origin is None and were_finite and not is_finite(result):
            self.origin = (name, self._where())
        is_root = self._find_origin and name in ("sqrt", "norm", "vector_norm", "std") and result.is_floating_point()
        if is_root and bool((result.detach() == 0).any()):  # it has no derivative there
            self.zero_roots.append((name, self._where()))
        return result

    def made_by(self, tensor: Any) -> tuple[str, int | None] | None:
        """The activation that made `tensor`, with its dimension (counted from the front)."""
        ref, what = self._made.get(id(tensor), (None, None))
        return what if ref is not None and ref() is tensor else None

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Follows which module of `model` runs, and records the inputs of those with weights."""
        with ExitStack() as handles:
            for name, module in model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    handles.enter_context(module.register_forward_pre_hook(partial(self._enter, name)))
                    handles.enter_context(module.register_forward_hook(partial(self._leave, name)))
            yield

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._inside.append(name)
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        is_other = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "norm" in type(module).__name__.lower()
        if not is_other and any(p is not None and p.dim() >= 2 for p in module._parameters.values()):
            self.layers.setdefault(name, Layer(name, module, tensor))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside and self._inside[-1] == name:
            self._inside.pop()

    def _where(self) -> str:
        return self._inside[-1] if self._inside else ""

    def _remember(self, tensor: Tensor, what: tuple[str, int | None]) -> None:
        self._made[id(tensor)] = (weakref.ref(tensor), what)


def is_finite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(is_finite, value))
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_sparse:
        return True
    return bool(torch.isfinite(value.detach()).all())
