"""Recovery: the settings of snapshots and rollbacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..records import values

CRITICAL_RULES = ("loss-explosion", "loss-divergence")


@dataclass(frozen=True)
class Recovery:
    """How to recover a run that goes wrong: `fastguard.wrap(optimizer, model, recovery=fastguard.Recovery())`.

    Every `every` steps the guard copies parameters, buffers and optimizer state into memory. A snapshot becomes valid
    when the run has stayed healthy for `quarantine` more steps, or for `patience` if the very next loss is above the
    limit. When the run goes wrong, the guard restores the newest valid snapshot in place, and training continues with
    the next data: the batches in between are left out. A run goes wrong if the loss stays above its robust limit for
    `patience` steps or is NaN; if it rises for good and is lower with a snapshot, which a few left-out steps test; if
    `max_consecutive_skips` steps in a row are skipped; if parameters or buffers are not finite; or if a rule of `rules`
    says so. Halfway through `patience`, gradients are clipped to the median norm.

    The second time within `window` steps the guard restores an older snapshot and multiplies the learning rate by
    `lr_factor`. The rate returns to its value over `ramp` steps; schedulers do not see this. If the loss is above the
    limit right after a rollback, the data are to blame: steps are left out, up to four times `every`, and then the
    level is accepted. After `attempts` rollbacks within `window`, the guard restores the best snapshot and raises
    `RecoveryFailedError`.

    While nothing goes wrong, training is bit-identical to training without recovery. A rollback does not touch
    schedules, loss scale, random state and data, unless they are in `state`.

    Args:
        every: steps from one snapshot to the next.
        keep: number of snapshots, >= 2. Each takes the memory of parameters, buffers and optimizer state, in pinned
            memory of the host if they are on a GPU.
        attempts: rollbacks within `window` steps; the next raises. If the loss rises for good again after all but one
            of them, the rise is accepted and reported, unless `wrap` has `objective="minimise"`.
        lr_factor: above 0, at most 1.
        ramp, window: steps. A resumed run continues to count.
        quarantine: steps; None: half of `every`.
        patience: number of steps in a row with a loss above the limit. The limit is the median of the newest 32 healthy
            losses plus the largest of: six times the robust standard deviation of 128, 30 % of the median, and 5 % of
            the progress since the beginning.
        rules: a new critical finding of one of these rules counts, too.
        state: more to restore, such as an EMA: objects with `state_dict` and `load_state_dict`.

    Raises:
        ValueError: a setting is out of its range; names it.

    Cost: every `every` steps a copy of all that is kept, on a GPU without a wait; 10 us a step on the host. A rollback
    is one such copy back. With several processes, one small `all_reduce` a step, which on GPUs waits for the step
    before.

    >>> Recovery(keep=1)
    Traceback (most recent call last):
    ValueError: `keep` must be an integer >= 2, got 1
    """

    every: int = 50
    keep: int = 3
    attempts: int = 3
    lr_factor: float = 0.5
    ramp: int = 100
    window: int = 1000
    quarantine: int | None = None
    patience: int = 6
    rules: tuple[str, ...] = CRITICAL_RULES
    state: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        least = {"every": 1, "keep": 2, "attempts": 1, "ramp": 0, "window": 1, "patience": 2}
        for name, smallest in least.items():
            values.at_least(smallest, name, getattr(self, name))
        quarantine = max(self.patience, self.every // 2) if self.quarantine is None else self.quarantine
        if isinstance(quarantine, bool) or not isinstance(quarantine, int) or quarantine < 0:
            raise ValueError(f"`quarantine` must be None or an integer >= 0, got {self.quarantine!r}")
        if not 0.0 < self.lr_factor <= 1.0:
            raise ValueError(f"`lr_factor` must be above 0 and at most 1, got {self.lr_factor!r}")
        state = tuple(self.state) if isinstance(self.state, (list, tuple)) else (self.state,)
        for one in state:
            if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
                raise ValueError(f"`state` must hold objects with state_dict and load_state_dict, got {one!r}")
        for name, found in (("quarantine", quarantine), ("state", state), ("rules", tuple(self.rules))):
            object.__setattr__(self, name, found)


def as_recovery(recovery: Any) -> Recovery | None:
    """The settings for `wrap(recovery=...)`; a TypeError for anything but a Recovery, a bool or None."""
    if recovery is None or isinstance(recovery, bool):
        return Recovery() if recovery else None
    if not isinstance(recovery, Recovery):
        raise TypeError(f"`recovery` must be True or a fastguard.Recovery, got {recovery!r}")
    return recovery
