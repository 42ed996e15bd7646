"""How much of planted trouble any threshold on norms can hold, if each training has its own, chosen with hindsight.

    python -m benchmarks.protection.bound

Asked of the fault suites' healthy trainings, a spike and a burst planted at every step of them.
A norm is scaled where it is more than r times a median of those before it. With r = 2 everything planted is held, and
every healthy step above twice the median is acted on; a larger r leaves such steps alone, and lets through what lies
between. For each training r is chosen, from all its norms, later ones too, which no policy knows, so that over all
of them least is let through at a given share of healthy steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from .criteria import MOST_UPDATE
from .norms import BURST, BURSTS, LATE, PAST, SPIKES, Trace
from .sources import load, sources

SHARES = (0.0005, 0.001, 0.002, 0.005, 0.01)


class Option(NamedTuple):
    """A threshold for a training: how many steps it acts on, and which share of spikes and bursts it lets through."""

    num_acted: int
    spikes: float
    bursts: float

    @property
    def missed(self) -> float:
        return len(SPIKES) * self.spikes + len(BURSTS) * self.bursts


def options_of(totals: Sequence[float], num_past: int) -> list[Option]:
    """From r = 2 upwards, one for each healthy step that it leaves alone; a spike or burst is planted at every step."""
    steps = range(LATE, len(totals) - BURST)
    usual = {s: statistics.median(totals[max(0, s - PAST) : s]) for s in steps}
    level = {s: statistics.median(totals[s - num_past : s]) for s in range(LATE, len(totals))}
    ratios = [totals[s] / level[s] for s in level]

    def seen(s: int, length: int, f: float) -> float:
        """The ratio of the first step whose update would be above the most allowed; 0 for none. After it, a policy may
        be wary of all that follow."""
        return next((f * x for x in totals[s : s + length] if f * x > MOST_UPDATE * usual[s]), 0.0) / level[s]

    spikes = [seen(s, 1, f) for f in SPIKES for s in steps]
    bursts = [seen(s, BURST, f) for f in BURSTS for s in steps]
    found = []
    for r in [MOST_UPDATE, *sorted(x for x in ratios if x > MOST_UPDATE)]:
        num_acted = sum(x > r for x in ratios)
        missed = [sum(0.0 < x <= r for x in one) / len(one) for one in (spikes, bursts)]
        found.append(Option(num_acted, *missed))
    return found


def best(trainings: Sequence[Sequence[Option]], num_steps: int, share: float) -> tuple[float, float, float]:
    """Share of steps acted on, and spikes and bursts held, where least is let through: one price a step for all."""
    low, high = 0.0, 1e6
    for _ in range(60):
        price = math.sqrt(max(low, 1e-9) * high)
        chosen = [min(some, key=lambda o: (o.missed + price * o.num_acted, o.num_acted)) for some in trainings]
        acted = sum(o.num_acted for o in chosen) / num_steps
        low, high = (price, high) if acted > share else (low, price)
    chosen = [min(some, key=lambda o: (o.missed + high * o.num_acted, o.num_acted)) for some in trainings]
    held = [1.0 - statistics.fmean(getattr(o, kind) for o in chosen) for kind in ("spikes", "bursts")]
    return sum(o.num_acted for o in chosen) / num_steps, held[0], held[1]


def main() -> None:
    """Prints a row for each of `SHARES`."""
    traces = [t for source in sources(range(0)) for t in load(source)]
    num_steps = sum(map(len, traces))
    for num_past in (17, LATE):
        trainings = [options_of(norms, num_past) for norms in map(_totals, traces) if _is_long(norms)]
        print(f"median of {num_past}; {len(trainings)} trainings; acted on, spikes held, bursts held")
        for share in SHARES:
            print("  " + "  ".join(f"{100 * x:6.2f} %" for x in best(trainings, num_steps, share)))


def _is_long(norms: Sequence[float]) -> bool:
    return len(norms) > LATE + BURST + 1 and min(norms) > 0.0


def _totals(trace: Trace) -> list[float]:
    return [trace.total(s) for s in range(len(trace))]


if __name__ == "__main__":
    main()
