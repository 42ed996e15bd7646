"""Samples in bounded memory: activations by module, weights by parameter, forward passes, updates of the weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from . import values
from .codec import Count, Part, row_reader
from .running import quantiles
from .samples import BatchSample, ModuleActivity, WeightStats

WINDOW = 16
NUM_FIRST = 8
NUM_BATCHES = 256
NUM_COSINES = 256
NUM_RECENT = 64
MIN_NUMEL = 16
SETTLED = 20  # steps after which an optimizer's averages no longer depend on their start at zero
MAX_NAMES = 4096
_Item = TypeVar("_Item", ModuleActivity, WeightStats)


class Point(NamedTuple):
    """One module or parameter at one sampled step."""

    step: int
    value: Any


@dataclass(slots=True, repr=False)
class Window(Part, Generic[_Item]):
    """The first sample of one name, the newest sixteen, and their number in all."""

    count: Count
    first: Annotated[Point, values.row]
    recent: Annotated[deque[Point], values.row]

    last = property(lambda self: self.recent[-1])  # the newest sample


class Sampled(Part, Mapping[str, Window[_Item]]):
    """Windows by name, in the order of first appearance; at most 4096 names with sixteen samples each."""

    num_samples: Count = 0  # sampled steps
    last_step: int = -1
    bad: Annotated[dict[str, None], values.mapping]  # names that ever had a bad sample: an ordered set
    _windows: Annotated[dict[str, Window[_Item]], values.mapping]  # `load` reads the rest

    def __init__(self, decode: Callable[[Mapping[str, Any]], _Item], is_bad: Callable[[_Item], bool]) -> None:
        self._decode: Any = decode
        self._is_bad: Any = is_bad
        self.bad, self._windows = {}, {}

    def add(self, step: int, items: Iterable[_Item]) -> None:
        """Takes the samples of one step. Cost: 0.5 us an item."""
        self.num_samples += 1
        self.last_step = step
        for item in items:
            sample = Point(step, item)
            window = self._windows.get(item.name)
            if window is None:
                if len(self._windows) >= MAX_NAMES:
                    continue
                window = self._windows[item.name] = Window(0, sample, deque(maxlen=WINDOW))
            window.recent.append(sample)
            window.count += 1
            if self._is_bad(item):
                self.bad[item.name] = None

    def current(self) -> Iterator[tuple[str, Window[_Item]]]:
        """Names and windows of the items that are still sampled: those of the newest sampled step."""
        return ((name, window) for name, window in self._windows.items() if window.last.step == self.last_step)

    def __getitem__(self, name: str) -> Window[_Item]:
        return self._windows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._windows)

    def __len__(self) -> int:
        return len(self._windows)

    def load(self, state: Any) -> None:
        super().load(state)
        point = row_reader((0, 1), (values.whole, self._decode), Point._make)
        readers = values.count, point, lambda plain: deque(values.each(point, plain), WINDOW)
        window = row_reader(range(3), readers, lambda row: Window(*row))
        self._windows = values.at("_windows", partial(values.by_name, window), self._windows)
        for name, found in self._windows.items():
            if not found.recent or any(sample.value.name != name for sample in found.recent):
                raise values.MisfitError("must hold samples, all of that name", ("_windows", name))
        for name in self.bad:
            if name not in self._windows:
                raise values.MisfitError(f"must be a sampled name, got {name!r}", ("bad",))


class GradientCosine(NamedTuple):
    """The cosine between the gradient of a step and that of the step before, on a sample of their elements."""

    step: int
    cosine: float


class SampledBatch(NamedTuple):
    """One forward pass, and the step whose record had it."""

    step: int
    batch: BatchSample


class UpdateRatio(NamedTuple):
    """The median over all weights of update norm / weight norm at one sampled step, and the lr if known."""

    step: int
    ratio: float
    lr: float | None


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias by its name, such as `bias`, or `bias_ih_l0` of a recurrent layer.

    >>> is_bias("layers.0.bias"), is_bias("debiased.weight")
    (True, False)
    """
    return name.rpartition(".")[2].startswith("bias")


@dataclass(repr=False)
class UpdateRatios(Part):
    """Median update ratios of sampled steps: the first, the largest from twenty steps later on, and the newest 64."""

    count: Count = 0
    first: UpdateRatio | None = None  # in `recent`, too, as long as there is room
    peak: UpdateRatio | None = None
    recent: deque[UpdateRatio] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def add(self, step: int, weights: Sequence[WeightStats], lr: float | None, chosen: Container[str] | None) -> None:
        """Takes one sampled step: the weights in `chosen`, or, if that is None, all but biases and small ones. Cost:
        0.5 us a weight."""
        if chosen is None:
            chosen = {w.name for w in weights if w.numel >= MIN_NUMEL and not is_bias(w.name)}
        found = [w.update_ratio for w in weights if w.name in chosen]
        ratios = [ratio for ratio in found if ratio is not None and math.isfinite(ratio)]
        if not ratios:
            return
        sample = UpdateRatio(step, quantiles(ratios, (0.5,))[0], lr)
        self.count += 1
        self.recent.append(sample)
        if self.first is None:
            self.first = sample
        elif step >= self.first.step + SETTLED and (self.peak is None or sample.ratio > self.peak.ratio):
            self.peak = sample
