"""Takes the figures that the documentation quotes: about nine minutes on two cores that do nothing else.

    python benchmarks/run.py

Writes benchmarks/results/cpu.json and the plots beside it, and from them the tables in README.md and
benchmarks/README.md.
"""

from __future__ import annotations

from pathlib import Path

from fastguard.commands import bench
from fastguard.commands.bench import plot, readme

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "cpu.json"
DOCUMENTS = (HERE.parent / "README.md", HERE / "README.md")


def main() -> None:
    plot.check_available()
    results = bench.collect(sweep=True)
    bench.save(results, RESULTS)
    written = [RESULTS, *plot.draw(results, RESULTS.parent)]
    written += [path for path in DOCUMENTS if readme.update(path, results)]
    print("\nwritten:", *(path.relative_to(HERE.parent) for path in written))


if __name__ == "__main__":
    main()
