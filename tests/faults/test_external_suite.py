"""What the rules said of the external suite when they were first asked: the documents have the saved figures."""

import json
from pathlib import Path

import pytest

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
    assert (weighted["num_faulty"], weighted["num_sound"]) == (1486, 853)
    assert weighted["found"] == pytest.approx(0.712, abs=5e-3)
