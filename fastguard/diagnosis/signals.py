"""What several rules need of one history, worked out once for each state of it."""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from ..records import BatchSample, Entry, TrainingHistory
from ..records.running import HUGE, quantiles, within
from ..records.sampled import Window
from ..records.samples import ModuleActivity
from . import needs

BLOCK = 20
_ENOUGH = 16  # samples of a batch
_loss_of, _norm_of, _lr_of = map(operator.attrgetter, ("loss", "norm", "lr"))


class Signals:
    """Series and levels of the clean steps, neither skipped nor non-finite, of a history's window, held weakly."""

    def __init__(self, history: TrainingHistory) -> None:
        self._history = weakref.ref(history)

    @property
    def history(self) -> TrainingHistory:
        history = self._history()
        if history is None:
            raise ReferenceError("the history that these signals are of no longer exists")
        return history

    @cached_property
    def clean(self) -> list[Entry]:
        """The window of clean steps."""
        return list(self.history.clean)

    @cached_property
    def loss_entries(self) -> list[Entry]:
        """The clean steps that have a finite loss; one beyond ±1e150 counts as that, so that sums stay finite."""
        if self._all_losses is not None:
            return self.clean
        entries = [e for e in self.clean if e.loss is not None and math.isfinite(e.loss)]
        if self.has_usual_losses:
            return entries
        return [e._replace(loss=within(e.loss)) for e in entries]  # type: ignore[arg-type]

    def newest_loss_entries(self, num: int) -> list[Entry]:
        """The newest `num` of `loss_entries`, oldest first. Cost: 25 ns each, whatever the window; nothing is kept."""
        if "loss_entries" in self.__dict__ or not self.has_usual_losses:
            return self.loss_entries[-num:]
        found = [*itertools.islice(reversed(self.history.clean), num)][::-1]
        losses = [*map(_loss_of, found)]
        if None not in losses and math.isfinite(sum(losses)):
            return found
        isfinite = math.isfinite
        newest = (e for e in reversed(self.history.clean) if e.loss is not None and isfinite(e.loss))
        return list(itertools.islice(newest, num))[::-1]

    @property
    def has_usual_losses(self) -> bool:
        """Whether all losses of the run, but for NaN and Inf, lie within ±1e150."""
        return self.history.losses.max <= HUGE and self.history.losses.min >= -HUGE

    @cached_property
    def losses(self) -> list[float]:
        """Their losses."""
        return self._all_losses or [e.loss for e in self.loss_entries]  # type: ignore[misc]

    @cached_property
    def _all_losses(self) -> list[float] | None:
        """The losses of all clean steps, if each has a finite one within ±1e150, as is usual."""
        losses = [*map(_loss_of, self.clean)]
        return losses if self.has_usual_losses and None not in losses and math.isfinite(sum(losses)) else None

    @cached_property
    def norms(self) -> list[float]:
        """Norms of the clean steps, zeros among them."""
        return [*map(_norm_of, self.clean)]

    @cached_property
    def loss_levels(self) -> list[float]:
        """Medians of the losses in blocks of 20 steps, oldest first; the newest block is always whole."""
        starts = range(len(self.losses) % BLOCK, len(self.losses), BLOCK)
        return [sorted(self.losses[i : i + BLOCK])[BLOCK // 2] for i in starts]

    @cached_property
    def lrs(self) -> list[float]:
        """Learning rates of the clean steps that have one."""
        rates = [*map(_lr_of, self.clean)]
        return rates if None not in rates else [rate for rate in rates if rate is not None]

    @cached_property
    def loss_noise(self) -> float:
        """Robust spread of the loss from one step to the next, over the newest 64; NaN if there are less than 8."""
        return noise(self.losses[-64:])

    @cached_property
    def modules(self) -> dict[str, list[tuple[str, Window[ModuleActivity]]]]:
        """Names and windows of the activations that are being sampled, by family."""
        families: dict[str, list[tuple[str, Window[ModuleActivity]]]] = {}
        for name, window in self.history.activations.current():
            families.setdefault(window.last.value.family, []).append((name, window))
        return families

    @cached_property
    def is_lr_rising(self) -> bool:
        """Whether the learning rate is still on its way up: higher than a quarter of the window's newest steps ago."""
        newest = self.lrs[-25:]
        return len(newest) > 1 and newest[-1] > 1.02 * newest[0]

    @cached_property
    def num_full_lr(self) -> int:
        """Clean steps of the window whose learning rate was at least half of the largest ever; all if not known."""
        if not self.lrs:
            return len(self.clean)
        limit = 0.5 * self.history.lrs.max
        return len([lr for lr in self.lrs if lr >= limit])

    @property
    def initial_loss(self) -> float:
        """Mean of the run's first ten losses, or the first if they rose tenfold at once; NaN before there were ten."""
        trend = self.history.loss_trend
        if trend.count < 10:
            return math.nan
        has_risen = trend.first > 10.0 * trend.firsts[0] > 0.0 and num_samples(self.history) >= _ENOUGH
        return trend.firsts[0] if has_risen else trend.first

    @cached_property
    def loss_level(self) -> float:
        """Median of the newest 20 losses; NaN before there were 20."""
        return self.loss_levels[-1] if self.loss_levels else math.nan

    @cached_property
    def chance(self) -> float:
        """The loss without knowledge of the inputs, ln C of classes or the targets' variance; 0.0 if not known.

        Of a yes or no, ln 2 if it came down to that.
        """
        history = self.history
        kinds = ("cross-entropy", "cross-entropy with smoothed labels", "negative log-likelihood", "log of the output")
        if needs.is_squared_error(history):
            return (history.model.target_std or 0.0) ** 2
        if needs.is_binary(history) and abs(history.loss_trend.best - math.log(2.0)) < 0.15 * math.log(2.0):
            return math.log(2.0)
        widths = [batch.output_width for _, batch in history.batches if batch.training]
        ops = needs.computing(history.model.loss_ops)
        is_of_classes = history.model.loss_kind in kinds or ops[:2] == ["NllLossBackward0", "LogSoftmaxBackward0"]
        if not is_of_classes or not widths or widths[0] < 2 or self._is_scaled(math.log(widths[0])):
            return 0.0
        return math.log(widths[0])

    @property
    def is_below_chance(self) -> bool:
        """Whether the newest losses lie clearly below `chance`: of a model that was trained before, say."""
        return 0.0 < self.loss_level < 0.85 * self.chance

    def _is_scaled(self, chance: float) -> bool:
        """Whether the loss is another in size than a mean over samples: a sum, or times a factor, with terms beside."""
        ops = self.history.model.loss_ops
        outer = list(itertools.takewhile(lambda op: not op.startswith(("Nll", "LogSoftmax")), ops))
        sizes = [batch.num_samples for _, batch in self.history.batches if batch.training]
        first, best = self.initial_loss, self.history.loss_trend.best
        if abs(best - chance) < 0.15 * chance:
            return False  # a mean that came down to chance
        is_times = any(op.startswith(("Mul", "Div")) for op in outer) and len(outer) < len(ops)
        is_sum = bool(sizes) and 0.5 < first / (chance * sizes[0]) < 2.0 and sizes[0] > 4
        return first > 2.0 * chance and (is_times or is_sum)

    @cached_property
    def progress(self) -> float:
        """How far the loss has come down at best, as a share of its beginning or `chance`; NaN if not known."""
        first = self.initial_loss
        if 0.0 < self.chance < first or 0.0 < first < 0.6 * self.chance:
            first = self.chance
        if not first or math.isnan(first) or not math.isfinite(self.history.loss_trend.best):
            return math.nan
        return (first - self.history.loss_trend.best) / abs(first)

    @property
    def progress_in_words(self) -> str:
        """`progress` in words, after "the loss has"."""
        return f"come down by {self.progress:.0%} at best" if self.progress >= 0.005 else "not come down"

    @cached_property
    def recovers_from_shift(self) -> bool:
        """Whether the loss falls after the newest of its `jumps`, by three tenths and for good; at first, at all."""
        places = jumps(self.loss_entries)
        after = self.losses[places[-1] :] if places else []
        if not after:
            return False
        size = min(BLOCK, len(after) // 2)
        levels = [median(after[i : i + size]) for i in range(0, len(after) - size + 1, size)]
        now = median(after[-size:])
        return now < levels[0] if len(after) < BLOCK else now < 0.7 * levels[0] and now < 1.5 * min(levels)

    @cached_property
    def is_flat(self) -> bool:
        """Whether the median of the newest 64 losses is no lower than nearly that of the 64 before them."""
        newest, before = self.losses[-64:], self.losses[-128:-64]
        return bool(before) and median(newest) >= 0.97 * median(before)

    @cached_property
    def still_falls(self) -> bool:
        """Whether the loss falls by 3 standard errors over the newest two thirds of the window, or of the whole run."""
        means = [bucket.loss.mean for bucket in self.history.overview.buckets if bucket.loss.num]
        falls = (fall_of(values[len(values) // 3 :]) for values in (self.losses, means))
        return any(fallen > 3.0 * error for fallen, error in falls)

    @cached_property
    def falls_steadily(self) -> bool:
        """Whether the window's second half brought half of what the first did, by more than 3 standard errors."""
        losses, middle = self.losses, len(self.losses) // 2
        if middle < 5:
            return False
        tenth, (fallen, error) = middle // 5, fall_of(losses[middle:])
        first, half, last = map(median, (losses[: 2 * tenth], losses[middle - tenth // 2 :][:tenth], losses[-tenth:]))
        return fallen > 3.0 * error and half - last >= 0.5 * (first - half)

    @cached_property
    def fall(self) -> float:
        """How far the loss has come down at best from where it began, as a share of that; NaN if not known."""
        first, best = self.initial_loss, self.history.loss_trend.best
        return (first - best) / abs(first) if first and math.isfinite(best) else math.nan


_known: weakref.WeakKeyDictionary[TrainingHistory, tuple[int, Signals]] = weakref.WeakKeyDictionary()


def signals_of(history: TrainingHistory) -> Signals:
    """The signals of `history` as it is now; the same object until it changes."""
    found = _known.get(history)
    if found is None or found[0] != history.revision:
        found = history.revision, Signals(history)
        _known[history] = found
    return found[1]


def is_felt_by_the_loss(history: TrainingHistory, steps: Iterable[int] = ()) -> bool:
    """Whether the loss lost its gain, or jumped near one of `steps`; True without any, False for one that may rise."""
    trend = history.loss_trend
    if needs.descent(history) is False or needs.may_rise(history):
        return False
    if trend.count < 20:
        return True
    if signals_of(history).recovers_from_shift:
        return False
    gained, spread = trend.first - trend.best, signals_of(history).loss_noise
    if trend.mean > trend.best + max(0.25 * gained, 0.0 if math.isnan(spread) else spread):
        return True
    near = {step + away for step in steps for away in (-1, 0, 1, 2, 3)}
    return any(spike.first_step in near for spike in trend.spikes)


def has_run_away(history: TrainingHistory) -> bool:
    """Whether the newest losses are three times the first, or one was NaN or Inf: what began it explains that."""
    s = signals_of(history)
    begin = max(s.initial_loss, *history.loss_trend.firsts[:1], 0.0) if history.loss_trend.firsts else 0.0
    return history.first_bad_loss_step >= 0 or s.loss_level > 3.0 * begin > 0.0


def span(history: TrainingHistory) -> tuple[int | None, int | None]:
    """First and last step of the newest ones that are kept; a pair of None before the first."""
    return (history.recent[0].step, history.recent[-1].step) if history.recent else (None, None)


def ends(entries: Sequence[Any]) -> tuple[int, int]:
    """First and last step of entries, or of whatever else has a step."""
    return entries[0].step, entries[-1].step


def has_had_time(history: TrainingHistory, num_losses: int) -> bool:
    """Whether so many losses of batches of 16 or more were seen, or more of smaller ones, or the run has ended."""
    samples = history.losses.count * min(num_samples(history), _ENOUGH)
    return history.has_ended or samples >= num_losses * _ENOUGH


def num_samples(history: TrainingHistory) -> int:
    """The size of the largest training batch that was looked at; 16 if there is none."""
    return max((x.num_samples for x in training_batches(history)), default=_ENOUGH)


def is_stuck(history: TrainingHistory, progress: float, num_losses: int, *, at_end: bool = False) -> bool:
    """Whether `num_losses`, or all losses at the end of the run, gained less than a share `progress` of the first."""
    had_time = has_had_time(history, num_losses) if at_end else history.losses.count >= num_losses
    return had_time and not signals_of(history).progress >= progress


def training_batches(history: TrainingHistory) -> list[BatchSample]:
    """Samples of the passes that learn."""
    return [sample for _, sample in history.batches if sample.training and sample.with_grad]


def jumps(entries: Sequence[Entry]) -> list[int]:
    """The places in `entries` where the loss doubled from one step to the next, and stayed there for five steps.

    Not where it, or the learning rate, rose in the steps before: a jump comes from other data, not from overshooting.
    """
    losses = [e.loss or 0.0 for e in entries]
    found: list[int] = []
    for i in range(10, len(losses) - 2):
        before, after = losses[i - 5 : i], losses[i : i + 5]
        low, high = min(before), max(before)
        is_doubled = after[0] > 2.0 * before[-1] and min(after) > 2.0 * high > 0.0 and max(after) < 2.0 * after[0]
        if not is_doubled or after[0] - before[-1] <= high - low or (found and i < found[-1] + 5):
            continue
        earlier, lrs = median(losses[i - 10 : i - 5]), [e.lr or 0.0 for e in entries[i - 5 : i]]
        has_risen = median(before) > 2.0 * earlier and high - earlier > 0.1 * (after[0] - before[-1])
        if not has_risen and max(lrs) <= 1.02 * lrs[0]:
            found.append(i)
    return found


def median(values: Sequence[float]) -> float:
    """The middle of `values`, as `quantiles` has it; NaN of nothing."""
    ordered = sorted(values)
    low, is_even = divmod(len(ordered) - 1, 2)
    gap = ordered[low + 1] - ordered[low] if len(ordered) > 1 else math.inf
    return ordered[low] + gap * (0.5 * is_even) if gap < math.inf else quantiles(ordered, (0.5,))[0]


def exp(value: float) -> float:
    """e to that, at most e^700: how many times larger, from a difference of logarithms, which may be beyond floats."""
    return math.exp(min(value, 700.0))


def noise(values: Sequence[float]) -> float:
    """Robust spread of a series from step to step: 1.05 times the median of |differences|; NaN of less than 8."""
    if len(values) < 8:
        return math.nan
    return 1.05 * median([abs(b - a) for a, b in pairwise(values)])


def fall_of(values: list[float]) -> tuple[float, float]:
    """By how much the line through `values` falls from its beginning to its end, and the standard error of that.

    Values far out are drawn in around the median, to 3 times the noise or to where nine of ten are, so that no spike
    bends the line. Of fewer than three nothing is sure.
    """
    n = len(values)
    if n < 3:
        return 0.0, math.inf
    low, middle, high = quantiles(values, (0.1, 0.5, 0.9))
    spread = max(3.0 * noise(values), high - low)
    drawn = [min(max(v, middle - spread), middle + spread) for v in values] if spread > 0.0 else values
    mean_x, mean_y = (n - 1) / 2, sum(drawn) / n
    sxx = n * (n * n - 1) / 12
    slope = sum((i - mean_x) * (v - mean_y) for i, v in enumerate(drawn)) / sxx
    rest = sum(d * d for d in (v - mean_y - slope * (i - mean_x) for i, v in enumerate(drawn)))
    return -slope * (n - 1), math.sqrt(rest / max(n - 2, 1) / sxx) * (n - 1)


def as_in_gpt2(stds: Mapping[str, float], module_kinds: Iterable[str]) -> set[str]:
    """The weights that are initialised as in GPT-2, by the standard deviations of all weights.

    GPT-2 draws all weights with a standard deviation of 0.02, whatever their fan-in, and divides those at the end of
    residual branches by the root of the number of branches. A model counts if a third of its matrices has 0.02, and if
    it has normalisation layers, which rescale the signals. Source: Radford et al. 2019, section 2.3; also BERT.
    """
    std, tolerance = 0.02, 0.1
    usual = sum(abs(one - std) <= tolerance * std for one in stds.values())
    if 3 * usual < len(stds) or not any("norm" in kind.lower() for kind in module_kinds):
        return set()
    least = (1.0 - tolerance) * std / math.sqrt(max(len(stds), 1))
    return {name for name, one in stds.items() if least <= one <= (1.0 + tolerance) * std}
