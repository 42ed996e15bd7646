"""Accelerate: the guard's state in its checkpoints, its values in its trackers, and a warning if it clips too."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from ..step import Guard
from .common import end, figures, replace_method

_log = logging.getLogger("fastguard")


def attach(accelerator: Any, *optimizers: Any) -> None:
    """Connects guarded optimizers to an `accelerate.Accelerator`.

    `save_state` and `load_state` then include the guard. `accelerator.log(values, step)` adds the guard's values, such
    as `fastguard/grad/norm`, or `fastguard/0/grad/norm` with several optimizers. A call of `clip_grad_norm_` or
    `clip_grad_value_` gives a warning, once, because the guard would then measure gradients that are already clipped.
    `end_training` notes the end of the run in the guard's log.

    Args:
        accelerator: the accelerator whose `prepare` took the optimizers.
        optimizers: guarded by `fastguard.wrap`, before or after `prepare`.

    Raises:
        NotGuardedError: an optimizer has no guard.
        TypeError: `accelerator` is not an Accelerator.

    Cost: about 80 us a guard at each `accelerator.log`, on the main process.

    >>> optimizer = fastguard.wrap(accelerator.prepare(optimizer), model, max_norm=1.0)  # doctest: +SKIP
    >>> fastguard.integrations.accelerate.attach(accelerator, optimizer)  # doctest: +SKIP
    """
    if not hasattr(accelerator, "register_for_checkpointing"):
        name = type(accelerator).__name__
        raise TypeError(f"`accelerator` must be an Accelerator, got {name}. Write attach(accelerator, optimizer).")
    guards = [Guard.of(optimizer) for optimizer in optimizers]
    accelerator.register_for_checkpointing(*guards)

    def log(method: Callable[..., Any], values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return method({**values, **figures(guards)} if accelerator.is_main_process else values, *args, **kwargs)

    warned: list[str] = []

    def clip(method: Callable[..., Any], parameters: Any, limit: float, *args: Any, **kwargs: Any) -> Any:
        if limit != math.inf and not warned and accelerator.is_main_process:
            warned.append(method.__name__)
            _log.warning(
                "accelerator.%s(..., %g) clips before the guard, which then measures clipped gradients. Remove the "
                "call, and give wrap the limit: max_norm=, or clip=fastguard.clip.Value(...).",
                method.__name__,
                limit,
            )
        return method(parameters, limit, *args, **kwargs)

    def end_training(method: Callable[[], None]) -> None:
        for guard in guards:
            end(guard)
        method()

    for name, call in (
        ("end_training", end_training),
        ("log", log),
        ("clip_grad_norm_", clip),
        ("clip_grad_value_", clip),
    ):
        replace_method(accelerator, name, call)
