"""Trainings that nobody tuned on: sound ones of many tasks, and faults after others' definitions. See README.md here.

python -m benchmarks.faults.external            # run what is not in the cache, print the table, write the results
python -m benchmarks.faults.external --help
"""

from __future__ import annotations

from .runs import Run, recorded

__all__ = ["Run", "recorded"]
