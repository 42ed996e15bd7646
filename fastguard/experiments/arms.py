"""Arms: named changes to a training from outside, never undone, each of one thing, in a process of its own."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..clip import GlobalNorm
from ..records import ModelNotes, TrainingHistory
from ..recovery import Slowed

_WARM_UP = "Raise the learning rate linearly over the first steps."
_LIMITED = ("clipped-away", "gradients-too-large-to-clip")
_CLIP = "Clip the gradients at their usual norm: fastguard.wrap(..., max_norm=...)."
_TUNING = ("the optimizer's default betas, eps and momentum", "wrong-optimizer-settings")
_USUAL_MOMENTUM = 0.9
_CLEAR = "Call optimizer.zero_grad() after each step."
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
