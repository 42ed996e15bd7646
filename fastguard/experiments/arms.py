"""Arms: named changes to a training, each of which changes one thing from outside, without the user's code.

An arm changes the process that it is applied in, and is never undone: apply it in a process of its own, a forked child
(`forked.py`) or a script started again (`fastguard try`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..clip import GlobalNorm
from ..records import TrainingHistory
from ..recovery.rescue import Slowed

_DROPOUTS = tuple(
    getattr(torch.nn, name)
    for name in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
)
_LAST_ACTIVATIONS = (torch.nn.Softmax, torch.nn.Softmax2d, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.ReLU)
_LOSSES_OF_NUMBERS_OR_LOGITS = frozenset(
    ("cross-entropy", "cross-entropy with smoothed labels", "binary cross-entropy with logits", "squared error",
     "absolute error")
)  # fmt: skip
_OF_TARGETS = ("label", "target", "decoder")  # parts of the names of keyword arguments that come from the targets
_TUNED = ("betas", "eps", "momentum", "dampening", "alpha", "rho")


@dataclass
class Context:
    """The training that an arm changes.

    Attributes:
        optimizers: without wrappers; those that share a guard.
        model: None if it is not known.
        guard: None if there is none.
        step: number of steps taken so far.
        num_steps: how long the arm runs.
        seed: of the arm's own random numbers. An arm never draws from the generators that the training uses.
        num_applied: how often a hook of the arm has changed something.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    model: torch.nn.Module | None = None
    guard: Any = None
    step: int = 0
    num_steps: int = 40
    seed: int = 0
    num_applied: int = 0

    @property
    def history(self) -> TrainingHistory | None:
        """What the guard has recorded; None without one."""
        return None if self.guard is None else self.guard.history

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def modules(self, kinds: type | tuple[type, ...] = torch.nn.Module) -> list[torch.nn.Module]:
        """The modules of the model that are of these kinds; none without a model."""
        return [] if self.model is None else [one for one in self.model.modules() if isinstance(one, kinds)]


@dataclass(frozen=True)
class Arm:
    """One change to a training.

    Attributes:
        name: what is changed, as a table shows it.
        text: the same as a clause that follows "with": "the learning rate divided by 10".
        apply: makes the change, from the next forward pass or step on.
        applies: returns why the change cannot be made, or would change nothing; None if it can.
        remedies: causes (`fastguard.diagnosis.CAUSES`) whose remedy this is.
        advice: what to change in the script if the arm helps.
        from_start: the change is only fair before the first step; later it would break trained weights.
        is_null: the arm is expected to harm; if it does not, the targets do not belong to the inputs.
    """

    name: str
    text: str
    apply: Callable[[Context], None]
    applies: Callable[[Context], str | None] = lambda context: None
    remedies: tuple[str, ...] = ()
    advice: str = ""
    from_start: bool = False
    is_null: bool = False

    def why_not(self, context: Context) -> str | None:
        """Why the arm cannot be run here, as a clause; None if it can."""
        if self.from_start and context.step:
            return "it has to start before the first step"
        return self.applies(context)


ARMS: dict[str, Arm] = {}


def _arm(name: str, text: str, apply: Callable[[Context], None], **more: Any) -> None:
    ARMS[name] = Arm(name, text, apply, **more)


def arms_for(causes: Iterable[str]) -> list[Arm]:
    """The arms that are a remedy of one of `causes`, in the order of the causes.

    >>> [arm.name for arm in arms_for(["learning-rate-too-low"])]
    ['lr x10']
    """
    return list(dict.fromkeys(arm for cause in causes for arm in ARMS.values() if cause in arm.remedies))


# Learning rate: a factor within each step, so that a scheduler neither sees it nor overwrites it.


