"""The tables of what fastguard withstands say what was measured, and that the rest was not."""

from __future__ import annotations

import pytest

readme = pytest.importorskip(
    "benchmarks.reliability.readme", reason="benchmarks/ is not beside these tests", exc_type=ImportError
)


def test_the_documents_show_the_saved_results():
    assert readme.main(["--check"]) == 0, "run `python -m benchmarks.reliability.readme`"
