"""What arms change about the model and its data: precision, mode, dropout, initialization, inputs, outputs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch

from ..diagnosis.needs import computing
from ..diagnosis.rules.output import loss_and_activation
from ..observers.loss_gradient import facts_of_loss
from ..observers.tensors import mapped
from .arms import Context, arm

_MODE = ("the model in training mode", "eval-mode-in-training")
_HALF = ("half-precision-overflow", "half-precision-underflow")
_DROP = {"advice": "Set dropout to 0.", "needs_model": True, "by_validation": True}
_ENDING = ("the loss given what it takes: no activation before it, or log_softmax", "wrong-output-layer")
_PLAIN = "Give the loss the plain output of the last layer (nll_loss its log_softmax)."
_INITIAL = ("PyTorch's default initialization", "poor-initialisation")
_RESET = "Leave the initialization to PyTorch: reset_parameters()."
_STANDARD = ("each input feature at mean 0 and standard deviation 1", "unnormalised-inputs")
_SCALED = ("the targets at mean 0 and standard deviation 1", "unnormalised-targets")
_SCALE = "Standardize the targets, and scale the predictions back."
_ORDER = "the training data in random order"
_SHUFFLE = "Pass shuffle=True to the DataLoader of the training data."
_NULL = ("inputs permuted against targets", "wrong-targets")
_LOOK = "Look at single samples with their targets as the model gets them."
_DROPOUTS = (torch.nn.modules.dropout._DropoutNd,)
_DROPPING = (torch.nn.MultiheadAttention, torch.nn.RNNBase)  # by an attribute `dropout`
_OF_TARGETS = ("label", "target", "decoder")  # parts of the names of keyword arguments that come from the targets
TensorChange: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def _log(p: torch.Tensor) -> torch.Tensor:
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()


def _logit(p: torch.Tensor) -> torch.Tensor:
    return p.logit(eps=torch.finfo(p.dtype).eps)


# What undoes an operation ahead of a loss function; by "" of any other, for which a second log_softmax changes nothing.
_ASKING: dict[str, tuple[Any, dict[str, TensorChange]]] = {
    "cross_entropy_loss": (torch._C._nn, {"Softmax": _log, "Sigmoid": _logit}),
    "binary_cross_entropy_with_logits": (torch, {"Sigmoid": _logit}),
    "nll_loss_nd": (torch._C._nn, {"Softmax": _log, "": lambda x: x.log_softmax(min(x.dim() - 1, 1))}),
}
_LOSSES = [(torch._C._nn, f"{name}_loss") for name in ("mse", "smooth_l1", "huber", "cross_entropy")]
_LOSSES += [(torch._C._nn, "nll_loss_nd"), (torch._C._nn, "binary_cross_entropy")]
_LOSSES += [(torch, "binary_cross_entropy_with_logits")]
_ELEMENTWISE = ("cross-entropy", "negative log-likelihood", "squared error", "binary cross-entropy",
                "binary cross-entropy with logits")  # fmt: skip
_LAST_ACTIVATIONS = (torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.ReLU)


@arm("train mode", *_MODE, advice="Call model.train() before training.", needs_model=True)
def _to_train_mode(context: Context) -> Iterator[str | None]:
    is_training = all(module.training for module in context.modules())
    yield "the model is in training mode" if is_training else None

    def before(module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            module.train()

    context.model.register_forward_pre_hook(before)


@arm("float32", "autocast off", *_HALF, advice="Train in float32.", needs_model=True)
def _leave_autocast(context: Context) -> Iterator[str | None]:
    is_known = context.known is not None or (context.history is not None and context.step)
    yield None if context.facts.autocast or not is_known else "the model does not run under autocast"
    before: list[dict[str, bool]] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        devices = {"cpu", *(p.device.type for p in module.parameters())}
        before.append({device: torch.is_autocast_enabled(device) for device in devices})
        for device in devices:
            torch.set_autocast_enabled(device, False)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> Any:
        for device, was_enabled in before.pop().items() if before else ():
            torch.set_autocast_enabled(device, was_enabled)
        return mapped(lambda x: x.float() if x.is_floating_point() else x, output)

    context.model.register_forward_pre_hook(enter)
    context.model.register_forward_hook(leave, always_call=True)


@arm("no dropout", "no dropout", "dropout-too-high", **_DROP)
def _without_dropout(context: Context) -> Iterator[str | None]:
    modules = context.modules((*_DROPOUTS, *_DROPPING))
    drops = any(getattr(one, "p", 0.0) or getattr(one, "dropout", 0.0) for one in modules)
    yield None if drops else "no module drops anything"
    for module in modules:
        setattr(module, "p" if isinstance(module, _DROPOUTS) else "dropout", 0.0)


@arm("no final activation", *_ENDING, advice=_PLAIN)
def _undo_final_activation(context: Context) -> Iterator[str | None]:
    """Undoes softmax or sigmoid before torch's losses; an error between numbers passes over the last activation."""
    facts = context.facts
    kind, activation = loss_and_activation(facts.loss_ops)
    is_wrong = activation in ("softmax", "sigmoid") or (kind == "negative log-likelihood" and activation != "log")
    is_asked = kind in ("cross-entropy", "binary cross-entropy with logits", "negative log-likelihood")
    leaves = [one for one in context.modules(_LAST_ACTIVATIONS) if type(one).__name__ in facts.last_modules[:1]]
    last = leaves[-1] if facts.loss_kind in ("squared error", "absolute error") and leaves else None
    yield None if (is_wrong and is_asked) or last is not None else "the loss takes what it is given"
    if last is not None:
        last.register_forward_hook(lambda module, args, output: args[0] if args else output)
    for name, (owner, changes) in _ASKING.items():
        _replace(context, owner, name, partial(_undone, changes, []))


