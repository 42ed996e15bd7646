"""What arms change about a step: learning rate, clipping, settings of the optimizer, leftover gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..clip import GlobalNorm
from ..recovery.rescue import Slowed
from .context import Context

_TUNED = ("betas", "eps", "momentum", "dampening", "alpha", "rho")


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


def multiply_lr(of: Callable[[Context], Callable[[int], float]]) -> Callable[[Context], None]:
    """An arm that multiplies the learning rate by `of(context)(number of steps since the arm began)`."""

    def apply(context: Context) -> None:
        for optimizer in context.optimizers:
            factor = _Factor(of(context))
            optimizer.register_step_pre_hook(factor.before)
            optimizer.register_step_post_hook(factor.after)

    return apply


def has_lr(context: Context) -> str | None:
    """Why there is no learning rate to change."""
    has = any(group.get("lr") is not None for group in context.groups())
    return None if has else "the optimizer has no `lr`"


def warm_up(context: Context) -> Callable[[int], float]:
    """A factor that rises to 1 over half of the steps."""
    length = max(context.num_steps // 2, 1)
    return lambda step: min((step + 1) / length, 1.0)


class ScriptClip:
    """What the script itself clips with `torch.nn.utils.clip_grad_norm_`, once `install` was called.

    Attributes:
        factor: that the limits of the script are multiplied by.
        num_calls: so far.
    """

    def __init__(self) -> None:
        self.factor, self.num_calls = 1.0, 0

    def install(self) -> None:
        """Puts itself in the place of torch's function, before the script imports it."""
        original = torch.nn.utils.clip_grad_norm_

        def clip_grad_norm_(parameters: Any, max_norm: float, *more: Any, **options: Any) -> torch.Tensor:
            self.num_calls += 1
            return original(parameters, self.factor * max_norm, *more, **options)

        torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
        torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_


SCRIPT_CLIP = ScriptClip()


def _limit(context: Context) -> float | None:
    clip = None if context.guard is None else context.guard.clip
    return clip.max_norm if isinstance(clip, GlobalNorm) else None


def raise_limit(context: Context) -> None:
    """Multiplies the limit of the guard, or that of the script, by 10."""
    limit = _limit(context)
    if limit is None:
        SCRIPT_CLIP.factor = 10.0
    else:
        context.guard.clip = GlobalNorm(10.0 * limit)


def has_limit(context: Context) -> str | None:
    """Why no clip limit can be raised."""
    return None if _limit(context) or SCRIPT_CLIP.num_calls else "nothing clips at a fixed norm"


def clip_at_median(context: Context) -> None:
    """Clips at the norm that half of the known steps exceed."""
    context.guard.clip = GlobalNorm(_median_norm(context))


def _median_norm(context: Context) -> float:
    history = context.history
    norms = [] if history is None else sorted(one.norm for one in history.recent if one.is_clean and one.norm > 0.0)
    return norms[len(norms) // 2] if norms else 0.0


def may_clip(context: Context) -> str | None:
    """Why clipping cannot be added."""
    if context.guard is None:
        return "there is no guard to clip with"
    if context.guard.clip is not None or SCRIPT_CLIP.num_calls:
        return "the gradients are clipped already"
    return None if _median_norm(context) else "no gradient norm is known yet"


def _defaults(optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """The settings that its class has by default."""
    parameters = inspect.signature(type(optimizer).__init__).parameters
    known = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    return {name: known[name] for name in _TUNED if known.get(name) is not None}


def set_defaults(context: Context) -> None:
    """Gives betas, eps, momentum and the like the defaults of the optimizer's class."""
    for optimizer in context.optimizers:
        for group in optimizer.param_groups:
            group.update({name: value for name, value in _defaults(optimizer).items() if name in group})


def has_tuned(context: Context) -> str | None:
    """Why default settings would change nothing."""
    for optimizer in context.optimizers:
        defaults = _defaults(optimizer)
        if any(group.get(name, value) != value for group in optimizer.param_groups for name, value in defaults.items()):
            return None
    return "the optimizer has its default settings"


def stop_decay(context: Context) -> None:
    """Sets `weight_decay` to 0."""
    for group in context.groups():
        if group.get("weight_decay"):
            group["weight_decay"] = 0.0


def has_decay(context: Context) -> str | None:
    """Why there is no decay to stop."""
    return None if any(group.get("weight_decay") for group in context.groups()) else "there is no weight decay"


def clear_gradients(context: Context) -> None:
    """Clears the gradients after each step."""
    for optimizer in context.optimizers:
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad())


def are_left(context: Context) -> str | None:
    """Why there is nothing to clear."""
    facts = context.facts
    is_cleared = facts.num_watched_backwards and not facts.num_left_gradients
    return "the loop clears the gradients itself" if is_cleared else None
