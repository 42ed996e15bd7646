"""What arms change about the model and its data: precision, mode, dropout, initialization, inputs, outputs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .arms import Context, arm

_DROPOUTS = (torch.nn.modules.dropout._DropoutNd,)
_DROPPING = (torch.nn.MultiheadAttention, torch.nn.RNNBase)  # by an attribute `dropout`
_LAST_ACTIVATIONS = (torch.nn.Softmax, torch.nn.Softmax2d, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.ReLU)
_LOSSES_OF_NUMBERS_OR_LOGITS = frozenset(
    ("cross-entropy", "cross-entropy with smoothed labels", "binary cross-entropy with logits", "squared error",
     "absolute error")
)  # fmt: skip
_OF_TARGETS = ("label", "target", "decoder")  # parts of the names of keyword arguments that come from the targets
_INVERSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Softmax": lambda p: p.clamp_min(torch.finfo(p.dtype).tiny).log(),
    "Sigmoid": lambda p: p.logit(eps=torch.finfo(p.dtype).eps),
}


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with each tensor changed: a tensor, or tuples, lists and dicts of such; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(one, change) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(one, change) for one in value)
    return value


_MODE = ("the model in training mode", "normalisation-statistics")


@arm("train mode", *_MODE, advice="Call model.train() before training.", needs_model=True)
def _to_train_mode(context: Context) -> Iterator[str | None]:
    is_training = all(module.training for module in context.modules())
    yield "the model is in training mode" if is_training else None

    def before(module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            context.num_applied += 1
            module.train()

    context.model.register_forward_pre_hook(before)


_HALF = ("half-precision-overflow", "half-precision-underflow")


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
        context.num_applied += any(before[-1].values())

    def leave(module: torch.nn.Module, args: Any, output: Any) -> Any:
        for device, was_enabled in before.pop().items() if before else ():
            torch.set_autocast_enabled(device, was_enabled)
        return map_tensors(output, lambda x: x.float() if x.is_floating_point() else x)

    context.model.register_forward_pre_hook(enter)
    context.model.register_forward_hook(leave, always_call=True)


_DROP = {"advice": "Set dropout to 0.", "needs_model": True, "by_validation": True}


@arm("no dropout", "no dropout", "dropout-too-high", **_DROP)
def _without_dropout(context: Context) -> Iterator[str | None]:
    modules = context.modules((*_DROPOUTS, *_DROPPING))
    drops = any(getattr(one, "p", 0.0) or getattr(one, "dropout", 0.0) for one in modules)
    yield None if drops else "no module drops anything"
    for module in modules:
        setattr(module, "p" if isinstance(module, _DROPOUTS) else "dropout", 0.0)


_PLAIN = "Remove the last activation: the loss takes the plain output of the last layer."
_ENDING = ("the model's last activation removed", "wrong-output-layer")


@arm("no final activation", *_ENDING, advice=_PLAIN, needs_model=True)
def _remove_final_activation(context: Context) -> Iterator[str | None]:
    leaves = [one for one in context.modules() if next(one.children(), None) is None]
    called = context.facts.last_modules[:1]  # as the last one; none if that is not known
    last = next((m for m in leaves[-1:] if isinstance(m, _LAST_ACTIVATIONS) and {*called} <= {type(m).__name__}), None)
    inverse = _INVERSES.get(next(iter(context.facts.last_operations), ""))
    if last is None and inverse is None:
        yield "the model does not end in an activation"
    is_of_any_number = context.facts.loss_kind in _LOSSES_OF_NUMBERS_OR_LOGITS
    yield None if is_of_any_number else "the loss is not one that takes any number"

    def pass_on(module: torch.nn.Module, args: Any, output: Any) -> Any:
        context.num_applied += 1
        if last is not None:
            return args[0] if args else output
        return map_tensors(output, lambda x: inverse(x) if inverse is not None and x.is_floating_point() else x)

    (context.model if last is None else last).register_forward_hook(pass_on)


_INITIAL = ("PyTorch's default initialization", "poor-initialisation")
_RESET = "Leave the initialization to PyTorch: reset_parameters()."


@arm("default initialization", *_INITIAL, advice=_RESET, needs_model=True, from_start=True)
def _initialize(context: Context) -> Iterator[str | None]:
    resets: list[Any] = [getattr(module, "reset_parameters", None) for module in context.modules()]
    resets = [reset for reset in resets if callable(reset)]
    yield None if resets else "no module has reset_parameters()"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(context.seed)
        for reset in resets:
            reset()


def _change_inputs(
    context: Context, make: Callable[[], Callable[[torch.Tensor], torch.Tensor]], *, in_validation: bool = False
) -> None:
    """Has `make()`, made for each forward pass, change the inputs of the model, but not its targets.

    Passes without gradients are left alone, unless `in_validation`.

    Inputs are the first positional argument or, without any, the keyword arguments whose names do not say that they
    come from the targets: many models compute the loss themselves, from targets that are passed beside the inputs.
    """

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (torch.is_grad_enabled() or in_validation):
            return None
        change = make()
        if args:
            return (map_tensors(args[0], change), *args[1:]), kwargs
        inputs = {key: one for key, one in kwargs.items() if not any(part in key for part in _OF_TARGETS)}
        return args, {**kwargs, **map_tensors(inputs, change)}

    context.model.register_forward_pre_hook(before, with_kwargs=True)


_STANDARD = ("each input feature at mean 0 and standard deviation 1", "unnormalised-inputs")


@arm("inputs standardized", *_STANDARD, advice="Standardize the inputs.", needs_model=True, from_start=True)
def _standardize_inputs(context: Context) -> Iterator[str | None]:
    """Brings each feature (dim 1, or all elements of a vector of samples) to mean 0 and standard deviation 1.

    By the statistics of each batch, over all dimensions but 1. Constant features become 0.
    """
    yield None

    def standardize(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point() or not x.dim() or len(x) < 2:
            return x
        context.num_applied += 1
        dims = [dim for dim in range(x.dim()) if dim != 1]
        centred = x - x.mean(dims, keepdim=True)
        std = centred.square().mean(dims, keepdim=True).sqrt()
        return centred / std.clamp_min(torch.finfo(x.dtype).eps * (1.0 + x.abs().amax()))

    _change_inputs(context, lambda: standardize, in_validation=True)


_SCALED = ("the targets at mean 0 and standard deviation 1", "unnormalised-targets")
_SCALE = "Standardize the targets, and scale the predictions back."


@arm("targets standardized", *_SCALED, advice=_SCALE, needs_model=True, from_start=True)
def _standardize_targets(context: Context) -> Iterator[str | None]:
    """Has the model predict targets of mean 0 and standard deviation 1, in the units of the loss as it is.

    Outputs are scaled by the mean and the standard deviation of the known targets. Gradients are divided by the latter,
    as those of a squared error of standardized targets are, so that losses can be compared and steps are as large.
    """
    mean, std = context.facts.target_mean or 0.0, context.facts.target_std or 1.0
    if context.facts.target_mean is None or not context.facts.target_std:
        yield "the targets of a squared error are not known"
    is_odd = abs(mean) > 2.0 * std or not 0.2 <= std <= 5.0
    yield None if is_odd else "the targets are about standardized"

    def scale(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        context.num_applied += 1
        return x / std + (x * std - x / std).detach() + mean

    context.model.register_forward_hook(lambda module, args, output: map_tensors(output, scale))


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


_SHUFFLE = "Pass shuffle=True to the DataLoader of the training data."
_ORDER = "the training data in random order"


@arm("batches shuffled", _ORDER, advice=_SHUFFLE, by_validation=True, prepare=_shuffle_loaders)
def _shuffle(context: Context) -> Iterator[str | None]:
    """Was done by `_shuffle_loaders`, before the script began."""
    samplers = [one.sampler for one in gc.get_objects() if isinstance(one, torch.utils.data.DataLoader)]
    if any(isinstance(one, torch.utils.data.RandomSampler) for one in samplers):
        yield "a DataLoader shuffles already"
    is_ordered = any(isinstance(one, torch.utils.data.SequentialSampler) for one in samplers)
    yield None if is_ordered else "no DataLoader reads a data set in order"


_LOOK = "Look at single samples with their targets as the model gets them."
_NULL = ("inputs permuted against targets", "wrong-targets")


@arm("inputs permuted", *_NULL, advice=_LOOK, needs_model=True, is_null=True)
def _permute_inputs(context: Context) -> Iterator[str | None]:
    yield None
    generator = torch.Generator().manual_seed(context.seed)

    def make() -> Callable[[torch.Tensor], torch.Tensor]:
        fraction = float(torch.rand((), generator=generator))

        def shift(x: torch.Tensor) -> torch.Tensor:
            if not x.dim() or len(x) < 2:
                return x
            context.num_applied += 1
            return x.roll(1 + int(fraction * (len(x) - 1)), 0)

        return shift

    _change_inputs(context, make)
