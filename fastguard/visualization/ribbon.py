"""The state of every step of a run."""

from __future__ import annotations

import itertools

# From the best to the worst: if steps share a pixel, it shows the worst.
STATES = ("none", "good", "clipped", "resumed", "rolled back", "skipped", "not finite")
_RANK = {state: rank for rank, state in enumerate(STATES)}
_MAX_BYTES = 1 << 22


class Ribbon:
    """The state of each step: "good", "clipped", "resumed" (the first after a restart), "rolled back" (its changes to
    the parameters were undone), "skipped" or "not finite" (whether skipped or not).

    Attributes:
        first_step: the step of the first byte of `states`.
        width: steps per byte: 1 up to four million steps, then 2, 4, ...; the worst of them counts.
        states: places in `STATES`, one per byte.
        counts: number of steps in each state.

    >>> ribbon = Ribbon()
    >>> for step in range(100):
    ...     ribbon.add(step, "skipped" if step == 42 else "good")
    >>> ribbon.worst(10)[4], ribbon.worst(10)[5], ribbon.counts["good"]
    ('skipped', 'good', 99)
    """

    def __init__(self) -> None:
        self.first_step = self.last_step = 0
        self.width = 1
        self.states = bytearray()
        self.counts = dict.fromkeys(STATES[1:], 0)

    def add(self, step: int, state: str) -> None:
        """Takes a step; if its number is not above the last one, the run was resumed. Cost: 0.3 us."""
        self.counts[state] += 1
        rank = _RANK[state]
        if not self.states:
            self.first_step = step
        elif step <= self.last_step:
            rank = max(rank, _RANK["resumed"])
            self.counts["resumed"] += 1
        self.last_step = step
        if step < self.first_step:  # before the first one: it has no place
            return
        place = (step - self.first_step) // self.width
        while place >= _MAX_BYTES:
            states = self.states + b"\0" * (len(self.states) % 2)
            self.states = bytearray(map(max, states[::2], states[1::2]))
            self.width *= 2
            place = (step - self.first_step) // self.width
        if place >= len(self.states):
            self.states.extend(b"\0" * (place - len(self.states) + 1))
        if rank > self.states[place]:
            self.states[place] = rank

    def mark(self, first: int, last: int, state: str) -> None:
        """Sets the steps from `first` to `last` to `state`, unless theirs is worse, and counts them."""
        rank, states = _RANK[state], self.states
        begin, end = ((step - self.first_step) // self.width for step in (first, last))
        for place in range(max(0, begin), min(len(states), end + 1)):
            states[place] = max(states[place], rank)
        self.counts[state] += last - first + 1

    def worst(self, num: int) -> list[str]:
        """The worst state in each of `num` equal parts; "none" without steps."""
        states, size = self.states, len(self.states)
        cuts = [i * size // num for i in range(num + 1)]
        return [STATES[max(states[a : max(b, a + 1)], default=0)] for a, b in itertools.pairwise(cuts)]

    def rolling(self, state: str, window: int, num: int) -> list[tuple[int, float]]:
        """At most `num` steps, each with the share in `state` of the last `window` steps up to it."""
        states, rank, size = self.states, _RANK[state], len(self.states)
        found = []
        for end in sorted({-(-size * i // num) for i in range(1, num + 1)}):
            begin = max(0, end - max(1, window // self.width))
            if known := end - begin - states.count(0, begin, end):
                step = min(self.last_step, self.first_step + end * self.width - 1)
                found.append((step, states.count(rank, begin, end) / known))
        return found
