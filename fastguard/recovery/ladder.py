"""When a run has gone wrong, and how far to roll back: arithmetic on losses and norms, averaged over all processes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ..ranks.exchange import all_reduced
from ..records import values
from ..records.codec import Count, Part, reader_of
from ..records.events import RecoveryEvent
from .rise import ALARM, LossRise, Trial
from .settings import Recovery

_NUM_KEPT, _NUM_LEVEL, _NUM_NEEDED, _ASK_EVERY = 128, 32, 20, 8
_SPREAD = 6.0  # times the robust standard deviation, above the median
_LEAST_SHARE = 0.3  # of the median: the limit is at least this far above it
_MOST_LEARNED = 3.0  # times the level, up to which losses of data that were left out raise the next limit
_SIGMA = 1.4826  # times the median of the distances from the median, for normal noise
_NUM_SAT_OUT = 4  # times `every`
_MOST_LOST = 1 / 3  # of the progress since the beginning, to a higher learning rate
_MOST_FASTER = 2.0  # times the learning rate at a snapshot, at which training continues from it
_NUM_FIRST = 20  # losses at the beginning of the run
_LEAST_SPREAD, _LEAST_GAIN = 0.02, 0.05  # of the level, and of the progress since the beginning


read_events = reader_of(list[RecoveryEvent])


class LossLevel(Part):
    """Where the losses of a healthy run are, how far they scatter, and from where on a loss is too high."""

    losses: deque[float]
    _num_new: Count = 0
    limit: float = math.inf  # while too little is known
    value: float = 0.0  # median of the newest 32 losses; 0 while it is not known
    spread: float = 0.0  # robust standard deviation, at least 2 % of the level and 5 % of the progress; 0 if not known
    first: list[float]  # the first twenty losses
    harder: float = 0.0  # by how much the losses of data that were left out were above the level

    def __init__(self) -> None:
        self.losses = deque(maxlen=_NUM_KEPT)
        self.first = []

    def take(self, loss: float) -> None:
        """Takes the loss of a healthy step."""
        self.losses.append(loss)
        self._num_new += 1
        if len(self.first) < _NUM_FIRST:
            self.first.append(loss)
        if self._num_new >= _ASK_EVERY and len(self.losses) >= _NUM_NEEDED:
            self._num_new = 0
            losses = [*self.losses]
            middle = median(losses[-_NUM_LEVEL:])
            sigma = _SIGMA * median([abs(x - middle) for x in losses])
            self.value = middle
            gain = _LEAST_GAIN * (median(self.first) - middle)  # a loss near zero is restless, and harmless
            self.spread = max(sigma, _LEAST_SPREAD * abs(middle), gain)
            self.limit = middle + max(_SPREAD * sigma, _LEAST_SHARE * abs(middle), gain, 1.5 * self.harder)

    @property
    def newest(self) -> float:
        """The median of the newest healthy losses; NaN without any."""
        return median([*self.losses][-_NUM_NEEDED:]) if self.losses else math.nan


class Ladder(Part):
    """Watches losses and norms, and counts rollbacks."""

    level: LossLevel  # of the losses
    rise: LossRise  # detects losses that stay above their level, also below the limit
    cut: float = 1.0  # the factor of the learning rate after a rollback
    cut_at: Count = 0  # the step of the rollback
    lr: float | None = None  # the newest of the schedule
    lr_back: float | None = None  # that of the restored snapshot
    _norms: deque[float]
    num_high: Count = 0  # losses in a row above the limit
    num_bad: Count = 0  # steps in a row with non-finite gradients
    attempts: list[Count]  # steps of the rollbacks
    is_waiting: bool = False  # the run was rolled back, and its loss is not yet known to be normal
    num_sat_out: Count = 0  # steps skipped since then

    def __init__(self, settings: Recovery) -> None:
        self._settings = settings
        self._norms = deque(maxlen=_NUM_KEPT)
        self.level, self.rise = LossLevel(), LossRise()
        self.has_aim = True  # whether a lower loss is better
        self.has_grown = False  # whether parameters are many times larger than before the loss began to rise
        self.trial: Trial | None = None  # of a snapshot; None without one
        self.cause = ""  # a reason to roll back that was found elsewhere; "" for none
        self.attempts = []

    def see(
        self, loss: float | None, norm: float, *, skipped: bool, vetoed: bool = False, lr: float | None = None
    ) -> None:
        """Adds a step: `norm` of all gradients, `lr` of the schedule, `vetoed` if recovery has skipped it.

        Non-finite and skipped steps enter no baseline.
        """
        self.lr = lr
        is_bad = not (math.isfinite(norm) or vetoed)
        self.num_bad = self.num_bad + 1 if is_bad else 0
        if loss is not None and not (is_bad and skipped):  # the batch has changed nothing
            if self.trial is not None:
                self.trial.see(loss)
            else:
                self._judge(loss, lr, skipped)
        if not self.num_high and not skipped and math.isfinite(norm):
            self._norms.append(norm)

    def _judge(self, loss: float, lr: float | None, skipped: bool) -> None:
        level = self.level
        is_high = not math.isfinite(loss) or (self.has_aim and loss > level.limit)
        if self.is_waiting and is_high and level.value > 0.0 and loss <= _MOST_LEARNED * level.value:
            level.harder = max(level.harder, loss - level.value)  # the same model: these data are merely harder
        self.num_high = self.num_high + 1 if is_high else 0
        if not self.has_aim:
            self.rise.calm()
        elif not self.is_waiting and level.spread > 0.0:
            self.rise.see(loss, lr, level.value, level.spread)
            if self.rise.num_suspect > _NUM_SAT_OUT * self._settings.every:  # with a reason, or hardly
                self._relearn()
        if not is_high and not skipped and not self.rise.is_suspect:
            level.take(loss)

    def _relearn(self) -> None:
        """The losses from here on make a new level."""
        self.level.losses.clear()
        self.level.spread = 0.0
        self.rise.calm()
        self.has_grown = False

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong with the run."""
        is_calm = not (self.rise.is_suspect or self.has_grown or self.trial)
        return is_calm and not (self.num_high or self.num_bad or self.cause or self.is_waiting)

    @property
    def is_blow(self) -> bool:
        """Whether the newest loss is too high, and the ones before were normal."""
        return self.num_high == 1 and not self.rise.is_odd

    @property
    def norm_limit(self) -> float:
        """The norm to clip to: the median of the healthy norms while something is wrong; Inf otherwise."""
        is_wrong = (self.num_high >= (self._settings.patience + 1) // 2 and not self._is_of_rate) or self.is_waiting
        return median(self._norms) if is_wrong and len(self._norms) >= _NUM_NEEDED else math.inf

    def reason(self) -> str:
        """Why to roll back; "" for no reason."""
        if self.cause:
            return self.cause
        if self.num_high >= self._settings.patience and not self._is_of_rate:
            return f"the loss stood above {self.level.limit:.4g} for {self.num_high} steps"
        return ""

    @property
    def _is_of_rate(self) -> bool:
        """Whether a higher learning rate may explain the loss: most of the progress is kept."""
        first, level = self.level.first, self.level.value
        is_kept = bool(first) and self.rise.level - level < _MOST_LOST * (median(first) - level)
        return self.rise.is_explained and is_kept

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
        if self.rise.sum >= ALARM and not self.rise.is_explained:
            return f"the loss stood at {self.rise.level:.4g} after it had been at {self.level.value:.4g}"
        return ""

    def try_back(self) -> Trial:
        """Begins the trial of a snapshot."""
        before, level = self.level, self.rise.level
        least = before.value + before.spread
        self.trial = Trial(before.value, max(level, least) if math.isfinite(level) else least, before.spread)
        self.rise.calm()
        return self.trial

    def accept(self) -> None:
        """Accepts a risen loss that is not the fault of the model, and learns its level again."""
        rise = 0.0 if self.trial is None else self.trial.rise
        self.trial, self.level.limit, self.num_high = None, math.inf, 0
        self._relearn()
        self.rise.accept(rise, self._settings.window)

    def attempts_before(self, step: int) -> int:
        """Number of rollbacks within the window."""
        self.attempts = [one for one in self.attempts if step - one < self._settings.window]
        return len(self.attempts)

    def went_back(self, step: int, baseline: dict[str, Any]) -> float:
        """Notes a rollback. Returns the factor of the learning rate from here on."""
        earlier = len(self.attempts)
        self.load_baseline(baseline)
        self.attempts.append(step)
        self.is_waiting, self.num_sat_out = True, 0
        self.cut, self.cut_at, self.lr_back = self._settings.lr_factor**earlier, step, baseline["lr"]
        return self.cut

    def sit_out(self) -> bool | None:
        """Whether to skip the next step after a rollback because losses are too high; None to accept the new level."""
        if not self.num_high:
            # at a learning rate far above that of the snapshot, the run would be ruined again
            is_faster = self.lr is not None and self.lr_back is not None and self.lr > _MOST_FASTER * self.lr_back > 0.0
            self.is_waiting = is_faster and self.num_sat_out < self._settings.every
            self.num_sat_out += self.is_waiting
            return self.is_waiting
        if self.num_sat_out >= _NUM_SAT_OUT * self._settings.every:
            self.is_waiting, self.num_high, self.level.limit = False, 0, math.inf
            self._relearn()
            self._norms.clear()
            return None
        self.num_sat_out += 1
        return True

    def lr_factor(self, step: int) -> float:
        """What the learning rate is multiplied by at `step`: it returns to its value in a straight line."""
        since, ramp = step - self.cut_at, self._settings.ramp
        if since >= ramp:
            self.cut = 1.0
        return 1.0 if self.cut == 1.0 else self.cut + (1.0 - self.cut) * since / ramp

    def baseline(self) -> dict[str, Any]:
        """Losses and norms as plain data."""
        return {"level": self.level.state(), "norms": [*self._norms], "lr": self.lr}

    def load_baseline(self, baseline: dict[str, Any]) -> None:
        """Goes back to what `baseline` returned; all alarms are over."""
        first, harder = self.level.first, self.level.harder
        self.level.load(baseline["level"])
        self.level.first, self.level.harder = first, harder
        self._norms = deque(baseline["norms"], _NUM_KEPT)
        self.num_high, self.num_bad, self.cause = 0, 0, ""
        self.rise.calm()
        self.has_grown, self.trial = False, None


class StepSeen(NamedTuple):
    """A step: `skipped` for any reason, `vetoed` by recovery."""

    loss: float | None
    norm: float
    skipped: bool
    vetoed: bool
    lr: float | None


Groups: TypeAlias = Sequence[dist.ProcessGroup]  # together they reach all processes


def reduced(numbers: Sequence[float], groups: Groups, how: Any) -> list[float]:
    """The numbers of all processes as one."""
    words = torch.tensor([float(x) for x in numbers], dtype=torch.float64, device="cpu")
    return list(all_reduced(words, groups, how).tolist())


seen_of = reader_of(StepSeen)  # from a list of its fields; a MisfitError for anything else


def exchanged(ladder: Ladder, arrived: list[StepSeen], groups: Groups) -> list[StepSeen]:
    """The mean of the records of all processes, so that all decide alike. It takes one `all_reduce` a group."""
    losses = [one.loss for one in arrived if one.loss is not None]
    sums = [sum(losses), len(losses), sum(one.norm for one in arrived), len(arrived)]
    sums += [sum(one.skipped for one in arrived), sum(one.vetoed for one in arrived)]
    sums += [bool(ladder.cause), ladder.has_grown, not ladder.has_aim]
    loss, num_losses, norm, count, skipped, vetoed, *flags = reduced(sums, groups, dist.ReduceOp.SUM)
    has_cause, ladder.has_grown, is_aimless = (number > 0 for number in flags)
    ladder.has_aim = not is_aimless
    if has_cause and not ladder.cause:
        ladder.cause = "another process says so"
    mean, lr = loss / num_losses if num_losses else None, arrived[-1].lr if arrived else None
    return [StepSeen(mean, norm / count, skipped > 0, vetoed > 0, lr)] if count else []


class Slowed:
    """Multiplies the learning rate by a factor for one step of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        self._entries = [(group, group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
        self._slow = [lr * factor for _, lr in self._entries]

    def apply(self) -> None:
        for (group, _), slow in zip(self._entries, self._slow):
            group["lr"] = slow

    def give_back(self) -> None:
        """Restores the same objects as before."""
        for (group, lr), slow in zip(self._entries, self._slow):
            if group["lr"] is slow:
                group["lr"] = lr


def check_state(state: Any) -> Any:
    """Returns `state`. Raises MisfitError if it does not come from `Rescue.state_dict`."""
    values.entry(state, "ladder", Ladder(Recovery()).load)
    values.entry(state, "events", read_events)
    values.entry(state, "arrived", lambda plain: values.each(seen_of, plain))
    return state
