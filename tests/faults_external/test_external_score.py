"""The documents show the saved figures of the external suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="its data come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults.external", reason="the suite is not beside these tests", exc_type=ImportError)

from benchmarks import readme as write_tables
from benchmarks.faults import readme

ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "benchmarks" / "results" / "faults-asked-once.json"


@pytest.mark.skipif(not SAVED.exists(), reason="the saved figures are not beside it")
def test_the_documents_have_what_the_rules_said_first():
    documents = [str(ROOT / "README.md"), str(ROOT / "benchmarks" / "README.md")]
    assert write_tables.main([str(SAVED), *documents, "--check"], tables=readme.TABLES) == 0
    weighted = readme.together(json.loads(SAVED.read_text(encoding="utf-8"))["sets"])
    assert (weighted["num_faulty"], weighted["num_sound"]) == (1035, 684)
    assert weighted["found"] == pytest.approx(0.716, abs=5e-3)
