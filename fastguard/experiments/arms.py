"""Arms: named changes to a training from outside, never undone, each of one thing, in a process of its own."""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from ..clip import GlobalNorm
from ..diagnosis.needs import computing
from ..diagnosis.rules.output import loss_and_activation
from ..observers.loss_gradient import facts_of_loss
from ..observers.tensors import mapped
from ..records import ModelNotes, TrainingHistory
from ..recovery import Slowed

_WARM_UP = "Raise the learning rate linearly over the first steps."
_LIMITED = ("clipped-away", "gradients-too-large-to-clip")
_CLIP = "Clip the gradients at their usual norm: fastguard.wrap(..., max_norm=...)."
_TUNING = ("the optimizer's default betas, eps and momentum", "wrong-optimizer-settings")
_USUAL_MOMENTUM = 0.9
_CLEAR = "Call optimizer.zero_grad() after each step."
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
_TUNED = ("betas", "eps", "momentum", "dampening", "alpha", "rho")


@dataclass
class Context:
    """The training that an arm changes."""

    optimizers: Sequence[torch.optim.Optimizer]  # without wrappers; those that share a guard
    model: Any = None  # None if it is not known
    guard: Any = None  # None if there is none
    step: int = 0  # number of steps taken so far
    num_steps: int = 40  # how long the arm runs
    # the history of a run of the same training without the arm; None if there was none
    known: TrainingHistory | None = None
    undo: list[Callable[[], None]] = field(default_factory=list)  # put back what it changed outside of the model

    @property
    def history(self) -> TrainingHistory | None:
        """What is known of the training without the arm, or what the guard has recorded; None without either."""
        return self.known if self.known is not None or self.guard is None else self.guard.history

    @property
    def facts(self) -> ModelNotes:
        """What is known of the model; empty notes if nothing is."""
        return ModelNotes() if self.history is None else self.history.model

    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def modules(self, kinds: type | tuple[type, ...] = torch.nn.Module) -> list[Any]:
        """The modules of the model that are of these kinds; none without a model."""
        return [] if self.model is None else [one for one in self.model.modules() if isinstance(one, kinds)]


# First yields why the change cannot be made, or would change nothing, and None if it can; then makes it.
Change: TypeAlias = Callable[[Context], Iterator[str | None]]
TensorChange: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Arm:
    """One change to a training."""

    name: str  # what is changed, as a table shows it
    text: str  # the same as a clause that follows "with": "the learning rate divided by 10"
    change: Change
    remedies: tuple[str, ...] = ()  # causes (`fastguard.diagnosis.CAUSES`) whose remedy this is
    advice: str = ""  # what to change in the script if the arm helps
    needs_model: bool = False  # it cannot be made where the model is not known
    from_start: bool = False  # the change is only fair before the first step; later it would break trained weights
    is_null: bool = False  # the arm is expected to harm; if it does not, the targets do not belong to the inputs
    # only validation losses can tell, because the arm also changes what the training loss measures
    by_validation: bool = False
    # makes a part of the change that has to be made before the script begins; None if there is none. In a training that
    # runs already, the arm cannot be applied then
    prepare: Callable[[], None] | None = None

    def apply(self, context: Context) -> None:
        """Makes the change, from the next forward pass or step on."""
        for _ in self.change(context):
            pass

    def why_not(self, context: Context) -> str | None:
        """Why the arm cannot be run here, as a clause; None if it can."""
        if (self.from_start or self.prepare is not None) and context.step:
            return "it has to start before the first step"
        if self.needs_model and context.model is None:
            return "the model is not known"
        return next(self.change(context))


ARMS: dict[str, Arm] = {}


def arm(name: str, text: str, *remedies: str, **more: Any) -> Callable[[Change], Change]:
    """Registers a function as the arm `name`, the remedy of these causes; `more` are further fields of `Arm`."""

    def register(change: Change) -> Change:
        ARMS[name] = Arm(name, text, change, remedies, **more)
        return change

    return register


def arms_for(causes: Iterable[str]) -> list[Arm]:
    return list(dict.fromkeys(arm for cause in causes for arm in ARMS.values() if cause in arm.remedies))


def _multiply_lr(context: Context, of: Callable[[int], float]) -> Iterator[str | None]:
    """Multiplies the learning rate within each step, by `of(number of steps since the arm began)`."""
    yield None if any(group.get("lr") is not None for group in context.groups()) else "the optimizer has no `lr`"

    def begin(optimizer: torch.optim.Optimizer) -> None:
        numbers, slowed = itertools.count(), list[Slowed]()

        def give_back(*args: Any) -> None:
            while slowed:
                slowed.pop().give_back()

        def before(*args: Any) -> None:
            give_back()  # of a step that raised
            slowed.append(Slowed(optimizer, of(next(numbers))))
            slowed[0].apply()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(give_back)

    for optimizer in context.optimizers:
        begin(optimizer)


