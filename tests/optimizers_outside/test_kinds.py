"""The page of what sits in a model and what trains it says what was measured."""

from __future__ import annotations

import pytest

pytest.importorskip("benchmarks.optimizers", reason="what measures is not beside these tests", exc_type=ImportError)

from benchmarks.optimizers import kinds, models, table
from benchmarks.readme import update


def test_the_page_is_that_of_the_results():
    assert not update(kinds.PAGE, kinds.saved(), kinds.TABLES, check=True)


def test_every_kind_has_classes_that_were_tried():
    results = kinds.saved()["optimizers"]
    for kind, packages in kinds.KINDS.items():
        tried = {name.split("'s ")[1].split(".")[-1] for name, _ in kinds.chosen(results, kind)}
        assert tried == {name for names in packages.values() for name in names}, kind


@pytest.mark.slow
def test_what_sits_in_a_model_stays_to_the_bit(caplog):
    caplog.set_level("ERROR", logger="fastguard")
    found = [(model, optimizer, table.record(verdict)) for model, optimizer, verdict in models.verdicts()]
    assert len(found) == 15
    for model, optimizer, record in found:
        assert "unusable" not in record and not table.failures(record), (model, optimizer, record)
        is_unclear = "clip_unknown" in record or record.get("clip_torch_ulp") is not None
        assert is_unclear or record["clip_torch"] <= table.CLOSE, (model, optimizer, record)
