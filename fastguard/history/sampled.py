"""What was sampled beside the gradients, in small windows: activations by module, weights by parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from ..stats import strict_json, values
from ..stats.part import COUNT, WHOLE, Kind, Part
from ..stats.samples import ModuleActivity, WeightStats

WINDOW = 16
MAX_NAMES = 4096
_Item = TypeVar("_Item", ModuleActivity, WeightStats)


@dataclass(slots=True)
class Point(Generic[_Item]):
    """One module or parameter at one sampled step."""

    step: int
    value: _Item


class Window(Generic[_Item]):
    """The first sample of one name, the newest sixteen, and how many there were."""

    __slots__ = ("count", "first", "recent")

    def __init__(self, first: Point[_Item]) -> None:
        self.first: Point[_Item] = first
        self.recent: deque[Point[_Item]] = deque(maxlen=WINDOW)
        self.count = 0

    @property
    def last(self) -> Point[_Item]:
        """The newest sample."""
        return self.recent[-1]

    def copy(self) -> Window[_Item]:
        """Another window of the same samples."""
        twin = Window(self.first)
        twin.recent.extend(self.recent)
        twin.count = self.count
        return twin

    def add(self, sample: Point[_Item]) -> None:
        """Takes the newest sample."""
        self.recent.append(sample)
        self.count += 1


def _encode(sample: Point[Any]) -> list[Any]:
    return [sample.step, strict_json.encode(sample.value.to_dict())]


_NAMES = Kind(list, lambda names, now: dict.fromkeys(values.each(values.text, names)))
_WINDOWS = Kind(
    lambda windows: {
        name: [window.count, _encode(window.first), [_encode(sample) for sample in window.recent]]
        for name, window in windows.items()
    },
    lambda plain, now: values.mapping(plain),  # decoded by `Sampled.load`, which knows how
    lambda windows: {name: window.copy() for name, window in windows.items()},
)


class Sampled(Part, Generic[_Item]):
    """Windows by name, in the order in which the names were first met; at most 4096 names, sixteen samples each.

    Attributes:
        num_samples, last_step: sampled steps, and the newest of them.
        bad: names that ever had a sample which `is_bad`, in that order: the values of the dict mean nothing.
    """

    __slots__ = ("_decode", "_is_bad", "_windows", "bad", "last_step", "num_samples")
    _fields: ClassVar = {"num_samples": COUNT, "last_step": WHOLE, "bad": _NAMES, "_windows": _WINDOWS}

    def __init__(self, decode: Callable[[Mapping[str, Any]], _Item], is_bad: Callable[[_Item], bool]) -> None:
        self._decode: Callable[[Mapping[str, Any]], _Item] = decode
        self._is_bad: Callable[[_Item], bool] = is_bad
        self.bad: dict[str, None] = {}
        self._windows: dict[str, Window[_Item]] = {}
        self.num_samples = 0
        self.last_step = -1

    def add(self, step: int, items: Iterable[_Item]) -> None:
        """Takes what was sampled at one step. Cost: 0.5 us an item."""
        self.num_samples += 1
        self.last_step = step
        for item in items:
            sample = Point(step, item)
            window = self._windows.get(item.name)
            if window is None:
                if len(self._windows) >= MAX_NAMES:
                    continue
                window = self._windows[item.name] = Window(sample)
            window.add(sample)
            if self._is_bad(item):
                self.bad[item.name] = None

    def current(self) -> Iterator[tuple[str, Window[_Item]]]:
        """Names and windows of those that are still being sampled: met at the newest sampled steps."""
        return ((name, window) for name, window in self._windows.items() if window.last.step == self.last_step)

    def items(self) -> Iterator[tuple[str, Window[_Item]]]:
        """Names and windows."""
        return iter(self._windows.items())

    def __getitem__(self, name: str) -> Window[_Item]:
        return self._windows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._windows

    def __len__(self) -> int:
        return len(self._windows)

    def load(self, state: Any) -> None:
        """Takes back what `state` gave; a MisfitError for anything else."""
        super().load(state)
        saved: Mapping[str, Any] = self._windows  # as they were
        self._windows = {name: values.at("_windows", self._window, {name: plain}) for name, plain in saved.items()}
        for name in self.bad:
            if name not in self._windows:
                raise values.MisfitError(f"must name what was sampled, got {name!r}", ("bad",))

    def _window(self, named: dict[str, Any]) -> Window[_Item]:
        ((name, plain),) = named.items()
        if len(values.at(name, values.row, plain)) != 3:
            raise values.MisfitError(f"must have 3 entries, got {len(plain)}", (name,))
        window = Window(values.at(name, self._sample, plain[1]))
        window.recent.extend(values.at(name, lambda samples: values.each(self._sample, samples), plain[2]))
        window.count = values.at(name, values.count, plain[0])
        if not window.recent or any(sample.value.name != name for sample in window.recent):
            raise values.MisfitError("must hold samples, all of that name", (name,))
        return window

    def _sample(self, pair: Any) -> Point[_Item]:
        if len(values.row(pair)) != 2:
            raise values.MisfitError(f"must be a step and a sample, got {len(pair)} entries")
        return Point(values.at(0, values.whole, pair[0]), values.at(1, self._decode, pair[1]))
