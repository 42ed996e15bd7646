"""When a run has gone wrong, and how far to go back: arithmetic on what each step has shown."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from ...stats import values
from .settings import Recovery

_NUM_KEPT, _NUM_LEVEL, _NUM_NEEDED, _ASK_EVERY = 128, 32, 20, 8
_LEAST_SHARE = 0.3  # of the median, by which a loss is above the limit at the least
_MOST_LEARNED = 3.0  # times the level, that data which were sat out may be above it to be known from then on
_SIGMA = 1.4826  # times the median of the distances from the median, for normal noise
_NUM_SAT_OUT = 4  # times `every`


class Ladder:
    """Watches losses and norms, and counts what was done.

    Attributes:
        limit: of the loss; Inf while too little is known.
        num_high: losses in a row above it.
        num_bad: steps in a row whose gradients were not finite.
        cause: why to go back, where somebody else has found that out; "" for no reason.
        attempts: steps at which the run went back.
        is_waiting: the run went back, and nothing is known yet of the loss since.
        num_sat_out: steps left out since, because that was too high.
    """

    def __init__(self, settings: Recovery) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=_NUM_KEPT)
        self._norms: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_new = 0
        self._level = self._rise = 0.0
        self.limit = math.inf
        self.num_high = self.num_bad = 0
        self.cause = ""
        self.attempts: list[int] = []
        self.is_waiting = False
        self.num_sat_out = 0
        self._factor, self._start = 1.0, 0

    def see(self, loss: float | None, norm: float, *, skipped: bool, vetoed: bool = False) -> None:
        """A step was taken, or left out.

        Args:
            skipped: by whatever; what is not finite enters no baseline, and what was left out neither.
            vetoed: it was left out by recovery.
        """
        is_bad = not (math.isfinite(norm) or vetoed)
        self.num_bad = self.num_bad + 1 if is_bad else 0
        if loss is not None and not (is_bad and skipped):  # of a batch that has changed nothing
            is_high = not loss <= self.limit or not math.isfinite(loss)
            if self.is_waiting and is_high and self._level > 0.0 and loss <= _MOST_LEARNED * self._level:
                self._rise = max(self._rise, loss - self._level)  # the same model, harder data: nothing to go back for
            self.num_high = self.num_high + 1 if is_high else 0
            if not is_high and not skipped:
                self._take(loss)
        if not self.num_high and not skipped and math.isfinite(norm):
            self._norms.append(norm)

    def _take(self, loss: float) -> None:
        self._losses.append(loss)
        self._num_new += 1
        if self._num_new >= _ASK_EVERY and len(self._losses) >= _NUM_NEEDED:
            self._num_new = 0
            losses = [*self._losses]
            middle = median(losses[-_NUM_LEVEL:])
            sigma = _SIGMA * median([abs(x - middle) for x in losses])
            self._level = middle
            self.limit = middle + max(self._settings.spread * sigma, _LEAST_SHARE * abs(middle), 1.5 * self._rise)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing speaks against what the run is now."""
        return not (self.num_high or self.num_bad or self.cause or self.is_waiting)

    @property
    def loss(self) -> float:
        """The median of the newest healthy losses; NaN where there is none."""
        return median([*self._losses][-_NUM_NEEDED:]) if self._losses else math.nan

    @property
    def norm_limit(self) -> float:
        """What to clip to: the median of the healthy norms while something is wrong; Inf else."""
        is_wrong = self.num_high >= (self._settings.patience + 1) // 2 or self.is_waiting
        return median(self._norms) if is_wrong and len(self._norms) >= _NUM_NEEDED else math.inf

    def reason(self) -> str:
        """Why to go back; "" where there is no reason."""
        if self.cause:
            return self.cause
        if self.num_high >= self._settings.patience:
            return f"the loss stood above {self.limit:.4g} for {self.num_high} steps"
        return ""

    def attempts_before(self, step: int) -> int:
        """How often the run went back within the window."""
        self.attempts = [one for one in self.attempts if step - one < self._settings.window]
        return len(self.attempts)

    def went_back(self, step: int, baseline: dict[str, Any]) -> float:
        """The run went back; returns the factor of the learning rate from here on."""
        earlier = len(self.attempts)
        self.load_baseline(baseline)
        self.attempts.append(step)
        self.is_waiting, self.num_sat_out = True, 0
        self._factor, self._start = self._settings.lr_factor**earlier, step
        return self._factor

    def sit_out(self) -> bool | None:
        """Of a run that went back: whether its next step is left out, its loss being too high; None where the level is
        now taken for a new one."""
        if not self.num_high:
            self.is_waiting = False
            return False
        if self.num_sat_out >= _NUM_SAT_OUT * self._settings.every:
            self.is_waiting, self.num_high, self.limit = False, 0, math.inf
            self._losses.clear()
            self._norms.clear()
            return None
        self.num_sat_out += 1
        return True

    def lr_factor(self, step: int) -> float:
        """What the learning rate is multiplied by at `step`: 1.0 once the ramp is over."""
        if self._factor == 1.0 or step >= self._start + self._settings.ramp:
            self._factor = 1.0
            return 1.0
        return self._factor + (1.0 - self._factor) * (step - self._start) / self._settings.ramp

    def baseline(self) -> dict[str, Any]:
        """What is known of losses and norms, as plain data."""
        return {
            "losses": [*self._losses],
            "norms": [*self._norms],
            "num_new": self._num_new,
            "limit": self.limit,
            "level": self._level,
        }

    def load_baseline(self, state: dict[str, Any]) -> None:
        """Goes back to what `baseline` gave; all alarms are over."""
        self._losses = deque(state["losses"], _NUM_KEPT)
        self._norms = deque(state["norms"], _NUM_KEPT)
        self._num_new, self.limit, self._level = state["num_new"], state["limit"], state["level"]
        self.num_high, self.num_bad, self.cause = 0, 0, ""

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.baseline(),
            "counts": [self.num_high, self.num_bad, self.num_sat_out, int(self.is_waiting), self._start],
            "attempts": list(self.attempts),
            "factor": self._factor,
            "rise": self._rise,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`; raises ValueError for anything else, and then changes nothing."""
        numbers = [values.entry(state, name, lambda plain: values.each(values.number, plain)) for name in _SERIES]
        counts = values.entry(state, "counts", lambda plain: values.each(values.count, plain))
        attempts = values.entry(state, "attempts", lambda plain: values.each(values.count, plain))
        limit, level, factor, rise = (values.entry(state, name, values.number) for name in _NUMBERS)
        num_new = values.entry(state, "num_new", values.count)
        if len(counts) != 5:
            raise values.MisfitError(f"must have 5 numbers, got {len(counts)}", ("counts",))
        self.load_baseline(
            {"losses": numbers[0], "norms": numbers[1], "num_new": num_new, "limit": limit, "level": level}
        )
        self._rise = rise
        self.num_high, self.num_bad, self.num_sat_out, is_waiting, self._start = counts
        self.is_waiting, self.attempts, self._factor = bool(is_waiting), attempts, factor


_SERIES = ("losses", "norms")
_NUMBERS = ("limit", "level", "factor", "rise")
