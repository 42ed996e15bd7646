"""When a run has gone wrong, and how far to go back: arithmetic on what each step has shown."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from ..records import values
from .rise import LossRise, Trial
from .settings import Recovery

_NUM_KEPT, _NUM_LEVEL, _NUM_NEEDED, _ASK_EVERY = 128, 32, 20, 8
_LEAST_SHARE = 0.3  # of the median, by which a loss is above the limit at the least
_MOST_LEARNED = 3.0  # times the level, that data which were sat out may be above it to be known from then on
_SIGMA = 1.4826  # times the median of the distances from the median, for normal noise
_NUM_SAT_OUT = 4  # times `every`
_MOST_LOST = 1 / 3  # of what was gained since the beginning, by a learning rate that is higher
_MOST_FASTER = 2.0  # times the learning rate at a snapshot, at which it is put to use again
_NUM_FIRST = 20  # losses that say where the run began
_LEAST_SPREAD, _LEAST_GAIN = 0.02, 0.05  # of the level, and of what was gained since the beginning


class Ladder:
    """Watches losses and norms, and counts rollbacks.

    Attributes:
        limit: of the loss; Inf while too little is known.
        num_high: losses in a row above the limit.
        num_bad: steps in a row with non-finite gradients.
        cause: a reason to roll back that was found elsewhere; "" for none.
        attempts: steps at which the run was rolled back.
        is_waiting: the run was rolled back, and its loss is not known to be right since.
        num_sat_out: steps skipped since then.
        rise: whether the loss stays above its level, also below the limit.
        has_aim: whether a lower loss is better.
        has_grown: whether parameters are many times larger than they were when the loss began to rise.
        trial: of a snapshot; None without one.
    """

    def __init__(self, settings: Recovery) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=_NUM_KEPT)
        self._norms: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_new = 0
        self._level = self._spread = self._harder = 0.0
        self._first: list[float] = []
        self.limit = math.inf
        self.rise = LossRise()
        self.has_aim, self.has_grown = True, False
        self.trial: Trial | None = None
        self.num_high = self.num_bad = 0
        self.cause = ""
        self.attempts: list[int] = []
        self.is_waiting = False
        self.num_sat_out = 0
        self._factor, self._start = 1.0, 0
        self._lr: float | None = None  # the newest
        self._lr_back: float | None = None  # of what was put back

    def see(
        self, loss: float | None, norm: float, *, skipped: bool, vetoed: bool = False, lr: float | None = None
    ) -> None:
        """Takes a step: `norm` of all gradients, `lr` of the schedule, `vetoed` if recovery has skipped it.

        Non-finite and skipped steps enter no baseline.
        """
        self._lr = lr
        is_bad = not (math.isfinite(norm) or vetoed)
        self.num_bad = self.num_bad + 1 if is_bad else 0
        if loss is not None and not (is_bad and skipped):  # of a batch that has changed nothing
            if self.trial is not None:
                self.trial.see(loss)
            else:
                self._judge(loss, lr, skipped)
        if not self.num_high and not skipped and math.isfinite(norm):
            self._norms.append(norm)

    def _judge(self, loss: float, lr: float | None, skipped: bool) -> None:
        is_high = not math.isfinite(loss) or (self.has_aim and loss > self.limit)
        if self.is_waiting and is_high and self._level > 0.0 and loss <= _MOST_LEARNED * self._level:
            self._harder = max(self._harder, loss - self._level)  # the same model, harder data: nothing to go back for
        self.num_high = self.num_high + 1 if is_high else 0
        if not self.has_aim:
            self.rise.calm()
        elif not self.is_waiting and self._spread > 0.0:
            self.rise.see(loss, lr, self._level, self._spread)
            if self.rise.num_suspect > _NUM_SAT_OUT * self._settings.every:  # with a reason, or hardly
                self._relearn()
        if not is_high and not skipped and not self.rise.is_suspect:
            self._take(loss)

    def _relearn(self) -> None:
        self._losses.clear()
        self._spread = 0.0
        self.rise.calm()
        self.has_grown = False

    def _take(self, loss: float) -> None:
        self._losses.append(loss)
        self._num_new += 1
        if len(self._first) < _NUM_FIRST:
            self._first.append(loss)
        if self._num_new >= _ASK_EVERY and len(self._losses) >= _NUM_NEEDED:
            self._num_new = 0
            losses = [*self._losses]
            middle = median(losses[-_NUM_LEVEL:])
            sigma = _SIGMA * median([abs(x - middle) for x in losses])
            self._level = middle
            gain = _LEAST_GAIN * (median(self._first) - middle)  # near zero a loss is restless, and harms nothing
            self._spread = max(sigma, _LEAST_SPREAD * abs(middle), gain)
            above = max(self._settings.spread * sigma, _LEAST_SHARE * abs(middle), gain, 1.5 * self._harder)
            self.limit = middle + above

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong with the run."""
        is_calm = not (self.rise.is_suspect or self.has_grown or self.trial)
        return is_calm and not (self.num_high or self.num_bad or self.cause or self.is_waiting)

    @property
    def is_blow(self) -> bool:
        """Whether the newest loss is the first that is too high, after usual ones."""
        return self.num_high == 1 and not self.rise.is_odd

    @property
    def loss(self) -> float:
        """The median of the newest healthy losses; NaN where there is none."""
        return median([*self._losses][-_NUM_NEEDED:]) if self._losses else math.nan

    @property
    def norm_limit(self) -> float:
        """What to clip to: the median of the healthy norms while something is wrong; Inf else."""
        is_wrong = (self.num_high >= (self._settings.patience + 1) // 2 and not self._is_of_rate) or self.is_waiting
        return median(self._norms) if is_wrong and len(self._norms) >= _NUM_NEEDED else math.inf

    def reason(self) -> str:
        """Why to roll back; "" for no reason."""
        if self.cause:
            return self.cause
        if self.num_high >= self._settings.patience and not self._is_of_rate:
            return f"the loss stood above {self.limit:.4g} for {self.num_high} steps"
        return ""

    @property
    def _is_of_rate(self) -> bool:
        """Whether a learning rate that is higher than before may be all: most of what was gained is kept."""
        if not self._first or not self.rise.is_explained:
            return False
        return self.rise.level - self._level < _MOST_LOST * (median(self._first) - self._level)

    @property
    def is_lawful(self) -> bool:
        """Whether the loss has stood above the limit for `every` steps, at a learning rate higher than before."""
        return self.num_high >= max(self._settings.every, self._settings.patience) and self._is_of_rate

    def doubt(self) -> str:
        """Why to try whether a snapshot has a lower loss; "" for no reason."""
        if not self.has_aim:
            return ""
        if self.has_grown and self.rise.is_odd:
            return "parameters had grown many times over, and the loss rose"
        if self.rise.is_lasting:
            return f"the loss stood at {self.rise.level:.4g} after it had been at {self._level:.4g}"
        return ""

    def try_back(self) -> None:
        """A snapshot is put back to look at its losses."""
        level = self.rise.level
        risen = max(level, self._level + self._spread) if math.isfinite(level) else self._level + self._spread
        self.trial = Trial(self._level, risen, self._spread)
        self.rise.calm()

    def accept(self) -> None:
        """The loss has risen, and that is no fault of the model: its level is learned anew."""
        rise = 0.0 if self.trial is None else self.trial.rise
        self.trial, self.limit, self.num_high = None, math.inf, 0
        self._relearn()
        self.rise.accept(rise, self._settings.window)

    def attempts_before(self, step: int) -> int:
        """How often the run went back within the window."""
        self.attempts = [one for one in self.attempts if step - one < self._settings.window]
        return len(self.attempts)

    def went_back(self, step: int, baseline: dict[str, Any]) -> float:
        """The run went back; returns the factor of the learning rate from here on."""
        earlier = len(self.attempts)
        self.load_baseline(baseline)
        self.attempts.append(step)
        self.is_waiting, self.num_sat_out, self._lr_back = True, 0, baseline["lr"]
        self._factor, self._start = self._settings.lr_factor**earlier, step
        return self._factor

    def sit_out(self) -> bool | None:
        """Whether to skip the next step after a rollback, as its loss is too high; None to accept the new level."""
        if not self.num_high:
            self.is_waiting = self._is_faster and self.num_sat_out < self._settings.every
            self.num_sat_out += self.is_waiting
            return self.is_waiting
        if self.num_sat_out >= _NUM_SAT_OUT * self._settings.every:
            self.is_waiting, self.num_high, self.limit = False, 0, math.inf
            self._relearn()
            self._norms.clear()
            return None
        self.num_sat_out += 1
        return True

    @property
    def _is_faster(self) -> bool:
        """Whether the learning rate is still far above what it was at the snapshot, as when the run was ruined."""
        return self._lr is not None and self._lr_back is not None and self._lr > _MOST_FASTER * self._lr_back > 0.0

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
            "spread": self._spread,
            "lr": self._lr,
        }

    def load_baseline(self, state: dict[str, Any]) -> None:
        """Goes back to what `baseline` gave; all alarms are over."""
        self._losses = deque(state["losses"], _NUM_KEPT)
        self._norms = deque(state["norms"], _NUM_KEPT)
        self._num_new, self.limit = state["num_new"], state["limit"]
        self._level, self._spread = state["level"], state["spread"]
        self.num_high, self.num_bad, self.cause = 0, 0, ""
        self.rise.calm()
        self.has_grown, self.trial = False, None

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.baseline(),
            "counts": [self.num_high, self.num_bad, self.num_sat_out, int(self.is_waiting), self._start],
            "attempts": list(self.attempts),
            "factor": self._factor,
            "harder": self._harder,
            "first": list(self._first),
            "rise": self.rise.state(),
            "has_aim": self.has_aim,
            "lr_back": self._lr_back,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`; raises ValueError for anything else, and then changes nothing."""
        numbers = [values.entry(state, name, lambda plain: values.each(values.number, plain)) for name in _SERIES]
        counts = values.entry(state, "counts", lambda plain: values.each(values.count, plain))
        attempts = values.entry(state, "attempts", lambda plain: values.each(values.count, plain))
        limit, level, spread, factor, harder = (values.entry(state, name, values.number) for name in _NUMBERS)
        num_new, has_aim = values.entry(state, "num_new", values.count), values.entry(state, "has_aim", values.truth)
        lr, lr_back = (values.entry(state, name, values.maybe(values.number)) for name in ("lr", "lr_back"))
        rise = LossRise()
        values.entry(state, "rise", rise.load)
        if len(counts) != 5:
            raise values.MisfitError(f"must have 5 numbers, got {len(counts)}", ("counts",))
        about = {"num_new": num_new, "limit": limit, "level": level, "spread": spread}
        self.load_baseline({"losses": numbers[0], "norms": numbers[1], **about})
        self._first, self._harder, self.rise, self.has_aim = numbers[2], harder, rise, has_aim
        self._lr, self._lr_back = lr, lr_back
        self.num_high, self.num_bad, self.num_sat_out, is_waiting, self._start = counts
        self.is_waiting, self.attempts, self._factor = bool(is_waiting), attempts, factor


_SERIES = ("losses", "norms", "first")
_NUMBERS = ("limit", "level", "spread", "factor", "harder")
