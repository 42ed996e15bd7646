"""`python -m benchmarks.scale [--check]`: what a guarded step's collectives take on up to 16,384 ranks, simulated.

Nothing is run. The formula of docs/scale.md is put to figures that others published of networks, and its tables are
written there. A collective takes what NCCL's own tuner reckons with, in its protocol for short messages (LL, at half of
a link's rate): a start, latencies of hops within nodes and between them, its bytes over the slowest link. Rings take
n - 1 hops for a gather and twice as many for a reduction, trees twice the logarithm of the nodes; of both the quicker.

Not in it: waiting for the slowest rank, which an optimizer's own collectives do as well; the host's part, which
`benchmarks.ranks` measures; copies to the host; contention.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastguard.ranks.exchange import MOST_GATHERED

from . import readme

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
HEADER, REDUCED, ROW = 18, (11, 13), (3, 9)  # words of 8 bytes: gathered; as MAX and SUM; a tensor's as MAX and SUM
RANKS, TENSORS = (8, 64, 512, 4096, 16384), (300, 3000, 100_000)
STEP_US, SHARE = 500_000.0, 2e-3  # of a step that is to be guarded; of it that collectives may take


class Network(NamedTuple):
    """Latencies in microseconds, bytes per microsecond one way.

    Attributes:
        node: ranks that NVLink joins.
        within, across: of a hop in a ring, a hop in a tree, and the rate of a link.
    """

    name: str
    node: int
    within: tuple[float, float, float]
    across: tuple[float, float, float]


START_RING, START_TREE = 6.6, 6.8  # NCCL, src/graph/tuning.cc: baseLat, LL
NVLINK = (0.6, 0.6, 450e3)  # the same, hwLat; H100 datasheet: 900 GB/s both ways
NETWORKS = (
    Network("NVLink 4 and NVSwitch", 72, NVLINK, NVLINK),
    # 1.0: the tuner's least latency of a hop where there is a network as well. ConnectX-7 datasheet: 400 Gb/s.
    Network("nodes of 8, InfiniBand NDR", 8, (1.0, 1.0, 450e3), (2.7, 5.0, 50e3)),
    # aws-ofi-nccl, include/nccl_ofi_tuner.h: TUNER_NET_LATENCY, and the rate of a rail.
    Network("nodes of 8, Ethernet 100 Gb/s", 8, (1.0, 1.0, 450e3), (20.0, 20.0, 12.5e3)),
)


def _hops(network: Network, ranks: int) -> tuple[int, int]:
    """Ranks of a node, and nodes."""
    return min(ranks, network.node), math.ceil(ranks / network.node)


def gather_us(network: Network, ranks: int, num_bytes: float) -> float:
    """A ring in which each rank hands on what each has."""
    _, nodes = _hops(network, ranks)
    rate = (network.across if nodes > 1 else network.within)[2] / 2
    latency = (ranks - nodes) * network.within[0] + (nodes - 1) * network.across[0]
    return START_RING + latency + (ranks - 1) * num_bytes / rate


def reduce_us(network: Network, ranks: int, num_bytes: float) -> float:
    """A ring or a tree, whichever is quicker, of so many bytes from each rank."""
    inside, nodes = _hops(network, ranks)
    rate = (network.across if nodes > 1 else network.within)[2] / 2
    ring = START_RING + 2 * ((ranks - nodes) * network.within[0] + (nodes - 1) * network.across[0])
    ring += 2 * (ranks - 1) / ranks * num_bytes / rate
    tree = START_TREE + 2 * ((inside - 1) * network.within[1] + math.log2(nodes) * network.across[1])
    return min(ring, tree + 2 * num_bytes / rate)


def header_us(network: Network, ranks: int, *, gathered: bool) -> float:
    """What each step exchanges."""
    if gathered:
        return gather_us(network, ranks, 8 * HEADER)
    return sum(reduce_us(network, ranks, 8 * words) for words in REDUCED)


def table_us(network: Network, ranks: int, tensors: int) -> float:
    """What a table of so many tensors takes on top."""
    return sum(reduce_us(network, ranks, 8 * words * tensors) for words in ROW)


def steps_between(network: Network, ranks: int, tensors: int) -> int:
    """How rare tables have to be, so that all collectives are `SHARE` of a step of `STEP_US`."""
    left = SHARE * STEP_US - header_us(network, ranks, gathered=ranks <= MOST_GATHERED)
    return math.ceil(table_us(network, ranks, tensors) / left) if left > 0.0 else 0


def _cases() -> list[tuple[Network, int]]:
    return [(n, ranks) for n in NETWORKS for ranks in RANKS if n.across is not n.within or ranks <= n.node]


def times(_: Any = None) -> list[str]:
    """The table of microseconds."""
    rows = []
    for network, ranks in _cases():
        each = [header_us(network, ranks, gathered=gathered) for gathered in (True, False)]
        each += [table_us(network, ranks, tensors) for tensors in TENSORS]
        step = header_us(network, ranks, gathered=ranks <= MOST_GATHERED) + 0.1 * table_us(network, ranks, 3000)
        rows.append([network.name, f"{ranks:,}", *(f"{us:,.0f}" for us in each), f"{step:,.0f}"])
    header = ["simulated, in us", "ranks", "header, gathered", "header, reduced"]
    return readme.markdown([*header, *(f"table of {t:,}" for t in TENSORS), "a step, 3,000 tensors"], rows)


def sampling(_: Any = None) -> list[str]:
    """The table of how rare tables have to be."""
    rows = []
    for network, ranks in _cases():
        counts = [steps_between(network, ranks, tensors) for tensors in TENSORS]
        rows.append([network.name, f"{ranks:,}", *(str(count) if count else "none" for count in counts)])
    return readme.markdown(["simulated", "ranks", *(f"{t:,} tensors" for t in TENSORS)], rows)


TABLES: Mapping[str, Callable[[Any], list[str]]] = {"scale-times": times, "scale-sampling": sampling}


def main() -> int:
    """Writes the tables, or says whether they are out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    is_check = parser.parse_args().check
    is_stale = readme.update(DOCUMENT, {}, TABLES, check=is_check)
    print("\n".join([*times(), "", *sampling()]))
    return int(is_check and is_stale)


if __name__ == "__main__":
    raise SystemExit(main())
