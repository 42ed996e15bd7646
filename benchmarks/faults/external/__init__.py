"""Trainings outside the suite's own tasks: base tasks, named fault operators, and tables of cases. See ../../README.md.

python -m benchmarks.faults.external            # train what is not in the cache, ask the rules, print the table
python -m benchmarks.faults.external --help
"""

from __future__ import annotations

from .runs import Run, recorded

__all__ = ["Run", "recorded"]