def _undone(
    changes: dict[str, TensorChange], last: list[TensorChange], output: torch.Tensor, target: Any
) -> tuple[Any, Any]:
    """The output before the operation that made it. Validation has no graph, and is changed like the newest pass."""
    made_by = computing(facts_of_loss(output, None).get("loss_ops", ()))[:1]
    if made_by:
        known = changes.get(made_by[0].partition("Backward")[0], changes.get(""))
        last[:] = [] if known is None else [known]
    return last[0](output) if last else output, target


def _replace(context: Context, owner: Any, name: str, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Has one of torch's loss functions take what `change` makes of its output and target."""
    original = getattr(owner, name)

    def call(output: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*change(output, target), *args, **kwargs)

    setattr(owner, name, call)
    context.undo.append(lambda: setattr(owner, name, original))


@arm("default initialization", *_INITIAL, advice=_RESET, needs_model=True, from_start=True)
def _initialize(context: Context) -> Iterator[str | None]:
    resets = [one.reset_parameters for one in context.modules() if callable(getattr(one, "reset_parameters", None))]
    yield None if resets else "no module has reset_parameters()"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for reset in resets:
            reset()


def _change_inputs(
    context: Context, make: Callable[[], Callable[[torch.Tensor], torch.Tensor]], *, in_validation: bool = False
) -> None:
    """Has `make()`, made for each forward pass, change the inputs of the model, but not its targets.

    Inputs are the first positional argument or, without any, the keyword arguments whose names do not say that they
    come from the targets. Passes without gradients are left alone, unless `in_validation`.
    """

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (torch.is_grad_enabled() or in_validation):
            return None
        change = make()
        if args:
            return (mapped(change, args[0]), *args[1:]), kwargs
        inputs = {key: one for key, one in kwargs.items() if not any(part in key for part in _OF_TARGETS)}
        return args, {**kwargs, **mapped(change, inputs)}

    context.model.register_forward_pre_hook(before, with_kwargs=True)


@arm("inputs standardized", *_STANDARD, advice="Standardize the inputs.", needs_model=True, from_start=True)
def _standardize_inputs(context: Context) -> Iterator[str | None]:
    """By the statistics of each batch, over all dimensions but 1, to mean 0 and std 1. Constant features become 0."""
    yield None

    def standardize(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point() or not x.dim() or len(x) < 2:
            return x
        dims = [dim for dim in range(x.dim()) if dim != 1]
        centred = x - x.mean(dims, keepdim=True)
        std = centred.square().mean(dims, keepdim=True).sqrt()
        return centred / std.clamp_min(torch.finfo(x.dtype).eps * (1.0 + x.abs().amax()))

    _change_inputs(context, lambda: standardize, in_validation=True)


@arm("targets standardized", *_SCALED, advice=_SCALE, needs_model=True, from_start=True)
def _standardize_targets(context: Context) -> Iterator[str | None]:
    """Scales outputs by the known targets' mean and standard deviation, and divides gradients by the latter."""
    mean, std = context.facts.target_mean or 0.0, context.facts.target_std or 1.0
    if context.facts.target_mean is None or not context.facts.target_std:
        yield "the targets of a squared error are not known"
    is_odd = abs(mean) > 2.0 * std or not 0.2 <= std <= 5.0
    yield None if is_odd else "the targets are about standardized"

    def scale(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        return x / std + (x * std - x / std).detach() + mean

    context.model.register_forward_hook(lambda module, args, output: mapped(scale, output))


def _shuffle_loaders() -> None:
    """Has every DataLoader that is made from now on, and reads a data set in order, shuffle it."""
    make = torch.utils.data.DataLoader.__init__

    def make_shuffled(self: Any, dataset: Any, *args: Any, **options: Any) -> None:
        make(self, dataset, *args, **options)
        if isinstance(self.sampler, torch.utils.data.SequentialSampler) and self.batch_sampler is not None:
            generator = torch.Generator().manual_seed(0)
            sampler = torch.utils.data.RandomSampler(dataset, generator=generator)
            self.__dict__["sampler"] = self.batch_sampler.sampler = sampler

    torch.utils.data.DataLoader.__init__ = make_shuffled  # type: ignore[method-assign]


@arm("batches shuffled", _ORDER, advice=_SHUFFLE, by_validation=True, prepare=_shuffle_loaders)
def _shuffle(context: Context) -> Iterator[str | None]:
    """Was done by `_shuffle_loaders`, before the script began."""
    samplers = [one.sampler for one in gc.get_objects() if isinstance(one, torch.utils.data.DataLoader)]
    if any(isinstance(one, torch.utils.data.RandomSampler) for one in samplers):
        yield "a DataLoader shuffles already"
    is_ordered = any(isinstance(one, torch.utils.data.SequentialSampler) for one in samplers)
    yield None if is_ordered else "no DataLoader reads a data set in order"


@arm("inputs permuted", *_NULL, advice=_LOOK, is_null=True)
def _permute_inputs(context: Context) -> Iterator[str | None]:
    """Shifts the targets of torch's loss functions against the outputs, or else the inputs of the model."""
    kind = loss_and_activation(context.facts.loss_ops)[0]
    yield None if kind in _ELEMENTWISE or context.model is not None else "the model is not known"
    generator = torch.Generator().manual_seed(0)

    def make() -> TensorChange:
        fraction = float(torch.rand((), generator=generator))

        def shift(x: torch.Tensor) -> torch.Tensor:
            if not x.dim() or len(x) < 2:
                return x
            return x.roll(1 + int(fraction * (len(x) - 1)), 0)

        return shift

    if kind not in _ELEMENTWISE:
        _change_inputs(context, make)
        return
    for owner, name in _LOSSES:
        _replace(context, owner, name, lambda y, target: (y, make()(target) if torch.is_grad_enabled() else target))
