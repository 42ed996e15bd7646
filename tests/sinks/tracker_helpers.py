"""What is written to each tracker, and what is to be read back."""

from __future__ import annotations

import math

import pytest

from records import make_record

HOSTILE = ["a/b", "", "../x", "/y//z", "NaN", "a#<b>", "x" * 400, "é\u202e", "a[/b]"]


def needs(package):
    return pytest.importorskip(package, reason=f"needs {package}; .ci/run installs it")


def write_some(sink):
    """Steps 0 to 4; NaN at 2, Inf at 3, both skipped; and a finding."""
    for step, norm in enumerate((1.0, 2.0, math.nan, math.inf, 3.0)):
        sink.write(make_record(step, norm, skipped=not math.isfinite(norm), loss=norm, lr=0.1))
    sink.tell({"rule": "a-rule", "severity": "warning", "summary": "S.", "recommendation": "R.", "last_step": 4})


def as_expected(norms):
    """Whether these are the norms of `write_some`, by step."""
    return len(norms) == 5 and all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(norms, EXPECTED))


EXPECTED = [1.0, 2.0, math.nan, math.inf, 3.0]


# What a user logs beside it, in a step of a loop.
def nothing(run, n): ...


def once(run, n):
    run.log({"mine": n})


def twice(run, n):
    run.log({"mine": n})
    run.log({"mine": n + 0.5})


def by_step(run, n):
    run.log({"mine": n}, step=n)


def every_third(run, n):
    if n % 3 == 2:
        run.log({"mine": n})


def by_epoch(run, n):
    if n % 2:
        run.log({"mine": n}, step=n // 2)