def _arm_of_rate(name: str, text: str, cause: str, factor: float, advice: str) -> None:
    arm(name, f"the learning rate {text}", cause, advice=advice)(lambda at: _multiply_lr(at, lambda step: factor))


_arm_of_rate("lr x10", "times 10", "learning-rate-too-low", 10.0, "Multiply the learning rate by 10.")
_arm_of_rate("lr x0.1", "divided by 10", "learning-rate-too-high", 0.1, "Divide the learning rate by 10.")
_arm_of_rate("lr x100", "times 100", "learning-rate-too-low", 100.0, "Multiply the learning rate by 100.")
_arm_of_rate("lr x0.01", "divided by 100", "learning-rate-too-high", 0.01, "Divide the learning rate by 100.")


@arm("warm-up", "a linear warm-up", "learning-rate-too-high", advice=_WARM_UP, from_start=True)
def _warm_up(context: Context) -> Iterator[str | None]:
    length = max(context.num_steps // 2, 1)
    return _multiply_lr(context, lambda step: min((step + 1) / length, 1.0))


class ScriptClip:
    """What the script itself clips with `torch.nn.utils.clip_grad_norm_`, once `install` was called."""

    def __init__(self) -> None:
        self.factor, self.num_calls = 1.0, 0  # the script's limits are multiplied by the factor

    def install(self) -> None:
        """Puts itself in the place of torch's function, before the script imports it."""
        original = torch.nn.utils.clip_grad_norm_

        def clip_grad_norm_(parameters: Any, max_norm: float, *more: Any, **options: Any) -> torch.Tensor:
            self.num_calls += 1
            return original(parameters, self.factor * max_norm, *more, **options)

        torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
        torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_


SCRIPT_CLIP = ScriptClip()


@arm("max_norm x10", "the clip limit times 10", *_LIMITED, advice="Multiply max_norm by 10.")
def _raise_limit(context: Context) -> Iterator[str | None]:
    clip = None if context.guard is None else context.guard.clip
    limit = clip.max_norm if isinstance(clip, GlobalNorm) else None
    yield None if limit or SCRIPT_CLIP.num_calls else "nothing clips at a fixed norm"
    if limit is None:
        SCRIPT_CLIP.factor = 10.0
    else:
        context.guard.clip = GlobalNorm(10.0 * limit)


@arm("clipping", "gradients clipped at their median norm", "exploding-gradients", advice=_CLIP)
def _clip_at_median(context: Context) -> Iterator[str | None]:
    recent = [] if context.history is None else context.history.recent
    norms = sorted(one.norm for one in recent if one.is_clean and one.norm > 0.0)
    if context.guard is None:
        yield "there is no guard to clip with"
    elif context.guard.clip is not None or SCRIPT_CLIP.num_calls:
        yield "the gradients are clipped already"
    yield None if norms else "no gradient norm is known yet"
    context.guard.clip = GlobalNorm(norms[len(norms) // 2])


@arm("no weight decay", "no weight decay", "weight-decay-too-high", advice="Set weight_decay=0.")
def _stop_decay(context: Context) -> Iterator[str | None]:
    decaying = [group for group in context.groups() if group.get("weight_decay")]
    yield None if decaying else "there is no weight decay"
    for group in decaying:
        group["weight_decay"] = 0.0


@arm("default settings", *_TUNING, advice="Leave betas, eps and momentum at the optimizer's defaults.")
def _set_defaults(context: Context) -> Iterator[str | None]:
    found = []
    for optimizer in context.optimizers:
        known = {name: one.default for name, one in inspect.signature(type(optimizer).__init__).parameters.items()}
        tuned = {name: known[name] for name in _TUNED if known.get(name) not in (None, inspect.Parameter.empty)}
        found += [(group, tuned) for group in optimizer.param_groups]
    is_tuned = any(group.get(name, value) != value for group, defaults in found for name, value in defaults.items())
    yield None if is_tuned else "the optimizer has its default settings"
    for group, defaults in found:
        if group.get("momentum", 0.0) > _USUAL_MOMENTUM:  # steps would be many times smaller without any
            defaults = {**defaults, "momentum": _USUAL_MOMENTUM}
        group.update({name: value for name, value in defaults.items() if name in group})


@arm("gradients cleared", "the gradients cleared after each step", "missing-zero-grad", advice=_CLEAR)
def _clear_gradients(context: Context) -> Iterator[str | None]:
    facts = context.facts
    is_cleared = facts.num_watched_backwards and not facts.num_left_gradients
    yield "the loop clears the gradients itself" if is_cleared else None
    for optimizer in context.optimizers:
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad())


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
