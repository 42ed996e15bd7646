"""The tables of docs/scale.md are those of the cost model, and the model is what the page says."""

from __future__ import annotations

import pytest

from fastguard.ranks import exchange, ranks

scale = pytest.importorskip("benchmarks.scale", reason="benchmarks/ is not beside these tests", exc_type=ImportError)
SMALL, NDR, ETHERNET = scale.NETWORKS


def test_the_page_has_the_tables_of_the_model() -> None:
    assert not scale.readme.update(scale.DOCUMENT, {}, scale.TABLES, check=True), "run python -m benchmarks.scale"


def test_the_model_sends_what_the_wire_sends() -> None:
    assert scale.HEADER == exchange.NUM_COLUMNS + 8
    assert (3, len(exchange._ADDED) + 3) == scale.ROW
    assert (scale.ROW[0] + 2 * len(ranks._ALIKE), scale.ROW[1] + len(ranks._ADDED)) == scale.REDUCED