@dataclass
class _Factor:
    """Multiplies the learning rate within each step, by `of(number of steps since the arm began)`."""

    of: Callable[[int], float]
    num_steps: int = 0
    slowed: list[Slowed] = field(default_factory=list)

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.slowed:
            self.after(optimizer, args, kwargs)  # of a step that raised
        self.slowed.append(Slowed(optimizer, self.of(self.num_steps)))
        self.slowed[0].apply()

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.num_steps += 1
        while self.slowed:
            self.slowed.pop().give_back()


def _multiply_lr(of: Callable[[Context], Callable[[int], float]]) -> Callable[[Context], None]:
    def apply(context: Context) -> None:
        for optimizer in context.optimizers:
            factor = _Factor(of(context))
            optimizer.register_step_pre_hook(factor.before)
            optimizer.register_step_post_hook(factor.after)

    return apply


def _has_lr(context: Context) -> str | None:
    has = any(group.get("lr") is not None for group in context.groups())
    return None if has else "the optimizer has no `lr`"


def _warm_up(context: Context) -> Callable[[int], float]:
    length = max(context.num_steps // 2, 1)
    return lambda step: min((step + 1) / length, 1.0)


_arm(
    "lr x10",
    "the learning rate times 10",
    _multiply_lr(lambda context: lambda step: 10.0),
    applies=_has_lr,
    remedies=("learning-rate-too-low",),
    advice="Multiply the learning rate by 10.",
)
_arm(
    "lr x0.1",
    "the learning rate divided by 10",
    _multiply_lr(lambda context: lambda step: 0.1),
    applies=_has_lr,
    remedies=("learning-rate-too-high",),
    advice="Divide the learning rate by 10.",
)
_arm(
    "warm-up",
    "a linear warm-up",
    _multiply_lr(_warm_up),
    applies=_has_lr,
    remedies=("learning-rate-too-high",),
    advice="Raise the learning rate linearly over the first steps.",
    from_start=True,
)


# Clipping, by the guard.


def _limit(context: Context) -> float | None:
    clip = None if context.guard is None else context.guard.clip
    return clip.max_norm if isinstance(clip, GlobalNorm) else None


def _raise_limit(context: Context) -> None:
    limit = _limit(context)
    if limit is not None:
        context.guard.clip = GlobalNorm(10.0 * limit)


def _clip_at_median(context: Context) -> None:
    context.guard.clip = GlobalNorm(_median_norm(context))


def _median_norm(context: Context) -> float:
    history = context.history
    norms = [] if history is None else sorted(one.norm for one in history.recent if one.is_clean and one.norm > 0.0)
    return norms[len(norms) // 2] if norms else 0.0


def _may_clip(context: Context) -> str | None:
    if context.guard is None:
        return "there is no guard to clip with"
    if context.guard.clip is not None:
        return "the guard clips already"
    return None if _median_norm(context) else "no gradient norm is known yet"


_arm(
    "max_norm x10",
    "the clip limit times 10",
    _raise_limit,
    applies=lambda context: None if _limit(context) else "the guard does not clip at a fixed norm",
    remedies=("clipped-away", "gradients-too-large-to-clip"),
    advice="Multiply max_norm by 10.",
)
_arm(
    "clipping",
    "gradients clipped at their median norm",
    _clip_at_median,
    applies=_may_clip,
    remedies=("exploding-gradients",),
    advice="Clip the gradients at their usual norm: fastguard.wrap(..., max_norm=...).",
)


# Settings of the optimizer.


def _defaults(optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """The settings that its class has by default."""
    parameters = inspect.signature(type(optimizer).__init__).parameters
    known = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    return {name: known[name] for name in _TUNED if known.get(name) is not None}


def _set_defaults(context: Context) -> None:
    for optimizer in context.optimizers:
        for group in optimizer.param_groups:
            group.update({name: value for name, value in _defaults(optimizer).items() if name in group})


def _has_tuned(context: Context) -> str | None:
    for optimizer in context.optimizers:
        defaults = _defaults(optimizer)
        if any(group.get(name, value) != value for group in optimizer.param_groups for name, value in defaults.items()):
            return None
    return "the optimizer has its default settings"


def _stop_decay(context: Context) -> None:
    for group in context.groups():
        if group.get("weight_decay"):
            group["weight_decay"] = 0.0


_arm(
    "no weight decay",
    "no weight decay",
    _stop_decay,
    applies=lambda context: (
        None if any(group.get("weight_decay") for group in context.groups()) else "there is no weight decay"
    ),
    remedies=("weight-decay-too-high",),
    advice="Set weight_decay=0.",
)
_arm(
    "default settings",
    "the optimizer's default betas, eps and momentum",
    _set_defaults,
    applies=_has_tuned,
    remedies=("wrong-optimizer-settings",),
    advice="Leave betas, eps and momentum at the optimizer's defaults.",
)


# The loop and the model.


def _clear_gradients(context: Context) -> None:
    for optimizer in context.optimizers:
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad())


def _are_left(context: Context) -> str | None:
    notes = None if context.history is None else context.history.model
    is_cleared = notes is not None and notes.num_watched_backwards and not notes.num_left_gradients
    return "the loop clears the gradients itself" if is_cleared else None


def _needs_model(context: Context) -> str | None:
    return "the model is not known" if context.model is None else None


def _to_train_mode(context: Context) -> None:
    def before(module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            context.num_applied += 1
            module.train()

    for module in (context.model,) if context.model is not None else ():
        module.register_forward_pre_hook(before)


def _leave_autocast(context: Context) -> None:
    """Switches autocast off within the model's forward pass; the loss stays as it is, and computes in float32."""
    before: list[dict[str, bool]] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        before.append({device: torch.is_autocast_enabled(device) for device in _autocast_devices(module)})
        for device in before[-1]:
            torch.set_autocast_enabled(device, False)
        context.num_applied += any(before[-1].values())

    def leave(module: torch.nn.Module, args: Any, output: Any) -> Any:
        for device, was_enabled in before.pop().items() if before else ():
            torch.set_autocast_enabled(device, was_enabled)
        return map_tensors(output, lambda x: x.float() if x.is_floating_point() else x)

    for module in (context.model,) if context.model is not None else ():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)


def _autocast_devices(module: torch.nn.Module) -> set[str]:
    return {"cpu", *(p.device.type for p in module.parameters())}


def _in_autocast(context: Context) -> str | None:
    notes = None if context.history is None else context.history.model
    if context.model is not None and (notes is None or not context.step or notes.autocast):
        return None
    return _needs_model(context) or "the model does not run under autocast"


def _without_dropout(context: Context) -> None:
    for module in context.modules(_DROPOUTS):
        module.p = 0.0  # type: ignore[assignment]
    for module in context.modules((torch.nn.MultiheadAttention, torch.nn.RNNBase)):
        module.dropout = 0.0  # type: ignore[assignment]


def _has_dropout(context: Context) -> str | None:
    modules = context.modules((*_DROPOUTS, torch.nn.MultiheadAttention, torch.nn.RNNBase))
    drops = any(getattr(one, "p", 0.0) or getattr(one, "dropout", 0.0) for one in modules)
    return None if drops else _needs_model(context) or "no module drops anything"


def _final_activation(context: Context) -> torch.nn.Module | None:
    leaves = [one for one in context.modules() if next(one.children(), None) is None]
    return leaves[-1] if leaves and isinstance(leaves[-1], _LAST_ACTIVATIONS) else None


def _remove_final_activation(context: Context) -> None:
    def pass_on(module: torch.nn.Module, args: Any, output: Any) -> Any:
        context.num_applied += 1
        return args[0] if args else output

    last = _final_activation(context)
    if last is not None:
        last.register_forward_hook(pass_on)


def _has_final_activation(context: Context) -> str | None:
    if _final_activation(context) is None:
        return _needs_model(context) or "the model does not end in an activation module"
    kind = "" if context.history is None else context.history.model.loss_kind
    return None if kind in _LOSSES_OF_NUMBERS_OR_LOGITS else "the loss is not one that takes any number"


def _initialize(context: Context) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(context.seed)
        for module in context.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()


def _can_initialize(context: Context) -> str | None:
    has_reset = any(callable(getattr(one, "reset_parameters", None)) for one in context.modules())
    return None if has_reset else _needs_model(context) or "no module has reset_parameters()"


_arm(
    "gradients cleared",
    "the gradients cleared after each step",
    _clear_gradients,
    applies=_are_left,
    remedies=("missing-zero-grad",),
    advice="Call optimizer.zero_grad() after each step.",
)
_arm(
    "train mode",
    "the model in training mode",
    _to_train_mode,
    applies=lambda context: (
        None
        if any(not module.training for module in context.modules())
        else _needs_model(context) or "the model is in training mode"
    ),
    remedies=("normalisation-statistics",),
    advice="Call model.train() before training.",
)
_arm(
    "float32",
    "autocast off",
    _leave_autocast,
    applies=_in_autocast,
    remedies=("half-precision-overflow", "half-precision-underflow"),
    advice="Train in float32.",
)
_arm(
    "no dropout",
    "no dropout",
    _without_dropout,
    applies=_has_dropout,
    advice="Set dropout to 0.",
)
_arm(
    "no final activation",
    "the model's last activation removed",
    _remove_final_activation,
    applies=_has_final_activation,
    remedies=("wrong-output-layer",),
    advice="Remove the last activation: the loss takes the plain output of the last layer.",
)
_arm(
    "default initialization",
    "PyTorch's default initialization",
    _initialize,
    applies=_can_initialize,
    remedies=("poor-initialisation",),
    advice="Leave the initialization to PyTorch: reset_parameters().",
    from_start=True,
)


# What goes into the model.


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with each tensor changed: a tensor, or tuples, lists and dicts of such; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: map_tensors(one, change) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(one, change) for one in value)
    return value


def _change_inputs(context: Context, make: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Has `make()`, made for each forward pass with gradients, change the inputs of the model, but not its targets.

    Inputs are the first positional argument or, without any, the keyword arguments whose names do not say that they
    come from the targets: many models compute the loss themselves, from targets that are passed beside the inputs.
    """

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        change = make()
        if args:
            return (map_tensors(args[0], change), *args[1:]), kwargs
        inputs = {key: one for key, one in kwargs.items() if not any(part in key for part in _OF_TARGETS)}
        return args, {**kwargs, **map_tensors(inputs, change)}

    if context.model is not None:
        context.model.register_forward_pre_hook(before, with_kwargs=True)


def _permute_inputs(context: Context) -> None:
    """Gives each sample the inputs of another of its batch: shifts them along dim 0, by another distance each time."""
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


def _standardize_inputs(context: Context) -> None:
    """Brings each feature (dim 1, or all elements of a vector of samples) to mean 0 and standard deviation 1.

    By the statistics of each batch, over all dimensions but 1. Constant features become 0.
    """

    def standardize(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point() or not x.dim() or len(x) < 2:
            return x
        context.num_applied += 1
        dims = [dim for dim in range(x.dim()) if dim != 1]
        centred = x - x.mean(dims, keepdim=True)
        std = centred.square().mean(dims, keepdim=True).sqrt()
        return centred / std.clamp_min(torch.finfo(x.dtype).eps * (1.0 + x.abs().amax()))

    _change_inputs(context, lambda: standardize)


_arm(
    "inputs standardised",
    "each input feature at mean 0 and standard deviation 1",
    _standardize_inputs,
    applies=_needs_model,
    remedies=("unnormalised-inputs",),
    advice="Standardise the inputs.",
    from_start=True,
)
_arm(
    "inputs permuted",
    "inputs permuted against targets",
    _permute_inputs,
    applies=_needs_model,
    remedies=("wrong-targets",),
    advice="Look at single samples with their targets as the model gets them.",
    is_null=True,
)
