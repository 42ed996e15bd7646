"""Recovery: what is kept of a run, and what is done when it goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..records import values

CRITICAL_RULES = ("loss-explosion", "loss-divergence")


@dataclass(frozen=True)
class Recovery:
    """How a run is brought back when it goes wrong: `fastguard.wrap(optimizer, model, recovery=fastguard.Recovery())`.

    Every `every` steps parameters, buffers and the optimizer's state are copied into memory that is kept for it. Such a
    snapshot counts once the run has stayed healthy for `quarantine` further steps; or for `patience`, where the next
    loss is too high at one blow. When the run goes wrong, the newest
    that counts is put back in place, and training goes on with the data that come next: the batches since then are
    left out. It goes wrong where the loss stands above its robust limit for `patience` steps, or is NaN; where it has
    risen for good and is lower with a snapshot, which some steps that are left out show; where
    `max_consecutive_skips` steps in a row are skipped; where parameters or buffers are not finite; where a rule of
    `rules` says so. Halfway through `patience`, gradients are clipped to the median norm.

    The second time within `window` steps an older snapshot is put back, and the learning rate is multiplied by
    `lr_factor`, and brought back to what it should be over `ramp` steps; around the optimizer's own step only, so that
    no scheduler sees it. While the loss of what was put back is above the limit, it is the data: steps are left out, up
    to four times `every`; then the level is taken for a new one. After `attempts` within `window` the best
    snapshot is put back, and `RecoveryFailedError` raised.

    While nothing goes wrong, training is bit-identical to training without. Schedules, loss scale, random state and
    data go on as they are, unless they are in `state`.

    Args:
        every: steps from one snapshot to the next.
        keep: snapshots, >= 2. Each takes the memory of parameters, buffers and optimizer state; on the host, pinned, if
            they are on a GPU.
        attempts: rollbacks within `window` steps; the next raises. A loss that rises for good once more after all but
            one of them is taken for lawful, and that is told, unless `wrap` was told `objective="minimise"`.
        lr_factor: above 0, at most 1.
        ramp: steps.
        window: steps. A resumed run goes on counting.
        quarantine: steps; None: half of `every`.
        patience: steps in a row with a loss above the limit, which is the median of the newest 32 healthy losses and
            `spread` times the robust standard deviation of 128, or 30 % of the median if that is more, or 5 % of what
            was gained since the beginning.
        spread: see `patience`.
        rules: of the diagnosis; what they find new and critical counts.
        state: what else is to go back, as an EMA: anything with `state_dict` and `load_state_dict`.
        replay: put the random state back too, to go through the same again, with the data loader in `state`.
        recompute: keep the random state of each forward pass, for `Guard.recompute`, and recompute steps with a closure
            whose gradients are not finite.

    Raises:
        ValueError: a setting is out of its range; says which.

    Cost: every `every` steps a copy of all that is kept, on a GPU without a wait; at each step 10 us on the host. A
    rollback is one such copy back. With several processes, one small `all_reduce` a step, which on GPUs waits for the
    step before.

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
    spread: float = 6.0
    rules: tuple[str, ...] = CRITICAL_RULES
    state: tuple[Any, ...] = ()
    replay: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        least = {"every": 1, "keep": 2, "attempts": 1, "ramp": 0, "window": 1, "patience": 2}
        for name, smallest in least.items():
            values.at_least(smallest, name, getattr(self, name))
        quarantine = max(self.patience, self.every // 2) if self.quarantine is None else self.quarantine
        if isinstance(quarantine, bool) or not isinstance(quarantine, int) or quarantine < 0:
            raise ValueError(f"`quarantine` must be None or an integer >= 0, got {self.quarantine!r}")
        if not 0.0 < self.lr_factor <= 1.0:
            raise ValueError(f"`lr_factor` must be above 0 and at most 1, got {self.lr_factor!r}")
        if not 0.0 < self.spread < math.inf:
            raise ValueError(f"`spread` must be a number above 0, got {self.spread!r}")
        state = tuple(self.state) if isinstance(self.state, (list, tuple)) else (self.state,)
        for one in state:
            if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
                raise ValueError(f"`state` must hold objects with state_dict and load_state_dict, got {one!r}")
        for name, found in (("quarantine", quarantine), ("state", state), ("rules", tuple(self.rules))):
            object.__setattr__(self, name, found)


def as_recovery(recovery: Any) -> Recovery | None:
    """What `wrap` was given.

    Raises:
        TypeError: it is neither a Recovery nor a bool nor None.
    """
    if recovery is None or recovery is False:
        return None
    if recovery is True:
        return Recovery()
    if not isinstance(recovery, Recovery):
        raise TypeError(f"`recovery` must be True or a fastguard.Recovery, got {recovery!r}")
    return recovery
